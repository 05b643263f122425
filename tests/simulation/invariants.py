"""What must hold of a schedule, whatever went wrong in it. Sentences for what did not."""

from __future__ import annotations

from collections.abc import Iterator

from history_check import check_history

from realsys.trial.lineage import Lineage

from .faults import Plan
from .trial import Trial

DETECT_WITHIN_S = 25.0  # of a cut, when nothing else goes wrong; the ttl is 15 s
DETECT_IN_A_MIX_S = 180.0  # outages and freezes may follow each other
# A worker that hears nothing from the store gives itself up after 120 s, as it is played (trial.py).
DETECT_DEAF_S = 150.0


def violations(trial: Trial, plan: Plan) -> list[str]:
    within_s = DETECT_WITHIN_S if plan.alone else DETECT_IN_A_MIX_S
    found = check_history(trial.history, detect_within_s=within_s, faults_known=True)
    found += _it_ends(trial)
    found += _the_trial_is_whole(trial)
    found += trial.missing
    found += _the_ended_are_silent(trial)
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
    """A reader of the metrics finds each step once, and each of the trial's own lineage."""
    if trial.verdict != "completed":
        return
    lineage, head = Lineage.of(trial.told), max(trial.told)
    if trial.names_point_to != head:
        yield f"the metrics shown are those of attempt {trial.names_point_to}, not of {head}"
    rows = trial.rows[head]
    for step in range(1, trial.num_steps + 1):
        writers = [attempt for attempt, written in rows if written == step]
        if len(writers) != 1:
            yield f"the metrics have {len(writers)} rows of step {step}"
        elif not lineage.counts(writers[0], step):
            yield f"the row of step {step} is of attempt {writers[0]}, which does not count there"


def _the_ended_are_silent(trial: Trial) -> Iterator[str]:
    """Nothing of an attempt is accepted once it was ended, or another one was taken."""
    over: dict[int, str] = {}
    for row in trial.history:  # in the order of what happened
        if row["op"] == "ended":
            over.setdefault(row["attempt"], f"was ended at {row['at']:.3f}")
        elif row["op"] == "took_attempt" and not trial.has_own_stores:
            for older in range(1, row["attempt"]):
                over.setdefault(older, f"was followed by {row['attempt']} at {row['at']:.3f}")
        elif row["op"] in ("registered", "checkpoint", "save", "done") and row["attempt"] in over:
            yield (
                f"{row['op']} of {row['worker']} was accepted at {row['at']:.3f}, but attempt "
                f"{row['attempt']} {over[row['attempt']]}"
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
