"""Calls functions of trl, in an environment of its own: ``env/install trl FOLDER`` makes it.

Most of trl's losses are methods of its trainers. They are called as they stand, with a stand-in for
``self`` that has the attributes which they read, and whose model says the log-probabilities of our batches.
Nothing of trl's code is here. Each form is named after what it calls.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from peer_io import Batch, Form, run_jobs

warnings.simplefilter("ignore")

from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer  # noqa: E402
from trl.experimental.cpo import CPOTrainer  # noqa: E402
from trl.experimental.gmpo import GMPOTrainer  # noqa: E402
from trl.rewards import get_soft_overlong_punishment  # noqa: E402
from trl.trainer import utils  # noqa: E402

ACCELERATOR = SimpleNamespace(
    num_processes=1,
    process_index=0,
    sync_gradients=True,
    device=torch.device("cpu"),
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    pad_across_processes=lambda x, **_: x,
    reduce=lambda x, reduction: x,
)


def trainer(**own: Any) -> SimpleNamespace:
    """A stand-in for a trainer that trains by one step without accumulation, on one process."""
    common = {
        "accelerator": ACCELERATOR,
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "aux_loss_enabled": False,
        "use_vllm": False,
        "current_gradient_accumulation_steps": 1,
    }
    return SimpleNamespace(**{**common, **own})


def policy_trainer(batch: Batch, **own: Any) -> SimpleNamespace:
    """One whose model says a batch's log-probs and entropies."""
    says = (batch["logprobs"], batch["entropies"], None)
    settings = {
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "_entropy_bonus_enabled": False,
        "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
    }
    made = trainer(_get_per_token_logps_and_entropies=lambda *_, **__: says, **{**settings, **own})
    made.get_high_entropy_mask = lambda *x: GRPOTrainer.get_high_entropy_mask(made, *x)
    return made


def policy_inputs(batch: Batch, advantages: str) -> dict[str, torch.Tensor]:
    """What a trainer makes of a batch's answers before the loss. ``advantages``: ``none`` for zeros."""
    mask = batch["mask"].long()
    zeros = torch.zeros_like(batch["logprobs"])
    return {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": torch.ones_like(mask),
        "tool_mask": mask,
        "advantages": zeros if advantages == "none" else batch[advantages],
        "old_per_token_logps": batch["old_logprobs"],
        "ref_per_token_logps": batch["ref_logprobs"],
        "importance_sampling_ratio": batch["weights"],
        "num_items_in_batch": mask.sum(),
    }


def grpo(
    batch: Batch,
    *,
    loss_type: str,
    low: float = 0.2,
    high: float = 0.2,
    delta: float | None = None,
    level: str = "token",
    beta: float = 0.0,
    kl_corrected: bool = False,
    weights: bool = False,
    advantages: str = "advantages",
    tau: tuple[float, float] = (1.0, 1.05),
    max_length: int = 24,
    top_entropy: float = 1.0,
    off_policy: float | None = None,
) -> torch.Tensor:
    """GRPOTrainer._compute_loss. ``advantages``: ``advantage_B``, or an input ``[B, T]``; none: zeros."""
    stub = policy_trainer(
        batch,
        top_entropy_quantile=top_entropy,
        off_policy_mask_threshold=off_policy,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm=weights,
        vllm_importance_sampling_correction=weights,
        max_completion_length=max_length,
        args=SimpleNamespace(
            use_bias_correction_kl=kl_corrected,
            delta=delta,
            sapo_temperature_pos=tau[0],
            sapo_temperature_neg=tau[1],
            steps_per_generation=1,
        ),
    )
    inputs = policy_inputs(batch, advantages)
    loss: torch.Tensor = GRPOTrainer._compute_loss(stub, stub.model, inputs)
    return loss


def gmpo(batch: Batch, *, epsilon: float) -> torch.Tensor:
    """GMPOTrainer._compute_loss."""
    stub = policy_trainer(batch, epsilon_low=epsilon, epsilon_high=epsilon)
    inputs = policy_inputs(batch, "advantage_B")
    loss: torch.Tensor = GMPOTrainer._compute_loss(stub, stub.model, inputs)
    return loss


