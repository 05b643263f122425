"""How long a trial's job may still run, and whether the run will be done by then (pure).

What Slurm says of the running job counts, so a limit that nobody asked for is seen too. For status, watch
and explain; what a plan expects is told by launcher/slurm/plan_lines.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.slurm.query.job_rows import JobInfo
from launcher.slurm.query.states import JobState
from launcher.terminal.text import duration
from realsys.api.plan import LaunchPlan


@dataclass(frozen=True, kw_only=True)
class TimeLeft:
    """Of the job whose batch step is the supervisor.

    Attributes:
        limit_s: the job's time limit.
        left_s: until it comes; None before the job has started, or while it is suspended.
        over_s: by how much the run, as fast as it goes now, will miss the moment at which it is told to
            save and end; None where it won't, or nothing is known of its end.
        requeue: the job then goes back to the queue, and the run goes on by itself.
    """

    limit_s: int
    left_s: float | None = None
    over_s: float | None = None
    requeue: bool = False


def time_left(
    job: JobInfo | None, plan: LaunchPlan | None, *, eta_s: float | None, now: float
) -> TimeLeft | None:
    """None where the job has no limit, is over, or Slurm was not asked.

    Args:
        eta_s: how long the run needs from now on, if that is known.
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
    """``9 min 50 s left of 10 min 00 s``; before the start the limit alone."""
    if left.left_s is None:
        return f"limit {duration(left.limit_s)}"
    return f"{duration(left.left_s)} left of {duration(left.limit_s)}"


def time_warning(left: TimeLeft | None, trial: str) -> str:
    """That the run will not be done in time, and what comes of it; empty where it will."""
    if left is None or left.over_s is None:
        return ""
    late = f"the run needs about {duration(left.over_s)} more than its job's time limit leaves it"
    if left.requeue:
        return f"{late}: it saves, the job is requeued, and the run goes on by itself"
    return (
        f"{late}: it will save and stop; then go on with `realsys resume {trial} --time LIMIT`, or with "
        "--requeue"
    )
