"""Tasks in Harbor's format: ``task=harbor task.path=TASKS_DIR``, a task's directory or a folder of them.

The policy is given ``instruction.md`` and answers once, with a script; it is run in a box of the task, and
the task's own tests give the reward (realsys/rewards/harbor/, docs/harbor.md). With ``task.agent=harbor``
it works there for several turns (realsys/rollout/runners/harbor_agent.py), with ``harbor_command`` by an
agent that is installed on the nodes (harbor_command_agent.py).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from experiments.parts.chosen_settings import MeasuredQuestions
from experiments.parts.held_out_records import ReadQuestions
from experiments.parts.question_files import absolute
from experiments.task import Task
from realsys.api import registry
from realsys.api.basics.reward import reward_terms
from realsys.api.errors import CheckpointError, ConfigError, DataError
from realsys.api.options import option
from realsys.api.plain import to_plain
from realsys.data.harbor.node_packages import lacking_packages
from realsys.data.harbor.task_directory import TaskDirectory, checked_task, task_paths
from realsys.data.sources.dataset_arguments import REFUSE

INSTRUCTION = (
    "Answer with one bash script in a fenced block: ```bash, the script, ```. It is run once, without "
    "a network, in the folder {workdir}."
)
_SHOWN = 5  # tasks that a message names


@dataclass(frozen=True, kw_only=True)
class HarborTask(Task):
    """Task directories of Harbor."""

    kind = "harbor"
    own_agents = ("harbor", "harbor_command")

    path: str | None = option(None, "a task's directory, or a folder of them")
    eval_path: str | None = option(None, "held-out tasks; none takes eval_size of path")
    instruction: str = option(
        INSTRUCTION, "text put behind each instruction; {workdir} is the task's working folder"
    )
    max_prompt_len: int = option(1024, "longest question; see long_prompts", unit="tokens", ge=1)

    @property
    def is_generated(self) -> bool:
        """False."""
        return False

    @property
    def reward_rule(self) -> dict[str, Any]:
        """The rules; ``harbor`` is given the folders, of which it checks all before the first answer."""
        found = super().reward_rule
        if self.kind in dict(reward_terms(self.rule)):
            folders = [absolute(path) for path in (self.path, self.eval_path) if path]
            args = {self.kind: {"tasks": folders}, **found.get("reward_args", {})}
            args[self.kind] = {"tasks": folders, **args[self.kind]}
            found["reward_args"] = args
        return found

    @property
    def episode_args(self) -> dict[str, Any]:
        """The agent's; its own agent gets the rule's, too, as it runs boxes and tests itself."""
        args = super().episode_args
        if self.agent in self.own_agents and "rule" not in args:
            args["rule"] = self.reward_rule.get("reward_args", {}).get(self.kind, {})
        return args

    def data_args(self) -> dict[str, Any]:
        """The task itself, from which a worker reads the directories."""
        return {
            "task": to_plain(self.with_absolute_paths()),
            "eval_size": self.eval_size,
            "max_prompt_len": self.max_prompt_len,
            "whole_answers": True,
            "needs_answer": False,
            **self._of_long_prompts,
        }

    def with_absolute_paths(self) -> Task:
        """Returns it with the paths of its folders absolute."""
        return replace(self, path=absolute(self.path), eval_path=absolute(self.eval_path))

    def read_questions(self, setting: str) -> Iterator[ReadQuestions]:
        """Yields its tasks' folders."""
        if self.path is not None:
            yield ReadQuestions(
                setting=setting,
                path=self.path,
                eval_path=self.eval_path,
                eval_size=self.eval_size,
                files=_folders(self.path),
                eval_files=_folders(self.eval_path),
            )

    def as_benchmark(self) -> Task:
        """Returns it with all tasks of its folder held out, at most ``eval_size``."""
        folder = self.eval_path or self.path
        held_out = replace(self, path=folder, eval_path=folder)
        return replace(held_out, eval_size=min(self.eval_size, len(held_out._read().test)))

    def records(self, split: str, seed: int) -> list[dict[str, Any]]:
        """Reads the tasks of a split, whatever the seed. Raises DataError: one can't be used."""
        found = self._read()
        if found.problems:
            raise found.problems[0]
        return [self._record(task) for task in (found.test if split == "test" else found.train)]

    def _record(self, task: TaskDirectory) -> dict[str, Any]:
        # An agent that works in the box says itself how it is to be answered.
        works_there = self.agent in self.own_agents
        asked = "" if works_there else self.instruction.replace("{workdir}", task.workdir)
        record = {
            "prompt": f"{task.instruction}\n\n{asked}".strip(),
            "task": task.name,
            "task_directory": str(task.path),
        }
        return record if task.answer is None else {**record, "answer": self._answer(task.answer)}

    def _answer(self, solution: str) -> str:
        """The solution as the answer that it would be."""
        if not self._rule_args.get("fenced", True):
            return solution
        fence = "```"
        while fence in solution:  # a longer one than any in it
            fence += "`"
        return f"{fence}bash\n{solution.rstrip()}\n{fence}"

    @property
    def _rule_args(self) -> Mapping[str, Any]:
        return self.reward_args.get(self.kind, {})

    def _read(self) -> _ReadTasks:
        """Reads all tasks. Held out are those whose names hash lowest, so that a new one moves few."""
        images = self._rule_args.get("images", ())
        images = () if isinstance(images, str) else tuple(map(str, images))
        tasks: dict[str, list[TaskDirectory]] = {"path": [], "eval_path": []}
        problems: list[DataError] = []
        for setting, path in (("path", self.path), ("eval_path", self.eval_path)):
            try:
                folders = task_paths(path) if path is not None else []
            except DataError as error:
                folders, problems = [], [*problems, error]
            for folder in folders:
                task, wrong = checked_task(folder, images)
                tasks[setting] += [task] if task is not None else []
                problems += wrong
        train, test = tasks["path"], tasks["eval_path"][: self.eval_size]
        if self.eval_path is None:
            hashed = sorted(train, key=lambda task: (zlib.crc32(task.name.encode()), task.name))
            test, rest = hashed[: self.eval_size], hashed[self.eval_size :]
            train = sorted(rest, key=lambda task: task.name)
        return _ReadTasks(train, test, problems)

    def problems(self, *, batch_size: int, tokenizer_dir: str | None) -> Iterator[ConfigError]:
        """Yields what is wrong with the directories, too few of them, and instructions over the limit."""
        yield from super().problems(batch_size=batch_size, tokenizer_dir=tokenizer_dir)
        if self.agent in self.own_agents and self.rule != self.kind:
            yield ConfigError(
                f"agent {self.agent} is rewarded by the tasks' tests alone, not by {self.rule!r}",
                where="task.reward and task.agent",
                fix="leave task.reward out",
            )
        if self.path is None:
            fix = "set task.path=FOLDER, a task's directory or a folder of them"
            yield ConfigError("task harbor has no tasks", where="task.path", fix=fix)
            return
        found = self._read()
        for error in found.problems:
            yield ConfigError(error.what, where=f"task.path, {error.where}", fix=error.fix)
        if self.agent == "harbor_command":
            yield from self._installed_agent_problems(found)
        few = len(found.train) < batch_size or len(found.test) < self.eval_size
        if few and not found.problems:
            total = f"{len(found.train) + len(found.test)} tasks are too few"
            yield ConfigError(
                f"{total}: {batch_size} per batch and {self.eval_size} held out",
                where=f"task.path, {self.path}",
                fix="lower train_bs_n_seqs or task.eval_size, or give more tasks",
            )
        longest, name = max(self._lengths(found, tokenizer_dir), default=(0, ""))
        if longest > self.max_prompt_len and self.long_prompts == REFUSE:
            yield ConfigError(
                f"an instruction is longer than {self.max_prompt_len} tokens: {name} has {longest}",
                where=f"task.max_prompt_len and {self.path}",
                fix=f"raise task.max_prompt_len to {longest}, or set task.long_prompts=drop",
            )

    def _installed_agent_problems(self, found: _ReadTasks) -> Iterator[ConfigError]:
        """Yields what the box of an agent that is installed on the nodes can't be."""
        from realsys.rollout.runners.agent_arguments import HarborCommandArguments

        args = self.episode_args
        rule = args.get("rule", {})
        allowed = rule.get("allow_missing", ())
        if "net" in ((allowed,) if isinstance(allowed, str) else allowed):
            yield ConfigError(
                "agent harbor_command reaches the policy by its box's own network, which nodes may lack",
                where="task.reward_args.harbor.allow_missing",
                fix="leave net out, and use nodes with network namespaces (docs/sandbox.md)",
            )
        if images := [task.name for task in (*found.train, *found.test) if task.sif]:
            yield ConfigError(
                f"in an image an agent can't reach the policy: {_some(images)}",
                where="task.reward_args.harbor.images",
                fix="leave images out, or use task.agent=harbor",
            )
        episode_s = args.get("timeout_s", HarborCommandArguments.timeout_s)
        tests_s = rule.get(
            "verifier_s", getattr(registry.find_reward(self.kind), "verifier_s", 0.0)
        )
        are_numbers = all(isinstance(one, int | float) for one in (episode_s, tests_s))
        if are_numbers and episode_s <= tests_s:  # other values are told with all arguments
            yield ConfigError(
                f"an episode has {episode_s:g} s, of which its tests may take {tests_s:g}",
                where="task.agent_args.timeout_s and task.reward_args.harbor.verifier_s",
                fix="give the episode more time",
            )

    def _lengths(self, found: _ReadTasks, tokenizer_dir: str | None) -> list[tuple[int, str]]:
        """Counts the prompts' tokens, with the tasks' names; empty if only a worker can."""
        from realsys.models.prompt_lengths import prompt_lengths  # loads a tokenizer

        tasks = [*found.train, *found.test]
        if tokenizer_dir is None or not tasks:
            return []
        prompts = [self._record(task)["prompt"] for task in tasks]
        try:
            counted = prompt_lengths(Path(tokenizer_dir).expanduser(), prompts) or []
        except CheckpointError:  # reported by the check of the directory
            return []
        return [(length, task.name) for length, task in zip(counted, tasks, strict=False)]

    def answer_problems(self) -> Iterator[ConfigError]:
        """Yields tasks without a solution that an answer could be."""
        found = self._read()
        if without := [t.name for t in (*found.train, *found.test) if t.answer is None]:
            yield ConfigError(
                f"{len(without)} tasks have no solution that is solve.sh alone: {_some(without)}",
                where=f"task.path, {self.path}",
                fix="fine-tune on tasks that have one, or start from a model (actor.path)",
            )

    def remarks(self, tokenizer_dir: str | None) -> Iterator[str]:
        """Reports packages that this node lacks, images that are not used, and tests that download."""
        found = self._read()
        tasks = [*found.train, *found.test]
        if lacking := lacking_packages(tasks, self._rule_args.get("assume", ())):
            yield f"nodes that score need packages that this one does not have: {lacking}"
        images = [t.environment.docker_image or t.build.image for t in tasks if not t.sif]
        if images := sorted({image for image in images if image}):
            yield f"images are not used ({_some(images)}): boxes have the programs of their node"
        if downloads := [f"{t.name}/{t.downloads[0]}" for t in tasks if t.downloads]:
            what = f"tests of {len(downloads)} tasks use a network, which a box does not have"
            yield f"{what}: {_some(downloads)}"

    def measured(self, tokenizer_dir: str) -> MeasuredQuestions | None:
        """How many and how long the questions are; None if they can't be read or counted."""
        found = self._read()
        lengths = self._lengths(found, tokenizer_dir)
        if found.problems or not lengths:
            return None
        held_out = None if self.eval_path is None else len(found.test)
        total = len(found.train) + (len(found.test) if held_out is None else 0)
        return MeasuredQuestions(
            longest=max(lengths)[0], exact=True, total=total, held_out=held_out
        )

    def input_files(self) -> tuple[str, ...]:
        """All files of the tasks."""
        found = self._read()
        files = [f for task in (*found.train, *found.test) for f in sorted(task.path.rglob("*"))]
        return tuple(str(file) for file in files if file.is_file())


class _ReadTasks(NamedTuple):
    """Those to train on, those held out, and what is wrong with any."""

    train: list[TaskDirectory]
    test: list[TaskDirectory]
    problems: list[DataError]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + ", …" * (len(names) > _SHOWN)


def _folders(path: str | None) -> frozenset[str]:
    """The real paths of the tasks that a setting means; none if it can't be read, which is reported."""
    try:
        found = [] if path is None else task_paths(path)
    except DataError:
        found = []
    return frozenset(os.path.realpath(folder) for folder in found)
