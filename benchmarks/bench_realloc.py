"""Measures weight transfer between processes against the raw limit of its transport, in one run.

    python benchmarks/bench_realloc.py [--mib 64,256,1024] [--rounds 7] [--plans]

Two processes alternate between all measurements in each round; the table has medians over the rounds in
GB/s, and medians of each round's ratio, so that other load on the machine affects all equally. The raw
limit of shared memory is one copy in and one copy out through a warm ring, pipelined; that of torch is
plain sockets on the loopback interface, between preallocated memory. ``--plans`` times the planning of
large models.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from realsys.api.model import ProcessTopology
from realsys.models.shape import ModelShape, Weight
from realsys.weights.layouts.boxes import Box, Layout
from realsys.weights.layouts.holdings import fsdp_layout, megatron_layout
from realsys.weights.realloc.links import Link
from realsys.weights.realloc.pairwise_link import PairwiseLink
from realsys.weights.realloc.realloc import Reallocator
from realsys.weights.realloc.realloc_plan import plan_realloc
from realsys.weights.realloc.shared_memory_link import SharedMemoryLink
from realsys.weights.realloc.torch_link import TorchLink

RAW_SLOTS, RAW_SLOT_BYTES = 4, 2 << 20
SOCKET_BYTES = 1 << 20
TIMEOUT_S = 120.0
LLAMA_8B = ModelShape(
    family="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)
LLAMA_70B = ModelShape(
    family="llama",
    hidden_size=8192,
    intermediate_size=28672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)


def weights_of(mib: int) -> list[Weight]:
    """bfloat16 matrices of 2048 columns and norms between them, ``mib`` MiB of matrices."""
    found = []
    for layer in range(mib // 16):
        found += [
            Weight(f"layers.{layer}.q_proj.weight", (2048, 2048)),
            Weight(f"layers.{layer}.norm.weight", (2048,)),
            Weight(f"layers.{layer}.down_proj.weight", (2048, 2048)),
        ]
    return found


class RawRing:
    """Copies in and out of shared memory, and two counters: nothing else."""

    def __init__(self, path: str, rank: int) -> None:
        size = 4096 + RAW_SLOTS * RAW_SLOT_BYTES
        if rank == 0:
            Path(path).write_bytes(bytes(size))
        dist.barrier()
        memory = np.memmap(path, np.uint8, "r+")
        dist.barrier()
        if rank == 0:
            os.unlink(path)
        self._counters = memoryview(memory[:4096]).cast("Q")
        self._slots = memory[4096:].reshape(RAW_SLOTS, RAW_SLOT_BYTES)
        self._rank, self._done = rank, 0

    def run(self, mine: np.ndarray[Any, Any]) -> None:
        for start in range(0, len(mine), RAW_SLOT_BYTES):
            part = mine[start : start + RAW_SLOT_BYTES]
            slot = self._slots[self._done % RAW_SLOTS][: len(part)]
            if self._rank == 0:
                while self._done - self._counters[8] >= RAW_SLOTS:
                    time.sleep(0)
                np.copyto(slot, part)
                self._done += 1
                self._counters[0] = self._done
            else:
                while self._counters[0] <= self._done:
                    time.sleep(0)
                np.copyto(part, slot)
                self._done += 1
                self._counters[8] = self._done


class RawSockets:
    """sendall and recv_into over the loopback interface."""

    def __init__(self, folder: str, rank: int) -> None:
        self._rank, port = rank, Path(folder, "port")
        if rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as server:
                draft = port.with_suffix(".draft")
                draft.write_text(str(server.getsockname()[1]))
                draft.rename(port)
                self._socket, _ = server.accept()
        else:
            while not port.exists():
                time.sleep(0.01)
            self._socket = socket.create_connection(("127.0.0.1", int(port.read_text())))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self, mine: np.ndarray[Any, Any]) -> None:
        view = memoryview(mine)
        if self._rank == 0:
            for start in range(0, len(view), SOCKET_BYTES):
                self._socket.sendall(view[start : start + SOCKET_BYTES])
            self._socket.recv(1)
        else:
            while view:
                view = view[self._socket.recv_into(view) :]
            self._socket.sendall(b"x")


class OurTransfer:
    """The same bytes as a model: from worker 0 to worker 1, or between two layouts on both."""

    def __init__(
        self, rank: int, link: Link, weights: list[Weight], sides: tuple[Any, ...]
    ) -> None:
        self._plan = plan_realloc(weights, *sides, dtype="bfloat16")
        source, source_workers, target, target_workers = sides
        self._source = _views(source, source_workers, rank)
        self._target = _views(target, target_workers, rank)
        self._reallocator = Reallocator(rank, link)
        self.num_bytes = self._plan.lower_bound

    def run(self, _: object) -> None:
        self._reallocator.run(self._plan, self._source, self._target)


def _views(layout: Layout, workers: Iterable[int], rank: int) -> dict[str, Any]:
    held = dict(zip(workers, layout, strict=True)).get(rank, {})
    return {
        name: [(box, torch.ones(box.shape, dtype=torch.bfloat16)) for box in boxes]
        for name, boxes in held.items()
    }


def rank_main(rank: int, folder: str, sizes_mib: list[int], num_rounds: int) -> None:
    """What each of the two processes runs; process 0 writes the table."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/world", 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ring, sockets = (
        RawRing("/dev/shm/realsys-bench-" + Path(folder).name, rank),
        RawSockets(folder, rank),
    )
    links = dist.FileStore(f"{folder}/links", 2)  # type: ignore[attr-defined]
    shared = PairwiseLink(SharedMemoryLink(rank, links, timeout_s=TIMEOUT_S), None)
    torch_link = TorchLink(timeout_s=TIMEOUT_S)
    lines = [
        "| | raw memory | shared memory | ratio | raw TCP | torch (gloo) | ratio "
        "| shared memory, both ways | torch, both ways |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for mib in sizes_mib:
        weights = weights_of(mib)
        whole = ({w.name: (Box.whole(w.shape),) for w in weights},)
        one_way = (whole, (0,), whole, (1,))
        halves = fsdp_layout(weights, ProcessTopology(tensor=2))
        both_ways = (halves, (0, 1), halves, (1, 0))  # everything crosses
        flat = torch.ones(mib << 20, dtype=torch.uint8).numpy()  # memory like that of weights
        ways: dict[str, tuple[Callable[[Any], None], int]] = {
            "raw memory": (ring.run, mib << 20),
            "raw sockets": (sockets.run, mib << 20),
        }
        for name, link, sides in (
            ("memory", shared, one_way),
            ("torch", torch_link, one_way),
            ("memory, both ways", shared, both_ways),
            ("torch, both ways", torch_link, both_ways),
        ):
            transfer = OurTransfer(rank, link, weights, sides)
            ways[name] = (transfer.run, transfer.num_bytes)
        rates = measure(ways, flat, num_rounds)
        lines.append(_row(mib, rates))
    if rank == 0:
        Path(f"{folder}/table").write_text("\n".join(lines) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def measure(
    ways: dict[str, tuple[Callable[[Any], None], int]], flat: Any, num_rounds: int
) -> dict[str, list[float]]:
    """GB/s of each way in each round; the first round warms up and is dropped."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds + 1):
        for name, (run, num_bytes) in ways.items():
            dist.barrier()
            began_s = time.perf_counter()
            run(flat)
            took_s = torch.tensor(time.perf_counter() - began_s)
            dist.all_reduce(took_s, dist.ReduceOp.MAX)
            rates[name].append(num_bytes / float(took_s) / 1e9)
    return {name: found[1:] for name, found in rates.items()}


def _row(mib: int, rates: dict[str, list[float]]) -> str:
    def ratio(ours: str, raw: str) -> str:
        return (
            f"{statistics.median(a / b for a, b in zip(rates[ours], rates[raw], strict=True)):.2f}"
        )

    cells = [f"{mib} MiB"]
    for ours, raw in (("memory", "raw memory"), ("torch", "raw sockets")):
        cells += [f"{statistics.median(rates[name]):.2f}" for name in (raw, ours)] + [
            ratio(ours, raw)
        ]
    cells += [
        f"{statistics.median(rates[f'{name}, both ways']):.2f}" for name in ("memory", "torch")
    ]
    return "| " + " | ".join(cells) + " |"


def planning_table() -> str:
    """Seconds and sizes of plans of large models."""
    lines = [
        "| plan | seconds | pieces | pairs | bytes over lower bound | busiest sender over its bound |",
        "|---|---|---|---|---|---|",
    ]
    for label, shape, source, target in (
        ("8B, d2t2p2 to d4t2 on 8 others", LLAMA_8B, "d2t2p2", "d4t2"),
        ("8B, fsdp d8 to t8 on 8 others", LLAMA_8B, "d8", "t8"),
        ("70B, d4t4p4 to d4t8 on 32 others", LLAMA_70B, "d4t4p4", "d4t8"),
        ("70B, fsdp d64 to d4t8 on 32 others", LLAMA_70B, "d64", "d4t8"),
    ):
        a, b = ProcessTopology.parse(source), ProcessTopology.parse(target)
        weights = shape.weights()
        held = fsdp_layout(weights, a) if "fsdp" in label else megatron_layout(shape, a)
        workers = range(a.world_size), range(a.world_size, a.world_size + b.world_size)
        began_s = time.perf_counter()
        plan = plan_realloc(
            weights, held, workers[0], megatron_layout(shape, b), workers[1], dtype="bfloat16"
        )
        took_s = time.perf_counter() - began_s
        sent = plan.bytes_sent
        over = sum(sent.values()) / plan.lower_bound, max(sent.values()) / plan.busiest_bound
        lines.append(
            f"| {label} | {took_s:.2f} | {sum(map(len, plan.streams.values()))} "
            f"| {len(plan.streams)} | {over[0]:.3f} | {over[1]:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", default="64,256,1024")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--rank", default="")
    args = parser.parse_args()
    if args.plans:
        sys.stdout.write(planning_table())
        return
    if args.rank:
        rank, folder, sizes, num_rounds = json.loads(args.rank)
        rank_main(rank, folder, sizes, num_rounds)
        return
    sizes = [int(mib) for mib in args.mib.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rank"]
        ranks = [
            subprocess.Popen([*command, json.dumps([rank, folder, sizes, args.rounds])])
            for rank in range(2)
        ]
        try:
            if any(rank.wait() for rank in ranks):
                sys.exit("a process failed; its error is above")
            sys.stdout.write(Path(folder, "table").read_text())
        finally:
            for rank in ranks:
                rank.kill()


if __name__ == "__main__":
    main()
