"""Lists this machine's usable GPUs from its device files and ``nvidia-smi -L``, without starting CUDA.

A process that starts CUDA holds memory on every GPU, so neither the command line nor a supervisor does.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping

SMI_TIMEOUT_S = 20.0  # without persistence mode it loads the driver, which takes seconds
_GPU = re.compile(r"^GPU (\d+):")
_MIG = re.compile(r"^\s+MIG .*\(UUID: (MIG-[^)\s]+)\)")


def machine_gpus(environ: Mapping[str, str], devices: str = "/dev") -> int:
    """Returns how many GPUs a process with this environment may use: NVIDIA's, AMD's, or a Windows host's
    (WSL)."""
    return len(gpu_entries(environ, devices))


def gpu_entries(
    environ: Mapping[str, str],
    devices: str = "/dev",
    ask: Callable[[Mapping[str, str]], str] | None = None,
) -> tuple[str, ...]:
    """Returns one entry of CUDA_VISIBLE_DEVICES for each usable GPU, in the order of the machine or of
    the variable.

    Args:
        devices: folder of device files.
        ask: returns the driver's list; by default that of ``nvidia-smi -L``.
    """
    names = _names(devices)
    found = sum(name.startswith("nvidia") and name[6:].isdigit() for name in names)
    nvidia = bool(found)
    if not found and "kfd" in names:
        found = sum(name.startswith("renderD") for name in _names(f"{devices}/dri"))
    if not found and "dxg" in names:
        found, nvidia = 1, True  # at least: the driver knows how many
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None and nvidia:
        return entries_of_list((ask or _nvidia_smi)(environ)) or _numbers(found)
    if visible is None or not found:
        return _numbers(found)
    entries = [entry.strip() for entry in visible.split(",")]
    # CUDA reads up to the first invalid entry (CUDA C Programming Guide, CUDA Environment Variables).
    shown = next((i for i, e in enumerate(entries) if e in ("", "-1")), len(entries))
    most = shown if "MIG-" in visible else min(found, shown)  # one GPU may be several MIG instances
    return tuple(entries[:most])


def entries_of_list(text: str) -> tuple[str, ...]:
    """Parses ``nvidia-smi -L``: a GPU's number, or the UUIDs of its MIG instances (pure).

    A number, because not every server accepts a UUID; of a GPU that is split into instances CUDA itself
    would show only one.
    """
    found: list[list[str]] = []
    for line in text.splitlines():
        if gpu := _GPU.match(line):
            found.append([gpu[1]])
        elif (instance := _MIG.match(line)) and found:
            found[-1].append(instance[1])
    return tuple(entry for number, *instances in found for entry in instances or [number])


def _nvidia_smi(environ: Mapping[str, str]) -> str:
    """Returns its output; empty if it is missing or fails."""
    try:
        return subprocess.run(
            ["nvidia-smi", "-L"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SMI_TIMEOUT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _numbers(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
