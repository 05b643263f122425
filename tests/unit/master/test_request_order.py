"""Calls on overlapping workers never wait for one another in a circle, whatever order messages take."""

import asyncio
import itertools
import random
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.master.graph import model_workers
from realsys.master.graph.model_workers import ModelWorkers, RequestOrder
from realsys.model_worker.ordered_requests import OrderedRequests
from realsys.transport.worker_requests import Exit


@dataclass(frozen=True)
class Ask:
    call: int
    order: int


class Cluster:
    """Workers that take requests by number; a call, a collective, ends when all its workers run it."""

    def __init__(self, num_workers, meshes, *, by_number=True):
        self.meshes, self.by_number = meshes, by_number
        self.queues = [OrderedRequests() for _ in range(num_workers)]
        self.arrived = [[] for _ in range(num_workers)]
        self.running = [None] * num_workers
        self.done = set()

    def deliver(self, worker, ask):
        self.queues[worker].put(ask)
        self.arrived[worker].append(ask)
        self.settle()

    def settle(self):
        """Lets everything happen that can."""
        moved = True
        while moved:
            moved = False
            for worker, running in enumerate(self.running):
                if running is None and (ask := self.next_of(worker)) is not None:
                    self.running[worker], moved = ask.call, True
            for call, mesh in enumerate(self.meshes):
                if call not in self.done and all(self.running[w] == call for w in mesh):
                    self.done.add(call)
                    moved = True
                    for worker in mesh:
                        self.running[worker] = None

    def next_of(self, worker):
        if self.by_number:
            ordered = self.queues[worker].take(0.0)
            return ordered.request if ordered else None
        return self.arrived[worker].pop(0) if self.arrived[worker] else None


def numbered(num_workers, meshes):
    """(worker, request) of every call, numbered as the master does: a call's requests together."""
    order = RequestOrder(num_workers)
    messages = []
    for call, mesh in enumerate(meshes):
        requests = order.number({worker: partial(Ask, call) for worker in mesh})
        messages += requests.items()
    return messages


def run(num_workers, meshes, deliveries, **options):
    cluster = Cluster(num_workers, meshes, **options)
    for worker, ask in deliveries:
        cluster.deliver(worker, ask)
    return cluster.done


@pytest.mark.thorough
def test_every_order_of_delivery_of_overlapping_calls_ends():
    meshes = [(0, 1), (1, 2), (0, 2), (0, 1, 2)]
    messages = numbered(3, meshes[:3])
    for deliveries in itertools.permutations(messages):
        assert run(3, meshes[:3], deliveries) == {0, 1, 2}
    messages = numbered(3, [meshes[3], meshes[0], meshes[1]])
    for deliveries in itertools.permutations(messages):
        assert run(3, [meshes[3], meshes[0], meshes[1]], deliveries) == {0, 1, 2}


def test_without_numbers_some_order_is_a_deadlock():
    meshes = [(0, 1), (0, 1)]
    messages = numbered(2, meshes)
    ends = {
        len(run(2, meshes, deliveries, by_number=False))
        for deliveries in itertools.permutations(messages)
    }
    assert ends == {0, 2}, "the test can tell a deadlock from an end"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sets(st.integers(0, 7), min_size=1, max_size=8).map(tuple), min_size=1, max_size=12
    ),
    st.integers(0, 2**32),
)
def test_random_meshes_and_deliveries_end(meshes, seed):
    messages = numbered(8, meshes)
    random.Random(seed).shuffle(messages)
    assert run(8, meshes, messages) == set(range(len(meshes)))


def test_workers_are_asked_by_number_and_answer_in_the_order_of_their_index(monkeypatch):
    log = []

    class Client:
        def __init__(self, control, *, peer_name, **_):
            self.name = peer_name

        def open(self):
            log.append(("open", self.name))

        async def close(self):
            log.append(("close", self.name))

        async def call(self, body, *, timeout_s, what):
            log.append((self.name, body, timeout_s, what))
            return f"{self.name} did"

        def fail(self, reason):
            log.append((self.name, reason))

    monkeypatch.setattr(model_workers, "RequestClient", Client)
    monkeypatch.setattr(
        model_workers, "client_context", lambda num: SimpleNamespace(term=lambda: None)
    )
    records = [SimpleNamespace(control="", worker=f"w{i}") for i in range(3)]

    async def main():
        async with ModelWorkers(records, sender="master") as workers:
            assert len(workers) == 3
            some = await workers.call(
                {2: partial(Ask, 7), 0: partial(Ask, 7)}, timeout_s=5, what="run"
            )
            every = await workers.call_all(partial(Ask, 8), timeout_s=6, what="all")
            await workers.say_exit(timeout_s=1)
            workers.fail("w1", "gone")
            return some, every

    some, every = asyncio.run(main())
    assert some == {2: "w2 did", 0: "w0 did"}
    assert every == ["w0 did", "w1 did", "w2 did"]
    assert log == [
        *(("open", f"w{i}") for i in range(3)),
        ("w2", Ask(7, order=0), 5, "run"),
        ("w0", Ask(7, order=0), 5, "run"),
        *((f"w{i}", Ask(8, order=int(i != 1)), 6, "all") for i in range(3)),
        *((f"w{i}", Exit(), 1, "exit") for i in range(3)),
        ("w1", "gone"),
        *(("close", f"w{i}") for i in range(3)),
    ]
