"""PPO's policy: samples answers, scores them under a model, and updates itself on them.

The same class serves actor (generate, train_step, evaluate) and reference (inference). Losses and
advantages are pure functions in realsys/algorithms; what they are fed with is ppo_experience.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from realsys.algorithms.advantages import masked_whiten
from realsys.algorithms.kl import KLController
from realsys.algorithms.logprobs import entropy, gather_logprobs, next_token_logprobs
from realsys.algorithms.policy_loss import aggregate, ppo_policy_loss, update_should_stop
from realsys.api.data import MicroBatchSpec
from realsys.api.model import Model, ModelInterface
from realsys.backends.data_parallel import DataParallel
from realsys.data_plane.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, answer_logits, answer_mask, num_answer_tokens
from realsys.interfaces.math_evaluation import evaluate_math
from realsys.interfaces.ppo_experience import PPOSettings, minibatches, prepare_experience

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

        def logprobs(logits: torch.Tensor, mb: SequenceSample) -> torch.Tensor:
            return next_token_logprobs(
                logits,
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

        During the critic's warm-up nothing is updated, and only the batch's figures are returned.
        """
        ranks = DataParallel.of(model)
        experience = prepare_experience(
            data.to(model.device), self, kl_coef=self.kl_controller.coef, ranks=ranks
        )
        stats = {**experience.stats, "early_stopped": 0.0}
        if model.version.global_step >= self.critic_warmup_steps:
            batch = self._whitened(experience.batch, ranks) if self.adv_norm else experience.batch
            stats |= self._update(model, batch, mb_spec, ranks)
        self.kl_controller.update(experience.kl_per_sequence, experience.num_sequences)
        model.inc_version()
        return stats

    def evaluate(self, model: Model, eval_batches: Iterable[SequenceSample]) -> dict[str, Any]:
        """Accuracy of greedy answers to held-out prompts, see ``evaluate_math``."""
        return evaluate_math(model, eval_batches, gen=self.gen, reward=self.reward)

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
        white = masked_whiten(batch.data["advantages"], answer_mask(batch), reduce=ranks.sum)
        return SequenceSample(batch.meta, {**batch.data, "advantages": white})

    def _update(
        self, model: Model, batch: SequenceSample, mb_spec: MicroBatchSpec, ranks: DataParallel
    ) -> dict[str, float]:
        """Means over the minibatches that were trained on.

        The minibatch whose figures pass a limit of early stopping is the last: what would come
        after it makes no optimizer step at all. Figures are global, so all ranks stop alike.
        """
        done: list[MinibatchStats] = []
        stopped = False
        for _ in range(self.ppo_epochs):
            for minibatch in minibatches(batch, self.ppo_n_minibatches):
                if not stopped:
                    done.append(self._train_minibatch(model, minibatch, mb_spec, ranks))
                    stopped = update_should_stop(
                        done[-1]["importance_weight"],
                        done[-1]["approx_kl"],
                        max_mean_ratio=self.early_stop_imp_ratio,
                        max_approx_kl=self.early_stop_kl,
                    )
        first = ("importance_weight", "clip_ratio", "max_abs_log_ratio")
        means = {k: sum(s[k] for s in done) / len(done) for k in done[0]}
        del means["max_abs_log_ratio"]
        all_done = len(done) == self.ppo_epochs * self.ppo_n_minibatches
        return {
            **means,
            **{f"first_minibatch/{k}": done[0][k] for k in first},
            "early_stopped": float(not all_done),
        }

    def _train_minibatch(
        self, model: Model, minibatch: SequenceSample, mb_spec: MicroBatchSpec, ranks: DataParallel
    ) -> MinibatchStats:
        largest = 0.0

        def loss_fn(
            logits: torch.Tensor, mb: SequenceSample
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            nonlocal largest
            loss, stats, log_ratio_R = self._policy_loss(logits, mb)
            if len(log_ratio_R):
                largest = max(largest, float(log_ratio_R.abs().max()))
            return loss, stats

        stats: MinibatchStats = model.module.train_batch(
            input_=minibatch,
            loss_fn=loss_fn,
            loss_weight_fn=num_answer_tokens,
            token_normalize_scope="global",
            mb_spec=mb_spec,
            version_steps=model.version.global_step,
        )
        stats["actor_loss"] = stats.pop("loss")
        stats["max_abs_log_ratio"] = ranks.max(largest)
        return stats

    def _policy_loss(
        self, logits: torch.Tensor, mb: SequenceSample
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        """Mean loss over the answer tokens R, mean figures, and the log-ratio of each token."""
        mask_N = answer_mask(mb)
        temperature = self.gen.temperature
        logits_RV, tokens_R = answer_logits(logits, mb)
        logprob_R = gather_logprobs(logits_RV, tokens_R, temperature=temperature)
        old_logprob_R = mb.data["packed_logprobs"][mask_N]
        every_R = torch.ones_like(logprob_R, dtype=torch.bool)
        loss_R, figures = ppo_policy_loss(
            logprob_R,
            old_logprob_R,
            mb.data["advantages"][mask_N],
            every_R,
            eps_clip=self.eps_clip,
            eps_clip_higher=self.eps_clip_higher,
            dual_clip=self.c_clip,
        )
        with torch.set_grad_enabled(self.entropy_coef > 0 and torch.is_grad_enabled()):
            entropy_R = entropy(logits_RV, temperature=temperature)

        def mean(per_token: torch.Tensor) -> torch.Tensor:
            return aggregate(per_token, every_R, "token_mean", denominator=float(len(every_R)))

        loss = (
            mean(loss_R) - self.entropy_coef * mean(entropy_R)
            if self.entropy_coef
            else mean(loss_R)
        )
        stats = {
            "importance_weight": mean(figures["importance_ratio"]),
            "clip_ratio": mean(figures["clip_fraction"]),
            "dual_clip_ratio": mean(figures["dual_clip_fraction"]),
            "approx_kl": mean(figures["approx_kl_k3"]),
            "entropy": mean(entropy_R.detach()),
        }
        return loss, stats, logprob_R.detach() - old_logprob_R
