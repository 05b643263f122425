"""Converts a finished batch to training data: scores and KL penalties → advantages and returns of tokens.

Actor and critic both prepare the batch that they get, with the same code and settings, so that neither
waits for the other. Each holds its own KL controller; given the same batches, they agree. Without a critic
an estimator makes one advantage an answer. A batch is prepared once a step and stays packed; statistics are
equal on all data-parallel ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from realsys.algorithms.advantage.advantages import (
    gae_advantages,
    group_advantages,
    length_adaptive_lambda,
    num_equal_groups,
)
from realsys.algorithms.advantage.estimators_by_name import answer_advantages, penalty_advantages
from realsys.algorithms.advantage.group_scores import GroupScores
from realsys.algorithms.advantage.kl import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    kl_estimate,
    kl_penalised_rewards,
    sequence_kl,
)
from realsys.algorithms.advantage.overlong import overlong_penalty
from realsys.algorithms.logprobs import shift_to_next_token
from realsys.algorithms.sequence_sums import longest_runs, sum_per_sequence, to_tokens
from realsys.api.basics.estimators import AnswerEstimator
from realsys.api.basics.reward import PARTS
from realsys.api.errors import DataError
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.ragged import pad_packed, unpad_to_packed
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, answer_mask, of_tokens
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.ppo.batch_checks import BEHAVIOUR, REFERENCE, checked_batch
from realsys.interfaces.ppo.batch_figures import (
    batch_figures,
    mean_and_std,
    require_something_to_learn,
)
from realsys.interfaces.ppo.episode_groups import EpisodeGroups

FROM_SCORE = "score_advantages"  # of compared answers: advantages without the KL penalty's part
# Bool per token, of compared answers: those to a question whose answers all scored the same; and those of
# them where the policy stands at the reference, so that what is left of the penalty is rounding.
EQUAL_SCORES, AT_REFERENCE = "equal_scores", "at_reference"
# 256 spacings of float32 at 1. Two passes of the same weights over a token, as sampling and the reference
# make them, differ by up to 2e-5 nats (logits of some 40, each rounded at 4e-6).
ROUNDING_OF_LOGPROBS = 256 * torch.finfo(torch.float32).eps


def make_kl_controller(settings: PPOSettings) -> KLController:
    """Makes the configured KL controller, at its initial coefficient."""
    if not settings.use_adaptive_kl_ctl:
        return FixedKLController(settings.kl_ctl)
    return AdaptiveKLController(
        settings.kl_ctl, target=settings.adaptive_kl_target, horizon=settings.adaptive_kl_horizon
    )


@dataclass(frozen=True)
class Experience:
    """A batch ready to train on.

    Attributes:
        batch: the batch with bool ``answer_mask`` and float32 ``advantages`` (not whitened), packed; with a
            critic also ``returns``, and ``values`` replaced by those of the state *before* each token; of
            compared answers also ``score_advantages``, ``equal_scores`` and ``at_reference``.
        kl_per_sequence: mean over sequences of the KL to the reference, summed over tokens; 0 without a
            reference.
        stats: statistics of the batch for the metrics.
    """

    batch: SequenceSample
    num_sequences: int
    kl_per_sequence: float
    stats: dict[str, float]


def prepare_experience(
    data: SequenceSample, settings: PPOSettings, *, kl_coef: float, ranks: DataParallel
) -> Experience:
    """Computes advantages, and with a critic returns, of ``data``, which has all keys that the calls write.

    Without a critic it has no ``values``, and if ``kl_coef`` is 0 it may lack the reference's log-probs.
    Keys that only some runs have (versions, proximal log-probs) stay in the batch. Rewards use the
    log-probs of the sampling policy, so that actor and critic agree even if only one has the proximal ones.

    Raises:
        DataError: see ``checked_batch`` and ``require_something_to_learn``.
    """
    estimator = settings.advantage
    needed = (
        *(("values",) if estimator.by_critic else ()),
        *((REFERENCE,) if kl_coef else ()),
    )
    data, scored_B = checked_batch(data, needed, ranks)
    require_something_to_learn(data, scored_B, ranks)
    batch = _Scored.of(data, settings, kl_coef if settings.kl_in == "reward" else 0.0, ranks)
    figures: dict[str, float] = {}
    if isinstance(estimator, AnswerEstimator) and estimator.compares:
        new, figures = _compared(batch, estimator, scored_B, ranks)
    elif isinstance(estimator, AnswerEstimator):
        new = _to_come(batch, estimator)
    else:
        new = _by_critic(batch)
    seqlens = data.meta.seqlens[INPUT]
    made = data.update(SequenceSample.from_tensors(data.ids, dict.fromkeys(new, seqlens), new))
    stats = {
        **batch_figures(made, scored_B, ranks),
        **batch.figures,
        **figures,
        "kl_coef": kl_coef,
    }
    kl_mean, _ = mean_and_std(batch.kl_B, scored_B, ranks)
    if REFERENCE in data.keys:
        stats["kl_ref/per_sequence"] = kl_mean
        stats["kl_ref/per_token"] = kl_mean / max(stats["response_length/mean"], 1.0)
    return Experience(made, int(stats["n_sequences"]), kl_mean, stats)


# ---- scores -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scored:
    """A batch's answers with their scores and their distance to the reference.

    Attributes:
        score_B: scaled, with the penalty of long answers; not yet clipped.
        kl_B: k1, summed over each answer.
        kl_coef: weight of the KL penalty in the reward.
    """

    data: SequenceSample
    settings: PPOSettings
    score_B: torch.Tensor
    kl_B: torch.Tensor
    kl_coef: float
    figures: dict[str, float]

    @staticmethod
    def of(
        data: SequenceSample, settings: PPOSettings, kl_coef: float, ranks: DataParallel
    ) -> _Scored:
        rewards_B = data.data["rewards"].float()
        score_B = settings.reward_output_scaling * (rewards_B - settings.reward_output_bias)
        score_B, figures = _penalise_length(score_B, data, settings, ranks)
        lengths = data.piece_lengths(INPUT)
        logprob_N = data.data[BEHAVIOUR]
        logprob_BT, ref_BT, mask_BT = (
            pad_packed(x, lengths)
            for x in (logprob_N, data.data.get(REFERENCE, logprob_N), answer_mask(data))
        )
        kl_B = sequence_kl(logprob_BT, ref_BT, mask_BT)
        return _Scored(data, settings, score_B, kl_B, kl_coef, figures)

    @cached_property
    def lengths(self) -> list[int]:
        return self.data.piece_lengths(INPUT)

    @cached_property
    def mask_BT(self) -> torch.Tensor:
        return pad_packed(answer_mask(self.data), self.lengths)

    def rewards_BT(self) -> torch.Tensor:
        """Penalty on each token, score on the last."""
        x, settings = self.data.data, self.settings
        return kl_penalised_rewards(
            self.score_B,
            pad_packed(x[BEHAVIOUR], self.lengths),
            pad_packed(x.get(REFERENCE, x[BEHAVIOUR]), self.lengths),
            self.mask_BT,
            kl_coef=self.kl_coef,
            estimator=settings.kl_estimate_by if self.kl_coef else "k1",  # type: ignore[arg-type]
            score_clip=settings.max_reward_clip,
            score_on_truncated=settings.score_on_truncated,
            truncated_B=x["seq_no_eos_mask"],
        )

    def clipped_B(self) -> torch.Tensor:
        """Scores as ``rewards_BT`` has them, an answer without tokens none."""
        clip = self.settings.max_reward_clip
        score_B = self.score_B.clamp(-clip, clip)
        if not self.settings.score_on_truncated:
            score_B = score_B.masked_fill(self.data.data["seq_no_eos_mask"].bool(), 0.0)
        return score_B.masked_fill(self.answer_lengths_B == 0, 0.0)

    @cached_property
    def answer_lengths_B(self) -> torch.Tensor:
        return sum_per_sequence(answer_mask(self.data).long(), self.lengths)

    def penalty_B(self) -> torch.Tensor:
        """The KL penalty of each answer."""
        by = self.settings.kl_estimate_by
        if by == "k1" or not self.kl_coef:
            return self.kl_coef * self.kl_B
        x = self.data.data
        kl_N = kl_estimate(x[BEHAVIOUR], x[REFERENCE], by)  # type: ignore[arg-type]
        kl_N = kl_N.masked_fill(~answer_mask(self.data), 0.0)
        return self.kl_coef * sum_per_sequence(kl_N, self.lengths)


def _penalise_length(
    score_B: torch.Tensor, data: SequenceSample, settings: PPOSettings, ranks: DataParallel
) -> tuple[torch.Tensor, dict[str, float]]:
    """Subtracts the penalty of overlong answers from the scores, if configured: of an episode of several
    answers that of the longest, since each may have ``max_new_tokens``.
    """
    if settings.overlong_buffer_len is None:
        return score_B, {}
    penalty_B = overlong_penalty(
        longest_runs(answer_mask(data), data.piece_lengths(INPUT)),
        max_length=settings.gen.max_new_tokens,
        buffer_length=settings.overlong_buffer_len,
        factor=settings.overlong_penalty_factor,
    )
    mean, _ = mean_and_std(penalty_B, torch.ones_like(penalty_B, dtype=torch.bool), ranks)
    return score_B + penalty_B, {"reward/overlong_penalty": mean}


# ---- advantages ---------------------------------------------------------------------------------


def _by_critic(batch: _Scored) -> dict[str, torch.Tensor]:
    """Computes ``advantages`` and ``returns`` by GAE, and ``values`` of the state before each
    token; packed.
    """
    settings, lengths, mask_BT = batch.settings, batch.lengths, batch.mask_BT
    values_N = batch.data.data["values"].float()
    value_N = shift_to_next_token(values_N, lengths)
    last_B = torch.tensor([end - 1 for end in accumulate(lengths)], device=value_N.device)
    reward_BT, value_BT = batch.rewards_BT(), pad_packed(value_N, lengths)

    def gae(lam: float | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gae_advantages(
            reward_BT,
            value_BT,
            mask_BT,
            gamma=settings.discount,
            lam=lam,
            truncation=settings.truncation,  # type: ignore[arg-type]  # options are checked at use
            truncated_B=batch.data.data["seq_no_eos_mask"],
            bootstrap_value_B=values_N[last_B],
        )

    advantage_BT, return_BT = gae(settings.gae_lambda)
    if settings.gae_length_alpha is not None:
        lam_B = length_adaptive_lambda(batch.answer_lengths_B, settings.gae_length_alpha)
        advantage_BT, _ = gae(lam_B)
    return {
        "advantages": unpad_to_packed(advantage_BT, lengths),
        "returns": unpad_to_packed(return_BT, lengths),
        "values": value_N,
    }


def _compared(
    batch: _Scored, estimator: AnswerEstimator, scored_B: torch.Tensor, ranks: DataParallel
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Computes ``advantages`` of answers compared within groups, and the score's part of them, packed; and
    group statistics.

    Score and KL penalty are each compared by themselves, and only the score's part is divided by a
    deviation: if all answers score the same, dividing that of a small penalty by it would inflate it. A
    group is all episodes of one id; they are never on two ranks.
    """
    score_B, lengths_B = batch.clipped_B(), batch.answer_lengths_B
    episodes = EpisodeGroups.of(batch.data, score_B.device)
    parts = _parts(batch.data, score_B.device) if estimator.reads_parts else {}
    by_score_E = answer_advantages(estimator, episodes.scores(score_B, lengths_B, parts))
    if batch.settings.norm == "group":
        by_score_E = group_advantages(by_score_E, episodes.group_E, normalise_std=True)
    penalty_E = episodes.sum(batch.penalty_B())
    by_penalty_E = penalty_advantages(
        estimator, GroupScores(-penalty_E, episodes.group_E, episodes.sum(lengths_B))
    )
    scored_E = episodes.sum(scored_B.long()) > 0
    equal_B = episodes.spread(
        _equal(episodes.mean(score_B), by_score_E, episodes.group_E, scored_E)
    )
    equal, every = num_equal_groups(episodes.mean(score_B)[scored_E], episodes.group_E[scored_E])
    equal, every = ranks.sum(torch.tensor([equal, every], dtype=torch.float64)).tolist()
    by_score_B, by_penalty_B = episodes.spread(by_score_E), episodes.spread(by_penalty_E)
    mask_N = answer_mask(batch.data)

    def spread(advantage_B: torch.Tensor) -> torch.Tensor:
        return to_tokens(advantage_B, mask_N, batch.lengths).masked_fill(~mask_N, 0.0)

    new = {
        "advantages": spread(by_score_B + by_penalty_B),
        FROM_SCORE: spread(by_score_B),
        EQUAL_SCORES: of_tokens(equal_B, batch.data) & mask_N,
        AT_REFERENCE: of_tokens(equal_B & _at_reference(batch, episodes), batch.data) & mask_N,
    }
    return new, {"groups/equal_scores": equal, "groups/compared": every}


