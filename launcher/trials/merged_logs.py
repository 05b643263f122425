"""Merges the logs of all workers of a trial, with the worker's name before each line.

For `realsys logs`. Within an attempt, lines are ordered by their leading time stamp (a line without one,
e.g. of a traceback, stays with the line before it); while following, in the order in which they were
read. It stops nothing and holds no lock.
"""

from __future__ import annotations

import fnmatch
import heapq
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from launcher.trials.submission import known_submission
from realsys.api.errors import ConfigError, TrialError, did_you_mean
from realsys.trial.records import AttemptFiles, AttemptRecord, TrialFiles
from realsys.trial.trial_reader import TrialReader

POLL_S = 0.2
BATCH = "batch"
CHUNK_BYTES = 1 << 16  # times the number of workers: the memory of a merge
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?")


@dataclass(frozen=True)
class LogLine:
    """One line, without its line end."""

    attempt: int
    worker: str
    text: str


class _Tail:
    """Reads complete lines of one growing file."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.rest, self.stamp = path, 0, b"", ""

    def read(self, *, last: bool = False) -> Iterator[tuple[str, str]]:
        """Yields (time, line) of new lines since the last call.

        With ``last``, also a line without a line end.
        """
        while chunk := self._chunk():
            self.offset += len(chunk)
            *lines, self.rest = (self.rest + chunk).split(b"\n")
            for line in lines:
                yield self._stamped(line)
        if last and self.rest:
            line, self.rest = self.rest, b""
            yield self._stamped(line)

    def _chunk(self) -> bytes:
        """Reads the next bytes. The file is not kept open: there may be a thousand of them."""
        try:
            with open(self.path, "rb") as file:
                if file.seek(0, 2) < self.offset:  # truncated by hand: start over
                    self.offset, self.rest = 0, b""
                file.seek(self.offset)
                return file.read(CHUNK_BYTES)
        except OSError:
            return b""

    def _stamped(self, line: bytes) -> tuple[str, str]:
        text = line.decode("utf-8", "replace").rstrip("\r")
        if stamp := _STAMP.match(text):
            self.stamp = stamp[0]
        return self.stamp, text


class TrialLogs:
    """The logs of the workers that match a pattern.

    Args:
        pattern: ``model_worker/*``, ``master_worker/0``, ``model_worker``, ``supervisor``; empty: all.
        grep: keep only lines in which this regular expression is found.
        attempt: one attempt; None for all.
        since: keep only lines stamped at or after this local time, ``2026-11-21T09:30:00``.
    Raises:
        ConfigError: ``grep`` is not a regular expression.
    """

    def __init__(
        self,
        files: TrialFiles,
        *,
        pattern: str = "",
        grep: str = "",
        attempt: int | None = None,
        since: str = "",
    ) -> None:
        self.files, self.pattern, self.attempt, self.since = files, pattern, attempt, since
        self._tails: dict[Path, _Tail] = {}
        try:
            self._grep = re.compile(grep)
        except re.error as error:
            raise ConfigError(
                f"{grep!r} is not a regular expression: {error}",
                where="--grep",
                fix="escape special characters with a backslash",
            ) from error

    def workers(self) -> list[str]:
        """Lists all workers that have a log, whether or not they match the pattern."""
        return list(dict.fromkeys(name for _, name, _ in self._all()))

    def check(self) -> None:
        """Raises TrialError if nothing matches, so that a typing error does not look like an empty log."""
        known = self.workers()
        if self.attempt is not None and not self.files.attempt(self.attempt).root.is_dir():
            numbers = [str(a.number) for a in self.files.all_attempts()]
            raise TrialError(
                f"there is no attempt {self.attempt}",
                where=str(self.files.attempts),
                fix=f"use one of {', '.join(numbers)}" if numbers else "it has not started yet",
            )
        if (
            known
            and self.pattern
            and not any(matches_pattern(name, self.pattern) for name in known)
        ):
            srun = f"srun-{self.pattern.partition('/')[0]}"
            if srun in known:
                raise TrialError(
                    f"{self.pattern!r} has no log: srun has not started it",
                    where=str(self.files.root),
                    fix=f"read srun's log: realsys logs {'/'.join(self.files.root.parts[-2:])} {srun}",
                )
            raise TrialError(
                f"no worker matches {self.pattern!r}",
                where=str(self.files.root),
                fix=did_you_mean(self.pattern, known),
            )

    def read(self, *, last: bool = False) -> Iterator[LogLine]:
        """Yields the lines written since the last call."""
        streams = []
        for attempt, worker, path in self._all():
            if not self.pattern or matches_pattern(worker, self.pattern):
                tail = self._tails.setdefault(path, _Tail(path))
                streams.append(_lines(attempt, worker, tail, last))
        for (_, stamp), line in heapq.merge(*streams, key=lambda item: item[0]):
            if stamp >= self.since and self._grep.search(line.text):
                yield line

    def follow(
        self, is_over: Callable[[], bool], *, sleep: Callable[[float], None] = time.sleep
    ) -> Iterator[LogLine]:
        """Yields lines as they are written, until the trial has ended and everything has been read."""
        while True:
            # Checked before reading, so that everything written until then is read.
            over = is_over()
            yield from self.read(last=over)
            if over:
                return
            sleep(POLL_S)

    def _all(self) -> Iterator[tuple[int, str, Path]]:
        for attempt in self.files.all_attempts():
            if self.attempt not in (None, attempt.number):
                continue
            if attempt.logs.is_dir():
                for path in sorted(attempt.logs.glob("*.log")):
                    yield attempt.number, worker_of(path), path
            for path in _batch_logs(self.files, attempt):
                yield attempt.number, BATCH, path


def _batch_logs(files: TrialFiles, attempt: AttemptFiles) -> list[Path]:
    """Lists submitit's files: output of the batch script before its supervisor had a log."""
    record = TrialReader(files).record(AttemptRecord, attempt.record)
    submission = known_submission(files)
    if record is None or not record.job_id:
        return []
    folder = Path(submission.folder) if submission and submission.folder else files.submitit
    # The other jobs of the layout split belong to the submission of this attempt.
    is_last = submission is not None and record.job_id == submission.job_id
    job_ids = submission.job_ids if submission is not None and is_last else (record.job_id,)
    return sorted(p for job_id in job_ids for p in folder.glob(f"{job_id}_0_log.*"))


def last_lines(lines: Iterator[LogLine], count: int | None) -> Iterable[LogLine]:
    """Returns the last ``count`` lines; if None, all of them lazily."""
    return lines if count is None else deque(lines, maxlen=count)


def since_stamp(text: str, now: datetime, *, where: str = "--since") -> str:
    """Converts ``90s``, ``10m``, ``2h``, ``1d`` ago, or a time, to the stamp at a line's start.

    Raises:
        ConfigError: it is neither.
    """
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
    try:
        if match := re.fullmatch(r"(\d+)([smhd])", text):
            at = now - timedelta(**{units[match[2]]: int(match[1])})
        else:
            at = datetime.fromisoformat(text)
            if at.tzinfo is not None:  # stamps are local
                at = at.astimezone().replace(tzinfo=None)
        return at.isoformat(timespec="seconds")
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{text!r} is not a time",
            where=where,
            fix="write 10m, 2h, 1d, or a time like 2026-11-21T09:30:00",
        ) from None


def _lines(
    attempt: int, worker: str, tail: _Tail, last: bool
) -> Iterator[tuple[tuple[int, str], LogLine]]:
    for stamp, text in tail.read(last=last):
        yield (attempt, stamp), LogLine(attempt, worker, text)


def worker_of(path: Path) -> str:
    """Returns the worker's name of a log: ``model_worker/3`` for ``model_worker-3.log``."""
    kind, dash, index = path.stem.rpartition("-")
    return f"{kind}/{index}" if dash and index.isdigit() else path.stem


def matches_pattern(worker: str, pattern: str) -> bool:
    """Whether the worker's name, type, or type without ``_worker`` matches the glob."""
    kind = worker.partition("/")[0]
    names = (worker, kind, kind.removesuffix("_worker"))
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def prefixes(workers: list[str], *, attempts: bool) -> Callable[[LogLine], str]:
    """Returns a formatter of lines: the worker's name padded to the longest, and optionally the attempt."""
    width = max((len(name) for name in workers), default=0)

    def shown(line: LogLine) -> str:
        number = f"{line.attempt} " if attempts else ""
        return f"{number}{line.worker:<{width}} | {line.text}"

    return shown
