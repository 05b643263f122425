"""Makes a profile from the files of a trial, running or finished: its plan and its newest events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from realsys.api.errors import ConfigError
from realsys.api.plan import LaunchPlan, read_plan
from realsys.observability.events import (
    Event,
    MfcEvent,
    MoveEvent,
    PeriodicEvent,
    StepEvent,
    parse_events,
)
from realsys.observability.jsonl import parse_jsonl
from realsys.observability.timeline import StepTiming, step_timings
from realsys.planner.gpu_models import Device
from realsys.planner.placed import PlacedExperiment, place_experiment
from realsys.planner.time.analytic import AnalyticCosts
from realsys.planner.time.profiled import CallProfile, Profile
from realsys.planner.time.simulated_timeline import Overheads
from realsys.trial.records import TrialFiles

NEWEST_BYTES = 1 << 20  # bytes of events that are read: hundreds of steps


def read_profile(files: TrialFiles, device: Device) -> Profile:
    """Reads the profile of a trial.

    Raises:
        ConfigError: fewer than two finished steps, or no plan. DataError: damaged events.
    """
    path = TrialFiles.phase(files.root).events
    return profile_of(_newest_events(path), read_plan(files.plan), device)


def _newest_events(path: Path) -> list[Event]:
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - NEWEST_BYTES))
        data = file.read()
    if size > NEWEST_BYTES:
        data = data.partition(b"\n")[2]
    return parse_events(parse_jsonl(data).rows, where=str(path))


def profile_of(events: Sequence[Event], plan: LaunchPlan, device: Device) -> Profile:
    """Derives the profile from events; the first step (warm-up, or incomplete) is left out.

    Raises:
        ConfigError: fewer than two finished steps.
    """
    every = dict(list(step_timings(events).items())[1:])
    if not every:
        raise ConfigError(
            "a profile needs two finished steps",
            where=plan.trial,
            fix="let it run on, or launch a short run: exp_ctrl.benchmark_steps=10",
        )
    found = place_experiment(plan)
    steps = _typical(every)
    chosen = set(steps)
    mine = [e for e in events if e.step in chosen]
    timings = [every[step] for step in steps]
    return Profile(
        trial=plan.trial,
        calls=dict(_calls(found, timings)),
        overheads=_overheads(mine, events, found),
        wall_s=fmean(t.wall_s for t in timings),
        steps=len(steps),
        moves=dict(_moves(mine, plan)),
        formulas=formulas_of(found, device) if not found.unknown else None,
    )


def _typical(timings: Mapping[int, StepTiming]) -> list[int]:
    """Selects the middle half of the steps by wall time. Their means add up, which medians do not."""
    steps = sorted(timings, key=lambda step: timings[step].wall_s)
    cut = len(steps) // 4
    return sorted(steps[cut : len(steps) - cut])


def formulas_of(
    found: PlacedExperiment, device: Device, *, gpus_per_node: int = 8
) -> AnalyticCosts:
    """Makes the formulas for an experiment's models and workload."""
    return AnalyticCosts(
        roles=found.roles,
        workload=found.workload,
        device=device,
        gpus_per_node=gpus_per_node,
        trained=frozenset(n.role for n in found.graph.nodes if n.is_train),
    )


def _calls(
    found: PlacedExperiment, timings: Sequence[StepTiming]
) -> Iterator[tuple[str, CallProfile]]:
    for name, place in found.allocation.items():
        own = [t.per_mfc[name] for t in timings if name in t.per_mfc]
        if own:
            yield (
                name,
                CallProfile(
                    place=place,
                    compute_s=fmean(m.compute_s for m in own),
                    tokens=fmean(m.tokens for m in own),
                ),
            )


def _moves(
    events: Sequence[Event], plan: LaunchPlan
) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Yields seconds of weight movements by the topologies of their ends (``weights actor@0 →
    actor@1``).
    """
    topologies = {
        str(shard.id.model_name): shard.id.topo
        for worker in plan.phases[-1].config.model_worker
        for shard in worker.shards
    }
    times: dict[str, dict[int, float]] = {}
    for event in events:
        if isinstance(event, MoveEvent):
            steps = times.setdefault(event.name, {})
            steps[event.step] = max(steps.get(event.step, 0.0), event.end - event.start)
    for name, steps in times.items():
        source, _, target = name.removeprefix("weights ").partition(" → ")
        if source in topologies and target in topologies:
            role = source.partition("@")[0]
            key = (role, str(topologies[source]), str(topologies[target]))
            yield key, fmean(steps.values())


# ---- what a run spends outside its calls ------------------------------------------------------------


def _overheads(
    events: Sequence[Event], every: Sequence[Event], found: PlacedExperiment
) -> Overheads:
    """Computes mean overheads over steps."""
    steps: dict[int, list[MfcEvent]] = {}
    for event in events:
        if isinstance(event, MfcEvent):
            steps.setdefault(event.step, []).append(event)
    bounds = {e.step: e for e in events if isinstance(e, StepEvent)}
    load = [min(e.queued for e in steps[n]) - bound.start for n, bound in bounds.items()]
    return Overheads(
        call_s=fmean(gap for calls in steps.values() for gap in _gaps(calls, found)),
        load_s=max(0.0, fmean(load)) if not found.ahead else 0.0,
        step_s=_between_steps(
            {e.step: e for e in every if isinstance(e, StepEvent)},
            [e for e in every if isinstance(e, PeriodicEvent)],
        ),
    )


def _gaps(calls: Sequence[MfcEvent], found: PlacedExperiment) -> Iterator[float]:
    """Yields, per call, seconds between its inputs and its own end in which it neither waited nor
    computed.
    """
    by_name: dict[str, list[MfcEvent]] = {}
    for call in calls:
        by_name.setdefault(call.name, []).append(call)
    for name, parts in by_name.items():
        slowest = max(parts, key=lambda e: e.end)
        if found.ahead:  # it waited for a request of another step, which is not included
            yield max(0.0, slowest.end - slowest.start - slowest.compute_s)
            continue
        parents = [e.end for p in found.graph.parents.get(name, ()) for e in by_name.get(p, ())]
        inputs = max(parents, default=slowest.queued)
        others = [
            e.end
            for e in calls
            if e.worker == slowest.worker and e.name != name and e.end <= slowest.start + 1e-4
        ]
        free = max([inputs, *others])
        yield max(0.0, slowest.end - free - slowest.compute_s)


def _between_steps(bounds: Mapping[int, StepEvent], periodic: Sequence[PeriodicEvent]) -> float:
    """Mean time from a step's last reply to the next step's first request, without saving and the like."""
    gaps = []
    for before, after in pairwise(sorted(bounds.values(), key=lambda e: e.step)):
        other = sum(p.end - p.start for p in periodic if p.step == before.step)
        if after.step == before.step + 1:
            gaps.append(max(0.0, after.start - before.end - other))
    return fmean(gaps) if gaps else 0.0
