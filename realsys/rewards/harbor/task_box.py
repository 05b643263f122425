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
import tarfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from realsys.api.errors import DataError
from realsys.data.harbor.dockerfile import INSTALL_NOTHING, CopyStep, RunStep
from realsys.data.harbor.task_directory import DOCKERFILE, TaskDirectory, copied_files
from realsys.rewards.harbor.verifier_rewards import FOLDER, OUTPUT, TaskVerdict, verdict_of
from realsys.rewards.sandbox.box_archive import UNPACK
from realsys.rewards.sandbox.box_limits import BoxLimits, BoxOutcome
from realsys.rewards.sandbox.box_program import environment
from realsys.rewards.sandbox.sandbox import Sandbox

_LOGS = ("/logs/agent", "/logs/artifacts")
_MOST_BUILT = 32
_SHOWN_BYTES = 2000  # of a failed step's output


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskLimits:
    """The most that any task gets; its own limits count where they are lower."""

    agent_s: float  # of one command
    verifier_s: float
    box: BoxLimits  # but for times

    def of(self, task: TaskDirectory, wall_s: float, asked_s: float | None) -> BoxLimits:
        """Returns the limits of one program; ``asked_s`` is the task's."""
        wall_s = min(wall_s, asked_s or wall_s)
        return replace(
            self.box,
            wall_s=wall_s,
            cpu_s=wall_s * max(1.0, task.cpus or 1.0),
            memory_bytes=min(self.box.memory_bytes, task.memory_bytes or self.box.memory_bytes),
            file_bytes=min(self.box.file_bytes, task.storage_bytes or self.box.file_bytes),
        )


class BoxEngine(Protocol):
    """Runs programs of tasks, each in a new box."""

    def prepared(self, task: TaskDirectory, limits: BoxLimits) -> bytes:
        """Returns an archive of the files that the task's box begins with.

        Raises:
            DataError: it can't be made here.
        """
        ...

    def run(
        self, task: TaskDirectory, argv: Sequence[str], kept: bytes, more: bytes, limits: BoxLimits,
        *, folders: Sequence[str], archive: Sequence[str],
    ) -> BoxOutcome:  # fmt: skip
        """Unpacks two archives, runs a program, and packs folders.

        Args:
            kept: archive that a box of this task returned, of ``kept_folders``.
            more: archive of the task's own files.
            folders: those that may be written, besides /tmp and a home.
            archive: folders of which the outcome has an archive.
        Raises:
            SandboxFailure: the box failed. ClusterError: this node has no such boxes.
        """
        ...


class TaskBox:
    """Files of a task's box, from one command to the next."""

    def __init__(self, task: TaskDirectory, engine: BoxEngine, limits: TaskLimits) -> None:
        self._task, self._engine, self._limits = task, engine, limits
        self._folders = [*task.folders, *_LOGS]
        self._files = engine.prepared(task, limits.of(task, limits.agent_s, None))

    def run(
        self, command: str, *, env: Mapping[str, str] | None = None, more: bytes = b""
    ) -> BoxOutcome:
        """Runs a command of bash in the task's working folder.

        Its files stay for the next one. Where these can't be kept, as there are too many say, the outcome's
        ``archive`` is None, and the box is as before.

        Args:
            more: an archive to unpack before.
        Raises:
            SandboxFailure: the box failed, and is as before.
        """
        limits = self._limits.of(self._task, self._limits.agent_s, self._task.agent_s)
        outcome = self._engine.run(
            self._task,
            self._argv(command, env or {}),
            self._files,
            more,
            limits,
            folders=[*self._folders, *(["/solution"] if more else [])],
            archive=kept_folders(self._task),
        )
        self._files = self._files if outcome.archive is None else outcome.archive
        return outcome

    def run_solution(self) -> BoxOutcome:
        """Runs the task's own solution, with all files that it has."""
        solution = packed_files([(self._task.path / "solution", "solution")], self._most_bytes)
        command = "exec /bin/bash /solution/solve.sh"
        return self.run(command, env=self._task.solution_env, more=solution)

    def verify(self) -> TaskVerdict:
        """Runs the tests on the files that the commands left.

        Raises:
            SandboxFailure: the box failed; nothing is known about the files.
        """
        tests = packed_files([(self._task.path / "tests", "tests")], self._most_bytes)
        outcome = self._engine.run(
            self._task,
            self._argv(
                f"exec /bin/bash /tests/test.sh > {FOLDER}/{OUTPUT} 2>&1",
                self._task.verifier_env,
            ),
            self._files,
            tests,
            self._limits.of(self._task, self._limits.verifier_s, self._task.verifier_s),
            folders=[*self._folders, "/tests", FOLDER],
            archive=[FOLDER],
        )
        return verdict_of(outcome)

    @property
    def _most_bytes(self) -> int:
        return self._limits.of(self._task, 1.0, None).file_bytes

    def _argv(self, command: str, env: Mapping[str, str]) -> list[str]:
        return shell_argv(
            command, self._task.workdir, {**self._task.build.env, **self._task.env, **env}
        )


