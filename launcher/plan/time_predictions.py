"""Predicts a plan's step time: chooses costs, prints the prediction, stores it at launch.

The simulation is in realsys/planner. Costs come from earlier trials (``--profile``, or the newest ones
with the same models and batch), else from formulas for a device (``--device``, or the site's GPU type).
Only a plan whose times may be known loads the planner's costs and simulation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.terminal import output
from launcher.trials.find_trials import created_at, find_trial
from realsys.api.errors import ConfigError, RealsysError
from realsys.api.plan import LaunchPlan
from realsys.planner.gpu_models import DEVICES, Device, device_of
from realsys.planner.placed import PlacedExperiment, place_experiment
from realsys.trial.records import TrialFiles, write_record

if TYPE_CHECKING:
    from realsys.planner.predict import Prediction
    from realsys.planner.time.costs import Costs
    from realsys.planner.time.gantt import Lane
    from realsys.planner.time.profiled import Profile

MAX_PROFILES = 4  # trials used if none was named
MAX_TRIALS_EXAMINED = 12  # newest trials considered
GPUS_PER_NODE = 8  # if the site does not state it


@dataclass(frozen=True, kw_only=True)
class CostSources:
    """Costs, and where they come from."""

    costs: Costs
    basis: str
    device: Device | None


def costs_for(
    plan: LaunchPlan,
    found: PlacedExperiment,
    *,
    profiles: Sequence[str] = (),
    device: str | None = None,
    cluster: str | None = None,
) -> CostSources | None:
    """Returns the costs of a plan; None if nothing is known about its times.

    Raises:
        NoSuchTrial, ConfigError, DataError: for a named trial or device.
    """
    site = _site_device(plan, device)
    if not (profiles or site or _measured_trials(plan)):
        return None
    from realsys.planner.read_profile import formulas_of, read_profile
    from realsys.planner.time.profiled import ProfiledCosts

    of = site or DEVICES["cpu"]
    known = [read_profile(find_trial(name, cluster=cluster), of) for name in profiles]
    if not known and device is None:
        known = list(_similar_profiles(plan, found, of))
    formulas = formulas_of(found, of, gpus_per_node=gpus_per_node(plan))
    if known:
        names = ", ".join(p.trial for p in known)
        costs = ProfiledCosts(known, None if found.unknown else formulas)
        return CostSources(costs=costs, basis=f"measured in {names}", device=site)
    if site is not None and not found.unknown:
        return CostSources(costs=formulas, basis=f"formulas for {site.name}", device=site)
    return None


def _site_device(plan: LaunchPlan, name: str | None) -> Device | None:
    """Returns the named device, or the GPU of the model workers' partition."""
    if name is not None:
        return device_of(name)
    partitions = plan.cluster.partitions
    wanted = plan.phases[-1].scheduling.model_worker.scheduling.partition
    spec = partitions.get(wanted or plan.cluster.slurm.partition or "")
    if spec is None or not spec.gpu_type:
        return None
    try:
        return device_of(spec.gpu_type)
    except ConfigError:
        return None


def gpus_per_node(plan: LaunchPlan) -> int:
    """Returns the largest number of GPUs per node of the site."""
    return max((p.gpus for p in plan.cluster.partitions.values()), default=0) or GPUS_PER_NODE


def _similar_profiles(
    plan: LaunchPlan, found: PlacedExperiment, device: Device
) -> Iterator[Profile]:
    """Yields profiles of the newest trials with the same calls, models and batch; equal placement first."""
    from realsys.planner.read_profile import read_profile

    scores = [(_similarity(files, found), files) for files in _measured_trials(plan)]
    alike = [(score, files) for score, files in scores if score is not None]
    taken = 0
    for _, files in sorted(alike, key=lambda pair: -pair[0]):  # stable: newest first among equals
        if taken == MAX_PROFILES:
            return
        # An unreadable profile is skipped: there are others, and the user did not name it.
        with suppress(RealsysError, OSError, ValueError):
            profile = read_profile(files, device)
            if profile.calls.keys() >= found.allocation.keys():
                yield profile
                taken += 1


def _measured_trials(plan: LaunchPlan) -> list[TrialFiles]:
    """Finds the newest other trials that have done something, newest first."""
    own = Path(plan.trial_dir)
    others = (TrialFiles(p.parent) for p in own.parent.parent.glob("*/*/plan.json"))
    measured = [t for t in others if t.root != own and os.path.exists(t.phase(t.root).events)]
    return sorted(measured, key=created_at, reverse=True)[:MAX_TRIALS_EXAMINED]


