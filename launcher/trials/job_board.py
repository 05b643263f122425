"""Slurm's answers about the jobs of several trials, queried together and reused for a while.

For every verb that shows trials: one board per command, so that the number of queries does not grow with
the number of trials or with the refresh rate of a live view.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from realsys.api.errors import ClusterError
from realsys.slurm.job_identity import JobIdentity
from realsys.trial.trial_state import JobState

if TYPE_CHECKING:
    from launcher.slurm.query.job_query import CachedAnswer, JobInfo
    from launcher.trials.submission import Submission

WATCH_AGE_S = 10.0  # minimum interval between queries of a live view
NEWS_AGE_S = 2.0  # the same once the trial's own records have changed


def _query_jobs(ids: list[str], **how: Any) -> CachedAnswer:
    from launcher.slurm.query.job_query import query_jobs  # only if there are Slurm jobs

    return query_jobs(ids, **how)


def _own_job(identity: JobIdentity, found: JobInfo, *, answered: bool) -> JobInfo:
    from launcher.slurm.query.own_job import own_job

    return own_job(identity, found, answered=answered)


def _with_detail(job: JobInfo) -> JobInfo:
    from launcher.slurm.query.waiting import with_detail

    return with_detail(job)


class JobBoard:
    """Job states by job id.

    Args:
        max_age_s: maximum age of an answer; None: unlimited, unless a trial's own records have changed
            since.
        query: queries Slurm; replaced by tests.
        detail: looks up details of why a job waits, for a single trial; replaced by tests.
    """

    def __init__(
        self,
        *,
        max_age_s: float | None = None,
        query: Callable[..., CachedAnswer] = _query_jobs,
        detail: Callable[[JobInfo], JobInfo] = _with_detail,
    ) -> None:
        self._max_age_s, self._query, self._detail = max_age_s, query, detail
        self._is_list = False
        self._details: dict[tuple[str, str], JobInfo] = {}
        self._ids: dict[str, None] = {}
        self._answer: CachedAnswer | None = None
        self._accounting: bool | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems of the last query."""
        return self._answer.problems if self._answer else ()

    def expect(self, submissions: Iterable[Submission]) -> None:
        """Registers jobs to be queried, so that the first query covers all of them."""
        self._ids |= {key: None for s in submissions for key in _keys(s)}
        self._is_list = True

    def job(
        self, submission: Submission, *, news_at: float = 0.0, accounting: bool | None = None
    ) -> JobInfo | None:
        """Returns the job whose batch step is the trial's supervisor; None if Slurm did not answer.

        A job that only has the id of the trial's is not returned: own_job.py says what is in its place.

        Args:
            news_at: when the trial's own records last changed (seconds since the epoch); an older answer
                is refreshed.
            accounting: whether sacct works, according to the cluster spec; None: try.
        """
        if self._accounting is None:
            self._accounting = accounting
        missing = [key for key in _keys(submission) if key not in self._ids]
        self._ids |= dict.fromkeys(missing)
        if self._answer is None or missing or self._is_old(news_at):
            age = self._acceptable_age(news_at, first=bool(missing))
            self._answer = self._query(list(self._ids), accounting=self._accounting, max_age_s=age)
            if self._answer.accounting_off:
                self._accounting = False
        job = next((info for _, info in self._own(submission)), None)
        return job if submission.cluster else self._with_details(job)

    def _with_details(self, job: JobInfo | None) -> JobInfo | None:
        """Adds details of the job's reason, looked up once per job and reason; not for lists, nor for
        jobs that are not Slurm's, nor on another cluster.
        """
        if job is None or self._is_list or job.doubt:
            return job
        known = self._details.get(key := (job.job_id, job.reason))
        if known is None:
            known = self._details[key] = self._detail(job)
        return replace(job, reason_words=known.reason_words, fix=known.fix)

    def _acceptable_age(self, news_at: float, *, first: bool) -> float:
        """Returns the acceptable cache age; 0 for the first query, so that a command's first output is
        current.
        """
        if self._answer is None or first:
            return 0.0
        return NEWS_AGE_S if self._answer.asked_at < news_at else self._max_age_s or 0.0

    def jobs_of(self, submission: Submission) -> list[JobInfo]:
        """Returns all jobs of the trial in the last answer: several in the job layout split."""
        return [info for _, info in self._own(submission)]

    def cancellable(self, submission: Submission) -> list[str]:
        """Lists the ids of the trial's jobs, in the last answer, that have not ended and are its own.

        Raises:
            ClusterError: whether one of them is the trial's own can't be told.
        """
        ids = []
        for identity, info in self._own(submission):
            if info.state is JobState.UNKNOWN and info.source == "none":
                raise ClusterError(
                    f"{info.doubt or f'Slurm does not report job {identity.job_id}'}; it was not "
                    "cancelled",
                    where=f"squeue -j {identity.job_id}",
                    fix=f"if `scontrol show job {identity.job_id}` shows the trial's: "
                    f"scancel {identity.job_id}",
                )
            if not info.state.has_ended:
                ids.append(identity.job_id)
        return ids

    def _own(self, submission: Submission) -> Iterator[tuple[JobIdentity, JobInfo]]:
        """Yields the submission's own jobs, in its order, as far as they are in the last answer."""
        if self._answer is None:
            return
        for identity, key in zip(submission.identities(), _keys(submission), strict=True):
            if (found := self._answer.jobs.get(key)) is not None:
                yield identity, _own_job(identity, found, answered=self._answer.reached)

    def _is_old(self, news_at: float) -> bool:
        assert self._answer is not None
        age = time.time() - self._answer.asked_at
        if self._answer.asked_at < news_at:
            return age > NEWS_AGE_S
        return self._max_age_s is not None and age > self._max_age_s


def _keys(submission: Submission) -> list[str]:
    """Returns the jobs as query_jobs takes them."""
    ids = submission.job_ids or (submission.job_id,)
    if submission.cluster is None:
        return list(ids)
    return [f"{job_id};{submission.cluster}" for job_id in ids]
