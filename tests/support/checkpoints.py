"""A checkpoint written at once, for tests of what lies in its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from realsys.master.checkpoint.recover import complete, publish
from realsys.master.graph.master_state import MasterState
from realsys.trial.lineage import Lineage


def commit(
    folder: Path,
    *,
    step: int,
    attempt: int,
    saved: Mapping[str, Any],
    keep: int,
    lineage: Lineage,
    state: MasterState | None = None,
    allow: Callable[[], None] = lambda: None,
) -> Path:
    """What the master does while its store answers. Args: as of ``complete`` and ``publish``."""
    complete(folder, step=step, attempt=attempt, saved=saved, state=state)
    return publish(folder, step=step, attempt=attempt, keep=keep, lineage=lineage, allow=allow)
