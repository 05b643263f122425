"""What Slurm says of several trials' jobs, asked in one query and kept for a while.

For every verb that shows trials: one board a command, so that the number of queries does not grow with
the number of trials or with how often a live view is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from launcher.slurm.query.job_query import CachedAnswer, JobInfo, query_jobs
from launcher.slurm.query.waiting import with_detail
from launcher.trials.submission import Submission

WATCH_AGE_S = 10.0  # a live view asks Slurm no more often than this
NEWS_AGE_S = 2.0  # but when the trial itself shows that something has changed, this often


class JobBoard:
    """Answers by job id.

    Args:
        max_age_s: how old an answer may become; None: never too old, unless a trial's own records
            show that something has changed.
        query: asks Slurm; replaced by tests.
        detail: finds out more about why a job waits, for a single trial; replaced by tests.
    """

    def __init__(
        self,
        *,
        max_age_s: float | None = None,
        query: Callable[..., CachedAnswer] = query_jobs,
        detail: Callable[[JobInfo], JobInfo] = with_detail,
    ) -> None:
        self._max_age_s, self._query, self._detail = max_age_s, query, detail
        self._is_list = False
        self._details: dict[tuple[str, str], JobInfo] = {}
        self._ids: dict[str, None] = {}
        self._answer: CachedAnswer | None = None
        self._accounting: bool | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """What kept Slurm from answering, of the last query."""
        return self._answer.problems if self._answer else ()

    def expect(self, submissions: Iterable[Submission]) -> None:
        """Names jobs that will be asked about, so that the first question asks for all."""
        self._ids |= {job_id: None for s in submissions for job_id in _ids(s)}
        self._is_list = True

    def job(
        self, submission: Submission, *, news_at: float = 0.0, accounting: bool | None = None
    ) -> JobInfo | None:
        """The job whose batch step is the trial's supervisor; None when Slurm did not answer.

        Args:
            news_at: when the trial's own records changed last (seconds since the epoch): an answer
                older than that is asked for again.
            accounting: whether sacct works, as the cluster spec says; None: try.
        """
        if self._accounting is None:
            self._accounting = accounting
        missing = [job_id for job_id in _ids(submission) if job_id not in self._ids]
        self._ids |= dict.fromkeys(missing)
        if self._answer is None or missing or self._is_old(news_at):
            age = self._age_that_will_do(news_at, first=bool(missing))
            self._answer = self._query(list(self._ids), accounting=self._accounting, max_age_s=age)
            if self._answer.accounting_off:
                self._accounting = False
        return self._told_further(self._answer.jobs.get(submission.job_id))

    def _told_further(self, job: JobInfo | None) -> JobInfo | None:
        """With what lies behind its reason, asked once a job and reason; a list does without."""
        if job is None or self._is_list:
            return job
        known = self._details.get(key := (job.job_id, job.reason))
        if known is None:
            known = self._details[key] = self._detail(job)
        return replace(job, reason_words=known.reason_words, fix=known.fix)

    def _age_that_will_do(self, news_at: float, *, first: bool) -> float:
        """0 for the first question: what a command shows first is true when it shows it."""
        if self._answer is None or first:
            return 0.0
        return NEWS_AGE_S if self._answer.asked_at < news_at else self._max_age_s or 0.0

    def jobs_of(self, submission: Submission) -> list[JobInfo]:
        """All jobs of the trial that the last answer tells of: several in the layout split."""
        jobs = self._answer.jobs if self._answer else {}
        return [jobs[job_id] for job_id in _ids(submission) if job_id in jobs]

    def _is_old(self, news_at: float) -> bool:
        assert self._answer is not None
        age = time.time() - self._answer.asked_at
        if self._answer.asked_at < news_at:
            return age > NEWS_AGE_S
        return self._max_age_s is not None and age > self._max_age_s


def _ids(submission: Submission) -> tuple[str, ...]:
    return submission.job_ids or (submission.job_id,)