def _equal(
    score_E: torch.Tensor, by_score_E: torch.Tensor, group_E: torch.Tensor, scored_E: torch.Tensor
) -> torch.Tensor:
    """Bool ``[E]``: of a group whose scored answers have equal scores, and no advantage by them (which
    estimators of parts may find all the same). An answer alone is one.
    """
    num = int(group_E.max()) + 1 if len(group_E) else 0
    empty_G = score_E.new_zeros(num)
    kept = group_E[scored_E]
    high_G = empty_G.scatter_reduce(0, kept, score_E[scored_E], "amax", include_self=False)
    low_G = empty_G.scatter_reduce(0, kept, score_E[scored_E], "amin", include_self=False)
    moved_G = torch.zeros_like(empty_G).index_add_(0, group_E, by_score_E.abs().to(empty_G))
    return ((high_G == low_G) & (moved_G == 0))[group_E]


def _at_reference(batch: _Scored, episodes: EpisodeGroups) -> torch.Tensor:
    """Bool ``[B]``: of a group of which no token's log-prob differs from the reference's by more than
    rounding; True without a reference.
    """
    x = batch.data.data
    apart_N = (x[BEHAVIOUR] - x.get(REFERENCE, x[BEHAVIOUR])).abs() > ROUNDING_OF_LOGPROBS
    apart_B = sum_per_sequence((apart_N & answer_mask(batch.data)).long(), batch.lengths)
    apart_E = episodes.sum(apart_B)
    num = int(episodes.group_E.max()) + 1 if len(episodes.group_E) else 0
    apart_G = apart_E.new_zeros(num).index_add_(0, episodes.group_E, apart_E)
    return episodes.spread((apart_G == 0)[episodes.group_E])


