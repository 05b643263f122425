"""What must hold of a schedule, whatever went wrong in it. Sentences for what did not."""

from __future__ import annotations

from collections.abc import Iterator

from realsys.observability.history_check import check_history

from .faults import Plan
from .trial import Trial

DETECT_WITHIN_S = 25.0  # of a cut, when nothing else goes wrong; the ttl is 15 s
DETECT_IN_A_MIX_S = 180.0  # outages and freezes may follow each other
# A worker that hears nothing from the store gives itself up after 120 s.
DETECT_DEAF_S = 150.0
CLOCK_SLACK = 1.02


def violations(trial: Trial, plan: Plan) -> list[str]:
    within_s = DETECT_WITHIN_S if plan.alone else DETECT_IN_A_MIX_S
    found = check_history(trial.history, detect_within_s=within_s, faults_known=True)
    found += _it_ends(trial)
    found += _the_trial_is_whole(trial)
    found += trial.missing
    found += _nobody_comes_back_too_late(trial)
    if plan.alone in ("outage", "pause"):
        found += _nothing_ends(trial, plan.alone)
    if plan.cut is not None:
        found += _the_cut_is_seen(trial, plan)
    return found


def _it_ends(trial: Trial) -> Iterator[str]:
    if not trial.verdict:
        yield f"the trial neither completed nor failed by {trial.world.now:.0f} s"
    for process in trial.world.processes:
        if process.alive:
            yield f"{process.name} of attempt {process.attempt} still runs at {trial.world.now:.0f} s"


def _the_trial_is_whole(trial: Trial) -> Iterator[str]:
    """A reader of the metrics finds each step once."""
    if trial.verdict != "completed":
        return
    resumed = trial.resumed()
    counts = dict.fromkeys(range(1, trial.num_steps + 1), 0)
    for attempt, step in trial.metrics:
        if not trial.rules.is_dead(attempt, step, resumed):
            counts[step] += 1
    for step, count in counts.items():
        if count != 1:
            yield f"the metrics have {count} living rows of step {step}"


def _nobody_comes_back_too_late(trial: Trial) -> Iterator[str]:
    for worker, attempt, at, silence_s in trial.silences:
        if silence_s > trial.rules.ttl_s * CLOCK_SLACK:
            yield (
                f"{worker} of attempt {attempt} took its key anew at {at:.3f}, {silence_s:.1f} s "
                f"after the store last heard of it (ttl {trial.rules.ttl_s:g} s)"
            )


def _nothing_ends(trial: Trial, fault: str) -> Iterator[str]:
    if trial.verdict != "completed" or len(trial.jobs) > 1:
        yield f"one short {fault} alone: {len(trial.jobs)} attempts, {trial.verdict or 'no end'}"
    for process in trial.world.processes:
        if process.code not in (0, -9):
            yield f"one short {fault} alone ended {process.name} with {process.code}"
    for row in trial.history:
        if row["op"] == "lost":
            yield f"one short {fault} alone: {row['worker']} was declared lost"


def _the_cut_is_seen(trial: Trial, plan: Plan) -> Iterator[str]:
    assert plan.cut is not None
    node, at, way = plan.cut
    within_s = DETECT_DEAF_S if way == "replies" else DETECT_WITHIN_S
    ends = [r for r in trial.history if r["op"] in ("lost", "exited", "done") and r["at"] >= at]
    end = min((float(row["at"]) for row in ends), default=float("inf"))
    if end - at > within_s:
        yield f"{node.name} was cut off at {at:.1f} ({way}), noticed after {end - at:.1f} s"
