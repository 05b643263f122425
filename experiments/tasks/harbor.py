"""Tasks in Harbor's format: ``task=harbor task.path=TASKS_DIR``, a task's directory or a folder of them.

The policy is given ``instruction.md`` and answers once, with a script; it is run in a box of the task, and
the task's own tests give the reward (realsys/rewards/harbor/, docs/harbor.md).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from experiments.parts.chosen_settings import MeasuredQuestions
from experiments.parts.question_files import absolute
from experiments.task import Task
from realsys.api.basics.reward import reward_terms
from realsys.api.errors import CheckpointError, ConfigError, DataError
from realsys.api.options import option
from realsys.api.plain import to_plain
from realsys.data.harbor.node_packages import lacking_packages
from realsys.data.harbor.task_directory import TaskDirectory, checked_task, task_paths

INSTRUCTION = (
    "Answer with one bash script in a fenced block: ```bash, the script, ```. It is run once, without "
    "a network, in the folder {workdir}."
)
_SHOWN = 5  # tasks that a warning names


@dataclass(frozen=True, kw_only=True)
class HarborTask(Task):
    """Task directories of Harbor."""

    kind = "harbor"

    path: str | None = option(None, "a task's directory, or a folder of them")
    eval_path: str | None = option(None, "held-out tasks; none takes eval_size of path")
    instruction: str = option(
        INSTRUCTION, "text put behind each instruction; {workdir} is the task's working folder"
    )
    max_prompt_len: int = option(
        1024, "longest question; a longer one is an error", unit="tokens", ge=1
    )

    @property
    def is_generated(self) -> bool:
        """False."""
        return False

    @property
    def reward_rule(self) -> dict[str, Any]:
        """The rules; ``harbor`` is given the folders, of which it checks all before the first answer."""
        found = super().reward_rule
        if self.kind in dict(reward_terms(self.rule)):
            folders = [path for path in (absolute(self.path), absolute(self.eval_path)) if path]
            args = found.get("reward_args", {})
            found["reward_args"] = {
                **args,
                self.kind: {"tasks": folders, **args.get(self.kind, {})},
            }
        return found

    def data_args(self) -> dict[str, Any]:
        """The task itself, from which a worker reads the directories."""
        task = replace(self, path=absolute(self.path), eval_path=absolute(self.eval_path))
        return {
            "task": to_plain(task),
            "eval_size": self.eval_size,
            "max_prompt_len": self.max_prompt_len,
            "whole_answers": True,
            "needs_answer": False,
        }

    def records(self, split: str, seed: int) -> list[dict[str, Any]]:
        """Reads the tasks of a split, whatever the seed. Raises DataError: one can't be used."""
        found = self._tasks()
        if found.problems:
            error = found.problems[0]
            raise DataError(error.what, where=error.where, fix=error.fix)
        return [self._record(task) for task in (found.test if split == "test" else found.train)]

    def _record(self, task: TaskDirectory) -> dict[str, Any]:
        asked = self.instruction.replace("{workdir}", task.workdir)
        record = {
            "prompt": f"{task.instruction}\n\n{asked}".strip(),
            "task": task.name,
            "task_directory": str(task.path),
        }
        return (
            record if task.solution is None else {**record, "answer": self._answer(task.solution)}
        )

    def _answer(self, solution: str) -> str:
        """A solution as the answer that it would be."""
        if not self._rule_args.get("fenced", True):
            return solution
        fence = "~~~" if "```" in solution else "```"
        return f"{fence}bash\n{solution.rstrip()}\n{fence}"

    @property
    def _rule_args(self) -> Mapping[str, Any]:
        return self.reward_args.get(self.kind, {})

    def _tasks(self) -> _Tasks:
        """Reads all tasks, and all that is wrong with them."""
        images = {str(name): str(file) for name, file in self._rule_args.get("images", {}).items()}
        read: dict[str, list[TaskDirectory]] = {"path": [], "eval_path": []}
        problems: list[ConfigError] = []
        for name, path in (("path", self.path), ("eval_path", self.eval_path)):
            wrong: list[DataError] = []
            try:
                for folder in task_paths(path) if path is not None else ():
                    task, faults = checked_task(folder, images)
                    read[name] += [task] if task is not None else []
                    wrong += faults
            except DataError as error:
                wrong.append(error)
            problems += [
                ConfigError(e.what, where=f"task.{name}, {e.where}", fix=e.fix) for e in wrong
            ]
        train, test = read["path"], read["eval_path"][: self.eval_size]
        if self.eval_path is None:
            by_name = sorted(train, key=lambda task: (zlib.crc32(task.name.encode()), task.name))
            test = by_name[: self.eval_size]
            held_out = {task.path for task in test}
            train = [task for task in train if task.path not in held_out]
        return _Tasks(train, test, problems)

    def problems(self, *, batch_size: int, tokenizer_dir: str | None) -> Iterator[ConfigError]:
        """Yields what is wrong with the directories, too few of them, and instructions over the limit."""
        yield from super().problems(batch_size=batch_size, tokenizer_dir=tokenizer_dir)
        if self.path is None:
            fix = "set task.path=FOLDER, a task's directory or a folder of them"
            yield ConfigError("task harbor has no tasks", where="task.path", fix=fix)
            return
        found = self._tasks()
        yield from found.problems
        if found.problems:
            return
        if len(found.train) < batch_size:
            held_out = "" if self.eval_path else f" and {self.eval_size} held out"
            yield ConfigError(
                f"{len(found.train)} tasks are left, too few for {batch_size} per batch{held_out}",
                where=f"task.path, {self.path}",
                fix="lower train_bs_n_seqs or task.eval_size, or give more tasks",
            )
        lengths = _lengths(self, found, tokenizer_dir)
        if lengths and max(lengths)[0] > self.max_prompt_len:
            longest, name = max(lengths)
            yield ConfigError(
                f"{sum(n > self.max_prompt_len for n, _ in lengths)} of {len(lengths)} instructions are "
                f"longer than {self.max_prompt_len} tokens; that of {name} has {longest}",
                where=f"task.max_prompt_len and {self.path}",
                fix=f"raise task.max_prompt_len to {longest}, or leave these tasks out",
            )

    def answer_problems(self) -> Iterator[ConfigError]:
        """Yields tasks without a solution that an answer could be."""
        found = self._tasks()
        without = [task.name for task in (*found.train, *found.test) if not task.is_solved]
        if without:
            yield ConfigError(
                f"{len(without)} tasks have no solution that is solve.sh alone: {_some(without)}",
                where=f"task.path, {self.path}",
                fix="fine-tune on tasks that have one, or start from a model (actor.path)",
            )

    def remarks(self, tokenizer_dir: str | None) -> Iterator[str]:
        """Reports packages that this node lacks, images that are not used, and tests that download."""
        found = self._tasks()
        tasks = [*found.train, *found.test]
        if lacking := lacking_packages(tasks, self._rule_args.get("assume", ())):
            yield f"nodes that score need packages that this one does not have: {lacking}"
        if images := [task.base for task in tasks if task.base]:
            yield (
                f"images of {len(images)} tasks are not used ({_some(sorted(set(images)))}): a box has the "
                "programs of its node"
            )
        if downloads := [f"{t.name}/{t.downloads[0]}" for t in tasks if t.downloads]:
            yield (
                f"the tests of {len(downloads)} tasks use a network, which a box does not have: "
                + (_some(downloads))
            )

    def measured(self, tokenizer_dir: str) -> MeasuredQuestions | None:
        """How many and how long the questions are; None if they can't be read or counted."""
        found = self._tasks()
        lengths = _lengths(self, found, tokenizer_dir)
        if found.problems or not lengths:
            return None
        given = self.eval_path is not None
        return MeasuredQuestions(
            longest=max(lengths)[0],
            exact=True,
            total=len(found.train) + (0 if given else len(found.test)),
            held_out=len(found.test) if given else None,
        )

    def input_files(self) -> tuple[str, ...]:
        """All files of the tasks."""
        found = self._tasks()
        return tuple(
            str(file)
            for task in (*found.train, *found.test)
            for file in sorted(task.path.rglob("*"))
            if file.is_file()
        )


class _Tasks(NamedTuple):
    """Those to train on, those held out, and what is wrong with any."""

    train: list[TaskDirectory]
    test: list[TaskDirectory]
    problems: list[ConfigError]


def _lengths(
    task: HarborTask, found: _Tasks, tokenizer_dir: str | None
) -> list[tuple[int, str]] | None:
    """Counts the prompts' tokens, with the tasks' names; None: only a worker can."""
    from realsys.models.prompt_lengths import prompt_lengths

    records = [task._record(one) for one in (*found.train, *found.test)]
    if tokenizer_dir is None or not records:
        return None
    try:
        counted = prompt_lengths(
            Path(tokenizer_dir).expanduser(), [record["prompt"] for record in records]
        )
    except CheckpointError:  # reported by the check of the directory
        return None
    names = [record["task"] for record in records]
    return None if counted is None else list(zip(counted, names, strict=True))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + ", …" * (len(names) > _SHOWN)
