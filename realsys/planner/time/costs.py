"""Costs of the calls of a placed graph: converts an allocation to the simulator's ``CallWork`` (pure).

``Costs`` is what a source of seconds offers: a table (here), formulas (analytic.py) or an earlier run
(profiled.py). Hooks follow from the allocation: a call of a trained role that sits elsewhere than its
train step, or is cut otherwise, gets the weights before it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from realsys.api.dataflow import DataflowGraph, MFCDef, OffloadHook, ParamReallocHook
from realsys.api.errors import ConfigError
from realsys.planner.allocation import CallAllocation, workers_text
from realsys.planner.time.simulated_timeline import CallWork, MovementWork, Overheads

Allocation = Mapping[str, CallAllocation]  # by call


class Costs(Protocol):
    """Source of durations of a run's operations. Equal-sized sets of workers cost the same,
    whatever their indices.
    """

    @property
    def overheads(self) -> Overheads:
        """Overheads of a step besides its calls."""

    def call_s(self, call: MFCDef, place: CallAllocation) -> float:
        """Seconds of the call's computation on each of its workers."""

    def fetch_s(self, call: MFCDef, place: CallAllocation, sources: Allocation) -> float:
        """Seconds to fetch the inputs that ``sources`` (other calls, elsewhere) produced."""

    def realloc_s(self, role: str, source: CallAllocation, target: CallAllocation) -> float:
        """Seconds to move a role's weights from one topology to another."""

    def offload_s(self, role: str, place: CallAllocation) -> float:
        """Seconds to move one of a role's copies to CPU memory, or back."""

    def together(self, call: MFCDef, place: CallAllocation) -> bool:
        """True if the call's workers wait for one another."""


def works_of(graph: DataflowGraph, allocation: Allocation, costs: Costs) -> list[CallWork]:
    """Lists the graph's calls with their seconds and weight movements, in the graph's order."""
    homes = home_of_roles(graph, allocation)
    return [_work(call, graph, allocation, homes, costs) for call in graph.nodes]


def _work(
    call: MFCDef,
    graph: DataflowGraph,
    allocation: Allocation,
    homes: Mapping[str, CallAllocation],
    costs: Costs,
) -> CallWork:
    place = allocation[call.name]
    home = homes.get(call.role, place)
    elsewhere = {p: allocation[p] for p in graph.parents[call.name] if allocation[p] != place}
    before: tuple[MovementWork, ...] = ()
    if home != place:
        before = (
            MovementWork(
                name=f"{call.role} weights → {workers_text(place.workers)} {place.topology}",
                workers=tuple(sorted({*home.workers, *place.workers})),
                seconds=costs.realloc_s(call.role, home, place),
                role=call.role,
            ),
        )
    return CallWork(
        call=call.name,
        workers=place.workers,
        seconds=costs.call_s(call, place),
        fetch_s=costs.fetch_s(call, place, elsewhere) if elsewhere else 0.0,
        release_s=release_s(call, place, costs),
        together=costs.together(call, place),
        before=before,
        after=tuple(_after(call, graph, allocation, costs)),
        trains=call.role if call.is_train else "",
    )


def release_s(call: MFCDef, place: CallAllocation, costs: Costs) -> float:
    """Seconds that a call's hooks spend on offloading its own copy afterwards and restoring it before."""
    leaves = any(isinstance(hook, OffloadHook) for hook in call.post_hooks)
    return 2 * costs.offload_s(call.role, place) if leaves else 0.0


def _after(
    call: MFCDef, graph: DataflowGraph, allocation: Allocation, costs: Costs
) -> Iterator[MovementWork]:
    """Yields weight movements of a call's hooks to other roles, e.g. of a moving average."""
    source = allocation[call.name]
    for hook in call.post_hooks:
        role = hook.target.role if isinstance(hook, ParamReallocHook) and hook.target else ""
        for target in [allocation[n.name] for n in graph.nodes if n.role == role][:1]:
            yield MovementWork(
                name=f"{call.role} weights → {role}",
                workers=tuple(sorted({*source.workers, *target.workers})),
                seconds=costs.realloc_s(call.role, source, target),
            )


def home_of_roles(graph: DataflowGraph, allocation: Allocation) -> dict[str, CallAllocation]:
    """Returns the place where each trained role is trained."""
    return {n.role: allocation[n.name] for n in graph.nodes if n.is_train}


@dataclass(frozen=True, kw_only=True)
class TableCosts:
    """Durations from a table: for runs of known costs, and for tests.

    Attributes:
        calls: (call, layout as text) or (call, "*") → seconds. Where a call's workers stand is no
            matter.
        fetch: seconds of any transfer of inputs.
        realloc, offload: by role, seconds of any movement of its weights.
        synchronous: calls whose workers wait for one another; None: all.
    """

    calls: Mapping[tuple[str, str], float]
    fetch: float = 0.0
    realloc: Mapping[str, float] = field(default_factory=dict)
    offload: Mapping[str, float] = field(default_factory=dict)
    overheads: Overheads = field(default_factory=Overheads)
    synchronous: frozenset[str] | None = None

    def call_s(self, call: MFCDef, place: CallAllocation) -> float:
        """Looks up the call. Raises ConfigError if it is not in the table."""
        for key in ((call.name, str(place.topology)), (call.name, "*")):
            if key in self.calls:
                return self.calls[key]
        raise ConfigError(
            f"the table has no time of {call.name} at {place.topology}",
            where="cost table",
            fix=f"add ({call.name!r}, {str(place.topology)!r}) or ({call.name!r}, '*')",
        )

    def fetch_s(self, call: MFCDef, place: CallAllocation, sources: Allocation) -> float:
        """Returns the same for every call that has inputs elsewhere."""
        return self.fetch

    def realloc_s(self, role: str, source: CallAllocation, target: CallAllocation) -> float:
        """Looks up the role; 0 if it is not in the table."""
        return self.realloc.get(role, 0.0)

    def offload_s(self, role: str, place: CallAllocation) -> float:
        """Looks up the role; 0 if it is not in the table."""
        return self.offload.get(role, 0.0)

    def together(self, call: MFCDef, place: CallAllocation) -> bool:
        """Looks up whether the call's workers wait for one another."""
        return self.synchronous is None or call.name in self.synchronous
