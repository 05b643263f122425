"""What Slurm says of our jobs: asked once for all of them, and never an exception.

One squeue; for what it does not know one sacct. ``squeue --states=all`` also knows jobs that ended
less than MinJobAge (300 s) ago, with their exit codes: `scontrol show job` knows no more, and takes a
single id. Several jobs are asked for as "all of mine", which costs the controller least (it sends all
users' jobs to a client that names several); what is then neither mine nor in accounting is asked for
by id, once. Reading is in job_rows.py, keeping in answer_cache.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
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
from launcher.slurm.query.states import JobState
from launcher.slurm.slurm_commands import names_no_job, run_slurm, said
from realsys.api.errors import ClusterError

__all__ = ["CachedAnswer", "JobInfo", "ask"]

SQUEUE_FORMAT = ",".join(f"{name}:{FIELD_END}" for name in SQUEUE_FIELDS[:-1])
SQUEUE_FORMAT += f",{SQUEUE_FIELDS[-1]}:{ROW_END}"
SECONDS = {"SLURM_TIME_FORMAT": "%s"}

_JOB_ID = re.compile(r"\d{1,10}(?:_\d{1,10}|\+\d{1,4})?", re.ASCII)
_LEFT = "Slurm no longer knows it; how it ended is not known"
_LEFT_UNRECORDED = "the controller no longer knows it, and accounting never learned how it ended"
_DISABLED = "accounting storage is disabled"


def ask(
    job_ids: Iterable[str],
    *,
    accounting: bool | None,
    max_age_s: float = 0.0,
    cluster: str = "",
    timeout_s: float = 30.0,
) -> CachedAnswer:
    """What Slurm says of these jobs; problems are in the answer, and make jobs UNKNOWN, never GONE.

    Every id asked for is a key of the answer (``12``, ``12_3``, ``12+0``, or ``12;cluster`` as sbatch
    --parsable prints it); of an array or a heterogeneous job its parts are there too, and the id alone
    is the part that says most (job_rows.py).

    Args:
        accounting: whether sacct works; None: try. Pass ``not answer.accounting_off`` next time.
        max_age_s: an answer of that age will do, also one that another process got: for those who
            ask again and again (at least 10 s, then).
        cluster: names the kept answer; without it the host does.
        timeout_s: of each program.
    """
    names = list(dict.fromkeys(job_ids))
    ids = {name: name.strip().partition(";")[0] for name in names}
    valid = list(dict.fromkeys(found for found in ids.values() if _JOB_ID.fullmatch(found)))
    if max_age_s > 0 and valid:
        answer = _through_cache(valid, accounting, max_age_s, cluster, timeout_s)
    else:
        answer = _fresh(valid, accounting, timeout_s)
    return _picked(answer, ids)


def _through_cache(
    ids: list[str], accounting: bool | None, max_age_s: float, cluster: str, timeout_s: float
) -> CachedAnswer:
    path = answer_cache.place(cluster)
    kept = answer_cache.load(path, max_age_s=max_age_s)
    if kept and not _unknown_in(kept, ids):
        return kept
    with answer_cache.turn(path, timeout_s=2 * timeout_s):
        kept = answer_cache.load(path, max_age_s=max_age_s)  # somebody may have asked meanwhile
        mine = kept or _from_squeue(["--me"], timeout_s)
        answer = _completed(mine, ids, accounting, timeout_s, only_mine=True)
        answer_cache.save(path, answer)
    return answer


def _fresh(ids: list[str], accounting: bool | None, timeout_s: float) -> CachedAnswer:
    if not ids:
        return CachedAnswer(asked_at=time.time())
    if len(ids) == 1:
        return _completed(_from_squeue(_by_id(ids), timeout_s), ids, accounting, timeout_s)
    mine = _from_squeue(["--me"], timeout_s)
    return _completed(mine, ids, accounting, timeout_s, only_mine=True)


def _completed(
    seen: CachedAnswer,
    ids: list[str],
    accounting: bool | None,
    timeout_s: float,
    *,
    only_mine: bool = False,
) -> CachedAnswer:
    """``seen`` with something about every id."""
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
    last_word = {job_id: _unseen(seen, job_id) for job_id in _not_over(seen, missing)}
    return replace(seen, jobs={**seen.jobs, **last_word})


def _not_over(seen: CachedAnswer, ids: list[str]) -> list[str]:
    """Those of ``ids`` that squeue did not show, and whose end accounting does not know either."""
    return [
        job_id
        for job_id in ids
        if not (info := seen.jobs.get(job_id))
        or (info.source != "squeue" and not info.state.has_ended)
    ]


def _unseen(seen: CachedAnswer, job_id: str) -> JobInfo:
    """The last word on a job that the controller did not show."""
    recorded = seen.jobs.get(job_id)
    if not seen.reached:  # what accounting says is then the best there is
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
    if names_no_job(done):
        return CachedAnswer(asked_at=asked_at)
    rows = read_squeue(done.stdout)
    problems = _unreadable("squeue", rows)
    if done.returncode != 0:
        problems += (f"squeue failed: {said(done.stderr) or f'exit {done.returncode}'}",)
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
        told = () if accounting is None else ("sacct: Slurm accounting storage is disabled here",)
        return replace(seen, problems=(*seen.problems, *told), accounting_off=True)
    rows = read_sacct(done.stdout)
    problems = _unreadable("sacct", rows)
    if done.returncode != 0:
        problems += (f"sacct failed: {said(done.stderr) or f'exit {done.returncode}'}",)
    # Of an array that is half in the queue, squeue's word on the whole stands.
    return replace(seen, jobs={**rows.jobs, **seen.jobs}, problems=(*seen.problems, *problems))


def _unreadable(program: str, rows: Rows) -> tuple[str, ...]:
    if not rows.unreadable:
        return ()
    return (f"{program} printed {rows.unreadable} rows that can't be read, first {rows.example!r}",)


def _unknown_in(seen: CachedAnswer, ids: list[str]) -> list[str]:
    return [job_id for job_id in ids if job_id not in seen.jobs]


def _by_id(ids: list[str]) -> list[str]:
    return [f"--jobs={','.join(ids)}"]


def _picked(answer: CachedAnswer, ids: dict[str, str]) -> CachedAnswer:
    """The answer with the jobs asked for, and their parts, alone."""
    jobs: dict[str, JobInfo] = {}
    problems = list(answer.problems)
    for name, job_id in ids.items():
        if info := answer.jobs.get(job_id):
            jobs[name] = info
            jobs.update(parts_of(job_id, answer.jobs))
        else:
            jobs[name] = JobInfo(job_id=name, state=JobState.UNKNOWN, reason_words="no job id")
            problems.append(f"{name!r} is no Slurm job id")
    return replace(answer, jobs=jobs, problems=tuple(problems))
