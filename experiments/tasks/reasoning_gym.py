"""Questions made by the package reasoning-gym: ``task=reasoning_gym task.names=[chain_sum,leg_counting]``.

https://github.com/open-thought/reasoning-gym has over a hundred generators, each with a scorer. A record
holds the generator's name and arguments and the question's number, so that the rule can ask the scorer of
the very same question.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.task import GeneratedTask
from realsys.api.errors import ConfigError, did_you_mean
from realsys.api.options import option
from realsys.config.extras import missing_packages
from realsys.data.sources.reasoning_gym_questions import PAYING, REFUSING, UNFIT

ALL = "*"  # among names


@dataclass(frozen=True, kw_only=True)
class ReasoningGymTask(GeneratedTask):
    """Questions of one or several of reasoning-gym's generators.

    ``*`` among the names stands for all generators whose scorers pay right answers alone
    (realsys/data/sources/reasoning_gym_questions.py); the others have to be named.
    """

    kind = "reasoning_gym"

    names: tuple[str, ...] = option(
        (), "generators, e.g. [chain_sum, leg_counting]; *: all whose scorers can't be gamed"
    )
    weights: tuple[float, ...] = option((), "how often each is drawn; none: equally")
    config: Mapping[str, Mapping[str, Any]] = option({}, "arguments of generators, by their names")
    instruction: str = option("", "text put before each question")
    max_prompt_len: int = option(512, "longest question; see long_prompts", unit="tokens", ge=1)

    def question(self, rng: random.Random) -> dict[str, Any]:
        """Makes a question of a generator drawn by the weights."""
        from realsys.data.sources.reasoning_gym_questions import NUM_QUESTIONS, question_of

        (name,) = rng.choices(self.drawn, self.weights or None)
        number = rng.randrange(NUM_QUESTIONS)
        record = {"generator": name, "number": number, "config": self._config(name)}
        question, answer = question_of(record)
        form = REFUSING.get(name, "")
        prompt = "\n".join(text for text in (self.instruction, question, form) if text)
        return {"prompt": prompt, "answer": answer, **record}

    @property
    def drawn(self) -> tuple[str, ...]:
        """The generators, with ``*`` replaced."""
        if ALL not in self.names:
            return self.names
        from realsys.data.sources.reasoning_gym_questions import generators

        rest = [name for name in self.names if name != ALL]
        left_out = {*PAYING, *UNFIT, *rest}
        return (*rest, *(name for name in generators() if name not in left_out))

    def reward_warnings(self) -> Iterator[str]:
        """Yields which of the named scorers pay for what is no right answer."""
        for name in self.names:
            if name in PAYING:
                yield (
                    f"task.names: the scorer of {name!r} pays for what is no right answer: "
                    f"{PAYING[name]}; `realsys data score reasoning_gym --attack --tasks {name}` shows it"
                )

    def _config(self, name: str) -> dict[str, Any]:
        return dict(self.config.get(name, {}))

    def input_files(self) -> tuple[str, ...]:
        """None: the code is a package's."""
        return ()

    def problems(self, *, batch_size: int, tokenizer_dir: str | None) -> Iterator[ConfigError]:
        """Yields a missing package, unknown generators, and what any task may have wrong."""
        missing = missing_packages(["reasoning_gym"], where="task=reasoning_gym")
        yield from missing
        mine = [] if missing else list(self._own_problems())
        yield from mine
        if not missing and not mine:
            yield from super().problems(batch_size=batch_size, tokenizer_dir=tokenizer_dir)

    def _own_problems(self) -> Iterator[ConfigError]:
        from realsys.data.sources.reasoning_gym_questions import generators

        if not self.names:
            fix = "name some, e.g. task.names=[chain_sum]"
            yield ConfigError("no generator is named", where="task.names", fix=fix)
        known = generators()
        for name in dict.fromkeys((*(n for n in self.names if n != ALL), *self.config)):
            if name not in known:
                yield ConfigError(
                    f"reasoning-gym has no generator {name!r}",
                    where="task.names" if name in self.names else f"task.config.{name}",
                    fix=did_you_mean(name, known),
                )
            elif name not in self.drawn and self.names:
                yield ConfigError(
                    f"no question is of generator {name!r}, so its arguments are not read",
                    where=f"task.config.{name}",
                    fix=f"add it to task.names, or leave it out; {did_you_mean(name, self.names)}",
                )
            else:
                yield from _argument_problems(name, self._config(name))
        yield from self._weight_problems()

    def _weight_problems(self) -> Iterator[ConfigError]:
        if self.weights and len(self.weights) != len(self.drawn):
            yield ConfigError(
                f"{len(self.weights)} weights for {len(self.drawn)} generators",
                where="task.weights",
                fix="give one above 0 for each of task.names, or leave it out",
            )
            return
        for name, weight in zip(self.drawn, self.weights, strict=False):
            if not 0 < weight < float("inf"):
                yield ConfigError(
                    f"weight {weight:g} of generator {name!r}",
                    where="task.weights",
                    fix="use a number above 0, or leave the generator out of task.names",
                )


def _argument_problems(generator: str, config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yields arguments that the generator does not have, or that are not the user's."""
    from realsys.data.sources.reasoning_gym_questions import SET_HERE, arguments_of

    known = arguments_of(generator)
    for name in config:
        where = f"task.config.{generator}.{name}"
        if name in SET_HERE:
            yield ConfigError(
                f"{name} of generator {generator!r} is set by realsys itself",
                where=where,
                fix="leave it out; task.train_size and seed are for the whole run",
            )
        elif known is not None and name not in known:
            yield ConfigError(
                f"generator {generator!r} has no argument {name!r}",
                where=where,
                fix=did_you_mean(name, known),
            )
