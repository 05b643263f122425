"""Several processes that are one model copy, or several at once: started, joined, ended with the test."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from realsys.api.model import ParallelGroups, ProcessTopology
from realsys.model_worker.process_groups import rank_groups


def run_ranks(module: str, world_size: int, folder: Path, *, timeout_s: float = 200) -> None:
    """Runs ``rank_main(rank, folder)`` of a test module beside this one in ``world_size`` processes.

    All must end well; none outlives the call.
    """
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import {module} as m; m.rank_main("
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", f"{code}{rank}, {str(folder)!r})"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        errors = [rank.communicate(timeout=timeout_s)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(errors)


def join(rank: int, world_size: int, folder: str) -> None:
    """The first thing that a rank does."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/rendezvous", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def groups_of(topo: ProcessTopology, workers: Sequence[int]) -> ParallelGroups:
    """Groups of a copy on ``workers``; every process of the world makes them, member or not."""
    mine = {}
    for axis, ranks in rank_groups(topo):
        if len(ranks) > 1:
            members = [workers[rank] for rank in ranks]
            group = dist.new_group(members)
            if dist.get_rank() in members:
                mine[axis] = group
    return ParallelGroups(**mine)


def write(folder: str, name: str, found: object) -> None:
    """Leaves figures for the test."""
    Path(folder, f"{name}.json").write_text(json.dumps(found))


def read(folder: Path, name: str) -> dict:
    """Figures that a rank has left."""
    return json.loads((folder / f"{name}.json").read_text())
