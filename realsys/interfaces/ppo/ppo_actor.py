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

from realsys.algorithms.advantage.kl import KLController
from realsys.algorithms.policy.entropy_control import EntropyControl
from realsys.algorithms.policy.policy_loss import update_should_stop
from realsys.algorithms.predictions import Predictions, next_token_figures, next_token_logprobs
from realsys.algorithms.value.value_norm import RunningMoments
from realsys.api.data import MicroBatchSpec
from realsys.api.model import SKIPPED_STEPS, Model, ModelInterface
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, kept_sets
from realsys.interfaces.interface_arguments import PPOActorArguments
from realsys.interfaces.math_evaluation import evaluate_math
from realsys.interfaces.ppo.advantage_norm import normalised
from realsys.interfaces.ppo.off_policy import correct_batch, staleness_stats
from realsys.interfaces.ppo.policy_objective import PolicyObjective
from realsys.interfaces.ppo.ppo_experience import (
    make_kl_controller,
    minibatches,
    prepare_experience,
)
from realsys.interfaces.ppo.teacher import with_teachers
from realsys.interfaces.ppo.token_selection import choose_by_covariance, keep_top_entropy
from realsys.interfaces.skipped_steps import made_and_skipped

MinibatchStats = dict[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class PPOActorInterface(PPOActorArguments, ModelInterface):
    """Interface of the policy. Fields: ``PPOHyperparameters``, the group size and the reward rule's
    name.
    """

    kl_controller: KLController = field(init=False, repr=False)
    entropy_control: EntropyControl = field(init=False, repr=False)
    running: RunningMoments = field(init=False, repr=False)  # of advantages, all batches so far

    def __post_init__(self) -> None:
        super().__post_init__()
        control = EntropyControl(
            self.entropy_coef, target=self.entropy_target, step=self.entropy_step
        )
        object.__setattr__(self, "kl_controller", make_kl_controller(self))
        object.__setattr__(self, "entropy_control", control)
        object.__setattr__(self, "running", RunningMoments())

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
        ``data`` has them, 0 at each sequence's first; with ``with_entropy`` also the ``entropy`` that each
        was drawn from.
        """
        figures = next_token_figures if self.with_entropy else next_token_logprobs

        def found(predictions: Predictions, mb: SequenceSample) -> torch.Tensor:
            return figures(
                predictions,
                mb.data[INPUT],
                mb.piece_lengths(INPUT),
                temperature=self.gen.temperature,
                kept=kept_sets(mb, self.gen),
            )

        output = model.module.forward(data, mb_spec=mb_spec, post_hook=found)
        columns = output.unbind(1) if self.with_entropy else (output,)
        made = dict(zip(("logprobs", "entropy"), columns, strict=False))
        seqlens = dict.fromkeys(made, data.meta.seqlens[INPUT])
        return SequenceSample.from_tensors(
            data.ids, seqlens, {name: x.contiguous() for name, x in made.items()}
        )

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """Trains on ``data`` in epochs and minibatches; advances the version by one.

        During the critic's warm-up, and if the batch is skipped because of ``on_mismatch=skip``, nothing is
        updated and only the batch's statistics are returned. A minibatch without any gradient makes no
        optimizer step, and one whose gradient is not finite neither: statistics are of the others. The
        version, and with it the learning rate's schedule, advances in each case.

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
        objective = PolicyObjective(
            self,
            kl_coef=self.kl_controller.coef,
            entropy_coef=self.entropy_control.coef,
            teachers=self.forward_teachers,
            taught=bool(self.teachers),
        )
        if version >= self.critic_warmup_steps and not ready.skipped:
            batch, figures = self._ready(ready.batch, objective, ranks)
            stats |= figures
            stats |= self._update(model, batch, objective, mb_spec, ranks)
            self.entropy_control.update(stats.get("entropy", float("nan")))
        stats |= {} if self.entropy_target is None else {"entropy_coef": objective.entropy_coef}
        if not self.needs_prox_logprobs and (found := "first_minibatch/max_abs_log_ratio") in stats:
            # The ratio's old policy is the sampler.
            stats.setdefault("mismatch/abs_max", stats[found])
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
        """State of the KL controller, of the entropy's, and of the running moments of advantages."""
        return {
            "kl_controller": self.kl_controller.state_dict(),
            "entropy_control": self.entropy_control.state_dict(),
            "advantage_scale": self.running.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned; older checkpoints have the KL controller's alone."""
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.entropy_control.load_state_dict(state.get("entropy_control", {}))
        if "advantage_scale" in state:
            self.running.load_state_dict(state["advantage_scale"])

    # ---- the update ---------------------------------------------------------------------------

    def _ready(
        self, batch: SequenceSample, objective: PolicyObjective, ranks: DataParallel
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Advantages as the loss takes them, and tokens that it treats in another way; and statistics."""
        mask_N, old_logprob_N = objective.mask(batch), batch.data[objective.old_logprobs]
        batch = normalised(batch, self, mask_N, self.running, ranks)
        batch, figures = with_teachers(batch, self.teachers, old_logprob_N, ranks)
        batch = keep_top_entropy(batch, mask_N, self.top_entropy_share, ranks)
        return choose_by_covariance(batch, self.loss, old_logprob_N, mask_N, ranks), figures

    def _update(
        self,
        model: Model,
        batch: SequenceSample,
        objective: PolicyObjective,
        mb_spec: MicroBatchSpec,
        ranks: DataParallel,
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
                if not total(objective.has_gradient(minibatch), ranks):
                    empty += 1  # a step would move weights by momentum and decay alone
                    continue
                done.append(_train_minibatch(model, minibatch, objective, mb_spec, ranks))
                stopped = SKIPPED_STEPS not in done[-1] and update_should_stop(
                    done[-1]["importance_weight"],
                    done[-1]["approx_kl"],
                    max_mean_ratio=self.early_stop_imp_ratio,
                    max_approx_kl=self.early_stop_kl,
                )
        all_done = len(done) + empty == self.ppo_epochs * self.ppo_n_minibatches
        made, skipped = made_and_skipped(done)
        stats = {**_means(made), **skipped, "early_stopped": float(not all_done)}
        return stats | {"empty_minibatches": float(empty)}


def _train_minibatch(
    model: Model,
    minibatch: SequenceSample,
    objective: PolicyObjective,
    mb_spec: MicroBatchSpec,
    ranks: DataParallel,
) -> MinibatchStats:
    largest = 0.0

    def loss_fn(
        predictions: Predictions, mb: SequenceSample
    ) -> tuple[Any, dict[str, torch.Tensor]]:
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


def total(mask_N: torch.Tensor, ranks: DataParallel) -> float:
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