def high_entropy_mask(batch: Batch, *, share: float) -> torch.Tensor:
    """As its loss calls it with ``top_entropy_quantile`` = share."""
    stub = policy_trainer(batch)
    found: torch.Tensor = stub.get_high_entropy_mask(
        batch["entropies"], batch["mask"].long(), 1 - share
    )
    return found.to(batch["entropies"].dtype)


def adaptive_entropy(batch: Batch, *, coef: float, target: float, step: float) -> torch.Tensor:
    """The weights of the bonus in one step after another, each with another entropy; but the first."""
    applied = []
    stub = policy_trainer(
        batch,
        loss_type="bnpo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        entropy_coef=coef,
        use_adaptive_entropy=True,
        _entropy_bonus_enabled=True,
        _last_world_entropy=float("inf"),
        _entropy_window_stats=None,
        args=SimpleNamespace(
            delta=None,
            entropy_target=target,
            entropy_coef_delta=step,
            entropy_coef_min=0.0,
            entropy_coef_max=float("inf"),
        ),
    )
    inputs = policy_inputs(batch, "none")
    for entropy in (1.0 + batch["score_B"].abs()).tolist():
        says = (batch["logprobs"], torch.full_like(batch["logprobs"], entropy), None)
        stub._get_per_token_logps_and_entropies = lambda *_, says=says, **__: says
        loss = GRPOTrainer._compute_loss(stub, stub.model, inputs)
        applied.append(-loss / entropy)  # the policy's own part is 0
    return torch.stack(applied[1:])


def aggregation(batch: Batch, *, loss_type: str, max_length: int = 24) -> torch.Tensor:
    """The same where the policy is unchanged: the loss of a token is -A then, so it only aggregates."""
    same = {**batch, "old_logprobs": batch["logprobs"], "minus": -batch["losses"]}
    return grpo(same, loss_type=loss_type, advantages="minus", max_length=max_length)


def _generated(
    which: type, batch: Batch, scores: torch.Tensor, size: int, **own: Any
) -> dict[str, Any]:
    """What ``_generate_and_score_completions`` makes of these answers and scores."""
    mask = (
        batch["mask"].long()
        if len(scores) == len(batch["mask"])
        else torch.ones(len(scores), 1).long()
    )
    completions = [[1] * mask.shape[1] for _ in mask]
    prompts = [[2] for _ in mask]
    generated: tuple[Any, ...] = (prompts, completions, [""] * len(mask))
    if which is GRPOTrainer:
        tools, logprobs = mask.tolist(), batch["behaviour_logprobs"].tolist()
        logprobs = logprobs if own.get("use_vllm") else None
        generated = (prompts, completions, tools, [""] * len(mask), logprobs, {}, None, None)
    stub = trainer(
        _generate=lambda _: generated,
        _calculate_rewards=lambda *_: scores.reshape(len(scores), -1).clone(),
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            batch["old_logprobs"]
            if len(scores) == len(batch["mask"])
            else torch.zeros(len(scores), 1),
            None,
            None,
        ),
        **{
            "environment_factories": None,
            "environments": None,
            "tools": None,
            "_tokenizer": SimpleNamespace(pad_token_id=0),
            "pad_to_multiple_of": None,
            "mask_truncated_completions": False,
            "eos_token_ids": [1],
            "args": SimpleNamespace(
                per_device_train_batch_size=len(mask),
                gradient_checkpointing_kwargs=None,
                steps_per_generation=1,
                gradient_accumulation_steps=1,
            ),
            "num_iterations": 1,
            "beta": 0.0,
            "num_generations": size,
            "multi_objective_aggregation": "sum_then_normalize",
            "reward_weights": torch.ones(1, dtype=scores.dtype),
            "reward_clip_range": None,
            "normalize_advantages": False,
            "reward_func_names": ["score"],
            "_logs": {
                **{name: [] for name in ("prompt", "completion", "advantages", "images")},
                **{name: defaultdict(list) for name in ("rewards", "extra")},
            },
            "_pending_extra_logs": {},
            "_pending_metrics": {},
            "log_multimodal": False,
            **own,
        },
    )
    found: dict[str, Any] = which._generate_and_score_completions(
        stub, [{"prompt": "x"} for _ in mask]
    )
    return found


