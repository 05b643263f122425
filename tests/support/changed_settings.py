"""Experiments with other settings, by dotted names, without the command line's checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any


def changed(options: Any, settings: Mapping[str, Any]) -> Any:
    """``options`` with ``settings`` on them: ``{"placement.n_model_workers": 2}``."""
    for path, value in settings.items():
        options = _with(options, path.split("."), value)
    return options


def _with(options: Any, names: list[str], value: Any) -> Any:
    first, *rest = names
    new = _with(getattr(options, first), rest, value) if rest else value
    return replace(options, **{first: new})
