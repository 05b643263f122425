"""What an evaluation raises, and what is told of it."""

from __future__ import annotations

from collections.abc import Mapping

from realsys.api.errors import RealsysError, encodable
from realsys.api.users_code.users_frames import shown_error


class LeaveRequested(Exception):
    """Raised before a batch to leave in the middle of an evaluation."""


class BenchmarksFailed(Exception):
    """Some benchmarks could not be evaluated; ``figures`` are those of the others."""

    def __init__(self, errors: Mapping[str, Exception], figures: Mapping[str, float]) -> None:
        super().__init__("; ".join(f"{name}: {one_line(e)}" for name, e in errors.items()))
        self.figures = dict(figures)


def one_line(error: Exception | str) -> str:
    """Returns the error's text on one line."""
    if isinstance(error, str):
        text = error
    elif isinstance(error, RealsysError):
        text = error.what
    elif isinstance(error, BenchmarksFailed):
        text = str(error)
    else:
        text = shown_error(error)
    return " ".join(encodable(text).split())[:500]
