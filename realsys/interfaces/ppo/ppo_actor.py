"""PPO's policy: generates answers, computes log-probs, and trains on them.

The same class serves actor (generate, inference of proximal log-probs, train_step, evaluate) and reference
(inference). Losses and advantages are pure functions in realsys/algorithms; ppo_experience.py prepares
their inputs, off_policy.py corrects for answers of an older policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from realsys.algorithms.advantage.advantages import masked_whiten
from realsys.algorithms.advantage.kl import KLController
from realsys.algorithms.policy.policy_loss import update_should_stop
from realsys.algorithms.predictions import Predictions, next_token_logprobs
from realsys.api.data import MicroBatchSpec
from realsys.api.model import Model, ModelInterface
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, kept_sets
from realsys.interfaces.interface_arguments import PPOActorArguments
from realsys.interfaces.math_evaluation import evaluate_math
from realsys.interfaces.ppo.off_policy import correct_batch, staleness_stats
from realsys.interfaces.ppo.policy_objective import PolicyObjective
from realsys.interfaces.ppo.ppo_experience import (
    FROM_SCORE,
    make_kl_controller,
    minibatches,
    prepare_experience,
)

MinibatchStats = dict[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class PPOActorInterface(PPOActorArguments, ModelInterface):
    """Interface of the policy. Fields: ``PPOHyperparameters``, the group size and the reward rule's
    name.
    """

    kl_controller: KLController = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "kl_controller", make_kl_controller(self))

    def generate(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """Generates ``group_size`` answers to each prompt, see ``PipelinableEngine.generate``."""
        sample: SequenceSample = model.module.generate(
            data,
            tokenizer=model.tokenizer,
            gconfig=replace(self.gen, n=self.group_size),
            mb_spec=mb_spec,
        )
        return sample

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """Computes float32 ``logprobs`` of every token at the sampling temperature, over its kept set if
        ``data`` has them; 0 at each sequence's first.
        """

        def logprobs(predictions: Predictions, mb: SequenceSample) -> torch.Tensor:
            return next_token_logprobs(
                predictions,
                mb.data[INPUT],
                mb.piece_lengths(INPUT),
                temperature=self.gen.temperature,
                kept=kept_sets(mb, self.gen),
            )

        output = model.module.forward(data, mb_spec=mb_spec, post_hook=logprobs)
        seqlens = {"logprobs": data.meta.seqlens[INPUT]}
        return SequenceSample.from_tensors(data.ids, seqlens, {"logprobs": output})

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """Trains on ``data`` in epochs and minibatches; advances the version by one.

        During the critic's warm-up, and if the batch is skipped because of ``on_mismatch=skip``, nothing is
        updated and only the batch's statistics are returned. A minibatch without any gradient makes no
        optimizer step. The version, and with it the learning rate's schedule, advances in each case.

        Raises:
            InternalError: a token is older than ``max_staleness``.
            PolicyMismatch: sampling and training policy differ too much, and ``on_mismatch=stop``.
        """
        ranks = DataParallel.of(model)
        data, version = data.to(model.device), model.version.global_step
        stats = staleness_stats(
            data, version=version, max_staleness=self.max_staleness, ranks=ranks
        )
        experience = prepare_experience(data, self, kl_coef=self.kl_controller.coef, ranks=ranks)
        ready = correct_batch(experience.batch, self, version=version, ranks=ranks)
        stats |= {**experience.stats, **ready.stats, "early_stopped": 0.0}
        if version >= self.critic_warmup_steps and not ready.skipped:
            stats |= self._update(model, self._whitened(ready.batch, ranks), mb_spec, ranks)
        if not self.needs_prox_logprobs and (found := "first_minibatch/max_abs_log_ratio") in stats:
            stats.setdefault(
                "mismatch/abs_max", stats[found]
            )  # the ratio's old policy is the sampler
        self.kl_controller.update(experience.kl_per_sequence, experience.num_sequences)
        model.inc_version()
        return stats

    def evaluate(
        self, model: Model, eval_batches: Iterable[SequenceSample], mb_spec: MicroBatchSpec
    ) -> dict[str, Any]:
        """Measures the accuracy of greedy answers to held-out prompts, see ``evaluate_math``."""
        return evaluate_math(
            model,
            eval_batches,
            gen=self.gen,
            reward=self.reward,
            reward_args=self.reward_args,
            mb_spec=mb_spec,
        )

    def save(self, model: Model, save_dir: str) -> None:
        """Writes a Hugging Face directory."""
        model.module.save_to_hf(tokenizer=model.tokenizer, save_dir=save_dir)

    def state_dict(self) -> dict[str, Any]:
        """State of the KL controller."""
        return {"kl_controller": self.kl_controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self.kl_controller.load_state_dict(state["kl_controller"])

    # ---- the update ---------------------------------------------------------------------------

    def _whitened(self, batch: SequenceSample, ranks: DataParallel) -> SequenceSample:
        """Whitens advantages; for groups only the score's part, where it is not 0.

        So neither the KL penalty nor a group whose answers all scored the same is scaled up.
        """
        if not self.adv_norm:
            return batch
        mask_N, advantage_N = PolicyObjective(self).mask(batch), batch.data["advantages"]
        score_N = batch.data.get(FROM_SCORE, advantage_N)
        if FROM_SCORE in batch.keys:
            mask_N = mask_N & (score_N != 0)
        if (self.mask_truncated or FROM_SCORE in batch.keys) and _total(mask_N, ranks) < 2:
            return batch  # too few for a variance; with none, nothing is trained
        white_N = masked_whiten(score_N, mask_N, reduce=ranks.sum) + (advantage_N - score_N)
        return SequenceSample(batch.meta, {**batch.data, "advantages": white_N})

    def _update(
        self, model: Model, batch: SequenceSample, mb_spec: MicroBatchSpec, ranks: DataParallel
    ) -> dict[str, float]:
        """Trains on the minibatches and returns means of their statistics.

        A minibatch whose statistics exceed an early-stopping limit is the last; the remaining ones make no
        optimizer step. Statistics are global, so all ranks stop together.
        """
        done: list[MinibatchStats] = []
        empty = 0
        stopped = False
        for _ in range(self.ppo_epochs):
            for minibatch in minibatches(batch, self.ppo_n_minibatches):
                if stopped:
                    continue
                if self._has_no_gradient(minibatch, ranks):
                    empty += 1
                    continue
                done.append(self._train_minibatch(model, minibatch, mb_spec, ranks))
                stopped = update_should_stop(
                    done[-1]["importance_weight"],
                    done[-1]["approx_kl"],
                    max_mean_ratio=self.early_stop_imp_ratio,
                    max_approx_kl=self.early_stop_kl,
                )
        all_done = len(done) + empty == self.ppo_epochs * self.ppo_n_minibatches
        stats = {**_means(done), "early_stopped": float(not all_done)}
        return stats | {"empty_minibatches": float(empty)}

    def _has_no_gradient(self, minibatch: SequenceSample, ranks: DataParallel) -> bool:
        """True if its gradient is 0 on all ranks: a step would move weights by momentum and decay alone."""
        return _total(PolicyObjective(self).has_gradient(minibatch), ranks) == 0

    def _train_minibatch(
        self, model: Model, minibatch: SequenceSample, mb_spec: MicroBatchSpec, ranks: DataParallel
    ) -> MinibatchStats:
        objective, largest = PolicyObjective(self), 0.0

        def loss_fn(
            predictions: Predictions, mb: SequenceSample
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            nonlocal largest
            loss, figures, log_ratio_R = objective.loss(predictions, mb)
            if len(log_ratio_R):
                largest = max(largest, float(log_ratio_R.abs().max()))
            return loss, figures

        made: MinibatchStats = model.module.train_batch(
            input_=minibatch,
            loss_fn=loss_fn,
            loss_weight_fn=objective.weight,
            mb_spec=mb_spec,
            version_steps=model.version.global_step,
        )
        stats = objective.means_over_tokens(made)
        stats["actor_loss"] = stats.pop("loss")
        stats["max_abs_log_ratio"] = ranks.max(largest)
        return stats


def _total(mask_N: torch.Tensor, ranks: DataParallel) -> float:
    """Number of tokens where ``mask_N`` is True, on all ranks."""
    return float(ranks.sum(mask_N.sum().double()))


def _means(done: list[MinibatchStats]) -> dict[str, float]:
    """Means over minibatches, and some statistics of the first; without minibatches only a gradient
    of 0.
    """
    if not done:
        return {"grad_norm": 0.0}
    means = {k: sum(s[k] for s in done) / len(done) for k in done[0]}
    del means["max_abs_log_ratio"]
    first = ("importance_weight", "clip_ratio", "max_abs_log_ratio")
    return {**means, **{f"first_minibatch/{k}": done[0][k] for k in first}}
