"""Estimators of advantages by their names, as settings choose them."""

from __future__ import annotations

from realsys.api.basics.choice import kind_named
from realsys.api.basics.estimators import AdvantageEstimator


def estimator(name: str) -> AdvantageEstimator:
    """Returns one with its default settings."""
    made = kind_named(AdvantageEstimator, name)()
    assert isinstance(made, AdvantageEstimator)
    return made
