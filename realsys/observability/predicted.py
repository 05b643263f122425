"""Compares the step time predicted at launch with the measured one (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from realsys.observability.events import Event
from realsys.observability.timeline import step_timings
from realsys.trial.records import PredictionRecord

STEP = "step"


@dataclass(frozen=True, kw_only=True)
class PredictedRow:
    """A call, or the whole step: predicted seconds, and the median of the measured ones."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction: negative if it took longer than predicted."""
        if self.measured_s <= 0:
            return 0.0
        return (self.predicted_s - self.measured_s) / self.measured_s


def predicted_rows(record: PredictionRecord, events: Sequence[Event]) -> list[PredictedRow]:
    """Returns the step first, then each predicted call that has run.

    The first step is excluded if there are others, because it includes warm-up.
    """
    every = list(step_timings(events).values())
    timings = every[1:] or every
    if not timings:
        return []
    rows = [
        PredictedRow(
            name=STEP,
            predicted_s=record.step_s,
            measured_s=median(t.wall_s for t in timings),
        )
    ]
    for name, seconds in record.calls.items():
        own = [t.per_mfc[name].compute_s for t in timings if name in t.per_mfc]
        if own:
            rows.append(PredictedRow(name=name, predicted_s=seconds, measured_s=median(own)))
    return rows


def error_text(row: PredictedRow) -> str:
    """Formats the error as ``-12 %``: it took longer than predicted."""
    return f"{row.error * 100:+.0f} %"
