"""Weights from a trainer to a generation server, beside the raw limit of what carries them, in one run.

    python benchmarks/bench_weight_sync.py [--mib 256 1024] [--rounds 7] [--checksums]

Two processes on one host. *publish* is how long the trainer stands still (copy and checksums), beside one
copy of the same bytes in warm memory. *fetch* is ``WeightReceiver.fetch``: whole, checked tensors. Limits
are measured in turn with it: one copy into and one out of a warm segment that two processes have mapped, in
pieces that overlap; sendall/recv_into over TCP; ZeroMQ with CURVE. All into memory that is there already.
Medians and the best of the rounds, after one more to warm up; beside other work the best says more.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from realsys.data.transfer.tensor_client import TensorClient
from realsys.data.transfer.tensor_server import TensorServer
from realsys.data.transfer.tensor_store import TensorStore
from realsys.models.shape import Weight
from realsys.transport.curve_keys import TrialKeypairs
from realsys.transport.generation_messages import WeightPart, WeightSource
from realsys.weights.layouts.boxes import Box
from realsys.weights.sync.manifest import KEY
from realsys.weights.sync.plan_publish import plan_publish, wire_dtypes
from realsys.weights.sync.publisher import WeightPublisher
from realsys.weights.sync.receiver import WeightReceiver

sys.path.insert(0, __file__.rpartition("/")[0])
import bench_transfer

MIB = 1 << 20
WHO: dict[str, Any] = {"trial": "bench/1", "attempt": 1}


def weights_of(mib: int) -> tuple[Weight, ...]:
    """bfloat16 matrices of 2048 columns and norms between them, ``mib`` MiB of matrices."""
    found = []
    for layer in range(mib // 16):
        found += [
            Weight(f"layers.{layer}.q_proj.weight", (2048, 2048)),
            Weight(f"layers.{layer}.norm.weight", (2048,)),
            Weight(f"layers.{layer}.down_proj.weight", (2048, 2048)),
        ]
    return tuple(found)


class Engine:
    """Whole weights in one process."""

    def __init__(self, weights: tuple[Weight, ...]) -> None:
        self.views = {
            w.name: [(Box.whole(w.shape), torch.full(w.shape, 1.0, dtype=torch.bfloat16))]
            for w in weights
        }

    def held_weights(self) -> Any:
        return self.views

    def train(self, share: float) -> None:
        """Changes every number, or the first ones of each matrix."""
        for parts in self.views.values():
            flat = parts[0][1].view(-1)
            flat[: max(1, int(share * len(flat)))].mul_(-1.0)


def trainer(link: Connection, sizes_mib: list[int], keypairs: TrialKeypairs, delta: bool) -> None:
    """Publishes when told; says how long it stood still."""
    torch.set_num_threads(1)
    store = TensorStore()
    server = TensorServer(
        TensorStore(), name="model_worker/0", published={KEY: store}, keypairs=keypairs, **WHO
    ).start()
    made = {}
    for mib in sizes_mib:
        weights = weights_of(mib)
        layout = ({w.name: (Box.whole(w.shape),) for w in weights},)
        giving = plan_publish(layout, [0], dtypes=wire_dtypes(weights, dtype="bfloat16"))
        model = f"m{mib}"
        publisher = WeightPublisher(store, giving, model=model, worker=0, delta=delta)
        made[mib] = Engine(weights), publisher
    link.send(server.endpoint)
    while (order := link.recv()) is not None:
        mib, version, share = order
        engine, publisher = made[mib]
        engine.train(share)
        source = np.ones(mib * MIB, np.uint8)
        target = np.ones(mib * MIB, np.uint8)
        began_s = time.perf_counter()
        np.copyto(target, source)
        copy_s = time.perf_counter() - began_s
        said = publisher.publish(engine, version)
        link.send((said.name, said.copy_s, said.seconds, copy_s))
    server.stop()


def checksums() -> list[str]:
    """GB/s of ways to make sure of 128 MiB in buckets of 16 MiB."""
    buckets = [np.random.default_rng(n).integers(0, 256, 16 * MIB, np.uint8) for n in range(8)]
    target = np.ones(16 * MIB, np.uint8)
    ways: dict[str, Callable[[Any], object]] = {
        "copy, for comparison": lambda x: np.copyto(target, x),
        "xxhash.xxh3_64": xxh3_64_intdigest,
        "zlib.crc32": zlib.crc32,
        "zlib.adler32": zlib.adler32,
        "hashlib.sha1": lambda x: hashlib.sha1(x).digest(),
        "hashlib.blake2b": lambda x: hashlib.blake2b(x).digest(),
    }
    lines = ["| | GB/s |", "|---|---:|"]
    for name, run in ways.items():
        took_s = []
        for _ in range(5):
            began_s = time.perf_counter()
            for bucket in buckets:
                run(bucket)
            took_s.append(time.perf_counter() - began_s)
        lines.append(f"| {name} | {128 * MIB / statistics.median(took_s) / 1e9:.2f} |")
    return lines


class Run:
    """Both processes, and what was measured."""

    def __init__(self, sizes_mib: list[int], *, delta: bool = False) -> None:
        keypairs = TrialKeypairs.generate()
        context = multiprocessing.get_context("spawn")
        self.link, other = context.Pipe()
        self.trainer = context.Process(
            target=trainer, args=(other, sizes_mib, keypairs, delta), daemon=True
        )
        self.trainer.start()
        self.endpoint = self.link.recv()
        self.receivers = {
            way: WeightReceiver(
                lambda endpoints, way=way: TensorClient(
                    endpoints, keypairs=keypairs, may_share=way == "memory", **WHO
                )
            )
            for way in ("memory", "socket")
        }
        self.version = 0

    def publish(self, mib: int, share: float = 1.0) -> tuple[WeightSource, dict[str, float]]:
        self.version += 1
        self.link.send((mib, self.version, share))
        name, copy_s, seconds, raw_s = self.link.recv()
        part = WeightPart(endpoint=self.endpoint, name=name)
        facts = {"copy": copy_s, "publish": seconds, "one copy": raw_s}
        return WeightSource(version=self.version, parts=(part,)), facts

    def fetch(self, way: str, source: WeightSource) -> tuple[float, int]:
        """Seconds, and bytes that came."""
        receiver = self.receivers[way]
        before, began_s = receiver.num_bytes, time.perf_counter()
        found = receiver.fetch(source, timeout_s=120)
        took_s = time.perf_counter() - began_s
        expected = -1.0 if self.version % 2 else 1.0
        assert all(float(x.view(-1)[0]) == expected for x in found.values())
        return took_s, receiver.num_bytes - before

    def close(self) -> None:
        self.link.send(None)
        for receiver in self.receivers.values():
            receiver.close()
        self.trainer.join(20)


def compare(sizes_mib: list[int], rounds: int) -> list[str]:
    """Tables of publish and fetch beside the limits."""
    keypairs = TrialKeypairs.generate()
    context = multiprocessing.get_context("spawn")
    link, other = context.Pipe()
    giver = context.Process(
        target=bench_transfer.give, args=(other, sizes_mib, keypairs, 1), daemon=True
    )
    giver.start()
    raw = bench_transfer.Taker(link, max(sizes_mib) * MIB, keypairs)
    seconds_of: dict[int, dict[str, list[float]]] = {}
    for mib in sizes_mib:
        run = Run([mib])
        took_s = seconds_of.setdefault(mib, {})
        for number in range(rounds + 1):
            source, facts = run.publish(mib)
            facts["memory"], _ = run.fetch("memory", source)
            facts["socket"], _ = run.fetch("socket", source)
            facts |= limits(raw, mib)
            for name, seconds in facts.items() if number else ():
                took_s.setdefault(name, []).append(seconds)
        run.close()
    link.send(None)
    giver.join(20)
    lines = []
    for title, pick in (("Medians", statistics.median), ("Best", min)):
        chosen = {
            mib: {name: pick(all_s) for name, all_s in took_s.items()}
            for mib, took_s in seconds_of.items()
        }
        lines += [f"{title} of {rounds} rounds", "", *table(chosen), ""]
    return lines


def table(seconds: dict[int, dict[str, float]]) -> list[str]:
    """Markdown: GB/s (10^9 bytes), and ours as a share of the limit."""
    lines = [
        "| | stop: copy | with checksums | of one copy | memory: limit | fetch | of the limit "
        "| sockets: TCP | CURVE | fetch | of CURVE |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for mib, s in seconds.items():
        rate = {name: mib * MIB / seconds / 1e9 for name, seconds in s.items()}
        cells = [
            f"{1000 * s['copy']:.0f} ms",
            f"{1000 * s['publish']:.0f} ms",
            f"{s['one copy'] / s['publish']:.0%}",
            f"{rate['limit']:.2f} GB/s",
            f"{rate['memory']:.2f} GB/s",
            f"{s['limit'] / s['memory']:.0%}",
            f"{rate['tcp']:.2f} GB/s",
            f"{rate['curve']:.2f} GB/s",
            f"{rate['socket']:.2f} GB/s",
            f"{s['curve'] / s['socket']:.0%}",
        ]
        lines.append(f"| {mib} MiB | " + " | ".join(cells) + " |")
    return lines


def limits(raw: bench_transfer.Taker, mib: int) -> dict[str, float]:
    """Seconds that the bare ways take."""
    ways: dict[str, Callable[[], None]] = {
        "limit": lambda: raw.limit_memory(mib, 2 * MIB),
        "tcp": lambda: raw.limit_tcp(mib),
        "curve": lambda: raw.limit_curve(mib),
    }
    took_s = {}
    for name, run in ways.items():
        began_s = time.perf_counter()
        run()
        took_s[name] = time.perf_counter() - began_s
    return took_s


def deltas(mib: int, rounds: int) -> list[str]:
    """Table of versions of which little has changed."""
    lines = [
        "| changed | came | publish | fetch: memory | fetch: sockets |",
        "|---:|---:|---:|---:|---:|",
    ]
    run = Run([mib], delta=True)
    for share in (1.0, 0.1, 0.01, 0.0):
        took: list[tuple[float, ...]] = []
        for _ in range(rounds + 1):
            source, facts = run.publish(mib, share)
            memory_s, num_bytes = run.fetch("memory", source)
            socket_s, _ = run.fetch("socket", source)
            took.append((num_bytes, facts["publish"], memory_s, socket_s))
        came, *times = (statistics.median(x) for x in zip(*took[1:], strict=True))
        cells = [f"{share:.0%}", f"{came / MIB:.1f} MiB"] + [f"{1000 * x:.0f} ms" for x in times]
        lines.append("| " + " | ".join(cells) + " |")
    run.close()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--checksums", action="store_true", help="only these")
    parser.add_argument("--deltas", action="store_true", help="only versions that change little")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.checksums:
        lines = checksums()
    elif args.deltas:
        lines = deltas(args.mib[0], args.rounds)
    else:
        lines = compare(args.mib, args.rounds)
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
