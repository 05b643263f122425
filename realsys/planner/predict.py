"""Predicts a step of a placed experiment from known costs (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from realsys.planner.placed import Placed
from realsys.planner.time.costs import Allocation, Costs, works_of
from realsys.planner.time.figures import StepFigures, figures
from realsys.planner.time.simulate_steps import simulate
from realsys.planner.time.simulated_timeline import CallWork, Timeline
from realsys.trial.records import PredictionRecord

STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A simulated run. ``basis`` names the source of the seconds."""

    basis: str
    works: tuple[CallWork, ...]
    timeline: Timeline
    figures: StepFigures

    def record(self) -> PredictionRecord:
        """Returns the record for the trial's folder."""
        return PredictionRecord(
            basis=self.basis,
            step_s=self.figures.wall_s,
            calls={work.call: work.seconds for work in self.works},
            idle=self.figures.mean_idle,
        )


def predict(
    found: Placed, costs: Costs, *, basis: str, allocation: Allocation | None = None
) -> Prediction:
    """Simulates the experiment, or the same with another allocation."""
    allocation = found.allocation if allocation is None else allocation
    works = works_of(found.graph, allocation, costs)
    used = max(worker for place in allocation.values() for worker in place.workers) + 1
    timeline = simulate(
        works,
        found.graph.parents,
        num_workers=max(used, found.num_workers if allocation is found.allocation else 0),
        steps=STEPS,
        ahead=found.ahead,
        overheads=costs.overheads,
    )
    return Prediction(basis=basis, works=tuple(works), timeline=timeline, figures=figures(timeline))
