"""Measures tensor transfer between processes, as a fraction of the machine's limit.

``python benchmarks/bench_transfer.py [--sizes-mib 1 16 64 256 1024] [--rounds 7] [--threads 1]`` prints
a table for each transport: shared memory (one host) and sockets (between hosts; here on loopback). The
limits are measured in the same run, alternating, between the same two processes: one copy into and one
copy out of a warm segment, whole or in overlapping pieces, whichever is faster; sendall/recv_into over
TCP; and ZeroMQ with CURVE, frames of 1 MiB. All of them into preallocated memory.

*fetch* is ``TensorClient.fetch_all``: the rows are in the store. *batch* is that and ``TensorStore.get``,
which gives a call its batch as one tensor of its own in fresh memory. Both count the round trip. On a
machine with other work the best of the rounds says more than the median.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import zmq

from realsys.api.data import SequenceMeta
from realsys.data.transfer.tensor_client import TensorClient
from realsys.data.transfer.tensor_server import TensorServer
from realsys.data.transfer.tensor_store import TensorStore
from realsys.transport.curve_keys import TrialKeypairs

MIB = 1 << 20
PIECE_BYTES = 2 * MIB  # of the overlapping copy; a share of the cache
NUM_IDS = 64
LOOPBACK = "127.0.0.1"
IDS = tuple(f"i{n}" for n in range(NUM_IDS))
WHO: dict[str, Any] = {"trial": "bench/1", "attempt": 1}


def ids_of(mib: int) -> tuple[str, ...]:
    """The datapoints whose rows are ``mib`` MiB together."""
    return tuple(f"{mib}-{name}" for name in IDS)


# ---- the process that has the tensors ------------------------------------------------------------


def give(link: Connection, sizes_mib: list[int], keypairs: TrialKeypairs, threads: int) -> None:
    """Serves its store, and plays the sender's part of each limit when told."""
    torch.set_num_threads(threads)
    store = TensorStore()
    for mib in sizes_mib:
        whole = torch.arange(mib * MIB // 8, dtype=torch.int64)
        store.put_rows(
            "x", zip(ids_of(mib), torch.split(whole, len(whole) // NUM_IDS), strict=True)
        )
    server = TensorServer(store, name="model_worker/0", keypairs=keypairs, **WHO).start()
    size = max(sizes_mib) * MIB
    source = np.arange(size // 8).view(np.uint8)
    fd, segment = new_segment(size)
    listener = socket.create_server((LOOPBACK, 0))
    curve, port = curve_socket(keypairs, serves=True)
    link.send((server.endpoint, os.getpid(), fd, listener.getsockname()[1], port))
    tcp, _ = listener.accept()
    senders: dict[str, Callable[[int, int], object]] = {
        "memory": lambda n, piece: copy_in(link, segment, source[:n], piece),
        "tcp": lambda n, _: tcp.sendall(source[:n]),
        "curve": lambda n, _: curve.send_multipart(
            [source[i : i + MIB] for i in range(0, n, MIB)], copy=False
        ),
    }
    while (order := link.recv()) is not None:
        kind, num_bytes, piece = order
        senders[kind](num_bytes, piece)
    curve.close(linger=0)
    server.stop()


def new_segment(size: int) -> tuple[int, np.ndarray]:
    """An anonymous file and its bytes, all pages there."""
    fd = os.memfd_create("bench")
    os.ftruncate(fd, size)
    memory = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
    memory[:] = 1
    return fd, memory


def copy_in(link: Connection, segment: np.ndarray, source: np.ndarray, piece: int) -> None:
    """Says after every piece that it is there."""
    for i in range(0, len(source), piece):
        segment[i : i + piece][: len(source) - i] = source[i : i + piece]
        link.send_bytes(b"x")


def curve_socket(keypairs: TrialKeypairs, *, serves: bool, port: int = 0) -> tuple[Any, int]:
    """A PAIR socket with encryption, and the port where it listens."""
    pair = zmq.Context.instance().socket(zmq.PAIR)
    pair.sndhwm = pair.rcvhwm = 0
    if serves:
        pair.curve_server, pair.curve_secretkey = True, keypairs.server_secret
        return pair, pair.bind_to_random_port(f"tcp://{LOOPBACK}")
    pair.curve_serverkey = keypairs.server_public
    pair.curve_publickey, pair.curve_secretkey = keypairs.client_public, keypairs.client_secret
    pair.connect(f"tcp://{LOOPBACK}:{port}")
    return pair, port


# ---- the process that wants them -------------------------------------------------------------------


class Taker:
    """Gets bytes in every way; each method returns when they are all here."""

    def __init__(self, link: Connection, largest: int, keypairs: TrialKeypairs) -> None:
        self.link, self.keypairs = link, keypairs
        endpoint, pid, fd, tcp_port, curve_port = link.recv()
        self.store = TensorStore()
        ours: dict[str, Any] = {"keypairs": keypairs, "store": self.store, **WHO}
        self.clients = {
            "memory": TensorClient([endpoint], **ours),
            "socket": TensorClient([endpoint], may_share=False, **ours),
        }
        segment = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        self.segment = np.frombuffer(mmap.mmap(segment, largest), dtype=np.uint8)
        self.segment.sum()  # every page is in our table
        self.target = np.ones(largest, dtype=np.uint8)
        self.tcp = socket.create_connection((LOOPBACK, tcp_port))
        self.curve, _ = curve_socket(keypairs, serves=False, port=curve_port)

    def limit_memory(self, mib: int, piece: int) -> None:
        self.link.send(("memory", mib * MIB, piece))
        for i in range(0, mib * MIB, piece):
            self.link.recv_bytes()
            self.target[i : i + piece][: mib * MIB - i] = self.segment[
                i : min(i + piece, mib * MIB)
            ]

    def limit_tcp(self, mib: int) -> None:
        self.link.send(("tcp", mib * MIB, 0))
        view, got = memoryview(self.target)[: mib * MIB], 0
        while got < len(view):
            got += self.tcp.recv_into(view[got:])

    def limit_curve(self, mib: int) -> None:
        self.link.send(("curve", mib * MIB, 0))
        target, start = memoryview(self.target), 0
        for frame in self.curve.recv_multipart(copy=False):
            target[start : start + len(frame)] = frame.buffer
            start += len(frame)
        assert start == mib * MIB

    def fetch(self, way: str, mib: int) -> None:
        self.clients[way].fetch_all([(0, "x", ids_of(mib))], timeout_s=60)

    def batch(self, way: str, mib: int) -> None:
        self.fetch(way, mib)
        self.store.get(meta_of(mib))

    def ways(self, mib: int) -> dict[str, Callable[[], None]]:
        """Name → what is measured."""
        return {
            "memory, whole": lambda: self.limit_memory(mib, mib * MIB),
            "memory, pieces": lambda: self.limit_memory(mib, min(PIECE_BYTES, mib * MIB // 4)),
            "tcp": lambda: self.limit_tcp(mib),
            "curve": lambda: self.limit_curve(mib),
            "memory fetch": lambda: self.fetch("memory", mib),
            "memory batch": lambda: self.batch("memory", mib),
            "socket fetch": lambda: self.fetch("socket", mib),
        }

    def seconds(self, mib: int, num_rounds: int) -> dict[str, list[float]]:
        """Of all ways, measured in turn; one more round before, to warm up."""
        took_s: dict[str, list[float]] = {}
        for _ in range(num_rounds + 1):
            for name, run in self.ways(mib).items():
                began_s = time.perf_counter()
                run()
                took_s.setdefault(name, []).append(time.perf_counter() - began_s)
                self.check(name, mib)
                self.store.clear(ids_of(mib))
        return {name: all_s[1:] for name, all_s in took_s.items()}

    def check(self, name: str, mib: int) -> None:
        """The last number is the one that was sent."""
        if name.endswith(("fetch", "batch")):
            (row,) = self.store.rows("x", ids_of(mib)[-1:])
            last = int(row[-1])
        else:
            last = int(self.target[: mib * MIB].view(np.int64)[-1])
        assert last == mib * MIB // 8 - 1, (name, last)


def meta_of(mib: int) -> SequenceMeta:
    return SequenceMeta(
        ids=ids_of(mib),
        seqlens={"x": ((mib * MIB // 8 // NUM_IDS,),) * NUM_IDS},
        dtypes={"x": "int64"},
        trailing_shapes={"x": ()},
    )


def tables(seconds: dict[int, dict[str, float]]) -> list[str]:
    """Markdown: GB/s (10^9 bytes), and ours as a fraction of the limit."""
    lines = [
        "| one host | limit, whole | limit, pieces | fetch | of the limit | batch | of the limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for mib, s in seconds.items():
        rate = {name: mib * MIB / took_s / 1e9 for name, took_s in s.items()}
        best = max(rate["memory, whole"], rate["memory, pieces"])
        ours = [rate["memory fetch"], rate["memory batch"]]
        shown = [rate["memory, whole"], rate["memory, pieces"]]
        cells = [f"{x:.2f} GB/s" for x in shown]
        cells += [text for x in ours for text in (f"{x:.2f} GB/s", f"{x / best:.0%}")]
        lines.append(f"| {mib} MiB | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| sockets | TCP | CURVE | fetch | of TCP | of CURVE |",
        "|---|---|---|---|---|---|",
    ]
    for mib, s in seconds.items():
        tcp, curve, ours_s = s["tcp"], s["curve"], s["socket fetch"]
        rates = " | ".join(f"{mib * MIB / x / 1e9:.2f} GB/s" for x in (tcp, curve, ours_s))
        lines.append(f"| {mib} MiB | {rates} | {tcp / ours_s:.0%} | {curve / ours_s:.0%} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keypairs = TrialKeypairs.generate()
    context = multiprocessing.get_context("spawn")
    link, other_end = context.Pipe()
    giver = context.Process(
        target=give, args=(other_end, args.sizes_mib, keypairs, args.threads), daemon=True
    )
    giver.start()
    taker = Taker(link, max(args.sizes_mib) * MIB, keypairs)
    took_s = {mib: taker.seconds(mib, args.rounds) for mib in args.sizes_mib}
    link.send(None)
    giver.join(20)
    for title, pick in (("Medians", statistics.median), ("Best", min)):
        chosen = {mib: {name: pick(s) for name, s in ways.items()} for mib, ways in took_s.items()}
        sys.stdout.write(
            "\n".join([f"{title} of {args.rounds} rounds", "", *tables(chosen), "", ""])
        )


if __name__ == "__main__":
    main()
