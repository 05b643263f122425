"""Weights from a trainer to a generation server over a network, beside a bare TCP socket, in one run.

    sudo python benchmarks/bench_weight_network.py [--mib 1024] [--rounds 9]

Two processes in network namespaces of their own, joined by a veth pair, which are made and removed here:
this needs root. In turn, in each round, on the same bytes:

- *bare TCP*: one connection, ``sendall`` and ``recv_into`` in pieces of 1 MiB, into memory that is there
  already; nothing is checked or encrypted;
- *channel*: ``TensorClient.stream`` of all buckets by the sealed stream (AES-256-GCM) into memory that is
  there already; requests and headers under CURVE count, checksums and putting together do not;
- *fetch*: ``WeightReceiver.fetch``, what a generation server does: lists, sealed buckets, their checksums,
  whole tensors by name in host memory that its neighbours can read; nothing of an earlier version is taken
  over;
- *publish and fetch*: with the trainer's copy and checksums before it;
- *a second server* of the same host, afterwards: it gets the same tensors from the first, and nothing over
  the network.

Prints medians, and the median of the rounds' ratios to bare TCP in the same round.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from realsys.data.transfer.sealed_receiver import TensorSink
from realsys.data.transfer.tensor_client import TensorClient
from realsys.data.transfer.tensor_server import TensorServer
from realsys.data.transfer.tensor_store import TensorStore
from realsys.transport.curve_keys import TrialKeypairs
from realsys.transport.generation_messages import WeightPart, WeightSource
from realsys.weights.layouts.boxes import Box
from realsys.weights.sync.buffer_pool import BufferPool
from realsys.weights.sync.host_share import HostShare
from realsys.weights.sync.manifest import KEY, decode_manifest
from realsys.weights.sync.plan_publish import plan_publish
from realsys.weights.sync.publisher import WeightPublisher
from realsys.weights.sync.receiver import WeightReceiver

sys.path.insert(0, __file__.rpartition("/")[0])
import bench_weight_sync

MIB = 1 << 20
GIVER, TAKER = "10.213.7.1", "10.213.7.2"
CLONE_NEWNET = 0x40000000
WHO: dict[str, Any] = {"trial": "bench/1", "attempt": 1}
WAYS = ("bare TCP", "channel", "fetch", "publish and fetch", "a second server")


@contextmanager
def two_networks() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces with a cable between them; gone afterwards."""
    names = tuple(f"realsys-{os.getpid()}-{side}" for side in "ab")
    ends = tuple(f"rs{os.getpid() % 10**6}{side}" for side in "ab")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, (GIVER, TAKER), strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]
    finally:
        for name in names:  # and with them the cable
            subprocess.run(["ip", "netns", "del", name], check=False)


