"""Rule ``harbor``: the script in an answer is run in a task's box, then the task's tests say the reward."""

from __future__ import annotations

import asyncio
import atexit
import logging
import platform
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from realsys.api.basics.thoughts import FinalTextRule
from realsys.api.errors import ClusterError, DataError
from realsys.api.options import option
from realsys.data.harbor.node_packages import lacking_packages
from realsys.data.harbor.task_directory import TaskDirectory, read_task, task_paths
from realsys.rewards.harbor.apptainer_engine import ApptainerEngine, check_image
from realsys.rewards.harbor.task_box import BoxEngine, SandboxEngine, TaskBox, TaskLimits
from realsys.rewards.harbor.verifier_rewards import TaskVerdict
from realsys.rewards.programs.fenced_blocks import last_block
from realsys.rewards.sandbox.box_limits import BoxLimits
from realsys.rewards.sandbox.sandbox import Sandbox

logger = logging.getLogger(__name__)
SHELLS = ("bash", "sh", "shell", "")


@dataclass(kw_only=True)
class HarborTests(FinalTextRule):
    """What a task's tests give: ``reward``, or the mean of what they name; all names are parts.

    ``no_verdict`` is the share of answers whose tests gave no reward, which counts 0. A box that fails is
    no score: the answer is tried again, then its record is set aside. A node that lacks what a task needs
    ends the run with what is missing.
    """

    call_s: ClassVar[float | None] = None  # waiting for a box, which has limits, may take long

    tasks: tuple[str, ...] = option(
        (), "folders of tasks for which a node is checked before the first answer; task.path"
    )
    fenced: bool = option(True, "the script is the last fenced block; else the whole answer")
    agent_s: float = option(30.0, "most that a task's script gets", unit="s", gt=0)
    verifier_s: float = option(60.0, "most that its tests get", unit="s", gt=0)
    mem: int = option(1024, "most memory of one box", unit="MiB", ge=16)
    disk: int = option(256, "most that its files take, in memory", unit="MiB", ge=64)
    boxes_at_once: int = option(8, "boxes of one process at the same time", ge=1)
    assume: tuple[str, ...] = option((), "packages that nodes have under other names")
    reads: tuple[str, ...] = option(
        (), "folders of the node that boxes may read, e.g. where an agent is installed"
    )
    images: tuple[str, ...] = option(
        (), "NAME=FILE: docker_image or a task's name, and the image's file, for Apptainer"
    )
    allow_missing: tuple[str, ...] = option(
        (), "what a node may lack: net, ipc, uts, seccomp (docs/sandbox.md)"
    )
    _is_checked: bool = field(init=False, repr=False, default=False)
    _sandbox: SandboxEngine | None = field(init=False, repr=False, default=None)
    _lock: threading.Lock = field(init=False, repr=False, default_factory=threading.Lock)

    async def __call__(
        self, response: str, record: Mapping[str, Any], final: str | None = None
    ) -> dict[str, float]:
        """Runs the script behind the answer's thoughts, and the tests.

        Raises:
            DataError: the record names no task, or one that can't be used. SandboxFailure: its box failed.
            ClusterError: this node lacks what tasks need.
        """
        path = directory_of(record)
        script = self.text_of(response, final)
        if script is not None and self.fenced:
            script = last_block(script, SHELLS)
        if script is None:
            return {"reward": 0.0, "correct": 0.0, "no_verdict": 0.0}
        return parts_of(await asyncio.to_thread(self.verdict, script, path))

    def verdict(self, script: str, path: Path) -> TaskVerdict:
        """Runs a script as an agent's work, and the tests. Blocks. Errors: as the call's."""
        box = self.open_box(read_task(path, self.images))
        outcome = box.run(script.replace("\0", ""))
        verdict = box.verify()
        if not verdict.rewards:
            logger.info("no verdict task=%s script=%s why=%s", path, outcome.ended, verdict.why)
        return verdict

    def open_box(self, task: TaskDirectory) -> TaskBox:
        """Opens a task's box on this node. Errors: as the call's."""
        box = BoxLimits(
            memory_bytes=self.mem << 20,
            file_bytes=self.disk << 20,
            processes=128,
            files=32768,
            open_files=1024,
        )
        limits = TaskLimits(agent_s=self.agent_s, verifier_s=self.verifier_s, box=box)
        return TaskBox(task, self._engine(task), limits)

    def _engine(self, task: TaskDirectory) -> BoxEngine:
        """Returns what runs a task's commands. Before the first, this node is checked for all tasks."""
        with self._lock:
            if not self._is_checked:
                self._check_node()
                self._is_checked = True
            if task.sif:
                return ApptainerEngine()
            if self._sandbox is None:
                made = Sandbox(
                    allow_missing=self.allow_missing,
                    read_only=self.reads,
                    boxes_at_once=self.boxes_at_once,
                )
                made.start()
                atexit.register(made.close)
                self._sandbox = SandboxEngine(made)
            return self._sandbox

    def _check_node(self) -> None:
        paths = [path for folder in self.tasks for path in task_paths(folder)]
        tasks = [read_task(path, self.images) for path in paths]
        for task in tasks:
            if task.sif:
                check_image(task)
        if lacking := lacking_packages(tasks, self.assume):
            raise ClusterError(
                f"tasks need packages that this node does not have: {lacking}",
                where=platform.node(),
                fix="install them, leave these tasks out, or name in task.reward_args.harbor.assume "
                "what is there under another name",
            )


def directory_of(record: Mapping[str, Any]) -> Path:
    """Returns the directory of a record's task. Raises DataError: the record names none."""
    path = record.get("task_directory")
    if not isinstance(path, str):
        raise DataError(
            "the record has no task_directory",
            where=f"a record with the fields {sorted(record)}",
            fix="use task=harbor, or give the path of a task's directory",
        )
    return Path(path)


def parts_of(verdict: TaskVerdict) -> dict[str, float]:
    """Returns a verdict as the named parts of a reward."""
    return {
        **verdict.rewards,
        "reward": verdict.reward,
        "correct": float(verdict.reward >= 1.0),
        "no_verdict": float(not verdict.rewards),
    }
