"""PPO's value model: predicts the return of each state and trains on observed returns.

With ``value_norm`` the module predicts normalised returns; outputs of this interface are real ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from realsys.algorithms.advantage.kl import KLController
from realsys.algorithms.aggregation import aggregate
from realsys.algorithms.logprobs import shift_to_next_token
from realsys.algorithms.value.value_loss import clipped_value_loss, explained_variance
from realsys.algorithms.value.value_norm import RunningMoments
from realsys.api.data import MicroBatchSpec
from realsys.api.model import Model, ModelInterface
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, answer_mask, num_answer_tokens
from realsys.interfaces.interface_arguments import PPOCriticArguments
from realsys.interfaces.ppo.batch_figures import mean_and_std
from realsys.interfaces.ppo.ppo_experience import (
    make_kl_controller,
    minibatches,
    prepare_experience,
)
from realsys.interfaces.skipped_steps import made_and_skipped


@dataclass(frozen=True, kw_only=True, eq=False)
class PPOCriticInterface(PPOCriticArguments, ModelInterface):
    """Interface of the critic. Fields: ``PPOHyperparameters`` and the group size."""

    kl_controller: KLController = field(init=False, repr=False)
    moments: RunningMoments | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        moments = RunningMoments(beta=self.value_norm_beta, eps=self.value_norm_eps)
        object.__setattr__(self, "kl_controller", make_kl_controller(self))
        object.__setattr__(self, "moments", moments if self.value_norm else None)

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """Computes float32 ``values``; at t, that of the state that includes token t."""
        values = model.module.forward(data, mb_spec=mb_spec).float()
        if self.moments is not None:
            values = self.moments.denormalise(values)
        seqlens = {"values": data.meta.seqlens[INPUT]}
        return SequenceSample.from_tensors(data.ids, seqlens, {"values": values})

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """Trains on ``data`` in epochs and minibatches; advances the version by one."""
        ranks = DataParallel.of(model)
        experience = prepare_experience(
            data.to(model.device), self, kl_coef=self.kl_controller.coef, ranks=ranks
        )
        batch = experience.batch
        values_N, returns_N, mask_N = (
            batch.data["values"],
            batch.data["returns"],
            answer_mask(batch),
        )
        # nan if all returns are equal, as in a first batch without a correct answer; keeps nan out of
        # metrics files.
        explained = explained_variance(values_N, returns_N, mask_N, reduce=ranks.sum)
        figures = {
            "explained_variance": 0.0 if math.isnan(explained) else explained,
            "return/mean": mean_and_std(returns_N, mask_N, ranks)[0],
            "value/mean": mean_and_std(values_N, mask_N, ranks)[0],
        }
        if self.moments is not None:
            batch = self._normalised(batch, self.moments, mask_N, ranks)
        done = [
            self._train_minibatch(model, minibatch, mb_spec)
            for _ in range(self.ppo_epochs)
            for minibatch in minibatches(batch, self.ppo_n_minibatches)
            if ranks.sum(answer_mask(minibatch).sum().double())  # not all answers were set aside
        ]
        self.kl_controller.update(experience.kl_per_sequence, experience.num_sequences)
        model.inc_version()
        made, skipped = made_and_skipped(done)
        means = {k: sum(s[k] for s in made) / len(made) for k in (made[0] if made else {})}
        return {**figures, **means, **skipped}

    def save(self, model: Model, save_dir: str) -> None:
        """Writes a Hugging Face directory that ``hf_critic`` reads."""
        model.module.save_to_hf(tokenizer=model.tokenizer, save_dir=save_dir)

    def state_dict(self) -> dict[str, Any]:
        """State of the KL controller and of the running moments."""
        moments = None if self.moments is None else self.moments.state_dict()
        return {"kl_controller": self.kl_controller.state_dict(), "moments": moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self.kl_controller.load_state_dict(state["kl_controller"])
        if self.moments is not None:
            self.moments.load_state_dict(state["moments"] or {})

    def _normalised(
        self,
        batch: SequenceSample,
        moments: RunningMoments,
        mask_N: torch.Tensor,
        ranks: DataParallel,
    ) -> SequenceSample:
        """Normalises targets by the new moments and old values by the moments of their prediction."""
        old_values_N = moments.normalise(batch.data["values"])
        moments.update(batch.data["returns"], mask_N, reduce=ranks.sum)
        returns_N = moments.normalise(batch.data["returns"])
        return SequenceSample(
            batch.meta, {**batch.data, "values": old_values_N, "returns": returns_N}
        )

    def _train_minibatch(
        self, model: Model, minibatch: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        stats: dict[str, float] = model.module.train_batch(
            input_=minibatch,
            loss_fn=self._value_loss,
            loss_weight_fn=num_answer_tokens,
            mb_spec=mb_spec,
            version_steps=model.version.global_step,
        )
        stats["value_loss"] = stats.pop("loss")
        return stats

    def _value_loss(
        self, values_N: torch.Tensor, mb: SequenceSample
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Mean value loss over answer tokens; a token's value is that of the state before it."""
        mask_N = answer_mask(mb)
        loss_N, figures = clipped_value_loss(
            shift_to_next_token(values_N, mb.piece_lengths(INPUT)),
            mb.data["values"],
            mb.data["returns"],
            mask_N,
            eps_clip=self.value_eps_clip,
            kind="mse" if self.value_huber_delta is None else "huber",
            huber_delta=self.value_huber_delta or 1.0,
        )
        weight = float(mask_N.sum())
        clip_ratio = aggregate(figures["clip_fraction"], mask_N, "token_mean", denominator=weight)
        loss = aggregate(loss_N, mask_N, "token_mean", denominator=weight)
        return loss, {"value_clip_ratio": clip_ratio}
