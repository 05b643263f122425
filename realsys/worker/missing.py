"""What is known of workers that somebody waits for in vain, for the error of that wait.

From the attempt's folder: last words, how a process ended, whether it has started at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from realsys.trial.records import AttemptFiles, Failure, WorkerExit, read_record

MOST_TOLD = 8


def describe_missing(names: Sequence[str], files: AttemptFiles) -> str:
    """A line a worker: ``model_worker/3 has not registered: failed: out of memory``; then where to look."""
    told = [f"{n} has not registered: {_what_became_of(n, files)}" for n in names[:MOST_TOLD]]
    if len(names) > MOST_TOLD:
        told.append(f"nor have {len(names) - MOST_TOLD} more")
    return "\n  ".join([*told, f"logs: {files.logs}"])


def _what_became_of(name: str, files: AttemptFiles) -> str:
    words = read_record(Failure, files.failure_record(name))
    if words is not None:
        return f"failed: {words.why.partition(chr(10))[0]}"
    ended = read_record(WorkerExit, files.exit_of(name))
    if ended is not None:
        code = ended.returncode
        how = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"{how} on {ended.host}" + (f": {ended.hint}" if ended.hint else "")
    log = files.log(name)
    if not log.exists():
        return "not started: it has no log yet"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"started, its log ends: {lines[-1][-160:]}" if lines else "started, its log is empty"
