"""Preference pairs from files: what a reward model is trained on. ``task=preferences``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from experiments.parts.answer_pairs import pair_problems, pair_warnings
from experiments.parts.question_files import dataset_problems
from experiments.task import FileTask
from realsys.api.errors import ConfigError
from realsys.api.model import DatasetAbstraction
from realsys.api.options import option
from realsys.data.sources.dataset_arguments import MathRecordsArguments


@dataclass(frozen=True, kw_only=True)
class PreferencesTask(FileTask):
    """Records with a prompt and two answers, one of them preferred."""

    kind = "preferences"

    chosen: str = option("chosen", "column of the better answer: a text, or messages ending in it")
    rejected: str = option("rejected", "column of the worse one")

    def answers(self, split: str, *, max_answer_len: int) -> DatasetAbstraction:
        """The pairs of a split."""
        columns = {"chosen": self.chosen, "rejected": self.rejected}
        args = {**self.data_args(), **columns, "max_answer_len": max_answer_len, "split": split}
        return DatasetAbstraction("preference_pairs", args)

    def conversation_problems(
        self, tokenizer_dir: str | None, *, max_answer_len: int
    ) -> Iterator[ConfigError]:
        """Yields nothing: pairs are no conversations, and parts/answer_pairs.py counts them."""
        yield from ()

    def conversation_warnings(self, tokenizer_dir: str | None) -> Iterator[str]:
        """Yields nothing, likewise."""
        yield from ()

    def answer_problems(self) -> Iterator[ConfigError]:
        """Yields records without one of the two answers, and pairs of one column."""
        if self.chosen == self.rejected:
            yield ConfigError(
                f"both answers of a pair are of the column {self.chosen!r}",
                where="task.chosen and task.rejected",
                fix="name two columns",
            )
        known = {problem.what for problem in _problems(self._data)}
        for column in (self.chosen, self.rejected):
            columns = replace(self.columns, answer=column)
            found = _problems(replace(self._data, columns=columns, needs_answer=True))
            yield from (problem for problem in found if problem.what not in known)

    def pair_problems(
        self, *, max_answer_len: int, positions: int, tokenizer_dir: str | None
    ) -> Iterator[ConfigError]:
        """Yields files with nothing to learn, and answers longer than the limit."""
        if self.chosen != self.rejected:
            yield from pair_problems(
                self._data,
                (self.chosen, self.rejected),
                max_answer_len=max_answer_len,
                positions=positions,
                tokenizer_dir=tokenizer_dir,
            )

    def remarks(self, tokenizer_dir: str | None) -> Iterator[str]:
        """Reports what other files' questions do, and pairs with equal answers."""
        yield from super().remarks(tokenizer_dir)
        yield from pair_warnings(self._data, (self.chosen, self.rejected))


def _problems(data: MathRecordsArguments) -> Iterator[ConfigError]:
    """Problems of the records alone: prompts' lengths and batches are checked by ``problems``."""
    return dataset_problems(data, batch_size=1, tokenizer_dir=None)
