"""Predicts a step of a placed experiment from known costs (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from realsys.generation.embedded_settings import EmbeddedSettings
from realsys.planner.placed import PlacedExperiment, ServedGeneration
from realsys.planner.time.analytic import AnalyticCosts
from realsys.planner.time.costs import Allocation, Costs, works_of
from realsys.planner.time.figures import StepFigures, figures
from realsys.planner.time.profiled import ProfiledCosts
from realsys.planner.time.simulate_steps import simulate
from realsys.planner.time.simulated_timeline import CallWork, Timeline
from realsys.trial.records import PredictionRecord

STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A simulated run. ``basis`` names the source of the seconds.

    Attributes:
        timeline, figures: of the calls, which are what the model workers do.
        served: generation on servers, which the calls leave out; None: there is none.
        served_s: seconds in which the servers make a step's answers; None: not known, or it is measured.
        is_measured: the calls' seconds are those of earlier runs, and so is the wait for answers.
    """

    basis: str
    works: tuple[CallWork, ...]
    timeline: Timeline
    figures: StepFigures
    served: ServedGeneration | None = None
    served_s: float | None = None
    is_measured: bool = False

    @property
    def lacks_generation(self) -> bool:
        """Whether the step is longer than is said here if its servers are slower than its trainers."""
        return self.served is not None and self.served_s is None and not self.is_measured

    @property
    def step_s(self) -> float:
        """Seconds of a step, with generation on servers as far as it is known."""
        if self.served is None or self.served_s is None:
            return self.figures.wall_s
        both = (self.figures.wall_s, self.served_s)
        return max(both) if self.served.overlaps else sum(both)

    def record(self) -> PredictionRecord:
        """Returns the record for the trial's folder."""
        return PredictionRecord(
            basis=self.basis + ("; without generation" if self.lacks_generation else ""),
            step_s=self.step_s,
            calls={work.call: work.seconds for work in self.works},
            idle=self.figures.mean_idle,
        )


def predict(
    found: PlacedExperiment, costs: Costs, *, basis: str, allocation: Allocation | None = None
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
    return Prediction(
        basis=basis,
        works=tuple(works),
        timeline=timeline,
        figures=figures(timeline),
        served=found.served,
        served_s=_served_s(found.served, costs),
        is_measured=isinstance(costs, ProfiledCosts),
    )


def _served_s(served: ServedGeneration | None, costs: Costs) -> float | None:
    """By formulas, of servers on the same kind of device as the model workers."""
    if served is None or served.model is None or not served.gpus:
        return None
    if not isinstance(costs, AnalyticCosts):
        return None
    rows = served.most_rows or (EmbeddedSettings.max_running if served.is_embedded else None)
    return costs.served_s(served.model, servers=served.servers, gpus=served.gpus, most_rows=rows)