def enter(network: str) -> None:
    """Moves this thread, and those that it starts, into a network namespace."""
    fd = os.open(f"/var/run/netns/{network}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(fd)


def give(link: Connection, network: str, mib: int, keypairs: TrialKeypairs) -> None:
    """The trainer: publishes when told, and plays the bare socket's sender."""
    enter(network)
    torch.set_num_threads(1)
    store = TensorStore()
    server = TensorServer(
        TensorStore(),
        name="model_worker/0",
        published={KEY: store},
        keypairs=keypairs,
        host=GIVER,
        **WHO,
    ).start()
    weights = bench_weight_sync.weights_of(mib)
    layout = ({w.name: (Box.whole(w.shape),) for w in weights},)
    giving = plan_publish(layout, [0], dtypes={w.name: "bfloat16" for w in weights})
    publisher = WeightPublisher(store, giving, model="m", worker=0)
    engine = bench_weight_sync.Engine(weights)
    listener = socket.create_server((GIVER, 0))
    link.send((server.endpoint, listener.getsockname()[1]))
    tcp, _ = listener.accept()
    source = memoryview(np.ones(mib * MIB, np.uint8))
    while (order := link.recv()) is not None:
        if order == "tcp":
            for start in range(0, len(source), MIB):
                tcp.sendall(source[start : start + MIB])
            continue
        engine.train(1.0)
        said = publisher.publish(engine, order)
        link.send((said.name, said.seconds, said.num_bytes))
    server.stop()


def take(link: Connection, to_giver: Connection, network: str, mib: int, rounds: int) -> None:
    """The generation server; sends the seconds of all ways, round by round."""
    enter(network)
    torch.set_num_threads(1)
    keypairs = link.recv()
    endpoint, port = to_giver.recv()
    tcp = socket.create_connection((GIVER, port))

    def client(endpoints: tuple[str, ...]) -> TensorClient:
        # Both are on this machine in truth: what is measured is the way between hosts.
        return TensorClient(endpoints, keypairs=keypairs, may_share=False, **WHO)

    def share(fetch: Any) -> HostShare:
        return HostShare(keypairs, attempt="1", fetch=fetch)

    receiver, second = (WeightReceiver(client, share=share) for _ in range(2))
    single = client((endpoint,))
    memory = BufferPool()
    target = memoryview(np.ones(mib * MIB, np.uint8))
    for version in range(1, rounds + 2):
        to_giver.send(version)
        name, published_s, num_bytes = to_giver.recv()
        took_s = {}

        began_s = time.perf_counter()
        to_giver.send("tcp")
        got = 0
        while got < len(target):
            got += tcp.recv_into(target[got : got + MIB])
        took_s["bare TCP"] = (time.perf_counter() - began_s) * num_bytes / (mib * MIB)

        (listed,) = single.fetch(0, KEY, [name], timeout_s=60)
        rows = [given.row for given in decode_manifest(listed.numpy().tobytes()).buckets]
        began_s = time.perf_counter()
        for _ in single.stream(
            [(0, KEY, (row,)) for row in rows],
            timeout_s=120,
            in_flight=3,
            sink_for=lambda source, num_bytes: TensorSink(memory.allocate(num_bytes)),
        ):
            pass
        took_s["channel"] = time.perf_counter() - began_s

        part = WeightPart(endpoint=endpoint, name=name)
        began_s = time.perf_counter()
        found = receiver.fetch(WeightSource(version=version, parts=(part,)), timeout_s=120)
        took_s["fetch"] = time.perf_counter() - began_s
        took_s["publish and fetch"] = published_s + took_s["fetch"]
        began_s = time.perf_counter()
        same = second.fetch(WeightSource(version=version, parts=(part,)), timeout_s=120)
        took_s["a second server"] = time.perf_counter() - began_s
        assert second.num_bytes == 0
        assert all(float(x.view(-1)[-1]) == float(same[n].view(-1)[-1]) for n, x in found.items())
        expected = -1.0 if version % 2 else 1.0
        assert all(float(x.view(-1)[-1]) == expected for x in found.values())
        assert sum(x.numel() * x.element_size() for x in found.values()) == num_bytes
        del found, same
        if version > 1:  # the first one warms up
            link.send((num_bytes, took_s))
    to_giver.send(None)
    receiver.close()
    second.close()
    single.close()


def measure(mib: int, rounds: int) -> tuple[int, list[dict[str, float]]]:
    """Bytes of a version, and seconds by way for each round."""
    context = multiprocessing.get_context("spawn")
    keypairs = TrialKeypairs.generate()
    with two_networks() as (giver_network, taker_network):
        giver_end, to_giver = context.Pipe()
        taker_end, link = context.Pipe()
        processes = [
            context.Process(target=give, args=(giver_end, giver_network, mib, keypairs)),
            context.Process(target=take, args=(taker_end, to_giver, taker_network, mib, rounds)),
        ]
        for process in processes:
            process.start()
        giver_end.close(), taker_end.close(), to_giver.close()
        try:
            link.send(keypairs)
            found = [link.recv() for _ in range(rounds)]
            for process in processes:
                process.join(30)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return found[0][0], [took_s for _, took_s in found]


def table(num_bytes: int, rounds: list[dict[str, float]]) -> list[str]:
    """Markdown: GB/s (10^9 bytes), and the ratio to bare TCP of the same round."""
    lines = ["| | GB/s | of bare TCP | least … most |", "|---|---:|---:|---:|"]
    for way in WAYS:
        rate = num_bytes / statistics.median(took_s[way] for took_s in rounds) / 1e9
        ratios = sorted(took_s["bare TCP"] / took_s[way] for took_s in rounds)
        middle = statistics.median(ratios)
        lines.append(f"| {way} | {rate:.2f} | {middle:.0%} | {ratios[0]:.0%} … {ratios[-1]:.0%} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    num_bytes, rounds = measure(args.mib, args.rounds)
    sys.stdout.write("\n".join(table(num_bytes, rounds)) + "\n")


if __name__ == "__main__":
    main()
