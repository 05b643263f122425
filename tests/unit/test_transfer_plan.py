"""Which tensors a worker gets from whom: nothing it has, everything else once, owners balanced."""

import asyncio
from types import SimpleNamespace

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
from realsys.data_plane.transfer_plan import plan_transfers
from realsys.master.buffer import AsyncIOSequenceBuffer
from realsys.master.model_function_call import ModelFunctionCall
from realsys.master.storage_tracker import StorageTracker
from realsys.transport.requests import CallDone

KEYS, IDS = ("x", "y"), tuple("abcdef")


def plan(owners, *, consumer=0, keys=KEYS, ids=IDS, size=1):
    """``owners`` and ``size``: (key, id) → workers, bytes; a single value means everywhere."""
    return plan_transfers(
        consumer=consumer,
        keys=keys,
        ids=ids,
        owners=lambda k, i: frozenset(owners[k, i] if isinstance(owners, dict) else owners),
        num_bytes=lambda k, i: size[k, i] if isinstance(size, dict) else size,
    )


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
    with pytest.raises(DataError) as refused:
        plan(owners)
    assert refused.value.what == "no worker holds 'y' of datapoint 'c'"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_plan_moves_exactly_what_is_missing_and_is_balanced(data):
    items = [(k, i) for k in KEYS for i in IDS]
    owners = {item: data.draw(st.sets(st.integers(0, 4), min_size=1)) for item in items}
    size = {item: data.draw(st.integers(0, 9)) for item in items}
    consumer = data.draw(st.integers(0, 5))
    sources = plan(owners, consumer=consumer, size=size)

    source_of = {}
    for worker, key, ids in sources:
        for name in ids:
            assert (key, name) not in source_of, "moved twice"
            assert worker in owners[key, name]
            source_of[key, name] = worker
    assert set(source_of) == {item for item in items if consumer not in owners[item]}
    assert list(sources) == sorted(sources, key=lambda s: (s[0], s[1]))

    load = {w: sum(size[item] for item, s in source_of.items() if s == w) for w in range(5)}
    for worker in range(5):
        mine = [item for item in items if source_of.get(item) == worker]
        if mine:  # its last piece went to it only because no other owner had less
            last = mine[-1]
            assert all(load[worker] - size[last] <= load[other] for other in owners[last])


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
        self.records = [SimpleNamespace(worker=f"model_worker/{i}") for i in range(count)]
        self.sources, self.may_reply = {}, asyncio.Event()

    async def call(self, requests, *, timeout_s, what):
        for make in requests.values():
            request = make(order=0)
            self.sources[request.call] = request.sources
        await self.may_reply.wait()
        return {worker: CallDone() for worker in requests}


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
