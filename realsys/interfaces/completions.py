"""Answers of a batch as reward rules see them (realsys.api.basics.reward)."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch

from realsys.api.basics.reward import OF_RECORD, QUESTION_TEXT, Completion
from realsys.api.basics.thoughts import decoded_answer, opened_thoughts, text_behind_thoughts
from realsys.api.errors import DataError
from realsys.data.record_bytes import RECORD, records_of
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, PROMPT_MASK, answer_mask
from realsys.rewards.set_aside import Answered

NO_EOS = "seq_no_eos_mask"


def answered_records(
    data: SequenceSample, tokenizer: Any, fields: Collection[str], *, asked: SequenceSample
) -> list[Answered]:
    """Returns each id with its answers, which carry what ``fields`` name.

    Args:
        data: prompts and answers; ``seq_no_eos_mask`` too, if ``finish_reason`` is named.
        asked: the same ids with ``metadata["answer"]``, the key ``record`` if it is named, and
            ``metadata["question_text"]`` where the data set gives it.
    Raises:
        DataError: what a rule looks at is not there.
    """
    records = records_of(asked) if RECORD in asked.keys else [{}] * data.batch_size
    if OF_RECORD & set(fields) and RECORD not in asked.keys:
        raise _missing("record", 'use a data set that gives the key "record" (with_record)')
    known = [str(x) for x in asked.meta.metadata.get("answer", ("",) * data.batch_size)]
    questions = asked.meta.metadata.get(QUESTION_TEXT, ("",) * data.batch_size)
    if "answer" in fields and "answer" not in asked.meta.metadata:
        raise _missing("answer", 'use a data set that sets metadata["answer"], e.g. math_prompts')
    lengths = data.piece_lengths(INPUT)
    tokens = torch.split(data.data[INPUT], lengths)
    masks = torch.split(answer_mask(data), lengths)
    written = [row[mask].tolist() for row, mask in zip(tokens, masks, strict=True)]
    cut_off = data.data[NO_EOS].tolist() if "finish_reason" in fields else [False] * len(written)
    ends = [0]
    for pieces in data.meta.seqlens[INPUT]:
        ends.append(ends[-1] + len(pieces))
    opened = [
        opened_thoughts(tokenizer, _before(tokens[first], masks[first])) if first < end else ""
        for first, end in pairwise(ends)
    ]

    def completion(number: int, record: int) -> Completion:
        reason: Literal["stop", "length"] = "length" if cut_off[number] else "stop"
        response = decoded_answer(tokenizer, written[number])
        return Completion(
            response=response,
            final=text_behind_thoughts(response, opened=opened[record]) or "",
            answer=known[record],
            record=records[record],
            token_ids=tuple(written[number]),
            finish_reason=reason,
            question=str(questions[record]),
        )

    return [
        Answered(
            id=id_,
            prompt=partial(_prompt, data, i, tokenizer),
            answers=[completion(number, i) for number in range(first, end)],
        )
        for i, (id_, (first, end)) in enumerate(zip(data.ids, pairwise(ends), strict=True))
    ]


def _before(tokens: torch.Tensor, mask: torch.Tensor) -> list[int]:
    """Returns what stands before the first answer token of a row; all, if there is none."""
    first = mask.nonzero()
    return list(tokens[: int(first[0]) if len(first) else None].tolist())


def _prompt(data: SequenceSample, number: int, tokenizer: Any) -> str:
    """Decodes the question of the record ``number``."""
    record = data.take([number])
    first = record.piece_lengths(INPUT)[0]
    tokens, mask = record.data[INPUT][:first], record.data[PROMPT_MASK][:first]
    return str(tokenizer.decode(tokens[mask].tolist(), skip_special_tokens=True))


def _missing(what: str, fix: str) -> DataError:
    return DataError(f"no {what} for the reward rule to look at", where="data set", fix=fix)
