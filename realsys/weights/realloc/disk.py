"""Executes a reallocation plan through a shared folder, for workers without a common process group.

Each sender writes one safetensors file with each region that it sends once; receivers read their parts of
it. A file gets its name only when it is complete.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from realsys.api.errors import CheckpointError, ConfigError
from realsys.trial.temporary_names import temporary_beside
from realsys.weights.realloc.buckets import WeightPiece
from realsys.weights.realloc.links import peer_timeout
from realsys.weights.realloc.realloc import ReallocReport, report_of
from realsys.weights.realloc.realloc_plan import ReallocPlan
from realsys.weights.realloc.views import Views, check_lossless, copy_within, parts_of, write

POLL_S = 0.05


class DiskReallocator:
    """Moves weights of one pair of copies through ``folder``, as ``Reallocator`` does through a link.

    All workers of both copies must make the same transfers in the same order, and none may start one
    before all have finished the previous one, whose files are then removed.
    """

    def __init__(self, worker: int, folder: Path, *, timeout_s: float) -> None:
        self.worker, self._folder, self._timeout_s = worker, folder, timeout_s
        self._transfers = 0
        self._former: Path | None = None

    def run(
        self,
        plan: ReallocPlan,
        source_views: Views | None,
        target_views: Views | None,
        eta: float = 1.0,
    ) -> ReallocReport:
        """Moves this worker's part; arguments, result and errors as in ``Reallocator.run`` and
        ``read_parts``.
        """
        self.close()
        self._transfers += 1
        folder = self._folder / str(self._transfers)
        if source_views is not None:
            self._former = write_part(plan, self.worker, source_views, folder)
        if target_views is not None:
            read_parts(
                plan,
                self.worker,
                target_views,
                folder,
                eta=eta,
                timeout_s=self._timeout_s,
                source_views=source_views,
            )
        return report_of(plan, self.worker)

    def close(self) -> None:
        """Removes the files that this worker wrote last; all receivers must have read them."""
        if self._former is not None:
            self._former.unlink(missing_ok=True)
            self._former = None


def write_part(plan: ReallocPlan, worker: int, views: Views, folder: Path) -> Path | None:
    """Writes what ``worker`` sends under ``plan``; returns None if it sends nothing.

    Args:
        folder: folder of this transfer alone; each transfer needs a new one.
    """
    pieces = {piece for pieces in plan.sends(worker).values() for piece in pieces}
    if not pieces:
        return None
    check_lossless(views, {piece.name for piece in pieces}, plan.dtypes, plan.rounded)
    folder.mkdir(parents=True, exist_ok=True)
    path = _file(folder, worker)
    draft = temporary_beside(path)
    with torch.no_grad():
        tensors = {_key(p): _gathered(views, p, plan.dtypes) for p in sorted(pieces)}
    save_file(tensors, draft)
    with open(draft, "rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)
    return path


def read_parts(
    plan: ReallocPlan,
    worker: int,
    views: Views,
    folder: Path,
    *,
    eta: float = 1.0,
    timeout_s: float,
    source_views: Views | None = None,
) -> None:
    """Reads into ``views`` what others wrote for ``worker``, waiting for their files.

    Args:
        source_views: what this worker holds of the source copy, if it is in both.
    Raises:
        WaitTimeout: names the worker whose file did not appear. CheckpointError: a file does not match
            the plan.
    """
    if not 0 < eta <= 1:
        raise ConfigError(f"eta is {eta}", where="read_parts", fix="use a number in (0, 1]")
    with torch.no_grad():
        for piece in plan.copies.get(worker, ()):
            copy_within(source_views or {}, views, piece, eta)
        for sender, pieces in plan.receives(worker).items():
            path = _file(folder, sender)
            _await_file(path, sender, timeout_s)
            try:
                with safe_open(path, framework="pt") as file:
                    for piece in pieces:
                        _read_piece(file, piece, views, eta)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"weights of model_worker/{sender} can't be read: {error}",
                    where=str(path),
                    fix="give each transfer a folder of its own; else see that worker's log",
                ) from error


def _read_piece(file: Any, piece: WeightPiece, views: Views, eta: float) -> None:
    read: Tensor = file.get_tensor(_key(piece))
    for box, x in parts_of(views, piece):
        write(x, read[box.slices_in(piece.box)].to(x.device), eta)


def _gathered(views: Views, piece: WeightPiece, dtypes: Mapping[str, str]) -> Tensor:
    whole = torch.empty(piece.box.shape, dtype=getattr(torch, dtypes[piece.name]))
    for box, x in parts_of(views, piece):
        whole[box.slices_in(piece.box)].copy_(x)
    return whole


def _await_file(path: Path, sender: int, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise peer_timeout(sender, f"write {path}", timeout_s)
        time.sleep(POLL_S)


def _file(folder: Path, worker: int) -> Path:
    return folder / f"worker{worker}.safetensors"


def _key(piece: WeightPiece) -> str:
    """Name of a piece's tensor in the file."""
    ranges = (f"{a}:{b}" for a, b in zip(piece.box.start, piece.box.stop, strict=True))
    return f"{piece.name}[{','.join(ranges)}]"