def grpo_advantages(batch: Batch, *, scale: str) -> torch.Tensor:
    scores = batch["even_scores"]
    said = _generated(GRPOTrainer, batch, scores.flatten(), scores.shape[1], scale_rewards=scale)
    found: torch.Tensor = said["advantages"]
    return found


def gdpo(batch: Batch, *, weights: tuple[float, float], missing: int | None = None) -> torch.Tensor:
    """The same with several rewards that are normalised each by itself; a function of one gave nothing
    to every ``missing``-th answer."""
    parts = [batch[name].flatten() for name in ("even_scores", "even_other")]
    scores, size = torch.stack(parts, 1), batch["even_scores"].shape[1]
    if missing is not None:
        scores[::missing, 1] = torch.nan
    found: torch.Tensor = _generated(
        GRPOTrainer,
        batch,
        scores,
        size,
        scale_rewards="group",
        multi_objective_aggregation="normalize_then_sum",
        reward_weights=torch.tensor(weights, dtype=scores.dtype),
        reward_funcs=[None, None],
        reward_func_names=["one", "other"],
    )["advantages"]
    return found


def rloo_advantages(batch: Batch) -> torch.Tensor:
    scores = batch["even_scores"]
    found: torch.Tensor = _generated(RLOOTrainer, batch, scores.flatten(), scores.shape[1])[
        "advantages"
    ]
    return found


def correction(
    batch: Batch, *, mode: str, low: float | None = None, high: float | None = None
) -> torch.Tensor:
    """The weights of vLLM's answers, on the tokens with mask 1."""
    mask = batch["mask"]
    said = _generated(
        GRPOTrainer,
        batch,
        batch["score_B"],
        1,
        scale_rewards="none",
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    found: torch.Tensor = said["importance_sampling_ratio"].expand(mask.shape) * mask
    return found


def rloo(batch: Batch, *, low: float, high: float) -> torch.Tensor:
    """RLOOTrainer._compute_loss: one ratio an answer, the product of its tokens'."""
    logprobs, mask = batch["logprobs"], batch["mask"].long()
    stub = trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
        epsilon_low=low,
        epsilon_high=high,
    )
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": batch["advantage_B"],
        "old_logps": (batch["old_logprobs"] * mask).sum(1),
    }
    loss: torch.Tensor = RLOOTrainer._compute_loss(stub, stub.model, inputs)
    return loss


def _answers(
    batch: Batch, *, times_length: bool = False
) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    """A model that says the log-probs of pairs, inputs for it, and the reference's sums.

    Args:
        times_length: all log-probs are multiplied by the tokens of their answer.
    """
    mask = batch["pair_mask"].long()
    scale = mask * mask.sum(1, keepdim=True) if times_length else mask
    zeros = torch.zeros_like(batch["pair_logprobs"])
    said = SimpleNamespace(
        log_probs=batch["pair_logprobs"] * scale,
        entropy=zeros,
        mean_logits=zeros,
        is_top1=zeros.bool(),
    )
    whole = torch.cat([torch.zeros_like(mask[:, :1]), mask], 1)
    inputs = {
        "input_ids": torch.zeros_like(whole),
        "attention_mask": torch.ones_like(whole),
        "completion_mask": whole,
    }
    return (lambda **_: said), inputs, (batch["pair_ref_logprobs"] * scale).sum(1)


def dpo(
    batch: Batch,
    *,
    loss_type: str,
    beta: float,
    label_smoothing: float = 0.0,
    times_length: bool = False,
) -> torch.Tensor:
    """DPOTrainer._compute_loss. ``times_length``: what it divides by lengths are sums then."""
    model, inputs, reference = _answers(batch, times_length=times_length)
    chosen, rejected = reference.chunk(2)
    stub = trainer(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=label_smoothing,
        use_weighting=False,
    )
    inputs.update(ref_chosen_logps=chosen, ref_rejected_logps=rejected)
    loss: torch.Tensor = DPOTrainer._compute_loss(stub, model, inputs, False)
    return loss


