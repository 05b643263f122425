"""Checks the two answers of preference pairs, before anything is submitted. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from experiments.parts.question_files import SampledQuestions, sample_of
from realsys.api.basics.record_names import is_hub_name
from realsys.api.errors import CheckpointError, ConfigError, DataError
from realsys.data.sources.dataset_arguments import MathRecordsArguments


def pair_problems(
    data: MathRecordsArguments,
    columns: Sequence[str],
    *,
    max_answer_len: int,
    positions: int,
    tokenizer_dir: str | None,
) -> Iterator[ConfigError]:
    """Yields files whose pairs are all of equal answers, and answers over the limit, of those that a plan
    reads. What can't be read or counted is told by other checks.

    Args:
        columns: of the better and of the worse answer.
        positions: of the model; 0: unknown.
    """
    for found in _read_pairs(data, columns):
        if found.num_equal == len(found.pairs):
            yield ConfigError(
                f"{columns[0]!r} and {columns[1]!r} are equal in all {len(found.pairs)} pairs "
                "that were read, so there is nothing to learn",
                where=f"task.{found.setting}, {found.file}",
                fix="give pairs of different answers, or name other columns (task.chosen, "
                "task.rejected)",
            )
        counted = None
        if tokenizer_dir is not None:
            with suppress(CheckpointError):
                counted = _longest_answers(found, tokenizer_dir)
        limit = min(max_answer_len, positions - 1) if positions else max_answer_len
        if counted and max(counted.values()) > limit:
            record, longest = max(counted.items(), key=lambda item: item[1])
            num_longer = sum(length > limit for length in counted.values())
            total = found.read.total
            sampled = "" if len(counted) == total else f" sampled from {total}"
            yield ConfigError(
                f"{num_longer} of {len(counted)} pairs{sampled} have an answer of more than {limit} "
                f"tokens; the longest has {longest}",
                where=f"max_answer_len and {found.read.kept.where(record)}",
                fix=_fix_of_length(longest, data.max_prompt_len, positions),
            )


def pair_warnings(data: MathRecordsArguments, columns: Sequence[str]) -> Iterator[str]:
    """Warns of pairs with equal answers."""
    for found in _read_pairs(data, columns):
        if 0 < found.num_equal < len(found.pairs):
            yield (
                f"{found.num_equal:,} of {len(found.pairs):,} pairs of {found.file} have equal answers, "
                "of which nothing is learned: drop them (task.keep)"
            )


class _Pairs:
    """The pairs of a file that a plan reads. Raises DataError: one lacks an answer."""

    def __init__(
        self, data: MathRecordsArguments, columns: Sequence[str], setting: str, file: str
    ) -> None:
        self.setting, self.file = setting, file
        sides = [replace(data.columns, answer=column) for column in columns]
        read = [
            SampledQuestions(replace(data, columns=side, needs_answer=True), file) for side in sides
        ]
        self.read = read[0]
        self.pairs = [
            [side.question(i).answer or "" for side in read] for i in range(len(self.read.kept))
        ]
        self.num_equal = sum(chosen == rejected for chosen, rejected in self.pairs)


def _read_pairs(data: MathRecordsArguments, columns: Sequence[str]) -> Iterator[_Pairs]:
    for setting, file in (("path", data.path), ("eval_path", data.eval_path)):
        if file is not None and not is_hub_name(file):
            with suppress(DataError, ConfigError):
                found = _Pairs(data, columns, setting, file)
                if found.pairs:
                    yield found


def _longest_answers(found: _Pairs, tokenizer_dir: str) -> dict[int, int] | None:
    """Counts the tokens of the longer answer of each sampled record; None if only a worker can."""
    from realsys.models.prompt_lengths import text_lengths

    chosen = sample_of([max(map(len, pair)) for pair in found.pairs])
    texts = [text for record in chosen for text in found.pairs[record]]
    counted = text_lengths(Path(tokenizer_dir).expanduser(), texts)
    if counted is None:
        return None
    longer = map(max, counted[::2], counted[1::2])
    return dict(zip(chosen, longer, strict=True))


def _fix_of_length(longest: int, prompt: int, positions: int) -> str:
    room = positions - prompt - 1
    if not positions or longest <= room:
        return f"raise max_answer_len to {longest}, or drop these pairs (task.keep)"
    shared = f"the model's {positions} positions hold task.max_prompt_len={prompt}, an answer, an end token"
    if room < 1:
        return f"lower task.max_prompt_len, and drop these pairs (task.keep): {shared}"
    return f"set max_answer_len={room}, and drop pairs with longer answers (task.keep): {shared}"
