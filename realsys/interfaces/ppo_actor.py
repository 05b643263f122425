"""PPO's policy: samples answers, scores them under a model, and updates itself on them.

The same class serves actor (generate, inference of proximal log-probs, train_step, evaluate) and reference
(inference). Losses and advantages are pure functions in realsys/algorithms; what they are fed with is
ppo_experience.py's, and what makes up for answers of another policy off_policy.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from realsys.algorithms.advantages import masked_whiten
from realsys.algorithms.kl import KLController
from realsys.algorithms.policy_loss import update_should_stop
from realsys.algorithms.predictions import Predictions, next_token_logprobs
from realsys.api.data import MicroBatchSpec
from realsys.api.model import Model, ModelInterface
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT
from realsys.interfaces.math_evaluation import evaluate_math
from realsys.interfaces.off_policy import corrected, staleness_stats
from realsys.interfaces.policy_objective import PolicyObjective
from realsys.interfaces.ppo_experience import (
    FROM_SCORE,
    PPOSettings,
    minibatches,
    prepare_experience,
)

MinibatchStats = dict[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class PPOActorInterface(PPOSettings, ModelInterface):
    """Fields are those of ``PPOHyperparameters``, the group size and the reward rule's name."""

    reward: str = "math_verify"
    kl_controller: KLController = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "kl_controller", self.make_kl_controller())

    def generate(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """``group_size`` answers to each prompt, see ``PipelinableEngine.generate``."""
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
        """float32 ``logprobs`` of every token at the sampling temperature; 0 at each first one."""

        def logprobs(predictions: Predictions, mb: SequenceSample) -> torch.Tensor:
            return next_token_logprobs(
                predictions,
                mb.data[INPUT],
                mb.piece_lengths(INPUT),
                temperature=self.gen.temperature,
            )

        output = model.module.forward(data, mb_spec=mb_spec, post_hook=logprobs)
        seqlens = {"logprobs": data.meta.seqlens[INPUT]}
        return SequenceSample.from_tensors(data.ids, seqlens, {"logprobs": output})

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """All epochs and minibatches on ``data``; one version, however many optimizer steps.

        During the critic's warm-up, and where the batch is left out because of ``on_mismatch=skip``,
        nothing is updated and only the batch's figures are returned. A minibatch from which nothing can
        be learned makes no optimizer step. The version, and with it the learning rate's schedule, goes
        on in each case.

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
        ready = corrected(experience.batch, self, version=version, ranks=ranks)
        stats |= {**experience.stats, **ready.stats, "early_stopped": 0.0}
        if version >= self.critic_warmup_steps and not ready.left_out:
            stats |= self._update(model, self._whitened(ready.batch, ranks), mb_spec, ranks)
        self.kl_controller.update(experience.kl_per_sequence, experience.num_sequences)
        model.inc_version()
        return stats

    def evaluate(
        self, model: Model, eval_batches: Iterable[SequenceSample], mb_spec: MicroBatchSpec
    ) -> dict[str, Any]:
        """Accuracy of greedy answers to held-out prompts, see ``evaluate_math``."""
        return evaluate_math(model, eval_batches, gen=self.gen, reward=self.reward, mb_spec=mb_spec)

    def save(self, model: Model, save_dir: str) -> None:
        """A Hugging Face directory."""
        model.module.save_to_hf(tokenizer=model.tokenizer, save_dir=save_dir)

    def state_dict(self) -> dict[str, Any]:
        """The KL controller's."""
        return {"kl_controller": self.kl_controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state_dict`` gave."""
        self.kl_controller.load_state_dict(state["kl_controller"])

    # ---- the update ---------------------------------------------------------------------------

    def _whitened(self, batch: SequenceSample, ranks: DataParallel) -> SequenceSample:
        """Of groups only the score's part, where it is not 0: neither the KL penalty nor a group whose
        answers scored the same is blown up to the size of the others."""
        if not self.adv_norm:
            return batch
        mask_N, advantage_N = PolicyObjective(self).mask(batch), batch.data["advantages"]
        score_N = batch.data.get(FROM_SCORE, advantage_N)
        if FROM_SCORE in batch.keys:
            mask_N = mask_N & (score_N != 0)
        if (self.mask_truncated or FROM_SCORE in batch.keys) and _total(mask_N, ranks) < 2:
            return batch  # too few to have a variance; without any, nothing is trained on
        white_N = masked_whiten(score_N, mask_N, reduce=ranks.sum) + (advantage_N - score_N)
        return SequenceSample(batch.meta, {**batch.data, "advantages": white_N})

    def _update(
        self, model: Model, batch: SequenceSample, mb_spec: MicroBatchSpec, ranks: DataParallel
    ) -> dict[str, float]:
        """Means over the minibatches that were trained on.

        The minibatch whose figures pass a limit of early stopping is the last: what would come
        after it makes no optimizer step at all. Figures are global, so all ranks stop alike.
        """
        done: list[MinibatchStats] = []
        empty = 0
        stopped = False
        for _ in range(self.ppo_epochs):
            for minibatch in minibatches(batch, self.ppo_n_minibatches):
                if stopped:
                    continue
                if self._teaches_nothing(minibatch, ranks):
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

    def _teaches_nothing(self, minibatch: SequenceSample, ranks: DataParallel) -> bool:
        """Whether its gradient is 0 on all ranks: a step would move weights by momentum and decay alone."""
        return _total(PolicyObjective(self).teaching(minibatch), ranks) == 0

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
            token_normalize_scope="global",
            mb_spec=mb_spec,
            version_steps=model.version.global_step,
        )
        stats = objective.means_over_tokens(made)
        stats["actor_loss"] = stats.pop("loss")
        stats["max_abs_log_ratio"] = ranks.max(largest)
        return stats


def _total(mask_N: torch.Tensor, ranks: DataParallel) -> float:
    """Number of tokens where ``mask_N``, on all ranks."""
    return float(ranks.sum(mask_N.sum().double()))


def _means(done: list[MinibatchStats]) -> dict[str, float]:
    """Means over minibatches, and some figures of the first one; without any only a gradient of 0."""
    if not done:
        return {"grad_norm": 0.0}
    means = {k: sum(s[k] for s in done) / len(done) for k in done[0]}
    del means["max_abs_log_ratio"]
    first = ("importance_weight", "clip_ratio", "max_abs_log_ratio")
    return {**means, **{f"first_minibatch/{k}": done[0][k] for k in first}}
