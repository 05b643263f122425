"""The probes by name: each takes the device and gives figures, or raises where something is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from device import Device

Figures = dict[str, Any]
Probe = Callable[[Device], Figures]
PROBES: dict[str, Probe] = {}


def probe(f: Probe) -> Probe:
    """Registers ``f`` under its name."""
    PROBES[f.__name__] = f
    return f
