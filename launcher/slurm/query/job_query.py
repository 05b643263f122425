"""Queries Slurm about the user's jobs: one batched call for all of them, and never an exception.

One squeue; then one sacct for the jobs that squeue does not know. ``squeue --states=all`` also lists jobs
that ended less than MinJobAge (300 s) ago, with their exit codes; `scontrol show job` knows no more and
takes a single id. Several jobs are queried as "all of mine", which costs the controller least (a query
that names several ids makes it send all users' jobs); ids that are then in neither answer are queried by
id, once. job_rows.py parses the output, answer_cache.py caches it.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from launcher.slurm.query import answer_cache
from launcher.slurm.query.answer_cache import CachedAnswer
from launcher.slurm.query.job_rows import (
    FIELD_END,
    ROW_END,
    SACCT_FIELDS,
    SQUEUE_FIELDS,
    JobInfo,
    Rows,
    parts_of,
    read_sacct,
    read_squeue,
)
from launcher.slurm.slurm_commands import failure_text, is_unknown_job, run_slurm
from realsys.api.errors import ClusterError
from realsys.trial.trial_state import JobState

__all__ = ["CachedAnswer", "JobInfo", "query_jobs"]

SQUEUE_FORMAT = f":{FIELD_END},".join(SQUEUE_FIELDS) + f":{ROW_END}"
SECONDS = {"SLURM_TIME_FORMAT": "%s"}

_JOB_ID = re.compile(r"\d{1,10}(?:_\d{1,10}|\+\d{1,4})?", re.ASCII)
_LEFT = "Slurm no longer knows the job; how it ended is unknown"
_LEFT_UNRECORDED = "the controller no longer knows the job, and accounting has no record of its end"
_DISABLED = "accounting storage is disabled"


def query_jobs(
    job_ids: Iterable[str],
    *,
    accounting: bool | None,
    max_age_s: float = 0.0,
    timeout_s: float = 30.0,
) -> CachedAnswer:
    """Queries these jobs. Problems are part of the answer and make jobs UNKNOWN, never GONE.

    Every id asked for is a key of the answer (``12``, ``12_3``, ``12+0``, or ``12;cluster`` as sbatch
    --parsable prints it); of an array or a heterogeneous job its parts are there too, and the id alone
    is the part that says most (job_rows.py).

    Args:
        accounting: whether sacct works; None: try. Pass ``not answer.accounting_off`` next time.
        max_age_s: accept a cached answer up to this age, also one of another process: for repeated
            queries (then at least 10 s).
        timeout_s: per program.
    """
    names = list(dict.fromkeys(job_ids))
    ids = {name: name.strip().partition(";")[0] for name in names}
    valid = list(dict.fromkeys(found for found in ids.values() if _JOB_ID.fullmatch(found)))
    if max_age_s > 0 and valid:
        answer = _through_cache(valid, accounting, max_age_s, timeout_s)
    else:
        answer = _fresh(valid, accounting, timeout_s)
    return _picked(answer, ids)


def _through_cache(
    ids: list[str], accounting: bool | None, max_age_s: float, timeout_s: float
) -> CachedAnswer:
    path = answer_cache.cache_file()
    kept = answer_cache.load(path, max_age_s=max_age_s)
    if kept and not _unknown_in(kept, ids):
        return kept
    with answer_cache.query_lock(path, timeout_s=2 * timeout_s):
        kept = answer_cache.load(path, max_age_s=max_age_s)  # another process may have queried
        mine = kept or _from_squeue(["--me"], timeout_s)
        answer = _completed(mine, ids, accounting, timeout_s, only_mine=True)
        answer_cache.save(path, answer)
    return answer


def _fresh(ids: list[str], accounting: bool | None, timeout_s: float) -> CachedAnswer:
    if not ids:
        return CachedAnswer(asked_at=time.time())
    several = len(ids) > 1
    seen = _from_squeue(["--me"] if several else _by_id(ids), timeout_s)
    return _completed(seen, ids, accounting, timeout_s, only_mine=several)


def _completed(
    seen: CachedAnswer,
    ids: list[str],
    accounting: bool | None,
    timeout_s: float,
    *,
    only_mine: bool = False,
) -> CachedAnswer:
    """Adds an entry to ``seen`` for every id, from sacct or by id if needed."""
    if (missing := _unknown_in(seen, ids)) and accounting is not False and not seen.accounting_off:
        seen = _with_sacct(seen, missing, accounting, timeout_s)
    if only_mine and seen.reached and (missing := _not_over(seen, missing)):
        others = _from_squeue(_by_id(missing), timeout_s)
        seen = replace(
            seen,
            jobs={**seen.jobs, **others.jobs},
            problems=(*seen.problems, *others.problems),
            reached=others.reached,
        )
    unseen = {job_id: _unseen(seen, job_id) for job_id in _not_over(seen, missing)}
    return replace(seen, jobs={**seen.jobs, **unseen})


def _not_over(seen: CachedAnswer, ids: list[str]) -> list[str]:
    """Selects the ids that squeue did not list and for which accounting has no end either."""
    return [
        job_id
        for job_id in ids
        if not (info := seen.jobs.get(job_id))
        or (info.source != "squeue" and not info.state.has_ended)
    ]


def _unseen(seen: CachedAnswer, job_id: str) -> JobInfo:
    """Decides the state of a job that the controller did not list."""
    recorded = seen.jobs.get(job_id)
    if not seen.reached:  # accounting's record is then the best there is
        why = "Slurm could not be asked"
        return recorded or JobInfo(job_id=job_id, state=JobState.UNKNOWN, reason_words=why)
    if recorded:
        return replace(recorded, state=JobState.GONE, reason_words=_LEFT_UNRECORDED)
    return JobInfo(job_id=job_id, state=JobState.GONE, reason_words=_LEFT)


def _from_squeue(which: list[str], timeout_s: float) -> CachedAnswer:
    asked_at = time.time()
    argv = ["squeue", *which, "--all", "--noheader", "--array", "--states=all"]
    try:
        done = run_slurm([*argv, f"--Format={SQUEUE_FORMAT}"], timeout_s=timeout_s, env=SECONDS)
    except ClusterError as error:
        return CachedAnswer(asked_at=asked_at, problems=(error.what,), reached=False)
    if is_unknown_job(done):
        return CachedAnswer(asked_at=asked_at)
    rows = read_squeue(done.stdout)
    problems = tuple(_problems(done, rows))
    return CachedAnswer(
        jobs=dict(rows.jobs), asked_at=asked_at, problems=problems, reached=not problems
    )


def _with_sacct(
    seen: CachedAnswer, missing: list[str], accounting: bool | None, timeout_s: float
) -> CachedAnswer:
    argv = ["sacct", "--allocations", "--parsable2", "--noheader", "--duplicates"]
    argv += [f"--delimiter={FIELD_END}", f"--format={','.join(SACCT_FIELDS)}"]
    try:
        done = run_slurm([*argv, f"--jobs={','.join(missing)}"], timeout_s=timeout_s, env=SECONDS)
    except ClusterError as error:
        return replace(seen, problems=(*seen.problems, error.what))
    if done.returncode != 0 and _DISABLED in done.stderr:
        disabled = "sacct: Slurm accounting storage is disabled here"
        problems = seen.problems if accounting is None else (*seen.problems, disabled)
        return replace(seen, problems=problems, accounting_off=True)
    rows = read_sacct(done.stdout)
    # For an array that is partly queued, squeue's entry for the whole takes precedence.
    problems = (*seen.problems, *_problems(done, rows))
    return replace(seen, jobs={**rows.jobs, **seen.jobs}, problems=problems)


def _problems(done: subprocess.CompletedProcess[str], rows: Rows) -> Iterator[str]:
    if rows.unreadable:
        found = f"{rows.unreadable} rows that can't be read, first {rows.example!r}"
        yield f"{done.args[0]} printed {found}"
    if done.returncode != 0:
        yield f"{done.args[0]} failed: {failure_text(done)}"


def _unknown_in(seen: CachedAnswer, ids: list[str]) -> list[str]:
    return [job_id for job_id in ids if job_id not in seen.jobs]


def _by_id(ids: list[str]) -> list[str]:
    return [f"--jobs={','.join(ids)}"]


def _picked(answer: CachedAnswer, ids: dict[str, str]) -> CachedAnswer:
    """Restricts the answer to the jobs asked for and their parts."""
    jobs: dict[str, JobInfo] = {}
    problems = list(answer.problems)
    for name, job_id in ids.items():
        if info := answer.jobs.get(job_id):
            jobs[name] = info
            jobs.update(parts_of(job_id, answer.jobs))
        else:
            jobs[name] = JobInfo(job_id=name, state=JobState.UNKNOWN, reason_words="no job id")
            problems.append(f"{name!r} is not a Slurm job id")
    return replace(answer, jobs=jobs, problems=tuple(problems))
