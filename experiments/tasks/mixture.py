"""Several tasks learned as one: ``task=mixture task.sources.sums=math task.sources.words=file …``.

Each source is a task of any kind with its own questions, limits, held-out records and rewards;
``weights`` say how many of a source's records come per record of the others; with a curriculum, so does how
often answers to its questions are right (docs/mixtures.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from experiments.parts.held_out_records import ReadQuestions
from experiments.task import Task, at_setting
from realsys.api.basics.reward import BY_SOURCE, GOES_ON, WITH_QUESTION
from realsys.api.errors import ConfigError, DataError, did_you_mean
from realsys.api.model import DatasetAbstraction
from realsys.api.options import option
from realsys.api.worker_configs import CurriculumControl
from realsys.data.sources.record_parts import items_of_epoch

_OF_SOURCES = ("eval_size", "max_prompt_len", "long_prompts", "reward", "reward_args")
_OF_MIXTURE = ("shuffle", "agent", "agent_args", "env", "env_args")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-100, 1e100  # their products are finite, and above 0


@dataclass(frozen=True, kw_only=True)
class Mixture(Task):
    """Questions of several tasks, each scored by the rules of its own."""

    kind = "mixture"
    asks_itself: ClassVar[bool] = False

    sources: Mapping[str, Task] = option({}, "tasks by names of yours, e.g. task.sources.sums=math")
    weights: Mapping[str, float] = option(
        {}, "how many of a source's records come per record of the others; none: each record once"
    )
    temperature: float = option(
        1.0, "without weights: sources come as size**(1/temperature); 1: each record once", gt=0
    )
    curriculum: str | None = option(
        None,
        "learnability: sources come as their weight times 4p(1-p), p their success rate, so that what is "
        "half right comes most; none: as their weight",
        choices=("learnability",),
    )
    curriculum_floor: float = option(
        0.1, "least of 4p(1-p), for what is always right or always wrong", gt=0, le=1
    )
    curriculum_steps: int = option(
        8,
        "p is that of all answers in so many newest steps that had some of the source",
        unit="steps",
        ge=1,
    )

    @property
    def rule(self) -> str:
        """No expression: each source has its own; empty: none has one."""
        return BY_SOURCE if any(source.rule for source in self.sources.values()) else ""

    @property
    def reward_rule(self) -> dict[str, Any]:
        """The rules of all sources."""
        if not self.rule:
            return {"reward": ""}
        args = {name: source.reward_rule for name, source in self.sources.items()}
        return {"reward": BY_SOURCE, "reward_args": args}

    @property
    def reward_keys(self) -> tuple[str, ...]:
        """Keys of a batch that the rules look at; the record says which source it is of."""
        keys = {key for source in self.sources.values() for key in source.reward_keys}
        return ("record", *sorted(keys - {"record"}))

    @property
    def rules_look_at_question(self) -> bool:
        """Whether the rules of some source do: all records of a batch have the same metadata."""
        return any(source.rules_look_at_question for source in self.sources.values())

    @property
    def is_generated(self) -> bool:
        """Whether no source reads a file."""
        return all(source.is_generated for source in self.sources.values())

    @property
    def num_questions(self) -> int | None:
        """Questions of an epoch; None: a source has as many as its file, or they are too many."""
        sizes = {name: source.num_questions for name, source in self.sources.items()}
        known = {name: size for name, size in sizes.items() if size is not None}
        if not known or len(known) < len(sizes) or min(self.weights.values(), default=1) <= 0:
            return None
        try:
            return sum(self._items(known).values())
        except DataError:  # reported by problems()
            return None

    def _items(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return items_of_epoch(sizes, self._weights_of_items, temperature=self.temperature)

    @property
    def _weights_of_items(self) -> dict[str, float]:
        """Weights that the data set repeats records by; with a curriculum the master looks at them."""
        return {} if self.curriculum_control else dict(self.weights)

    @property
    def curriculum_control(self) -> CurriculumControl | None:
        """How often sources come by their success."""
        if self.curriculum is None:
            return None
        return CurriculumControl(
            weights=dict(self.weights), floor=self.curriculum_floor, steps=self.curriculum_steps
        )

    @property
    def num_held_out(self) -> int:
        """Held-out questions of all sources."""
        return sum(source.num_held_out for source in self.sources.values())

    @property
    def longest_prompt(self) -> int:
        """The longest question that any source allows, in tokens."""
        return max((source.longest_prompt for source in self.sources.values()), default=1)

    def data_args(self) -> dict[str, Any]:
        """Arguments of the data set ``mixture``, besides the split and what the sources are."""
        return {
            "sources": {
                name: {**source.data_args(), "with_record": True}
                for name, source in self.sources.items()
            },
            "weights": self._weights_of_items,
            "temperature": self.temperature,
        }

    def prompts(self, split: str) -> DatasetAbstraction:
        """The questions of a split of all sources."""
        args = self.data_args()
        if self.rules_look_at_question:
            sources = {name: {**of, WITH_QUESTION: True} for name, of in args["sources"].items()}
            args = {**args, "sources": sources}
        return self._data_set({**args, "of": "math_prompts", "split": split})

    def answers(self, split: str, *, max_answer_len: int) -> DatasetAbstraction:
        """Questions with their worked answers, for fine-tuning."""
        args = self.data_args()
        sources = {
            name: {**given, "max_answer_len": max_answer_len}
            for name, given in args["sources"].items()
        }
        return self._data_set({**args, "sources": sources, "of": "math_sft", "split": split})

    def _data_set(self, args: Mapping[str, Any]) -> DatasetAbstraction:
        """The data set; where records come several times an epoch, it goes on where the last one ended."""
        repeats = args["split"] == "train" and (args["weights"] or args["temperature"] != 1.0)
        return DatasetAbstraction("mixture", {**args, **({GOES_ON: True} if repeats else {})})

    def problems(self, *, batch_size: int, tokenizer_dir: str | None) -> Iterator[ConfigError]:
        """Yields what is wrong with the mixture, and with each source."""
        wrong = list(self._own_problems())
        yield from wrong
        if wrong:
            return
        if self.num_questions is not None and self.num_questions < batch_size:
            yield ConfigError(
                f"{self.num_questions} questions are too few for a batch of {batch_size}",
                where="task.sources and train_bs_n_seqs",
                fix="raise task.sources.<name>.train_size, or lower train_bs_n_seqs",
            )
        yield from self._epoch_problems()
        for name, source in self.sources.items():
            found = source.problems(batch_size=1, tokenizer_dir=tokenizer_dir)
            yield from (at_setting(p, source, f"task.sources.{name}") for p in found)

    def _epoch_problems(self) -> Iterator[ConfigError]:
        """Yields too long an epoch, where all sources can be counted; else workers refuse it."""
        if not self._weights_of_items and self.temperature == 1.0:
            return
        sizes = {name: source.counted_questions() for name, source in self.sources.items()}
        known = {name: size for name, size in sizes.items() if size is not None}
        try:
            if len(known) == len(sizes):
                self._items(known)
        except DataError as error:
            yield ConfigError(error.what, where=error.where, fix=error.fix)

    def _own_problems(self) -> Iterator[ConfigError]:
        if not self.sources:
            fix = "name tasks, e.g. task.sources.sums=math task.sources.words=file"
            yield ConfigError("a mixture without sources", where="task.sources", fix=fix)
        yield from _changed(self, _OF_SOURCES, "task", "each source has its own", "task.sources.*")
        for name, source in self.sources.items():
            where = f"task.sources.{name}"
            if isinstance(source, Mixture) or not _NAME.fullmatch(name):
                what = "a mixture in a mixture" if isinstance(source, Mixture) else f"name {name!r}"
                fix = "use other tasks, and names of letters, digits, - and _"
                yield ConfigError(f"{what} is not possible", where=where, fix=fix)
            yield from _changed(source, _OF_MIXTURE, where, "all sources have one", "task")
        for name, weight in self.weights.items():
            if name not in self.sources or not _LEAST_WEIGHT <= weight <= _MOST_WEIGHT:
                yield ConfigError(
                    f"weight {weight:g} of source {name!r}",
                    where=f"task.weights.{name}",
                    fix=f"use a number above 0, from {_LEAST_WEIGHT:g} to {_MOST_WEIGHT:g}"
                    if name in self.sources
                    else did_you_mean(name, self.sources),
                )
        if self.weights and self.temperature != 1.0:
            yield ConfigError(
                "weights are given, and a temperature that would make others",
                where="task.weights and task.temperature",
                fix="leave one of them out",
            )
        if self.curriculum_control is not None:
            yield from self._curriculum_problems()

    def _curriculum_problems(self) -> Iterator[ConfigError]:
        if len(self.sources) == 1:
            yield ConfigError(
                "a curriculum chooses among sources, and there is 1",
                where="task.curriculum and task.sources",
                fix="name two sources or more, or use task.curriculum=none",
            )
        if self.temperature != 1.0:
            yield ConfigError(
                f"temperature {self.temperature:g} makes weights of sizes, which a curriculum does not "
                "look at",
                where="task.curriculum and task.temperature",
                fix="set task.weights.<name> instead, or use task.curriculum=none",
            )

    def reward_problems(self) -> Iterator[ConfigError]:
        """Yields sources without a rule, unless no source has one and the agent rewards."""
        if not self.rule and not self.needs_rule:
            return
        for name, source in self.sources.items():
            yield from (
                at_setting(p, source, f"task.sources.{name}") for p in source.reward_problems()
            )

    def answer_problems(self) -> Iterator[ConfigError]:
        """Yields a curriculum, and sources without anything to fine-tune on."""
        if self.curriculum_control is not None:
            yield ConfigError(
                "a curriculum goes by the success of sampled answers, and fine-tuning samples none",
                where="task.curriculum",
                fix="leave it out here; a run with rewards takes it",
            )
        for name, source in self.sources.items():
            yield from (
                at_setting(p, source, f"task.sources.{name}") for p in source.answer_problems()
            )

    def conversation_problems(
        self, tokenizer_dir: str | None, *, max_answer_len: int
    ) -> Iterator[ConfigError]:
        """Yields those of each source."""
        for name, source in self.sources.items():
            found = source.conversation_problems(tokenizer_dir, max_answer_len=max_answer_len)
            yield from (at_setting(p, source, f"task.sources.{name}") for p in found)

    def conversation_warnings(self, tokenizer_dir: str | None) -> Iterator[str]:
        """Yields those of each source."""
        for name, source in self.sources.items():
            found = source.conversation_warnings(tokenizer_dir)
            yield from (f"source {name}: {remark}" for remark in found)

    def remarks(self, tokenizer_dir: str | None) -> Iterator[str]:
        """Reports what each source has to say."""
        for name, source in self.sources.items():
            yield from (f"source {name}: {remark}" for remark in source.remarks(tokenizer_dir))

    def trusted_rules(self) -> tuple[str, ...]:
        """Those of all sources."""
        found = [name for source in self.sources.values() for name in source.trusted_rules()]
        return tuple(dict.fromkeys(found))

    def read_questions(self, setting: str) -> Iterator[ReadQuestions]:
        """Yields the files of all sources."""
        for name, source in self.sources.items():
            yield from source.read_questions(f"{setting}.sources.{name}")

    def with_absolute_paths(self) -> Task:
        """Returns it with those of all sources absolute."""
        return self._with(lambda source: source.with_absolute_paths())

    def as_benchmark(self) -> Task:
        """Returns it with all questions of its sources held out."""
        return self._with(lambda source: source.as_benchmark())

    def _with(self, change: Callable[[Task], Task]) -> Mixture:
        return replace(self, sources={name: change(one) for name, one in self.sources.items()})

    def input_files(self) -> tuple[str, ...]:
        """The files of all sources."""
        files = [file for source in self.sources.values() for file in source.input_files()]
        return tuple(dict.fromkeys(files))


def _changed(
    task: Task, names: tuple[str, ...], where: str, why: str, instead: str
) -> Iterator[ConfigError]:
    """Yields settings that stand on the wrong level, where nothing would read them."""
    defaults = type(task)()
    for name in names:
        if getattr(task, name) != getattr(defaults, name):
            fix = f"set {instead}.{name}, and leave this out"
            yield ConfigError(f"{name} is not read here: {why}", where=f"{where}.{name}", fix=fix)
