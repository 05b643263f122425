"""How many GPUs this machine has for us, from its device files: no driver is asked, no torch loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping


def machine_gpus(environ: Mapping[str, str], devices: str = "/dev") -> int:
    """GPUs that a process with this environment may use: NVIDIA's, AMD's, or a Windows host's (WSL)."""
    names = _names(devices)
    found = sum(name.startswith("nvidia") and name[6:].isdigit() for name in names)
    if not found and "kfd" in names:
        found = sum(name.startswith("renderD") for name in _names(f"{devices}/dri"))
    if not found and "dxg" in names:
        found = 1  # at least; it does not say how many
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not found:
        return found
    entries = [entry.strip() for entry in visible.split(",")]
    # CUDA reads up to the first that is none (CUDA C Programming Guide, CUDA Environment Variables).
    shown = next((i for i, e in enumerate(entries) if e in ("", "-1")), len(entries))
    return shown if "MIG-" in visible else min(found, shown)  # one GPU may be several MIG instances


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
