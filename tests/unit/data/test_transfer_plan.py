"""Which tensors a worker gets from whom: nothing it has, everything else once, owners balanced."""

import asyncio
import os
from collections import Counter
from itertools import product

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.api.data import SequenceMeta
from realsys.api.dataflow import MFCDef, build_graph
from realsys.api.errors import DataError
from realsys.api.model import (
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    ProcessTopology,
)
from realsys.data.packing import contiguous
from realsys.data.transfer.transfer_plan import plan_redistribution
from realsys.master.graph.buffer import AsyncIOSequenceBuffer
from realsys.master.graph.model_function_call import ModelFunctionCall
from realsys.master.graph.model_workers import RequestOrder
from realsys.master.graph.storage_tracker import StorageTracker
from realsys.master.graph.weight_hooks import WeightHooks
from realsys.transport.worker_requests import CallDone
from realsys.trial.records import WorkerRecord

KEYS, IDS = ("x", "y"), tuple("abcdef")
PROCESS = {"host": "n1", "pid": 7, "start": 9, "attempt": 1, "token": ""}


def plan(owners, *, consumer=0, keys=KEYS, ids=IDS, size=1):
    """``owners`` and ``size``: (key, id) → workers, bytes; a single value means everywhere."""
    found = plan_redistribution(
        {consumer: ids},
        keys=keys,
        owners=lambda k, i: frozenset(owners[k, i] if isinstance(owners, dict) else owners),
        num_bytes=lambda k, i: size[k, i] if isinstance(size, dict) else size,
        host_of=lambda w: 0,
    )
    return found[consumer]


def test_what_is_here_is_not_moved():
    assert plan({0, 1}) == ()


def test_one_owner_sends_all_in_one_request_a_key():
    assert plan({2}) == ((2, "x", IDS), (2, "y", IDS))


def test_owners_of_the_same_share_the_work():
    # One byte each, worker 1 first on a tie: a→1, b→2, c→1, d→2.
    assert plan({1, 2}, keys=["x"], ids="abcd") == ((1, "x", ("a", "c")), (2, "x", ("b", "d")))


def test_the_owner_asked_for_the_fewest_bytes_is_taken():
    size = {("x", "a"): 100, ("x", "b"): 10, ("x", "c"): 10, ("x", "d"): 10}
    # a → 1 (100 bytes); b, c, d → 2 (30 in all)
    assert plan({1, 2}, keys=["x"], ids="abcd", size=size) == (
        (1, "x", ("a",)),
        (2, "x", ("b", "c", "d")),
    )


def test_ids_keep_their_order():
    assert plan({1}, keys=["x"], ids=("c", "a", "b")) == ((1, "x", ("c", "a", "b")),)


def test_a_tensor_that_nobody_holds_is_named():
    owners = {(k, i): {1} for k in KEYS for i in IDS} | {("y", "c"): set()}
    with golden.raises(DataError):
        plan(owners)


# ---- all consumers of a call together ------------------------------------------------------------

LAYOUTS = [
    ProcessTopology(data=d, tensor=t, pipeline=p)
    for d, t, p in product(range(1, 9), repeat=3)
    if d * t * p <= 8
]
EVERY = 1 if os.environ.get("REALSYS_TESTS_ALL_LAYOUTS") else 3  # of all pairs, evenly
NAMES = tuple("abcdefghij")
SIZES = {(k, n): 1 + 7 * i % 5 + (k == "y") for k in KEYS for i, n in enumerate(NAMES)}


def redistribution(consumers, owners, *, keys=KEYS, size=1, host_of=lambda w: 0):
    return plan_redistribution(
        consumers,
        keys=keys,
        owners=lambda k, i: frozenset(owners[k, i] if isinstance(owners, dict) else owners),
        num_bytes=lambda k, i: size[k, i] if isinstance(size, dict) else size,
        host_of=host_of,
    )


def ids_per_worker(topo, first_worker, names):
    """All workers of a data-parallel slot see its part of ``names``."""
    parts = contiguous(len(names), topo.data)
    return {
        first_worker + rank: tuple(names[i] for i in parts[data])
        for data in range(topo.data)
        for rank in topo.slot(data)
    }


