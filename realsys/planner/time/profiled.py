"""Seconds of calls from earlier runs, brought to other layouts and sizes by formulas (pure).

A call that ran in the same layout takes what it took. In another one it takes that times the ratio of
what the formulas say of the two; without formulas, the ratio of the data-parallel degrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from realsys.api.dataflow import MFCDef
from realsys.api.errors import ConfigError
from realsys.planner.allocation import CallAllocation
from realsys.planner.time.costs import Allocation, Costs
from realsys.planner.time.simulated_timeline import Overheads


@dataclass(frozen=True, kw_only=True)
class CallProfile:
    """One call as it ran: means over typical steps, of the slowest worker each."""

    place: CallAllocation
    compute_s: float
    tokens: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a run's files say.

    Attributes:
        wall_s: of a step, from its first request to its last reply, mean.
        moves: (role, layout it came from, layout it went to) → seconds of a movement of weights.
        formulas: of that run's models and workload; None where its models are not known.
    """

    trial: str
    calls: Mapping[str, CallProfile]
    overheads: Overheads
    wall_s: float
    steps: int
    moves: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    formulas: Costs | None = None


@dataclass(frozen=True)
class ProfiledCosts:
    """Costs from profiles: the first that knows a call in its very layout, else the nearest, scaled.

    ``formulas`` are of the run that is planned.
    """

    profiles: Sequence[Profile]
    formulas: Costs | None = None

    @property
    def overheads(self) -> Overheads:
        """Of the first profile."""
        return self.profiles[0].overheads

    def call_s(self, call: MFCDef, place: CallAllocation) -> float:
        """Measured, or measured elsewhere and scaled. Raises ConfigError for a call that never ran."""
        known = [(p, p.calls[call.name]) for p in self.profiles if call.name in p.calls]
        if not known:
            raise ConfigError(
                f"call {call.name} never ran in {', '.join(p.trial for p in self.profiles)}",
                where="--profile",
                fix="profile a run of the same experiment",
            )
        size = place.topology.world_size
        profile, measured = min(
            known,
            key=lambda pair: (
                pair[1].place.topology != place.topology,
                abs(pair[1].place.topology.world_size - size),
            ),
        )
        return measured.compute_s * self._ratio(call, place, profile, measured)

    def _ratio(
        self, call: MFCDef, place: CallAllocation, profile: Profile, measured: CallProfile
    ) -> float:
        if self.formulas is None or profile.formulas is None:
            return measured.place.topology.data / place.topology.data
        # Where a call stands matters to the formulas across nodes only.
        same = place.topology == measured.place.topology
        was = profile.formulas.call_s(call, place if same else measured.place)
        return self.formulas.call_s(call, place) / was

    def fetch_s(self, call: MFCDef, place: CallAllocation, sources: Allocation) -> float:
        """As the formulas say; without them it is in the overhead of a call."""
        return self.formulas.fetch_s(call, place, sources) if self.formulas else 0.0

    def realloc_s(self, role: str, source: CallAllocation, target: CallAllocation) -> float:
        """Measured between these layouts, else as the formulas say."""
        key = (role, str(source.topology), str(target.topology))
        for profile in self.profiles:
            if key in profile.moves:
                return profile.moves[key]
        return self.formulas.realloc_s(role, source, target) if self.formulas else 0.0

    def offload_s(self, role: str, place: CallAllocation) -> float:
        """As the formulas say."""
        return self.formulas.offload_s(role, place) if self.formulas else 0.0

    def together(self, call: MFCDef, place: CallAllocation) -> bool:
        """As the formulas say; without them, always."""
        return self.formulas.together(call, place) if self.formulas else True
