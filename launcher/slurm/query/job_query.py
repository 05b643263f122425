"""Queries Slurm about the user's jobs: one batched call for all of them, and never an exception.

One squeue; then one sacct for the jobs that squeue does not know. ``squeue --states=all`` also lists jobs
that ended less than MinJobAge (300 s) ago, with their exit codes; `scontrol show job` knows no more and
takes a single id. Several jobs are queried as "all of mine", which costs the controller least (a query
that names several ids makes it send all users' jobs); ids that are then in neither answer are queried by
id, once. Each cluster is asked for its own jobs, so that one that does not answer hides no other.
job_rows.py parses the output, answer_cache.py caches it, own_job.py decides whose the jobs are.
"""

from __future__ import annotations

import os
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
from launcher.slurm.slurm_commands import failure_text, is_unknown_job, is_unreachable, run_slurm
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
    --parsable prints it; ``12;`` is of slurm.conf's own cluster, ``12`` of those that SLURM_CLUSTERS
    names); of an array or a heterogeneous job its parts are there too, and the id alone is the part that
    says most (job_rows.py). The same id on another cluster is among its namesakes.

    Args:
        accounting: whether sacct works; None: try. Pass ``not answer.accounting_off`` next time.
        max_age_s: accept a cached answer up to this age, also one of another process: for repeated
            queries (then at least 10 s).
        timeout_s: per program.
    """
    names = list(dict.fromkeys(job_ids))
    asked: dict[str | None, dict[str, str]] = {}
    for name in names:
        job_id, clusters = _address(name)
        for cluster in clusters:
            asked.setdefault(cluster, {})[name] = job_id
    answers = []
    for cluster, ids in asked.items():
        valid = list(dict.fromkeys(found for found in ids.values() if _JOB_ID.fullmatch(found)))
        if max_age_s > 0 and valid:
            answer = _through_cache(valid, accounting, max_age_s, timeout_s, cluster)
        else:
            answer = _fresh(valid, accounting, timeout_s, cluster)
        answers.append(_picked(answer, ids))
    return _joined(names, answers)


def _address(name: str) -> tuple[str, tuple[str | None, ...]]:
    """Returns the job id and the clusters to ask, as for run_slurm."""
    job_id, sign, cluster = name.strip().partition(";")
    if sign:
        return job_id, (cluster,)
    named = [
        found for part in os.environ.get("SLURM_CLUSTERS", "").split(",") if (found := part.strip())
    ]
    return job_id, tuple(named) if len(named) > 1 else (None,)


def _joined(names: list[str], answers: list[CachedAnswer]) -> CachedAnswer:
    """Joins the clusters' answers: of a job asked of several, the one that has a record of it counts."""
    if not answers:
        return CachedAnswer(asked_at=time.time())
    if len(answers) == 1:
        return answers[0]
    jobs: dict[str, JobInfo] = {}
    for name in [*names, *(name for answer in answers for name in answer.jobs)]:
        if name not in jobs:
            first, *others = sorted(
                (answer.jobs[name] for answer in answers if name in answer.jobs), key=_recorded
            )
            known = tuple(one for one in others if one.source != "none")
            jobs[name] = replace(first, namesakes=known) if known else first
    return CachedAnswer(
        jobs=jobs,
        asked_at=min(answer.asked_at for answer in answers),
        problems=tuple(dict.fromkeys(p for answer in answers for p in answer.problems)),
        reached=all(answer.reached for answer in answers),
        accounting_off=all(answer.accounting_off for answer in answers),
    )


def _recorded(info: JobInfo) -> int:
    """Orders records of one id: an unanswered question says more than another cluster's ignorance."""
    if info.source != "none":
        return 0 if info.source == "squeue" else 1
    return 2 if info.state is JobState.UNKNOWN else 3


def _through_cache(
    ids: list[str],
    accounting: bool | None,
    max_age_s: float,
    timeout_s: float,
    cluster: str | None,
) -> CachedAnswer:
    path = answer_cache.cache_file(cluster)
    kept = answer_cache.load(path, max_age_s=max_age_s)
    if kept and not _unknown_in(kept, ids):
        return kept
    with answer_cache.query_lock(path, timeout_s=2 * timeout_s):
        kept = answer_cache.load(path, max_age_s=max_age_s)  # another process may have queried
        mine = kept or _from_squeue(["--me"], timeout_s, cluster)
        answer = _completed(mine, ids, accounting, timeout_s, cluster, only_mine=True)
        answer_cache.save(path, answer)
    return answer


def _fresh(
    ids: list[str], accounting: bool | None, timeout_s: float, cluster: str | None
) -> CachedAnswer:
    if not ids:
        return CachedAnswer(asked_at=time.time())
    several = len(ids) > 1
    seen = _from_squeue(["--me"] if several else _by_id(ids), timeout_s, cluster)
    return _completed(seen, ids, accounting, timeout_s, cluster, only_mine=several)


def _completed(
    seen: CachedAnswer,
    ids: list[str],
    accounting: bool | None,
    timeout_s: float,
    cluster: str | None,
    *,
    only_mine: bool = False,
) -> CachedAnswer:
    """Adds an entry to ``seen`` for every id, from sacct or by id if needed."""
    if (missing := _unknown_in(seen, ids)) and accounting is not False and not seen.accounting_off:
        seen = _with_sacct(seen, missing, accounting, timeout_s, cluster)
    if only_mine and seen.reached and (missing := _not_over(seen, missing)):
        others = _from_squeue(_by_id(missing), timeout_s, cluster)
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


def _from_squeue(which: list[str], timeout_s: float, cluster: str | None) -> CachedAnswer:
    asked_at = time.time()
    argv = ["squeue", *which, "--all", "--noheader", "--array", "--states=all"]
    try:
        done = run_slurm(
            [*argv, f"--Format={SQUEUE_FORMAT}"],
            timeout_s=timeout_s,
            env=SECONDS,
            cluster=cluster,
            output_counts=True,
        )
    except ClusterError as error:
        return CachedAnswer(asked_at=asked_at, problems=(error.what,), reached=False)
    return squeue_answer(done, asked_at)


def squeue_answer(done: subprocess.CompletedProcess[str], asked_at: float) -> CachedAnswer:
    """Reads what squeue printed: its rows count whatever its exit status, as one of several clusters may
    not know a job, or not answer (pure).
    """
    rows = read_squeue(done.stdout)
    problems = () if is_unknown_job(done) else tuple(_problems(done, rows))
    if not problems and not rows.jobs and done.returncode == 0 and is_unreachable(done.stderr):
        problems = (f"{done.args[0]} printed nothing: {failure_text(done)}",)
    return CachedAnswer(
        jobs=dict(rows.jobs), asked_at=asked_at, problems=problems, reached=not problems
    )


def _with_sacct(
    seen: CachedAnswer,
    missing: list[str],
    accounting: bool | None,
    timeout_s: float,
    cluster: str | None,
) -> CachedAnswer:
    argv = ["sacct", "--allocations", "--parsable2", "--noheader", "--duplicates"]
    argv += [f"--delimiter={FIELD_END}", f"--format={','.join(SACCT_FIELDS)}"]
    try:
        asked = [*argv, f"--jobs={','.join(missing)}"]
        done = run_slurm(asked, timeout_s=timeout_s, env=SECONDS, cluster=cluster)
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