class Stores:
    """What every worker holds, as values that a transfer must not change."""

    def __init__(self):
        self.held = {}  # worker → (key, name) → value

    def keep(self, worker, key, names):
        self.held.setdefault(worker, {}).update({(key, n): f"{key} of {n}" for n in names})

    def owners(self):
        return {
            item: {w for w, held in self.held.items() if item in held}
            for item in product(KEYS, NAMES)
        }

    def run(self, topo, first_worker, names, *, host_of):
        """Plans a call's transfers, checks them against what each worker lacks, and carries them out."""
        needed, owners = ids_per_worker(topo, first_worker, names), self.owners()
        plan = redistribution(needed, owners, size=SIZES, host_of=host_of)
        assert plan.keys() == needed.keys()
        before = {worker: dict(held) for worker, held in self.held.items()}
        for worker, sources in plan.items():
            lacks = set(product(KEYS, needed[worker])) - before.get(worker, {}).keys()
            moved = [(source, (k, n)) for source, k, ids in sources for n in ids]
            # Exactly what it lacks, each once: so the bytes are the fewest that there can be.
            assert sorted(item for _, item in moved) == sorted(lacks)
            assert [(w, k) for w, k, _ in sources] == sorted({(w, k) for w, k, _ in sources})
            for source, item in moved:
                near = {w for w in owners[item] if host_of(w) == host_of(worker)}
                assert source in (near or owners[item])
                self.held.setdefault(worker, {})[item] = before[source][item]
        for worker, names_here in needed.items():
            for key, name in product(KEYS, names_here):
                assert self.held[worker][key, name] == f"{key} of {name}"


def produced_by(topo):
    """Stores after a call on workers 0…: inputs x on its whole slots, outputs y on their heads."""
    stores = Stores()
    for worker, names in ids_per_worker(topo, 0, NAMES).items():
        stores.keep(worker, "x", names)
        if worker in topo.data_parallel_heads():
            stores.keep(worker, "y", names)
    return stores