def _to_come(batch: _Scored, estimator: AnswerEstimator) -> dict[str, torch.Tensor]:
    """Computes ``advantages`` of answers that are not compared: what the estimator makes of the score, less
    the KL penalties of a token and those after it; packed.
    """
    mask_BT, score_B = batch.mask_BT, batch.clipped_B()
    lengths_B = batch.answer_lengths_B
    every_B = torch.arange(len(score_B), device=score_B.device)
    by_score_B = answer_advantages(estimator, GroupScores(score_B, every_B, lengths_B))
    penalty_BT = batch.rewards_BT() - _on_last(score_B, mask_BT)
    to_come_BT = penalty_BT.flip(1).cumsum(1).flip(1) + by_score_B[:, None]
    return {"advantages": unpad_to_packed(to_come_BT.masked_fill(~mask_BT, 0.0), batch.lengths)}


def _on_last(score_B: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """``[B, T]``: the score on the last token with mask 1."""
    left_BT = mask_BT.flip(1).cumsum(1).flip(1)
    return (mask_BT & (left_BT == 1)) * score_B[:, None]


def _parts(data: SequenceSample, device: torch.device) -> dict[str, torch.Tensor]:
    """Parts of each answer's reward by name, ``[B]``; NaN where an answer has none of that name.

    Raises:
        DataError: an id has parts of another number of answers than it has.
    """
    texts = data.meta.metadata.get(PARTS) or ["[]"] * data.batch_size
    rows: list[dict[str, float]] = []
    for id_, pieces, text in zip(data.ids, data.meta.seqlens[INPUT], texts, strict=True):
        found = json.loads(text)  # empty where a record was set aside
        if found and len(found) != len(pieces):
            raise DataError(
                f"{len(pieces)} answers, and parts of {len(found)} rewards",
                where=f"batch, id {id_}",
                fix="report this as a bug; an interface of your own gives one mapping an answer",
            )
        rows += found or [{} for _ in pieces]
    return {
        name: torch.tensor([float(row.get(name, "nan")) for row in rows], device=device)
        for name in sorted({name for row in rows for name in row})
    }


def minibatches(batch: SequenceSample, num: int) -> Iterator[SequenceSample]:
    """Splits the ids, in order, into ``num`` parts that differ by at most one id.

    Raises:
        DataError: there are fewer ids than parts, so other ranks would wait for this one.
    """
    if batch.batch_size < num:
        raise DataError(
            f"{batch.batch_size} ids on this data-parallel rank, {num} minibatches",
            where="ppo_n_minibatches",
            fix="use fewer minibatches or ranks, or a larger train_bs_n_seqs",
        )
    least, more = divmod(batch.batch_size, num)
    yield from batch.split([least + (i < more) for i in range(num)])
