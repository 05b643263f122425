"""Converts a finished batch to PPO's training data: rewards per token, advantages and returns.

Actor and critic both prepare the batch that they get, with the same code and settings, so that neither
waits for the other. Each holds its own KL controller; given the same batches, they agree. Without a critic
the answers to a question are compared with one another. Statistics are equal on all data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from realsys.algorithms.advantage.advantages import (
    gae_advantages,
    group_advantages,
    masked_sums,
    num_equal_groups,
)
from realsys.algorithms.advantage.kl import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    kl_penalised_rewards,
    sequence_kl,
)
from realsys.algorithms.advantage.overlong import overlong_penalty
from realsys.algorithms.logprobs import shift_to_next_token
from realsys.api.errors import DataError
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.ragged import pad_packed, unpad_to_packed
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, answer_lengths, answer_mask
from realsys.interfaces.interface_arguments import PPOSettings

# Log-probs by the sampling policy and by the one about to be trained; weight version of each token.
BEHAVIOUR, PROXIMAL, VERSIONS = "packed_logprobs", "packed_prox_logprobs", "packed_versions"
REFERENCE = "packed_ref_logprobs"  # by the reference policy; missing if not needed
FROM_SCORE = "score_advantages"  # without a critic: advantages without the KL penalty's part


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
        batch: the batch with float32 ``advantages`` (not whitened), packed; with a critic also
            ``returns``, and ``values`` replaced by those of the state *before* each token; without
            a critic ``score_advantages``.
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
    """Computes advantages, and with a critic returns, of ``data``, which has all keys that PPO's
    calls write.

    Without a critic (``settings.advantage`` is not ``gae``) it has no ``values``, and if
    ``kl_coef`` is 0 it
    may lack the reference's log-probs. Keys that only some runs have (versions, proximal log-probs) stay in
    the batch. Rewards use the log-probs of the sampling policy, so that actor and critic agree even if only
    one has the proximal ones.

    Raises:
        DataError: the keys' lengths are inconsistent, or an answer has a non-finite number. Raised on all
            ranks; those that hold it name the datapoint.
    """
    needed = (
        *(("values",) if settings.advantage == "gae" else ()),
        *((REFERENCE,) if kl_coef else ()),
    )
    lengths = _checked_lengths(data, needed)
    data, scored_B = _mask_unscored(data, lengths)
    _check_numbers(data, ranks)
    x, mask_BT = data.data, pad_packed(answer_mask(data), lengths)
    logprob_BT = pad_packed(x["packed_logprobs"], lengths)
    has_reference = REFERENCE in x
    ref_logprob_BT = pad_packed(x[REFERENCE], lengths) if has_reference else logprob_BT
    score_B = settings.reward_output_scaling * (x["rewards"].float() - settings.reward_output_bias)
    score_B, overlong = _penalise_length(score_B, mask_BT, settings, ranks)
    kl_B = sequence_kl(logprob_BT, ref_logprob_BT, mask_BT)
    by_critic = settings.advantage == "gae"
    reward_BT = kl_penalised_rewards(
        score_B,
        logprob_BT,
        ref_logprob_BT,
        mask_BT,
        kl_coef=kl_coef if by_critic else 0.0,
        score_clip=settings.max_reward_clip,
        score_on_truncated=settings.score_on_truncated,
        truncated_B=x["seq_no_eos_mask"],
    )
    groups: dict[str, float] = {}
    if by_critic:
        new = _gae_advantages(data, settings, reward_BT, mask_BT, lengths)
    else:
        new, groups = _group_advantages(
            data, settings, reward_BT.sum(1), kl_coef * kl_B, mask_BT, scored_B, ranks
        )
    seqlens = data.meta.seqlens[INPUT]
    batch = data.update(SequenceSample.from_tensors(data.ids, dict.fromkeys(new, seqlens), new))
    stats = {**_batch_figures(batch, scored_B, ranks), **overlong, **groups, "kl_coef": kl_coef}
    kl_mean, _ = mean_and_std(kl_B, scored_B, ranks)
    if has_reference:
        stats["kl_ref/per_sequence"] = kl_mean
        stats["kl_ref/per_token"] = kl_mean / max(stats["response_length/mean"], 1.0)
    return Experience(batch, int(stats["n_sequences"]), kl_mean, stats)


def _mask_unscored(data: SequenceSample, lengths: list[int]) -> tuple[SequenceSample, torch.Tensor]:
    """Masks answers that got no reward (NaN); returns the batch and a mask of the scored answers.

    They keep their place, since ranks and minibatches count records, but none of their tokens is
    trained on.
    """
    none_B = data.data["rewards"].isnan()
    if not none_B.any():
        return data, ~none_B
    no_answer_N = none_B.repeat_interleave(torch.tensor(lengths, device=none_B.device))
    new = {
        "rewards": data.data["rewards"].masked_fill(none_B, 0.0),
        "prompt_mask": data.data["prompt_mask"] | no_answer_N,
        "seq_no_eos_mask": data.data["seq_no_eos_mask"] & ~none_B,
    }
    return SequenceSample(data.meta, {**data.data, **new}), ~none_B


def _check_numbers(data: SequenceSample, ranks: DataParallel) -> None:
    """Raises DataError for non-finite log-probs and values.

    The loss would not reveal all of them: a ratio of nan has no gradient, like a clipped one.
    """
    mask_N = answer_mask(data)
    keys = [k for k in (BEHAVIOUR, PROXIMAL, REFERENCE, "values") if k in data.keys]
    bad = {key: ~data.data[key].isfinite() & mask_N for key in keys}
    counts = ranks.sum(torch.stack([bad_N.sum().double() for bad_N in bad.values()])).tolist()
    for key, count in zip(keys, counts, strict=True):
        if count:
            rows = data.meta.rows_per_id(INPUT)
            mine = zip(data.ids, torch.split(bad[key], list(rows)), strict=True)
            ids = [name for name, bad_M in mine if bad_M.any()]
            raise DataError(
                f"{count:.0f} answer tokens have a {key} that is not finite",
                where=f"datapoints {ids[:5]}" if ids else "another data-parallel rank",
                fix="check the weights, and the engine that returned these log-probs",
            )


def _penalise_length(
    score_B: torch.Tensor, mask_BT: torch.Tensor, settings: PPOSettings, ranks: DataParallel
) -> tuple[torch.Tensor, dict[str, float]]:
    """Subtracts the penalty of overlong answers from the scores, if configured."""
    if settings.overlong_buffer_len is None:
        return score_B, {}
    penalty_B = overlong_penalty(
        mask_BT.sum(1),
        max_length=settings.gen.max_new_tokens,
        buffer_length=settings.overlong_buffer_len,
        factor=settings.overlong_penalty_factor,
    )
    mean, _ = mean_and_std(penalty_B, torch.ones_like(penalty_B, dtype=torch.bool), ranks)
    return score_B + penalty_B, {"reward/overlong_penalty": mean}


def _gae_advantages(
    data: SequenceSample,
    settings: PPOSettings,
    reward_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    lengths: list[int],
) -> dict[str, torch.Tensor]:
    """Computes ``advantages`` and ``returns`` by GAE, and ``values`` of the state before each
    token; packed.
    """
    values_N = data.data["values"].float()
    value_N = shift_to_next_token(values_N, lengths)
    last_B = torch.tensor([end - 1 for end in accumulate(lengths)], device=value_N.device)
    advantage_BT, return_BT = gae_advantages(
        reward_BT,
        pad_packed(value_N, lengths),
        mask_BT,
        gamma=settings.discount,
        lam=settings.gae_lambda,
        truncation=settings.truncation,  # type: ignore[arg-type]  # its options are checked at use
        truncated_B=data.data["seq_no_eos_mask"],
        bootstrap_value_B=values_N[last_B],
    )
    return {
        "advantages": unpad_to_packed(advantage_BT, lengths),
        "returns": unpad_to_packed(return_BT, lengths),
        "values": value_N,
    }


def _group_advantages(
    data: SequenceSample,
    settings: PPOSettings,
    score_B: torch.Tensor,
    penalty_B: torch.Tensor,
    mask_BT: torch.Tensor,
    scored_B: torch.Tensor,
    ranks: DataParallel,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Computes group-relative ``advantages`` and the score's part of them, packed; and group statistics.

    Score and KL penalty are each centred on the group's mean, and only the score's part is divided by the
    group's deviation: if all answers score the same, dividing by the deviation of a small penalty would
    inflate it. A group is all sequences of one id; they are never on two ranks.
    """
    pieces = data.meta.seqlens[INPUT]
    group_B = torch.tensor([i for i, group in enumerate(pieces) for _ in group]).to(score_B.device)
    leave_one_out = settings.advantage == "rloo"
    by_score_B = group_advantages(
        score_B,
        group_B,
        normalise_std=settings.advantage == "grpo",
        leave_one_out=leave_one_out,
    )
    by_penalty_B = group_advantages(
        -penalty_B, group_B, normalise_std=False, leave_one_out=leave_one_out
    )
    equal, every = num_equal_groups(score_B[scored_B], group_B[scored_B])
    equal, every = ranks.sum(torch.tensor([equal, every], dtype=torch.float64)).tolist()
    lengths = data.piece_lengths(INPUT)

    def packed(advantage_B: torch.Tensor) -> torch.Tensor:
        return unpad_to_packed(advantage_B[:, None] * mask_BT, lengths)

    new = {"advantages": packed(by_score_B + by_penalty_B), FROM_SCORE: packed(by_score_B)}
    return new, {"groups/equal_scores": equal, "groups/compared": every}


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