class SandboxEngine:
    """Boxes of this node's programs, in the sandbox; the Dockerfile's steps are run in one."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._built: dict[Path, bytes] = {}  # those of the last tasks
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
        outcomes = self._sandbox.run_each(
            programs,
            limits=limits,
            folders=[*task.folders, *_LOGS],
            archive=kept_folders(task),
        )
        for step, outcome in zip(task.build.steps, outcomes, strict=True):
            if not outcome.succeeded or outcome.archive is None:
                end = f"ended with {outcome.ended} {outcome.exit_code or ''}".strip()
                output = (outcome.stdout + outcome.stderr).decode(errors="replace").strip()
                raise DataError(
                    f"a step of the Dockerfile {end}: {output[-_SHOWN_BYTES:]}",
                    where=f"{task.path / DOCKERFILE}:{step.line}",
                    fix="a box has this node's programs, no network and no root: change the step "
                    "or leave the task out (docs/harbor.md)",
                )
        return outcomes[-1].archive or b""

    def run(
        self, task: TaskDirectory, argv: Sequence[str], kept: bytes, more: bytes, limits: BoxLimits,
        *, folders: Sequence[str], archive: Sequence[str],
    ) -> BoxOutcome:  # fmt: skip
        """As ``BoxEngine``."""
        programs: list[tuple[Sequence[str], bytes]] = [(UNPACK, kept + more), (argv, b"")]
        return self._sandbox.run_each(programs, limits=limits, folders=folders, archive=archive)[-1]


def kept_folders(task: TaskDirectory) -> list[str]:
    """Returns the folders of which files stay from one command to the next."""
    return [*task.folders, "/tmp", "/box", *_LOGS]


def shell_argv(command: str, folder: str, env: Mapping[str, str]) -> list[str]:
    """Returns argv that runs a command of bash in a folder, with variables."""
    path = environment({})["PATH"]
    given = [f"{k}={v.replace('${PATH}', path).replace('$PATH', path)}" for k, v in env.items()]
    return ["/usr/bin/env", f"--chdir={folder}", *given, "/bin/bash", "-c", command]


def packed_files(
    named: Iterable[tuple[Path, str]], most_bytes: int, mode: int | None = None
) -> bytes:
    """Returns an archive of files and folders under other names; links stay links.

    Raises:
        DataError: a file can't be read, or they are larger than ``most_bytes``.
    """
    size, made = 0, io.BytesIO()

    def counted(member: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal size
        size += member.size
        if size > most_bytes:
            raise DataError(
                f"its files are larger than the box's {most_bytes >> 20} MiB",
                where=str(path),
                fix="raise task.reward_args.harbor.disk",
            )
        if mode is not None and member.isreg():
            member.mode = mode
        return member

    path = Path()
    try:
        with tarfile.open(fileobj=made, mode="w") as archive:
            for path, name in named:
                archive.add(path, name, filter=counted)
    except OSError as error:
        what = f"{error.filename or path} can't be read: {error.strerror}"
        raise DataError(what, where=str(path), fix="let the worker's user read it") from error
    return made.getvalue()


def _copied(step: CopyStep, task: TaskDirectory, most_bytes: int) -> bytes:
    """The files of a COPY as an archive."""
    folder, named = task.path / "environment", list[tuple[Path, str]]()
    target = step.target.strip("/")
    for source in step.sources:
        for path in copied_files(folder, source):
            if path.is_dir() and not path.is_symlink():
                named += [(inner, f"{target}/{inner.name}") for inner in sorted(path.iterdir())]
            else:
                named.append((path, f"{target}/{path.name}" if step.into else target))
    return packed_files(named, most_bytes, step.mode)
