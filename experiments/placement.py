"""Placements: which model workers compute which calls. ``placement=split``.

    shared   all roles on the same model workers
    split    actor and reference on the first half of them, the others on the second

``pools`` and ``allocation`` say more: any call in a parallel layout and on workers of its own.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from realsys.api.basics.choice import Choice
from realsys.api.options import MOST_WORKERS, option


@dataclass(frozen=True, kw_only=True)
class Placement(Choice, abc.ABC):
    """Base."""

    choice = "placement"
    is_split: ClassVar[bool] = False

    n_model_workers: int | None = option(
        None, "model workers, each with one GPU; none: as many as are needed", ge=1, le=MOST_WORKERS
    )
    pools: Mapping[str, str] = option(
        {}, "named groups of model workers: how many (4, in the order listed), or which (0-3)"
    )
    allocation: str | None = option(
        None, "layout and pool of calls: actor_gen:d4t1p1@left,*:d2t2p1; none: the roles' own"
    )
    copies_through: str = option(
        "memory",
        "how copies of a model get their weights: in memory, from process to process; or through "
        "files in the trial's folder",
        choices=("memory", "disk"),
    )


@dataclass(frozen=True, kw_only=True)
class Shared(Placement):
    """Roles share the model workers."""

    kind = "shared"


@dataclass(frozen=True, kw_only=True)
class Split(Placement):
    """Two halves of the model workers compute at the same time: pools ``left`` and ``right``."""

    kind = "split"
    is_split = True
