"""Measures thousands of workers on one small etcd: registration, waiting, lease renewal, stop requests.

    python benchmarks/bench_registration.py [--workers 1000] [--watchers 1000,4000]

Starts an etcd of its own (on disk, synced) and plays the workers in two processes: each has its own lease
and its two keys, written and renewed as its heartbeat process does (worker_keys.py, lease_validity.py). A
third process plays the master, which waits for all, and the supervisor, which looks each second. The
workers share ``--connections`` connections; real ones have one each.
Goals: 1,000 workers ready in 30 s, 10,000 in 120 s, and nobody lost.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "etcd"))

from etcd_server import EtcdCluster

from realsys.api.errors import LeaseLost, StoreError
from realsys.heartbeat.heartbeat_messages import Init
from realsys.heartbeat.worker_keys import WorkerKeys
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.lease_validity import (
    RENEWALS_PER_TTL,
    LeaseStatus,
    LeaseValidity,
    lease_ttl_s,
)
from realsys.name_resolve.open import open_store
from realsys.name_resolve.store import EventKind, Lease, NameResolve
from realsys.supervisor.health.worker_leases import WorkerLeases
from realsys.trial.records import AttemptRecord, WorkerRecord, WorkerStatus, dumps

KEYS = TrialKeys(cluster="here", user="anna", experiment="bench", trial="registration")
ATTEMPT = AttemptRecord(
    number=1, token="ours", host="here", supervisor_pid=1, supervisor_start=1, started_at=0.0
)
TYPE = "model_worker"
PROCESSES, THREADS = 4, 8
DEADLINE_S = 600.0
GOODBYES = 50
WATCHERS = 100
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Client:
    """One worker: what its heartbeat process knows of it."""

    index: int
    keys: WorkerKeys
    due_s: float = 0.0
    lease: Lease | None = None
    judge: LeaseValidity | None = None

    def register(self, ttl_s: float) -> None:
        sent_s = time.monotonic()
        record = WorkerRecord(
            worker=f"{TYPE}/{self.index}",
            host=f"node{self.index // 8}",
            pid=1000 + self.index,
            start=1,
            attempt=1,
            token=ATTEMPT.token,
            control="tcp://10.11.12.13:40000",
            data="tcp://10.11.12.13:40001",
        )
        status = WorkerStatus(state="ready", attempt=1, token=ATTEMPT.token)
        self.lease = self.keys.register(record, status, ttl_s=ttl_s)
        self.judge = LeaseValidity(self.lease.ttl_s, granted_s=sent_s)

    def leave(self) -> float:
        """Says goodbye; returns when it began to."""
        began_s = time.monotonic()
        self.keys.deregister(WorkerStatus(state="done", attempt=1, token=ATTEMPT.token))
        return began_s


@dataclass
class Tally:
    """What a process of workers counts."""

    registered: int = 0
    renewals_s: list[float] = field(default_factory=list)
    unrenewed_s: float = 0.0  # the longest that anybody went
    suspended: int = 0
    lost: int = 0
    errors: list[str] = field(default_factory=list)


class Fleet:
    """Workers of one process, driven by a few threads: registering, then renewing in turn."""

    def __init__(self, url: str, indices: Sequence[int], *, ttl_s: float, connections: int):
        stores = [open_store(url) for _ in range(connections)]
        self.ttl_s, self.tally = ttl_s, Tally()
        self.clients = {i: Client(i, worker_keys(stores[i % connections], i)) for i in indices}
        # All pauses are equal, so that who renewed first is due first.
        self._joining, self._renewing = deque(self.clients.values()), deque[Client]()
        self._lock = threading.Lock()

    def start(self) -> None:
        for _ in range(THREADS):
            threading.Thread(target=self._run, daemon=True).start()

    def renew_rest(self) -> Tally:
        """What was counted since the last call."""
        with self._lock:
            tally, self.tally = self.tally, Tally(registered=self.tally.registered)
        return tally

    def _run(self) -> None:
        while True:
            client = self._next()
            if client is None:
                time.sleep(0.005)
            elif client.lease is None:
                self._try(client, lambda client=client: client.register(self.ttl_s))
                self.tally.registered += client.lease is not None
            else:
                time.sleep(max(0.0, client.due_s - time.monotonic()))
                self._try(client, lambda client=client: self._renew(client))

    def _next(self) -> Client | None:
        with self._lock:
            renewing = self._renewing
            if renewing and (renewing[0].due_s <= time.monotonic() or not self._joining):
                return renewing.popleft()
            return self._joining.popleft() if self._joining else None

    def _try(self, client: Client, deed: Any) -> None:
        try:
            deed()
        except LeaseLost:
            self.tally.lost += 1
            return
        except StoreError as error:
            self.tally.errors.append(error.what)
        with self._lock:
            if client.lease is None:
                self._joining.append(client)
                return
            assert client.judge is not None
            client.due_s = client.judge.renewed_s + self.ttl_s / RENEWALS_PER_TTL
            self._renewing.append(client)

    def _renew(self, client: Client) -> None:
        assert client.lease is not None
        assert client.judge is not None
        sent_s = time.monotonic()
        self.tally.unrenewed_s = max(self.tally.unrenewed_s, sent_s - client.judge.renewed_s)
        self.tally.suspended += client.judge.lease_status(sent_s) is not LeaseStatus.VALID
        client.lease.keep_alive()
        self.tally.renewals_s.append(time.monotonic() - sent_s)
        client.judge.renewed(sent_s)


def worker_keys(store: NameResolve, index: int) -> WorkerKeys:
    begin = Init(
        worker_type=TYPE,
        index=index,
        pid=os.getpid(),
        attempt=1,
        token=ATTEMPT.token,
        store_url="",
        keys=KEYS,
        attempt_dir="",
    )
    return WorkerKeys(store, begin)


def play_workers(end: Connection, url: str, indices: Sequence[int], **how: Any) -> None:
    """A process of workers. Answers "start", "tally" and the index of a worker that shall leave."""
    fleet = Fleet(url, indices, **how)
    end.send("open")
    while (order := end.recv()) is not None:
        if order == "start":
            fleet.start()
        elif order == "tally":
            end.send(fleet.renew_rest())
        else:
            end.send(fleet.clients[order].leave())


def play_watchers(end: Connection, url: str, count: int, *, connections: int) -> None:
    """Watchers of the stop key by NameResolve. Tells when the first of them heard of it, and the last.

    Two threads each, which wake up ten times a second: a process holds a few hundred at most.
    """
    stores = [open_store(url) for _ in range(connections)]
    first = stores[0].revision() + 1
    watches = [stores[i % connections].watch(KEYS.stop, from_revision=first) for i in range(count)]
    while not all(watch.is_connected for watch in watches):
        time.sleep(0.05)
    end.send("watching")
    heard_s = []
    for watch in watches:
        events = watch.poll(DEADLINE_S)
        assert [event.key for event in events] == [KEYS.stop], events
        heard_s.append(time.monotonic())
    end.send((heard_s[0], heard_s[-1]))
    os._exit(0)  # hundreds of threads need long to say goodbye


def play_streams(end: Connection, url: str, count: int, *, connections: int) -> None:
    """As ``play_watchers``, with etcd's streams alone in one event loop: for their number."""
    asyncio.run(follow_streams(end, url.removeprefix("etcd://"), count, connections=connections))
    os._exit(0)


