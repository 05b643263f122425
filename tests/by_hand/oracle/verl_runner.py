"""Calls functions of verl, in an environment of its own: ``env/install verl FOLDER`` makes it.

Nothing of verl's code is here, only what its functions are handed. Each form is named after what it calls.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from peer_io import Batch, Form, run_jobs
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

OFF = 1e30  # a bound that never acts


class Config(dict[str, Any]):
    """Settings that are read as keys and as attributes."""

    __getattr__ = dict.__getitem__


@contextmanager
def wide() -> Iterator[None]:
    """Meanwhile code that names float32 computes in float64."""
    patch = mock.patch.object
    with patch(torch, "float32", torch.float64), patch(np, "float32", np.float64):
        yield


def policy(name: str) -> Form:
    """A loss of its registry: the aggregated loss."""

    def form(
        batch: Batch,
        *,
        aggregation: str = "token-mean",
        low: float = 0.2,
        high: float = 0.2,
        c: float | None = None,
        weights: bool = False,
        sequence_advantages: bool = False,
        tau: tuple[float, float] = (1.0, 1.05),
        settings: dict[str, Any] | None = None,
        old: str = "old_logprobs",
        shift: float | None = None,
    ) -> torch.Tensor:
        """``shift``: log-probs before the update are those of now less this, instead of ``old``."""
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            use_dynamic_bsz=True,
            clip_ratio=low,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=OFF if c is None else c,
            tau_pos=tau[0],
            tau_neg=tau[1],
            policy_loss=PolicyLossConfig(**(settings or {})),
        )
        torch.manual_seed(0)  # clip_cov draws the tokens that it leaves out
        mask = batch["mask"].to(batch["logprobs"].dtype)
        advantages = batch["advantages"]
        if sequence_advantages:
            advantages = batch["advantage_B"][:, None].expand_as(mask).contiguous()
        before = batch[old] if shift is None else batch["logprobs"].detach() - shift
        loss, _ = core_algos.get_policy_loss_fn(name)(
            old_log_prob=before,
            log_prob=batch["logprobs"],
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode=aggregation,
            config=config,
            rollout_is_weights=batch["weights"] if weights else None,
        )
        return loss

    return form


def kl_penalty(batch: Batch, *, kind: str) -> torch.Tensor:
    return core_algos.kl_penalty(batch["logprobs"], batch["ref_logprobs"], kind) * batch["mask"]


def agg_loss(batch: Batch, *, mode: str, norm_length: int | None = None) -> torch.Tensor:
    mask = batch["mask"].to(batch["losses"].dtype)
    return core_algos.agg_loss(batch["losses"], mask, mode, loss_scale_factor=norm_length)


def gae(batch: Batch, *, gamma: float, lam: float) -> dict[str, torch.Tensor]:
    """Its advantages are whitened, its returns are not."""
    mask = batch["mask"].to(batch["values"].dtype)
    advantages, returns = core_algos.compute_gae_advantage_return(
        batch["rewards"], batch["values"], mask, gamma, lam
    )
    return {"value": advantages * mask, "returns": returns * mask}


def outcome(name: str) -> Form:
    """An advantage estimator of its registry, of one score an answer: ``[B]`` where it says the same of all
    tokens, else ``[B, T]``."""

    def form(
        batch: Batch,
        *,
        groups: str = "groups",
        per_token: bool = False,
        score: str = "score_B",
        kl_coef: float = 0.0,
        config: dict[str, Any] | None = None,
        **settings: Any,
    ) -> torch.Tensor:
        mask = batch["mask"] if per_token else torch.ones_like(batch["mask"])
        rewards = torch.zeros_like(batch["logprobs"])
        last = batch["mask"].long().cumsum(1).argmax(1)  # the last token with mask 1
        rewards[torch.arange(len(rewards)), last] = batch[score]
        if kl_coef:
            policies = (batch["old_logprobs"], batch["ref_logprobs"])
            rewards = core_algos.compute_rewards(rewards, *policies, kl_coef)
        advantages, _ = core_algos.get_adv_estimator_fn(name)(
            token_level_rewards=rewards,
            response_mask=mask.to(rewards.dtype),
            index=batch[groups].numpy(),
            **({"reward_baselines": batch["baseline_B"]} if name == "remax" else {}),
            **({} if config is None else {"config": Config(config)}),
            **settings,
        )
        return advantages * mask if per_token else advantages[:, 0]

    return form


def gdpo(batch: Batch, *, weights: dict[str, float]) -> torch.Tensor:
    """Of several parts of a reward, by their names in the batch."""
    mask = batch["mask"].to(batch["logprobs"].dtype)
    prompts = torch.ones_like(mask[:, :1])
    with wide():
        advantages, _ = core_algos.compute_gdpo_outcome_advantage(
            torch.zeros_like(mask),
            mask,
            batch["groups"].numpy(),
            config=Config(gdpo_reward_keys=list(weights), gdpo_reward_weights=weights.values()),
            non_tensor_batch={name: batch[name].numpy() for name in weights},
            batch={"prompts": prompts, "attention_mask": torch.cat([prompts, mask], 1).long()},
        )
    return advantages


def compute_value_loss(batch: Batch, *, clip: float) -> torch.Tensor:
    mask = batch["mask"].to(batch["values"].dtype)
    loss, _ = core_algos.compute_value_loss(
        batch["values"], batch["returns"], batch["old_values"], mask, clip
    )
    return loss


def masked_whiten(batch: Batch) -> torch.Tensor:
    mask = batch["mask"].to(batch["values"].dtype)
    return torch_functional.masked_whiten(batch["values"], mask) * mask


def correction(batch: Batch, *, level: str, threshold: str | float) -> torch.Tensor:
    mask = batch["mask"].to(batch["logprobs"].dtype)
    log_ratio = batch["old_logprobs"] - batch["behaviour_logprobs"]
    weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
        log_ratio, mask, rollout_is=level, rollout_is_threshold=threshold
    )
    return weights


def rejection(batch: Batch, *, kind: str, low: float, high: float) -> torch.Tensor:
    """Weights of tokens, 0 on what its mask of rejection leaves out."""
    mask = batch["mask"].to(batch["logprobs"].dtype)
    log_ratio = batch["old_logprobs"] - batch["behaviour_logprobs"]
    kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        log_ratio, mask, rollout_rs=kind, rollout_rs_threshold=f"{low!r}_{high!r}"
    )
    weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
        log_ratio, mask, rollout_is="token", rollout_is_threshold=OFF
    )
    return weights * kept


def compute_rewards(batch: Batch, *, coef: float) -> torch.Tensor:
    scores = torch.zeros_like(batch["logprobs"])
    last = batch["mask"].long().cumsum(1).argmax(1)
    scores[torch.arange(len(scores)), last] = batch["score_B"]
    rewards = core_algos.compute_rewards(scores, batch["old_logprobs"], batch["ref_logprobs"], coef)
    return rewards * batch["mask"]


def adaptive_kl(batch: Batch, *, horizon: float) -> torch.Tensor:
    """Its coefficient after each of several batches of 10 answers."""
    controller = core_algos.AdaptiveKLController(0.1, 2.0, horizon)
    found = []
    for kl in batch["score_B"].tolist():
        controller.update(2.0 + kl, 10)
        found.append(float(controller.value))
    return torch.tensor(found, dtype=torch.float64)


def entropy_from_logits(batch: Batch) -> torch.Tensor:
    return torch_functional.entropy_from_logits(batch["logits"])


def logprobs_from_logits(batch: Batch, *, temperature: float) -> torch.Tensor:
    return torch_functional.logprobs_from_logits_v2(batch["logits"] / temperature, batch["labels"])


FORMS: dict[str, Form] = {
    **{name: policy(name) for name in core_algos.POLICY_LOSS_REGISTRY},
    **{
        f"advantage {name}": outcome(name)
        for name in (
            *("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "remax", "gpg"),
            *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo_passk"),
        )
    },
    "advantage gdpo": gdpo,
    "kl_penalty": kl_penalty,
    "agg_loss": agg_loss,
    "compute_gae_advantage_return": gae,
    "compute_value_loss": compute_value_loss,
    "masked_whiten": masked_whiten,
    "compute_rollout_correction_weights": correction,
    "compute_rollout_rejection_mask": rejection,
    "compute_rewards": compute_rewards,
    "AdaptiveKLController": adaptive_kl,
    "entropy_from_logits": entropy_from_logits,
    "logprobs_from_logits_v2": logprobs_from_logits,
}

if __name__ == "__main__":
    run_jobs(
        FORMS,
        {
            "verl": importlib.metadata.version("verl"),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    )