def mean_and_std(x: torch.Tensor, mask: torch.Tensor, ranks: DataParallel) -> tuple[float, float]:
    """Mean and standard deviation over all ranks' elements where ``mask``; nan if there are none."""
    count, first, second = masked_sums(x, mask, ranks.sum)
    if not count:
        return float("nan"), float("nan")
    mean = first / count
    return mean, max(second / count - mean * mean, 0.0) ** 0.5


def _batch_figures(
    batch: SequenceSample, scored_B: torch.Tensor, ranks: DataParallel
) -> dict[str, float]:
    x, mask_N = batch.data, answer_mask(batch)
    lengths = answer_lengths(batch)
    own = [float(x["seq_no_eos_mask"].sum()), float(len(mask_N))]
    own += [float(scored_B.sum()), float((~scored_B).sum())]
    sums = ranks.sum(torch.tensor(own, dtype=torch.float64)).tolist()
    no_eos, num_tokens, num_sequences, num_unscored = sums
    if not num_sequences:
        raise DataError(
            f"none of the {num_unscored:.0f} answers of the batch has a reward",
            where="rewards",
            fix="look for `record set aside` in the logs of the workers that score",
        )
    reward_mean, reward_std = mean_and_std(x["rewards"], scored_B, ranks)
    length_mean, _ = mean_and_std(torch.tensor(lengths, device=scored_B.device), scored_B, ranks)
    advantage_mean, advantage_std = mean_and_std(x["advantages"], mask_N, ranks)
    return {
        **({"reward/answers_set_aside": num_unscored} if num_unscored else {}),
        "reward/mean": reward_mean,
        "reward/std": reward_std,
        "advantage/mean": advantage_mean,
        "advantage/std": advantage_std,
        "response_length/mean": length_mean,
        "response_length/max": ranks.max(max(lengths)),
        "no_eos_ratio": no_eos / num_sequences,
        "n_tokens": num_tokens,
        "n_sequences": num_sequences,
    }


def _checked_lengths(data: SequenceSample, needed: tuple[str, ...]) -> list[int]:
    seqlens = data.meta.seqlens
    one_each = tuple((1,) * len(pieces) for pieces in seqlens[INPUT])
    optional = [key for key in (REFERENCE, PROXIMAL, VERSIONS) if key in seqlens]
    for key in dict.fromkeys(("prompt_mask", BEHAVIOUR, *needed, *optional)):
        data.meta.rows_per_id(key)  # raises DataError for a missing key
        if seqlens[key] != seqlens[INPUT]:
            raise _length_error(key, "the lengths of packed_input_ids")
    for key in ("rewards", "seq_no_eos_mask"):
        data.meta.rows_per_id(key)
        if seqlens[key] != one_each:
            raise _length_error(key, "one value a sequence")
    return data.piece_lengths(INPUT)


def _length_error(key: str, wanted: str) -> DataError:
    return DataError(
        f"key {key!r} has other lengths than {wanted}",
        where="PPO experience",
        fix="compute every key for the same sequences; log-probs and values cover prompts too",
    )