async def follow_streams(end: Connection, target: str, count: int, *, connections: int) -> None:
    from grpc import aio

    from realsys.name_resolve.etcd import protocol

    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [aio.insecure_channel(target, options) for _ in range(connections)]
    create = protocol.WatchCreateRequest(key=f"/{KEYS.stop}".encode(), prev_kv=True)
    request, method = protocol.WatchRequest(create_request=create), protocol.WATCH
    calls = [
        channels[i % connections].unary_stream(method.path, method.to_bytes, method.from_bytes)
        for i in range(count)
    ]
    streams = [call(request) for call in calls]
    assert all([(await stream.read()).created for stream in streams])
    end.send("watching")

    async def heard(stream: Any) -> float:
        reply = await stream.read()
        assert reply.events, reply
        return time.monotonic()

    heard_s = await asyncio.gather(*(heard(stream) for stream in streams))
    end.send((min(heard_s), max(heard_s)))


class Usage:
    """CPU and memory of etcd between two looks."""

    def __init__(self, pid: int) -> None:
        self._pid, self._cpu_s, self._at_s = pid, self._used_s(pid), time.monotonic()

    def text(self) -> str:
        share = (self._used_s(self._pid) - self._cpu_s) / (time.monotonic() - self._at_s)
        status = Path(f"/proc/{self._pid}/status").read_text()
        rss_mib = int(status.partition("VmRSS:")[2].split()[0]) / 1024
        return f"{share:.0%} of a core, {rss_mib:.0f} MiB"

    @staticmethod
    def _used_s(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def row(name: str, value: str) -> None:
    say(f"  {name:58} {value}")


class Players:
    """The processes that play workers or watchers, and the pipes to them."""

    def __init__(self, target: Any, all_args: Sequence[tuple[Any, ...]], **how: Any) -> None:
        context = multiprocessing.get_context("spawn")  # gRPC does not live through a fork
        self.ends, self.processes = [], []
        for args in all_args:
            here, there = context.Pipe()
            process = context.Process(target=target, args=(there, *args), kwargs=how, daemon=True)
            process.start()
            self.ends.append(here)
            self.processes.append(process)

    def hear(self) -> list[Any]:
        """The next answer of each."""
        for end in self.ends:
            if not end.poll(DEADLINE_S):
                raise TimeoutError("a process of the benchmark does not answer")
        return [end.recv() for end in self.ends]

    def tell(self, order: object) -> None:
        for end in self.ends:
            end.send(order)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def bench_workers(
    url: str,
    etcd_pid: int,
    num_workers: int,
    *,
    connections: int,
    steady_s: float,
    look_every_s: float,
) -> None:
    store, ttl_s = open_store(url), lease_ttl_s(num_workers)
    store.clear_subtree(KEYS.root)
    store.add(KEYS.attempt, dumps(ATTEMPT))
    shares = [(url, range(i, num_workers, PROCESSES)) for i in range(PROCESSES)]
    players = Players(play_workers, shares, ttl_s=ttl_s, connections=connections // PROCESSES)
    try:
        players.hear()
        say(f"{num_workers} workers, ttl {ttl_s:g} s, {connections} connections")
        usage, began_s = Usage(etcd_pid), time.monotonic()
        players.tell("start")
        store.wait([KEYS.worker(TYPE, i) for i in range(num_workers)], timeout_s=DEADLINE_S)
        waited_s = time.monotonic() - began_s
        leases = WorkerLeases(store, KEYS, ATTEMPT, judges_leases=True, has_left=lambda task: False)
        looks_s = [look_s(leases)]
        while (
            len(ready := [s for s in leases.statuses.values() if s.state == "ready"]) < num_workers
        ):
            assert time.monotonic() - began_s < DEADLINE_S, f"{len(ready)} are ready"
            looks_s.append(look_s(leases))
        row("all registered, as the master waits for them", f"{waited_s:.1f} s")
        row("all ready, as the supervisor reads it", f"{time.monotonic() - began_s:.1f} s")
        row("etcd meanwhile", usage.text())
        first = sum_of(players)
        bench_steady(
            store,
            leases,
            players,
            num_workers,
            etcd_pid,
            steady_s=steady_s,
            look_every_s=look_every_s,
        )
        assert not first.lost, f"{first.lost} lost while others registered"
        row("longest without a renewal while others registered", f"{first.unrenewed_s:.1f} s")
        bench_goodbyes(store, players, num_workers)
    finally:
        players.end()
        store.close()


def bench_steady(
    store: NameResolve,
    leases: WorkerLeases,
    players: Players,
    num_workers: int,
    etcd_pid: int,
    *,
    steady_s: float,
    look_every_s: float,
) -> None:
    ttl_s = lease_ttl_s(num_workers)
    time.sleep(ttl_s)  # until the burst of the beginning is over
    sum_of(players)
    usage, began_s, looks_s, missed = Usage(etcd_pid), time.monotonic(), [], set[str]()
    while time.monotonic() - began_s < steady_s:
        looks_s.append(look_s(leases))
        missed |= set(leases.detector.gone_since_s)
        time.sleep(max(0.0, look_every_s - looks_s[-1]))
    took_s, tally = time.monotonic() - began_s, sum_of(players)
    expected = num_workers / (ttl_s / RENEWALS_PER_TTL)
    row("etcd in steady state", usage.text())
    row(
        "renewals a second; workers / (ttl / renewals a ttl)",
        f"{len(tally.renewals_s) / took_s:.0f}; {expected:.0f}",
    )
    p50_s, p99_s = (percentile(tally.renewals_s, share) for share in (0.5, 0.99))
    row("a renewal, p50 / p99", f"{1e3 * p50_s:.1f} / {1e3 * p99_s:.1f} ms")
    row("longest without a renewal; suspended from", f"{tally.unrenewed_s:.1f}; {0.8 * ttl_s:g} s")
    row(
        "lost / suspended / missed by the supervisor",
        f"{tally.lost} / {tally.suspended} / {len(missed)}",
    )
    row("failed calls", str(len(tally.errors)) + (f": {tally.errors[0]}" if tally.errors else ""))
    row("a look of the supervisor, median", f"{1e3 * statistics.median(looks_s):.0f} ms")


def bench_goodbyes(store: NameResolve, players: Players, num_workers: int) -> None:
    took_s = []
    with store.watch(KEYS.workers) as watch:
        for index in range(0, num_workers, max(1, num_workers // GOODBYES)):
            end = players.ends[index % PROCESSES]
            end.send(index)
            (event,) = watch.poll(10.0)
            now_s = time.monotonic()
            assert (event.kind, event.key) == (EventKind.DELETE, KEYS.worker(TYPE, index)), event
            took_s.append(now_s - end.recv())
    p50_s, p99_s = (percentile(took_s, share) for share in (0.5, 0.99))
    row(
        "from a goodbye to the master's event, p50 / p99",
        f"{1e3 * p50_s:.1f} / {1e3 * p99_s:.1f} ms",
    )


def bench_fan_out(url: str, etcd_pid: int, count: int, *, connections: int) -> None:
    store, how = open_store(url), {"connections": connections // PROCESSES}
    store.delete(KEYS.stop, missing_ok=True)
    groups = [
        Players(play, [(url, number // PROCESSES) for _ in range(PROCESSES)], **how)
        for play, number in ((play_watchers, WATCHERS), (play_streams, count - WATCHERS))
        if number
    ]
    try:
        for players in groups:
            players.hear()
        time.sleep(2.0)
        usage, began_s = Usage(etcd_pid), time.monotonic()
        store.add(KEYS.stop, b"stop")
        say(f"{count} watchers of the stop key, {WATCHERS} of them NameResolve's: first / last")
        for name, players in zip(("NameResolve's", "streams alone"), groups, strict=False):
            times = players.hear()
            first_s, last_s = min(first for first, _ in times), max(last for _, last in times)
            row(name, f"{1e3 * (first_s - began_s):.0f} / {1e3 * (last_s - began_s):.0f} ms")
        row("etcd", usage.text().partition(", ")[2])
    finally:
        for players in groups:
            players.end()
        store.close()


def look_s(leases: WorkerLeases) -> float:
    """How long one look of the supervisor takes."""
    began_s = time.monotonic()
    found = leases._read()
    leases.statuses = found.statuses
    present = {worker: record.host for worker, record in found.records.items()}
    verdict = leases.detector.look(
        present, now_s=time.monotonic(), asked_s=began_s, leases=found.leases
    )
    assert not verdict.lost
    return time.monotonic() - began_s


def sum_of(players: Players) -> Tally:
    players.tell("tally")
    tallies: list[Tally] = players.hear()
    return Tally(
        registered=sum(t.registered for t in tallies),
        renewals_s=[s for t in tallies for s in t.renewals_s],
        unrenewed_s=max(t.unrenewed_s for t in tallies),
        suspended=sum(t.suspended for t in tallies),
        lost=sum(t.lost for t in tallies),
        errors=[e for t in tallies for e in t.errors],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = lambda text: [int(n) for n in text.split(",") if n]  # noqa: E731
    parser.add_argument("--workers", type=numbers, default=[1000])
    parser.add_argument("--watchers", type=numbers, default=[1000, 4000])
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--steady-s", type=float, default=30.0)
    parser.add_argument("--look-every-s", type=float, default=1.0, help="of the supervisor")
    options = parser.parse_args()
    flags = {"unsafe-no-fsync": "false", "election-timeout": 1000, "heartbeat-interval": 100}
    with EtcdCluster(Path(tempfile.mkdtemp()) / "etcd", flags=flags) as etcd:
        pid = etcd.members[0].pid
        for num_workers in options.workers:
            bench_workers(
                etcd.url,
                pid,
                num_workers,
                connections=options.connections,
                steady_s=options.steady_s,
                look_every_s=options.look_every_s,
            )
        for count in options.watchers:
            bench_fan_out(etcd.url, pid, count, connections=options.connections)
        say("load average of this machine " + " ".join(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()
