"""Seconds of calls from earlier runs, converted to other topologies and sizes by formulas (pure).

A call in the same topology takes the measured time. In another it takes that times the ratio of the
formulas' results; without formulas, the ratio of the data-parallel degrees.
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
    """Measurements of one call: means over typical steps, of the slowest worker each."""

    place: CallAllocation
    compute_s: float
    tokens: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measurements from a run's files.

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
    """Costs from profiles: the first with a call in the same topology, else the nearest, scaled.

    ``formulas`` are of the run that is planned.
    """

    profiles: Sequence[Profile]
    formulas: Costs | None = None

    @property
    def overheads(self) -> Overheads:
        """Overheads of the first profile."""
        return self.profiles[0].overheads

    def call_s(self, call: MFCDef, place: CallAllocation) -> float:
        """Measured seconds, scaled if from another topology. Raises ConfigError for a call that
        never ran.
        """
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
        """Seconds by the formulas; without them they are part of a call's overhead."""
        return self.formulas.fetch_s(call, place, sources) if self.formulas else 0.0

    def realloc_s(self, role: str, source: CallAllocation, target: CallAllocation) -> float:
        """Seconds measured between these topologies, else by the formulas."""
        key = (role, str(source.topology), str(target.topology))
        for profile in self.profiles:
            if key in profile.moves:
                return profile.moves[key]
        return self.formulas.realloc_s(role, source, target) if self.formulas else 0.0

    def offload_s(self, role: str, place: CallAllocation) -> float:
        """Seconds by the formulas."""
        return self.formulas.offload_s(role, place) if self.formulas else 0.0

    def together(self, call: MFCDef, place: CallAllocation) -> bool:
        """True as by the formulas, or without them."""
        return self.formulas.together(call, place) if self.formulas else True
