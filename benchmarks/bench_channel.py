"""Measures round trips of small control messages: the channel against bare ZeroMQ REQ/REP, in one run.

``python benchmarks/bench_channel.py [calls]`` prints p50 and p99 of both, their ratio, and calls per
second with 100 calls in flight. Both ends of the channel run in one event loop, each end of REQ/REP
in its own thread, on the loopback interface; only the channel encrypts, checks and de-duplicates.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import threading
import time

import msgspec
import zmq

from realsys.transport.channel import RequestClient, RequestServer, client_context
from realsys.transport.curve_keys import TrialKeypairs


class Ping(msgspec.Struct, frozen=True, tag=True):
    text: str


def bare_round_trips_s(num_calls: int) -> list[float]:
    with zmq.Context() as context, context.socket(zmq.REP) as rep, context.socket(zmq.REQ) as req:
        port = rep.bind_to_random_port("tcp://127.0.0.1")
        req.connect(f"tcp://127.0.0.1:{port}")

        def serve() -> None:
            for _ in range(num_calls):
                rep.send(rep.recv())

        server = threading.Thread(target=serve, name="bare server")
        server.start()
        took_s = []
        for _ in range(num_calls):
            began_s = time.perf_counter()
            req.send(b"x" * 100)
            req.recv()
            took_s.append(time.perf_counter() - began_s)
        server.join()
    return took_s


async def channel_round_trips_s(num_calls: int) -> tuple[list[float], float]:
    """Round trips one after another, then calls per second with 100 in flight."""
    keypairs, context = TrialKeypairs.generate(), client_context()
    took_s = []

    async def echo(request: Ping) -> Ping:
        return request

    async with RequestServer(
        name="server", trial="bench/1", attempt=1, keypairs=keypairs, request_type=Ping
    ) as server:
        serving = asyncio.create_task(server.serve(echo), name="server")
        async with RequestClient(
            server.endpoint,
            peer_name="server",
            sender="client",
            trial="bench/1",
            attempt=1,
            keypairs=keypairs,
            reply_type=Ping,
            context=context,
        ) as client:
            ping = Ping("x" * 100)
            await client.call(ping, timeout_s=10, what="connect")
            for _ in range(num_calls):
                began_s = time.perf_counter()
                await client.call(ping, timeout_s=10, what="ping")
                took_s.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            for _ in range(num_calls // 100):
                calls = (client.call(ping, timeout_s=10, what="ping") for _ in range(100))
                await asyncio.gather(*calls)
            per_second = num_calls // 100 * 100 / (time.perf_counter() - began_s)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    context.term()
    return took_s, per_second


def main() -> None:
    num_calls = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    bare_s = bare_round_trips_s(num_calls)
    channel_s, per_second = asyncio.run(channel_round_trips_s(num_calls))
    lines = []
    for name, took_s in (("bare REQ/REP", bare_s), ("channel", channel_s)):
        p50_us = statistics.median(took_s) * 1e6
        p99_us = statistics.quantiles(took_s, n=100)[98] * 1e6
        lines.append(f"{name:14} p50 {p50_us:7.0f} us   p99 {p99_us:7.0f} us")
    ratio = statistics.median(channel_s) / statistics.median(bare_s)
    lines.append(f"ratio of p50 {ratio:.1f}   calls/s with 100 in flight {per_second:.0f}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