def kto(batch: Batch, *, beta: float, desirable: float, undesirable: float) -> torch.Tensor:
    """KTOTrainer._compute_loss, with the KL of mismatched answers."""
    model, inputs, reference = _answers(batch)
    mask = batch["pair_mask"].long()
    stub = trainer(
        _compute_kl_logps=lambda *_: (batch["pair_mismatched"] * mask).sum(1),
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=beta,
        desirable_weight=desirable,
        undesirable_weight=undesirable,
    )
    inputs.update(
        label=batch["pair_label"],
        ref_logps=reference,
        ref_KL_logps=(batch["pair_ref_mismatched"] * mask).sum(1),
    )
    loss: torch.Tensor = KTOTrainer._compute_loss(stub, model, inputs, False)
    return loss


def of_log_ratios(batch: Batch, *, beta: float, label_smoothing: float) -> torch.Tensor:
    """CPOTrainer.cpo_loss: DPO's where log-ratios stand in for the log-probs that it takes."""
    log_ratios = ((batch["pair_logprobs"] - batch["pair_ref_logprobs"]) * batch["pair_mask"]).sum(1)
    stub = trainer(alpha=0.0, loss_type="sigmoid", beta=beta, label_smoothing=label_smoothing)
    losses, _, _ = CPOTrainer.cpo_loss(stub, *log_ratios.chunk(2))
    loss: torch.Tensor = losses.mean()
    return loss


def simpo(batch: Batch, *, beta: float, gamma: float) -> torch.Tensor:
    """CPOTrainer.cpo_loss of mean log-probs."""
    mask = batch["pair_mask"]
    mean = (batch["pair_logprobs"] * mask).sum(1) / mask.sum(1)
    stub = trainer(alpha=0.0, loss_type="simpo", simpo_gamma=gamma, beta=beta, label_smoothing=0.0)
    losses, _, _ = CPOTrainer.cpo_loss(stub, *mean.chunk(2))
    loss: torch.Tensor = losses.mean()
    return loss


def overlong(batch: Batch, *, max_length: int, buffer: int) -> torch.Tensor:
    answers = [[0] * n for n in batch["length_B"].tolist()]
    return torch.tensor(
        get_soft_overlong_punishment(max_length, buffer)(completion_ids=answers),
        dtype=torch.float64,
    )


def selective_log_softmax(batch: Batch, *, temperature: float) -> torch.Tensor:
    found: torch.Tensor = utils.selective_log_softmax(batch["logits"], batch["labels"], temperature)
    return found


def entropy_from_logits(batch: Batch) -> torch.Tensor:
    found: torch.Tensor = utils.entropy_from_logits(batch["logits"])
    return found


def off_policy_mask(batch: Batch, *, threshold: float) -> torch.Tensor:
    found: torch.Tensor = GRPOTrainer.get_off_policy_mask(
        batch["advantage_B"][:, None],
        batch["logprobs"],
        batch["old_logprobs"],
        batch["mask"].long(),
        threshold,
    )
    return found


FORMS: dict[str, Form] = {
    "GRPOTrainer._compute_loss": grpo,
    "GRPOTrainer._compute_loss, at r = 1": aggregation,
    "GRPOTrainer._generate_and_score_completions": grpo_advantages,
    "GRPOTrainer._generate_and_score_completions, vLLM weights": correction,
    "GRPOTrainer._generate_and_score_completions, normalize_then_sum": gdpo,
    "GRPOTrainer.get_off_policy_mask": off_policy_mask,
    "GRPOTrainer.get_high_entropy_mask": high_entropy_mask,
    "GRPOTrainer._compute_loss, adaptive entropy": adaptive_entropy,
    "GMPOTrainer._compute_loss": gmpo,
    "RLOOTrainer._generate_and_score_completions": rloo_advantages,
    "RLOOTrainer._compute_loss": rloo,
    "DPOTrainer._compute_loss": dpo,
    "KTOTrainer._compute_loss": kto,
    "CPOTrainer.cpo_loss": simpo,
    "CPOTrainer.cpo_loss, of log-ratios": of_log_ratios,
    "get_soft_overlong_punishment": overlong,
    "selective_log_softmax": selective_log_softmax,
    "entropy_from_logits": entropy_from_logits,
}

if __name__ == "__main__":
    run_jobs(
        FORMS,
        {
            "trl": importlib.metadata.version("trl"),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    )
