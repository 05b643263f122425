"""One srun and its tasks: how each ended, from srun's log, the tasks' own records and srun's code.

srun's log names failed tasks at once, and inotify reports when srun, on this host, has written to it;
each task's parent has recorded the details (realsys/worker/srun_task.py). A step that srun can't start is
given up after a while, with srun's message.
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from realsys.api.plan import PhasePlan, StepPlan
from realsys.name_resolve.file.folder_changes import FileWrites
from realsys.runtime import worker_exit_codes
from realsys.slurm.srun_messages import failed_tasks, last_trouble, patience_s, step_wait
from realsys.slurm.step_command import Again, srun_log
from realsys.trial.records import AttemptFiles, WorkerExit, read_fresh

REFRESH_S = 0.05
LOOK_S = 1.0  # interval of checking files, while srun runs: they are on a shared file system
SURE_S = 10.0  # interval of reading srun's log even if inotify reports no write
KEPT_CHARS = 1 << 16  # of srun's output, to explain why a step failed or waits
STRICT_TASKS = 64  # up to this many tasks, each one's own record is read after a step's end


@dataclass
class SlurmTask:
    """One task of a step."""

    worker: str
    step: Step
    host: str  # Slurm's name of its node; the worker's own, once it has ended
    pid: int = 0
    ended_at: float | None = None
    hint: str = ""
    returncode: int | None = None
    node: str = ""
    was_killed: bool = False

    def __post_init__(self) -> None:
        self.node = self.node or self.host

    def poll(self) -> int | None:
        """Returns the return code, or None while it runs or its end is unknown."""
        if self.returncode is None:
            self.step.refresh()
        return self.returncode


@dataclass
class Step:
    """One srun and its tasks.

    Attributes:
        written: writes of this host to the folder of logs.
        again: the restarted or added worker, if the step has just that one.
    """

    phase: PhasePlan
    plan: StepPlan
    process: subprocess.Popen[bytes]
    attempt: AttemptFiles
    log_start: int
    written: FileWrites
    again: Again | None = None
    tasks: list[SlurmTask] = field(default_factory=list)
    _next_refresh: float = 0.0
    _next_look: float = 0.0
    _next_read: float = 0.0
    _over: bool = False
    _log_fd: int = -1
    _read: int = 0  # where in the log we are
    _unread: bytes = b""  # the last line, as far as it was written
    _said: str = ""  # its newest lines
    _began_s: float = field(default_factory=time.monotonic)
    _is_up: bool = False  # some task of it was seen to have a log

    def refresh(self) -> None:
        """Updates the tasks' return codes."""
        now_s = time.monotonic()
        if self._over or now_s < self._next_refresh:
            return
        self._next_refresh = now_s + REFRESH_S
        ended = self.process.poll()  # before the log is read: what srun said last is in it then
        has_spoken = self.written.has(self._log.name)
        if ended is None and not has_spoken and now_s < self._next_look:
            return
        self._next_look = now_s + LOOK_S
        news = ""
        if ended is not None or has_spoken or now_s >= self._next_read:
            self._next_read = now_s + (SURE_S if self.written.is_active else LOOK_S)
            news = self._news(is_last=ended is not None)
        self._said = text = (self._said + news)[-KEPT_CHARS:]
        for index, (host, code, how) in failed_tasks(news).items():
            if index < len(self.tasks) and self.tasks[index].returncode is None:
                self._set_end(self.tasks[index], code, hint=f"srun: {how} on {host}")
        for task in self.tasks:
            if task.was_killed and task.returncode is None:  # srun may not have heard of it
                self._set_recorded_end(task)
        if ended is not None:
            self._over = True
            self._set_all_ends(ended, last_trouble(text), named=bool(failed_tasks(text)))
        else:
            self._check_start(step_wait(text))

    def _check_start(self, sentence: str) -> None:
        """Gives up a step that srun has tried to start for too long."""
        limit_s = patience_s(sentence)
        if self._is_up or time.monotonic() - self._began_s < limit_s:
            return
        if not sentence and any(self.attempt.log(t.worker).exists() for t in self.tasks):
            self._is_up = True
            return
        self.process.terminate()  # otherwise it might start them after they were given up
        hint = f"srun could not start its step for {limit_s:.0f} s: {sentence or 'no message'}"
        for task in self.tasks:
            if task.returncode is None:
                self._set_end(task, self._not_started(worker_exit_codes.FAILED), hint=hint)

    def _not_started(self, code: int) -> int:
        """Returns the code of a failed first start. A restart may be tried once more: slurmctld may be
        unavailable."""
        return worker_exit_codes.NOT_STARTED if self.again is None else code

    def _set_all_ends(self, srun_code: int, trouble: str, *, named: bool) -> None:
        """Sets the end of all tasks after srun's: by their own records, else by its code.

        Args:
            named: srun reported single tasks, so the step was started.
        """
        looked_at = self.tasks if len(self.tasks) <= STRICT_TASKS or srun_code else self.tasks[:1]
        for task in looked_at:
            if task.returncode is None:
                hint = f"srun ended with {srun_code}" + (f": {trouble}" if trouble else "")
                started = named or srun_code <= 0 or self.attempt.log(task.worker).exists()
                code = (
                    (srun_code or worker_exit_codes.FAILED)
                    if started
                    else self._not_started(srun_code)
                )
                known = self._set_end(task, code, hint=hint)
                if not known and srun_code == 0:
                    task.hint = (
                        "no exit record and srun ended with 0: no task ran, or Slurm ended it"
                    )
                    task.hint += f" ({trouble})" if trouble else ""
        for task in self.tasks:
            if task.returncode is None:
                task.returncode, task.ended_at = srun_code, time.time()

    def _set_end(self, task: SlurmTask, code: int, *, hint: str) -> bool:
        """Sets a task's end; returns True if its own parent recorded it."""
        if self._set_recorded_end(task):
            return True
        task.returncode, task.ended_at, task.hint = code, time.time(), hint
        return False

    def _set_recorded_end(self, task: SlurmTask) -> bool:
        record = read_fresh(WorkerExit, self.attempt.exit_of(task.worker))
        if record is None:
            return False
        task.returncode, task.host, task.pid = record.returncode, record.host, record.pid
        task.ended_at, task.hint = record.at, record.hint
        return True

    @property
    def _log(self) -> Path:
        return srun_log(self.attempt, self.plan, self.again)

    def _news(self, *, is_last: bool) -> str:
        """Returns srun's output since the last call, in whole lines."""
        try:
            if self._log_fd < 0:
                self._log_fd = os.open(self._log, os.O_RDONLY)
                self._read = self.log_start
            if (grown := os.fstat(self._log_fd).st_size - self._read) > 0:
                data = os.pread(self._log_fd, grown, self._read)
                self._read, self._unread = self._read + len(data), self._unread + data
        except OSError:
            pass
        lines, newline, rest = self._unread.rpartition(b"\n")
        if is_last:
            lines, newline, rest = self._unread, b"", b""
            if self._log_fd >= 0:
                os.close(self._log_fd)
        self._unread = rest
        return (lines + newline).decode("utf-8", "replace")
