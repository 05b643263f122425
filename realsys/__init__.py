"""RL post-training on Slurm: the runtime (see docs/architecture.md), and the door of the Python API.

``realsys.launch``, ``realsys.Trial`` and ``realsys.trials`` come from launcher/python_api.py when they are
first used: the runtime imports nothing of the launcher.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"
_API = ("Trial", "launch", "trials")


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(importlib.import_module("launcher.python_api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