def _similarity(files: TrialFiles, found: PlacedExperiment) -> int | None:
    """Counts calls placed as in ``found``, plus equal prefetching; None if models or batch differ."""
    from realsys.api.plan import read_plan

    try:
        other = place_experiment(read_plan(files.plan))
    except (RealsysError, OSError, ValueError):
        return None
    if (other.roles, other.workload) != (found.roles, found.workload):
        return None
    same = sum(other.allocation.get(name) == place for name, place in found.allocation.items())
    return 2 * same + (other.ahead == found.ahead)


# ---- output of `plan` about a plan's time --------------------------------------------------------------


def show_prediction(
    plan: LaunchPlan,
    *,
    profiles: Sequence[str] = (),
    device: str | None = None,
    cluster: str | None = None,
) -> Prediction | None:
    """Prints the predicted step of a plan, or how to obtain a prediction."""
    found = place_experiment(plan)
    known = costs_for(plan, found, profiles=profiles, device=device, cluster=cluster)
    output.data("")
    if known is None:
        output.data(
            "time of a step: unknown; give --profile TRIAL (an earlier run), or --device h100"
        )
        return None
    from realsys.planner.predict import predict
    from realsys.planner.time.gantt import gantt

    try:
        predicted = predict(found, known.costs, basis=known.basis)
    except ConfigError as problem:
        if profiles or device:
            raise
        output.data(f"time of a step: unknown: {problem.what}")
        return None
    output.data(*prediction_lines(predicted))
    print_gantt(gantt(predicted.timeline))
    return predicted


def prediction_lines(predicted: Prediction) -> Iterator[str]:
    """Yields step time, idle share, and the critical path."""
    figures = predicted.figures
    yield f"{_step_text(predicted)}, workers idle {_idle(predicted):.0%}   ({predicted.basis})"
    yield from _servers_text(predicted)
    path = " → ".join(f"{p.name} {seconds(p.seconds)}" for p in figures.path if p.seconds > 0)
    yield f"  critical path  {path}"


def _step_text(predicted: Prediction) -> str:
    served, training = predicted.served, seconds(predicted.figures.wall_s)
    if predicted.lacks_generation:
        return f"predicted training of a step {training}, without generation"
    if served is None or predicted.served_s is None:
        return f"predicted step {training}"
    making = f"generation {seconds(predicted.served_s)} on {served.servers} servers"
    if not served.overlaps:
        return f"predicted step {seconds(predicted.step_s)}: {making}, then training {training}"
    bound = "generation" if predicted.served_s > predicted.figures.wall_s else "training"
    return f"predicted step {seconds(predicted.step_s)}, bound by {bound}: {making}, training {training}"


def _idle(predicted: Prediction) -> float:
    """The share of the step in which model workers neither compute nor move weights."""
    busy = (1 - predicted.figures.mean_idle) * predicted.figures.step_s
    return 1 - busy / max(predicted.step_s, predicted.figures.step_s)


def _servers_text(predicted: Prediction) -> Iterator[str]:
    served = predicted.served
    if served is None or predicted.served_s is not None:
        return
    if predicted.is_measured:
        yield "  the wait for servers' answers is that of the measured runs, with their servers"
    elif not served.gpus:
        yield "  generation: no prediction for servers on CPUs; a step waits for them if they take longer"
    else:
        yield "  generation: no prediction, since the sizes of the servers' model are not known"


def print_gantt(lanes: Sequence[Lane]) -> None:
    """Prints the bars, coloured by call on a terminal."""
    import sys

    if not output.colour(sys.stdout):
        for lane in lanes:
            output.data(f"  {lane.text}")
        return
    from rich.text import Text

    palette = ("cyan", "green", "yellow", "magenta", "blue", "red")
    calls = list(dict.fromkeys(p.call for lane in lanes for p in lane.pieces if p.call))
    for lane in lanes:
        line = Text(f"  {lane.label} │")
        for piece in lane.pieces:
            colour = palette[calls.index(piece.call) % len(palette)] if piece.call else "dim"
            line.append(piece.text, style=f"black on {colour}" if piece.call else colour)
        line.append("│")
        output.console().print(line, soft_wrap=True)


def seconds(value: float) -> str:
    """Renders ``12.3 s``, ``0.045 s``."""
    return f"{value:.1f} s" if value >= 10 else f"{value:.3g} s"


def store_prediction(plan: LaunchPlan, files: TrialFiles) -> None:
    """Stores the prediction of a launched plan in its folder, if there is one. Never fails a launch."""
    try:
        found = place_experiment(plan)
        known = costs_for(plan, found)
        if known is not None:
            from realsys.planner.predict import predict

            predicted = predict(found, known.costs, basis=known.basis)
            write_record(files.prediction, predicted.record())
    except (RealsysError, OSError, ValueError):
        return  # a launch does not depend on a prediction
