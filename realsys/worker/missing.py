"""Explains what happened to workers that did not register, for the error of the wait.

Read from the attempt's folder: failure records, how a process ended, whether it has started at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from realsys.trial.records import AttemptFiles, Failure, WorkerExit, read_record

MAX_NAMED = 8


def describe_missing(names: Sequence[str], files: AttemptFiles) -> str:
    """Returns one line per worker, ``model_worker/3 has not registered: failed: out of memory``, then
    where the logs are."""
    lines = [f"{n} has not registered: {_explain(n, files)}" for n in names[:MAX_NAMED]]
    if len(names) > MAX_NAMED:
        lines.append(f"nor have {len(names) - MAX_NAMED} more")
    return "\n  ".join([*lines, f"logs: {files.logs}"])


def _explain(name: str, files: AttemptFiles) -> str:
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
