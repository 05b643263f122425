"""The box of one Harbor task: an agent's commands in it, one after another, then the task's tests.

    box = TaskBox(task, engine, limits)
    box.run("echo 42 > answer.txt")
    verdict = box.verify()

Each command gets a new box with the files that the last one left; processes do not outlive their command.
So the tests, and the folder for their verdict, are in no box that an agent's command ran in. A box that
fails by itself has changed nothing: the command can be run again.
"""

from __future__ import annotations

import io
import math
import tarfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from realsys.api.errors import DataError
from realsys.data.harbor.dockerfile import INSTALL_NOTHING, CopyStep, RunStep
from realsys.data.harbor.task_directory import DOCKERFILE, TaskDirectory, copied_files
from realsys.rewards.harbor.verifier_rewards import FOLDER, OUTPUT, TaskVerdict, verdict_of
from realsys.rewards.sandbox.box_archive import UNPACK
from realsys.rewards.sandbox.box_limits import BoxLimits, BoxOutcome
from realsys.rewards.sandbox.box_program import environment
from realsys.rewards.sandbox.box_root import WRITABLE
from realsys.rewards.sandbox.sandbox import OnListening, Sandbox

INSTRUCTION = "/logs/agent/instruction.md"
_LOGS = ("/logs/agent", "/logs/artifacts")
AGENT_OUTPUT_BYTES = 16 << 20  # of an installed agent's standard output, and of its errors
_MOST_BUILT, _SHOWN = 32, 300  # tasks whose first files are kept; characters of an output


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskLimits:
    """The most that any task gets; its own limits count where they are lower."""

    agent_s: float  # of one command
    verifier_s: float
    box: BoxLimits  # but for times

    def of(self, task: TaskDirectory, wall_s: float, asked_s: float | None = None) -> BoxLimits:
        """Returns the limits of one program; ``asked_s`` is the task's."""
        wall_s, asked = min(wall_s, asked_s or wall_s), task.environment
        return replace(
            self.box,
            wall_s=wall_s,
            cpu_s=wall_s * max(1.0, asked.cpus),
            memory_bytes=min(self.box.memory_bytes, asked.memory_bytes or self.box.memory_bytes),
            file_bytes=min(self.box.file_bytes, asked.storage_bytes or self.box.file_bytes),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxCommand:
    """A command of bash, and the files that it is run on.

    Attributes:
        kept: archive that a box of this task returned, of ``kept_folders``.
        more: archive of files of the task's directory.
        folders: those that may be written, besides /tmp and /box.
        archive: folders of which the outcome is to have an archive.
        env: variables of the task's files, in which ``$PATH`` is the box's.
        exact_env: further variables, as they are.
        on_listening: see ``Sandbox.run_each``; None: the box reaches nothing.
    """

    task: TaskDirectory
    text: str
    env: Mapping[str, str]
    kept: bytes
    more: bytes
    limits: BoxLimits
    folders: Sequence[str]
    archive: Sequence[str]
    exact_env: Mapping[str, str] = field(default_factory=dict)
    on_listening: OnListening | None = None


class BoxEngine(Protocol):
    """Runs commands, each in a new box."""

    def prepared(self, task: TaskDirectory, limits: BoxLimits) -> bytes:
        """Returns an archive of what a task's box begins with. Raises DataError, ClusterError: it can't."""
        ...

    def run(self, command: BoxCommand) -> BoxOutcome:
        """Unpacks, runs and packs.

        Raises:
            SandboxFailure: the box failed. ClusterError: this node has no such boxes.
        """
        ...


class TaskBox:
    """Files of a task's box, from one command to the next."""

    def __init__(self, task: TaskDirectory, engine: BoxEngine, limits: TaskLimits) -> None:
        self._task, self._engine, self._limits = task, engine, limits
        self._files = engine.prepared(task, limits.of(task, limits.agent_s))

    def run(
        self,
        text: str,
        *,
        env: Mapping[str, str] | None = None,
        solution: bytes = b"",
        most_s: float = math.inf,
    ) -> BoxOutcome:
        """Runs a command of bash in the task's working folder, for ``most_s`` at most.

        Its files stay for the next one. Where these can't be kept, as there are too many say, the outcome's
        ``archive`` is None, and the box is as before.

        Raises:
            SandboxFailure: the box failed, and is as before.
        """
        wall_s, asked_s = min(self._limits.agent_s, most_s), self._task.agent.timeout_sec
        command = BoxCommand(
            task=self._task,
            text=text,
            env=env or {},
            kept=self._files,
            more=solution,
            limits=self._limits.of(self._task, wall_s, asked_s),
            folders=[*self._task.folders, *_LOGS, *(["/solution"] if solution else [])],
            archive=kept_folders(self._task),
        )
        outcome = self._engine.run(command)
        self._files = self._files if outcome.archive is None else outcome.archive
        return outcome

    def run_agent(
        self,
        text: str,
        *,
        env: Mapping[str, str],
        most_s: float,
        on_listening: OnListening,
    ) -> BoxOutcome:
        """Runs an agent that is installed on the node, as ``run``; the policy's time is within ``most_s``.

        What it is to do is in the file ``INSTRUCTION`` of the box, too.

        Args:
            on_listening: see ``Sandbox.run_each``.
        Raises:
            SandboxFailure: the box failed, and is as before. ConfigError: it is an image's.
        """
        named = [(self._task.path / "instruction.md", INSTRUCTION.lstrip("/"))]
        limits = replace(self._limits.of(self._task, most_s), output_bytes=AGENT_OUTPUT_BYTES)
        command = BoxCommand(
            task=self._task,
            text=text,
            env={},
            exact_env=env,
            kept=self._files,
            more=packed_files(named, limits.file_bytes),
            limits=limits,
            folders=[*self._task.folders, *_LOGS],
            archive=kept_folders(self._task),
            on_listening=on_listening,
        )
        outcome = self._engine.run(command)
        self._files = self._files if outcome.archive is None else outcome.archive
        return outcome

    def run_solution(self) -> BoxOutcome:
        """Runs the task's own solution, with all files that it has."""
        text = "exec /bin/bash /solution/solve.sh"
        return self.run(text, env=self._task.solution.env, solution=self._packed("solution"))

    def verify(self) -> TaskVerdict:
        """Runs the tests on the files that the commands left.

        Raises:
            SandboxFailure: the box failed; nothing is known about the files.
        """
        wall_s, asked_s = self._limits.verifier_s, self._task.verifier.timeout_sec
        tests = self._packed("tests")
        command = BoxCommand(
            task=self._task,
            text=f"exec /bin/bash /tests/test.sh > {FOLDER}/{OUTPUT} 2>&1",
            env=self._task.verifier.env,
            kept=self._files,
            more=tests,
            limits=self._limits.of(self._task, wall_s, asked_s),
            folders=[*self._task.folders, *_LOGS, "/tests", FOLDER],
            archive=[FOLDER],
        )
        return verdict_of(self._engine.run(command), tests)

    def _packed(self, name: str) -> bytes:
        most_bytes = self._limits.of(self._task, 1.0).file_bytes
        return packed_files([(self._task.path / name, name)], most_bytes)


class SandboxEngine:
    """Boxes of this node's programs, in the sandbox; the Dockerfile's steps are run in one."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._built: dict[Path, bytes] = {}  # of the last tasks
        self._lock = threading.Lock()

    def prepared(self, task: TaskDirectory, limits: BoxLimits) -> bytes:
        """As ``BoxEngine``: what the Dockerfile's steps leave."""
        with self._lock:
            built = self._built.get(task.path)
        if built is None:
            built = self._build(task, limits) if task.build.steps else b""
            with self._lock:
                if len(self._built) >= _MOST_BUILT:
                    del self._built[next(iter(self._built))]
                self._built[task.path] = built
        return built

    def _build(self, task: TaskDirectory, limits: BoxLimits) -> bytes:
        """Runs the Dockerfile's steps, one after another in one box."""
        programs: list[tuple[Sequence[str], bytes]] = []
        for step in task.build.steps:
            if isinstance(step, RunStep):
                text = f"{INSTALL_NOTHING}\n{step.text}"
                programs.append((shell_argv(text, step.workdir, step.env), b""))
            else:
                programs.append((UNPACK, _copied(step, task, limits.file_bytes)))
        outcomes = self._run_each(programs, limits, [*task.folders, *_LOGS], kept_folders(task))
        for step, outcome in zip(task.build.steps, outcomes, strict=True):
            if not outcome.succeeded or outcome.archive is None:
                output = (outcome.stdout + outcome.stderr).decode(errors="replace").strip()
                raise DataError(
                    f"a step of the Dockerfile failed ({outcome.ended} {outcome.exit_code}): "
                    f"{output[-_SHOWN:]}",
                    where=f"{task.path / DOCKERFILE}:{step.line}",
                    fix="a box has this node's programs, no network and no root: change the step, "
                    "or leave the task out (docs/harbor.md)",
                )
        return outcomes[-1].archive or b""

    def run(self, command: BoxCommand) -> BoxOutcome:
        """As ``BoxEngine``."""
        programs: list[tuple[Sequence[str], bytes]] = [(UNPACK, command.kept + command.more)]
        programs.append((command_argv(command), b""))
        return self._run_each(
            programs, command.limits, command.folders, command.archive, command.on_listening
        )[-1]

    def _run_each(
        self,
        programs: Sequence[tuple[Sequence[str], bytes]],
        limits: BoxLimits,
        folders: Sequence[str],
        archive: Sequence[str],
        on_listening: OnListening | None = None,
    ) -> list[BoxOutcome]:
        """Runs programs in a box with those of the folders that it can have on this node."""
        usable = self._sandbox.usable_folders(folders)
        packed = [folder for folder in archive if folder in (*WRITABLE, *usable)]
        return self._sandbox.run_each(
            programs, limits=limits, folders=usable, archive=packed, on_listening=on_listening
        )


def kept_folders(task: TaskDirectory) -> list[str]:
    """Returns the folders of which files stay from one command to the next."""
    return [*task.folders, "/tmp", "/box", *_LOGS]


def command_argv(command: BoxCommand) -> list[str]:
    """Returns argv for a command, with the variables of its task."""
    env = {**command.task.build.env, **command.task.environment.env, **command.env}
    return shell_argv(command.text, command.task.workdir, env, command.exact_env)


def shell_argv(
    text: str, folder: str, env: Mapping[str, str], exact_env: Mapping[str, str] | None = None
) -> list[str]:
    """Returns argv that runs a command of bash in a folder. ``$PATH`` in ``env`` is the box's."""
    path = environment({})["PATH"]
    given = [f"{k}={v.replace('${PATH}', path).replace('$PATH', path)}" for k, v in env.items()]
    given += [f"{k}={v}" for k, v in (exact_env or {}).items()]
    return ["/usr/bin/env", f"--chdir={folder}", *given, "/bin/bash", "-c", text]


def packed_files(named: Iterable[tuple[Path, str]], most_bytes: int) -> bytes:
    """Returns an archive of files and folders under other names; links stay links.

    Raises:
        DataError: a file can't be read, or they are larger than ``most_bytes``.
    """
    size, made, path = 0, io.BytesIO(), Path()

    def counted(member: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal size
        size += member.size
        if size > most_bytes:
            raise DataError(
                f"its files are larger than the box's {most_bytes >> 20} MiB",
                where=str(path),
                fix="raise task.reward_args.harbor.disk",
            )
        return member

    try:
        with tarfile.open(fileobj=made, mode="w") as archive:
            for path, name in named:
                archive.add(path, name, filter=counted)
    except OSError as error:
        what = f"{error.filename or path} can't be read: {error.strerror}"
        raise DataError(what, where=str(path), fix="let the worker's user read it") from error
    return made.getvalue()


def _copied(step: CopyStep, task: TaskDirectory, most_bytes: int) -> bytes:
    """Returns an archive of the files of a COPY."""
    folder, named = task.path / "environment", list[tuple[Path, str]]()
    target = step.target.strip("/")
    for path in (path for source in step.sources for path in copied_files(folder, source)):
        if path.is_dir() and not path.is_symlink():
            named += [(inner, f"{target}/{inner.name}") for inner in sorted(path.iterdir())]
        else:
            named.append((path, f"{target}/{path.name}" if step.into else target))
    return packed_files(named, most_bytes)