@pytest.mark.thorough
@pytest.mark.parametrize("producer", LAYOUTS, ids=str)
def test_every_consumer_of_any_layout_ends_with_its_rows_and_nothing_else_is_moved(producer):
    orders = (NAMES, NAMES[::-1], NAMES[3:8])
    starts = sorted({0, producer.world_size // 2, producer.world_size})  # the same, some, none
    index = LAYOUTS.index(producer)
    others = [
        consumer
        for number, consumer in enumerate(LAYOUTS)
        if (number + index + index // 8 + 2) % EVERY == 0
        or max(producer.world_size, consumer.world_size) <= 2
    ]
    for consumer, start, names in product(others, starts, orders):
        produced_by(producer).run(consumer, start, names, host_of=lambda w: w // 4)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_chain_of_calls_finds_its_rows(data):
    stores = produced_by(data.draw(st.sampled_from(LAYOUTS)))
    per_host = data.draw(st.integers(1, 8))
    for _ in range(3):
        topo, start = data.draw(st.sampled_from(LAYOUTS)), data.draw(st.integers(0, 8))
        names = data.draw(st.permutations(NAMES))
        stores.run(topo, start, names, host_of=lambda w: w // per_host)


def test_senders_are_balanced_over_all_consumers():
    # One byte for each of four consumers: each owner sends one, not the first owner all four.
    plan = redistribution(dict.fromkeys((4, 5, 6, 7), "a"), {0, 1, 2, 3}, keys=["x"])
    assert [sources[0][0] for sources in plan.values()] == [0, 1, 2, 3]


def test_a_tensor_with_one_owner_counts_before_it_is_asked_for_others():
    # b (9 bytes) is at 1 alone, so that a and c (5 each) come from 2, though a comes first.
    owners = {("x", "a"): {1, 2}, ("x", "b"): {1}, ("x", "c"): {1, 2}}
    size = {("x", "a"): 5, ("x", "b"): 9, ("x", "c"): 4}
    plan = redistribution({0: "abc"}, owners, keys=["x"], size=size)
    assert plan == {0: ((1, "x", ("b",)), (2, "x", ("a", "c")))}


def test_an_owner_on_the_same_host_is_preferred_however_busy():
    hosts = {0: "n1", 1: "n1", 2: "n2", 3: "n1"}
    plan = redistribution({0: "abcd", 3: "abcd"}, {1, 2}, keys=["x"], host_of=hosts.__getitem__)
    assert plan == {w: ((1, "x", tuple("abcd")),) for w in (0, 3)}


def test_who_has_all_is_sent_nothing_and_nothing_comes_twice():
    plan = redistribution({0: "abab", 1: "ab"}, {1}, keys=["x", "x"])
    assert plan == {0: ((1, "x", ("a", "b")),), 1: ()}


def test_a_tensor_that_nobody_holds_is_named_for_whomever_it_is():
    with golden.raises(DataError):
        redistribution({0: "ab"}, {("x", "a"): {0}, ("x", "b"): set()}, keys=["x"])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_owners_of_the_same_send_the_same_but_for_one_tensor(data):
    num_owners = data.draw(st.integers(1, 6))
    sizes = {(k, i): data.draw(st.integers(0, 50)) for k in KEYS for i in IDS}
    consumers = {
        w: data.draw(st.permutations(IDS)) for w in range(10, 10 + data.draw(st.integers(1, 5)))
    }
    plan = redistribution(consumers, set(range(num_owners)), size=sizes)
    sent = Counter(dict.fromkeys(range(num_owners), 0))
    for sources in plan.values():
        for worker, key, names in sources:
            sent[worker] += sum(sizes[key, name] for name in names)
    assert max(sent.values()) - min(sent.values()) <= max(sizes.values())
    assert plan == redistribution(consumers, set(range(num_owners)), size=sizes)  # deterministic


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_no_owner_of_a_tensor_would_have_been_less_busy(data):
    items = list(product(KEYS, IDS))
    owners = {item: data.draw(st.sets(st.integers(0, 4), min_size=1)) for item in items}
    sizes = {item: data.draw(st.integers(0, 9)) for item in items}
    plan = redistribution({8: IDS, 9: IDS}, owners, size=sizes)
    source = {(c, (k, n)): w for c, found in plan.items() for w, k, ids in found for n in ids}
    sent = Counter(dict.fromkeys(range(5), 0))
    for (_, item), worker in source.items():
        sent[worker] += sizes[item]
    # Largest first, of those that have a choice; the last that came to a worker came to the least busy.
    choices = [(c, item) for c in (8, 9) for item in items if len(owners[item]) > 1]
    last = {}
    for c, item in sorted(choices, key=lambda choice: -sizes[choice[1]]):
        last[source[c, item]] = item
    for worker, item in last.items():
        assert sent[worker] - sizes[item] <= min(sent[other] for other in owners[item])


# ---- who holds what -------------------------------------------------------------------------------


def meta(ids, key, rows, dtype="float32", trailing=()):
    return SequenceMeta(
        ids=tuple(ids),
        seqlens={key: tuple((n,) for n in rows)},
        dtypes={key: dtype},
        trailing_shapes={key: trailing},
    )


def test_the_tracker_knows_owners_and_sizes():
    storage = StorageTracker()
    storage.add(meta("ab", "x", (3, 5), trailing=(2,)), 1)
    storage.add(meta("a", "x", (3,), trailing=(2,)), 4)
    assert storage.owners("x", "a") == {1, 4}
    assert storage.owners("x", "b") == {1}
    assert storage.owners("y", "b") == frozenset()
    assert storage.num_bytes("x", "a") == 3 * 2 * 4


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("int64", 8), ("float64", 8), ("int32", 4), ("bfloat16", 2), ("float16", 2), ("bool", 1)],
)
def test_a_row_has_its_dtypes_bytes(dtype, size):
    storage = StorageTracker()
    storage.add(meta("a", "x", (7,), dtype), 0)
    assert storage.num_bytes("x", "a") == 7 * size


def test_used_datapoints_are_forgotten_on_all_who_hold_them():
    storage = StorageTracker()
    storage.add(meta("ab", "x", (1, 1)), 1)
    storage.add(meta("b", "y", (1,)), 2)
    assert storage.forget(["b", "unknown"]) == {1, 2}
    assert storage.owners("x", "b") == frozenset()
    assert storage.owners("x", "a") == {1}


class Recorder:
    """The connections' place: keeps requests, replies when told."""

    def __init__(self, count):
        self.records = [WorkerRecord(worker=f"model_worker/{i}", **PROCESS) for i in range(count)]
        self.sources, self.may_reply = {}, asyncio.Event()
        self.number = RequestOrder(count).number

    async def exchange(self, bodies, *, timeout_s, what):
        for request in bodies.values():
            self.sources[request.call] = request.sources
        await self.may_reply.wait()
        return {worker: CallDone() for worker in bodies}


def test_a_tensor_is_only_fetched_from_a_worker_that_has_it_already():
    """Worker 0 is still to fetch x from worker 1 when worker 2 needs it: 0 can't give it yet."""

    def call(name):
        return MFCDef(
            name=name,
            n_seqs=2,
            interface_type=ModelInterfaceType.INFERENCE,
            interface_impl=ModelInterfaceAbstraction("test"),
            model_name=ModelName(name),
            input_keys=("x",),
        )

    async def scenario():
        nodes = [call("on_0"), call("on_2")]
        buffer = AsyncIOSequenceBuffer(build_graph(nodes, dataset_keys=["x"]))
        storage, workers = StorageTracker(), Recorder(3)
        storage.add(meta("ab", "x", (3, 3)), 1)
        await buffer.put_batch(meta("ab", "x", (3, 3)))
        async with asyncio.TaskGroup() as group:
            for node, worker in zip(nodes, (0, 2), strict=True):
                runner = ModelFunctionCall(
                    node,
                    topo=ProcessTopology(),
                    placement={0: worker},
                    buffer=buffer,
                    storage=storage,
                    workers=workers,
                    hooks=WeightHooks([]),
                    on_change=lambda call, names: None,
                )
                group.create_task(runner.run(1), name=node.name)
            while len(workers.sources) < 2:
                await asyncio.sleep(0)
            workers.may_reply.set()
        return workers.sources, storage.owners("x", "a")

    sources, owners = asyncio.run(scenario())
    assert sources["on_0"] == ((1, "x", ("a", "b")),)
    assert sources["on_2"] == ((1, "x", ("a", "b")),)
    assert owners == {0, 1, 2}  # after their replies all three hold it
