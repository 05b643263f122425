"""What a batch must be before it is trained on: lengths that agree, finite numbers, answers with a
reward."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from realsys.api.errors import DataError
from realsys.backends.hf.data_parallel import DataParallel
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import ANSWER_MASK, INPUT, PROMPT_MASK, answer_mask

# Log-probs by the sampling policy and by the one about to be trained; weight version of each token.
BEHAVIOUR, PROXIMAL, VERSIONS = "packed_logprobs", "packed_prox_logprobs", "packed_versions"
REFERENCE = "packed_ref_logprobs"  # by the reference policy; missing if not needed
ENTROPY = "packed_prox_entropy"  # of the policy about to be trained; missing if not needed


def checked_batch(
    data: SequenceSample, needed: tuple[str, ...], ranks: DataParallel
) -> tuple[SequenceSample, torch.Tensor]:
    """Returns the batch with its ``answer_mask``, and bool ``[B]``: which answers have a reward.

    Answers without one (NaN) keep their place, since ranks and minibatches count records, but none of their
    tokens is trained on.

    Args:
        needed: keys with one value a token, besides those of every batch.
    Raises:
        DataError: the keys' lengths are inconsistent, or an answer has a non-finite number. Raised on all
            ranks; those that hold it name the datapoint.
    """
    _check_lengths(data, needed)
    none_B = data.data["rewards"].isnan()
    if none_B.any():
        data = _without_answers(data, none_B)
    lengths = data.meta.seqlens[INPUT]
    masks = SequenceSample.from_tensors(
        data.ids, {ANSWER_MASK: lengths}, {ANSWER_MASK: answer_mask(data)}
    )
    data = data.update(masks)
    _check_numbers(data, ranks)
    return data, ~none_B


def _without_answers(data: SequenceSample, none_B: torch.Tensor) -> SequenceSample:
    lengths = torch.tensor(data.piece_lengths(INPUT), device=none_B.device)
    new: Mapping[str, torch.Tensor] = {
        "rewards": data.data["rewards"].masked_fill(none_B, 0.0),
        PROMPT_MASK: data.data[PROMPT_MASK] | none_B.repeat_interleave(lengths),
        "seq_no_eos_mask": data.data["seq_no_eos_mask"] & ~none_B,
    }
    return SequenceSample(data.meta, {**data.data, **new})


def _check_lengths(data: SequenceSample, needed: tuple[str, ...]) -> None:
    seqlens = data.meta.seqlens
    one_each = tuple((1,) * len(pieces) for pieces in seqlens[INPUT])
    optional = [key for key in (REFERENCE, PROXIMAL, VERSIONS, ENTROPY) if key in seqlens]
    for key in dict.fromkeys((PROMPT_MASK, BEHAVIOUR, *needed, *optional)):
        data.meta.rows_per_id(key)  # raises DataError for a missing key
        if seqlens[key] != seqlens[INPUT]:
            raise _length_error(key, "the lengths of packed_input_ids")
    for key in ("rewards", "seq_no_eos_mask"):
        data.meta.rows_per_id(key)
        if seqlens[key] != one_each:
            raise _length_error(key, "one value a sequence")


def _length_error(key: str, wanted: str) -> DataError:
    return DataError(
        f"key {key!r} has other lengths than {wanted}",
        where="PPO experience",
        fix="compute every key for the same sequences; log-probs and values cover prompts too",
    )


def _check_numbers(data: SequenceSample, ranks: DataParallel) -> None:
    """Raises DataError for non-finite log-probs and values.

    The loss would not reveal all of them: a ratio of nan has no gradient, like a clipped one.
    """
    mask_N = answer_mask(data)
    keys = [k for k in (BEHAVIOUR, PROXIMAL, REFERENCE, ENTROPY, "values") if k in data.keys]
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
