"""Several processes that are one model copy, or several at once: started, joined, ended with the test."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import forked
import torch
import torch.distributed as dist

from realsys.api.model import ParallelGroups, ProcessTopology
from realsys.model_worker.process_groups import rank_groups
from realsys.runtime.child_processes.parent_death import die_with_parent


def rows_asked(head: torch.nn.Module) -> list[int]:
    """From now on, of how many rows ``head`` makes logits, call by call."""
    rows: list[int] = []

    def count(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], made: object) -> None:
        rows.append(inputs[0].numel() // inputs[0].shape[-1])

    head.register_forward_hook(count)
    return rows


def run_ranks(
    module: str, world_size: int, folder: Path, *, main: str = "rank_main", timeout_s: float = 200
) -> None:
    """Runs ``main(rank, folder)`` of a test module beside this one in ``world_size`` processes.

    All must end well; none outlives the call.
    """
    command = [sys.executable, "-m", "parallel_ranks", module, main, str(world_size), str(folder)]
    here = f"{Path(__file__).parent}:{Path(__file__).parents[1] / 'support'}"
    path = ":".join(filter(None, (forked.environment().get("PYTHONPATH"), here)))
    environment = {**os.environ, "PYTHONPATH": path, "REALSYS_PARENT_PID": str(os.getpid())}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        try:
            _, errors = parent.communicate(timeout=timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
    assert parent.returncode == 0, errors


def _fork_ranks(module: str, main: str, world_size: int, folder: str) -> None:
    """What ``run_ranks`` starts: modules are imported once, then each rank is a fork."""
    die_with_parent(int(os.environ["REALSYS_PARENT_PID"]))
    rank_main = getattr(importlib.import_module(module), main)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(rank_main, rank, folder, os.getpid()), daemon=True)
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    while alive := [rank for rank in ranks if rank.is_alive()]:
        if any(rank.exitcode for rank in ranks):
            break
        multiprocessing.connection.wait([rank.sentinel for rank in alive])
    sys.exit(any(rank.exitcode for rank in ranks))  # the first failure ends all: see run_ranks


def _rank(rank_main: Callable[[int, str], None], rank: int, folder: str, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    rank_main(rank, folder)


def join(rank: int, world_size: int, folder: str) -> dist.Store:
    """The first thing that a rank does."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/rendezvous", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return store


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


if __name__ == "__main__":
    _fork_ranks(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
