"""What trainings on preference pairs share: their data, and the checks of it (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from experiments.parts.model_files import max_positions_of
from experiments.sft import SFTExperiment
from experiments.task import Task
from experiments.tasks.preferences import PreferencesTask
from realsys.api.errors import ConfigError
from realsys.api.options import option


@dataclass(frozen=True, kw_only=True)
class PairTraining(SFTExperiment):
    """Base: training of a given model on pairs of answers."""

    task: Task = option(PreferencesTask(), "pairs of answers")
    train_bs_n_seqs: int = option(64, "pairs a step", ge=1)

    def problems(self) -> Iterator[ConfigError]:
        """Yields what fine-tuning checks, a missing start, another task, and pairs that can't be used."""
        if not isinstance(self.task, PreferencesTask):
            yield ConfigError(
                f"task {self.task.kind} has no pairs of answers",
                where="task",
                fix="set task=preferences task.path=FILE",
            )
            return
        yield from super().problems()
        yield from self.task.pair_problems(
            max_answer_len=self.max_answer_len,
            positions=max_positions_of(self.model.path),
            tokenizer_dir=self.model.path,
        )
        if self.model.path is None:
            yield ConfigError(
                "there is no model to start from",
                where="model.path",
                fix="set model.path=<Hugging Face directory>, e.g. the policy's",
            )
        limit, longest = self.model.max_tokens_per_mb, self.task.max_prompt_len
        if limit is not None and limit < (pair := 2 * (longest + self.max_answer_len + 1)):
            yield ConfigError(
                f"a pair may have {pair} tokens, a micro-batch {limit}",
                where="model.max_tokens_per_mb, task.max_prompt_len and max_answer_len",
                fix=f"set model.max_tokens_per_mb={pair}, or lower the other two",
            )
