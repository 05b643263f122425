"""Computes how long a trial's job may still run, and whether the run will finish in time (pure).

Uses Slurm's data on the running job, so a default limit counts too. For status, watch and explain; what a
plan predicts is in launcher/slurm/plan_lines.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.terminal.text import duration
from realsys.trial.trial_state import JobState

if TYPE_CHECKING:
    from launcher.slurm.query.job_rows import JobInfo
    from realsys.api.plan import LaunchPlan
    from realsys.trial.plan_summary import PlanSummary


@dataclass(frozen=True, kw_only=True)
class TimeLeft:
    """Time limit and remaining time of the job whose batch step is the supervisor.

    Attributes:
        limit_s: the job's time limit.
        left_s: time until the limit; None before the job has started, or while it is suspended.
        over_s: by how much the run, at its present speed, will overrun the moment when Slurm signals it
            to save and end; None if it will not, or its end can't be estimated.
        requeue: the job is then requeued and the run continues automatically.
    """

    limit_s: int
    left_s: float | None = None
    over_s: float | None = None
    requeue: bool = False


def time_left(
    job: JobInfo | None,
    plan: LaunchPlan | PlanSummary | None,
    *,
    eta_s: float | None,
    now: float,
) -> TimeLeft | None:
    """Computes the remaining time; None if the job has no limit, has ended, or Slurm was not queried.

    Args:
        eta_s: remaining run time from now on; None if unknown.
    """
    if job is None or not job.time_limit_s or job.state.has_ended:
        return None
    job_plan = plan.job if plan else None
    requeue = job_plan is not None and job_plan.requeue
    if job.started_at is None or job.state is JobState.PAUSED:
        return TimeLeft(limit_s=job.time_limit_s, requeue=requeue)
    left_s = max(0.0, job.started_at + job.time_limit_s - now)
    grace_s = plan.cluster.slurm.grace_seconds if plan else 0
    over_s = None if eta_s is None else eta_s - max(0.0, left_s - grace_s)
    return TimeLeft(
        limit_s=job.time_limit_s,
        left_s=left_s,
        over_s=over_s if over_s is not None and over_s > 0 else None,
        requeue=requeue,
    )


def time_words(left: TimeLeft) -> str:
    """Renders ``9 min 50 s left of 10 min 00 s``; before the start only the limit."""
    if left.left_s is None:
        return f"limit {duration(left.limit_s)}"
    return f"{duration(left.left_s)} left of {duration(left.limit_s)}"


def time_warning(left: TimeLeft | None, trial: str) -> str:
    """Warns that the run will not finish in time, with the consequence; empty if it will."""
    if left is None or left.over_s is None:
        return ""
    late = f"the run needs about {duration(left.over_s)} more than its job's time limit leaves"
    if left.requeue:
        return f"{late}: it saves, the job is requeued, and the run continues automatically"
    return (
        f"{late}: it will save and stop; then continue with `realsys resume {trial} --time LIMIT`, or "
        "with --requeue"
    )
