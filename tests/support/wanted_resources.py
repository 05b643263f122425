"""A user's settings of resources in short, for tests that make experiments without the command line."""

from __future__ import annotations

from typing import Any

from realsys.api.scheduling import GroupOptions, SchedulingOptions


def model_workers(**wanted: Any) -> SchedulingOptions:
    """``scheduling.model_worker.*``."""
    return SchedulingOptions(model_worker=GroupOptions(**wanted))
