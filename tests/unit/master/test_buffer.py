"""The sequence buffer: oldest first, each datapoint once to each call, cost by live samples."""

import asyncio
import random
import sys
from dataclasses import dataclass, field, replace

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import run_virtually

from realsys.api.data import SequenceMeta
from realsys.api.dataflow import MFCDef, build_graph
from realsys.api.errors import DataError, InternalError, WaitTimeout
from realsys.api.model import ModelInterfaceAbstraction, ModelInterfaceType, ModelName
from realsys.master.graph.buffer import AsyncIOSequenceBuffer
from realsys.master.graph.buffer_core import SequenceBufferCore

# gen reads prompts and makes answers; reward reads answers and makes scores; train reads both.
READS = {"gen": ("prompts",), "reward": ("answers",), "train": ("answers", "scores")}
MAKES = {"gen": "answers", "reward": "scores"}


def meta(ids, *keys, rows=1, **metadata):
    ids = tuple(ids)
    return SequenceMeta(
        ids=ids,
        seqlens={key: tuple((rows,) for _ in ids) for key in keys},
        dtypes=dict.fromkeys(keys, "int64"),
        trailing_shapes=dict.fromkeys(keys, ()),
        metadata=metadata,
    )


def core(n_seqs=2):
    return SequenceBufferCore(input_keys=READS, n_seqs=dict.fromkeys(READS, n_seqs))


# ---- the core -------------------------------------------------------------------------------------


def test_a_batch_has_the_calls_keys_and_the_metadata():
    buffer = core()
    buffer.put(meta("ab", "prompts", "extra", answer=("1", "2")))
    batch = buffer.take("gen")
    assert batch.keys == {"prompts"}
    assert batch.metadata == {"answer": ("1", "2")}


def test_reward_waits_for_answers_and_train_for_both():
    buffer = core()
    buffer.put(meta("ab", "prompts"))
    assert buffer.take("reward") is None
    buffer.amend(meta("ab", "answers"))
    assert buffer.take("reward").ids == ("a", "b")
    assert buffer.take("train") is None
    buffer.amend(meta("ab", "scores"))
    assert buffer.take("train").keys == {"answers", "scores"}


def test_an_id_that_left_may_come_again():
    buffer = core(n_seqs=1)
    for _ in range(2):
        buffer.put(meta("a", "prompts", "answers", "scores"))
        for call in READS:
            assert buffer.take(call).ids == ("a",)
        assert buffer.pop_used(["a"]) == ["a"]


def test_keys_for_a_datapoint_that_is_not_here_are_refused():
    buffer = core()
    with golden.raises(DataError):
        buffer.amend(meta("a", "answers"))


def test_a_key_is_made_once():
    buffer = core()
    buffer.put(meta("a", "prompts"))
    buffer.amend(meta("a", "answers"))
    with golden.raises(DataError):
        buffer.amend(meta("a", "answers"))


def test_an_id_that_is_here_is_refused_and_nothing_of_its_batch_is_kept():
    buffer = core()
    buffer.put(meta("a", "prompts"))
    with golden.raises(DataError):
        buffer.put(meta("ba", "prompts"))
    assert len(buffer) == 1


def test_dropping_what_is_not_here_is_our_mistake():
    with golden.raises(InternalError):
        core().pop_used(["zz"])


def test_a_reader_can_see_what_each_call_waits_for():
    buffer = core()
    buffer.put(meta("abc", "prompts"))
    buffer.amend(meta("a", "answers"))
    assert buffer.describe() == {"gen": "3/2", "reward": "1/2", "train": "0/2"}


def test_a_checkpoint_has_datapoints_of_one_state_together_and_gives_back_the_same():
    buffer = core()
    buffer.put(meta("abcde", "prompts", answer=tuple("12345")))
    assert buffer.take("gen").ids == ("a", "b")
    buffer.amend(meta("acd", "answers"))
    state = buffer.snapshot()
    kinds = [("a", "answers prompts", ("gen",)), ("b", "prompts", ("gen",))]
    kinds += [("cd", "answers prompts", ()), ("e", "prompts", ())]
    assert [("".join(m.ids), " ".join(sorted(m.keys)), had) for m, had in state] == kinds
    assert [m.metadata for m, _ in state] == [{"answer": tuple(t)} for t in ("1", "2", "34", "5")]
    resumed = core()
    for part, had in state:
        resumed.restore(part, had)
    assert resumed.snapshot() == state
    assert (
        resumed.describe() == buffer.describe() == {"gen": "3/2", "reward": "3/2", "train": "0/2"}
    )
    assert [resumed.take("gen").ids, resumed.take("reward").ids] == [("c", "d"), ("a", "c")]
    resumed.drop("cb")
    assert (len(resumed), resumed.describe()["reward"]) == (3, "1/2")


def test_datapoints_of_one_batch_are_of_one_kind():
    buffer = core()
    buffer.put(meta("a", "prompts"))
    buffer.put(replace(meta("b", "prompts"), dtypes={"prompts": "int32"}))
    with golden.raises(DataError):
        buffer.take("gen")


# ---- against brute force --------------------------------------------------------------------------


@dataclass
class Model:
    """The same by looking at everything each time."""

    n_seqs: dict[str, int]
    order: list[str] = field(default_factory=list)
    keys: dict[str, set[str]] = field(default_factory=dict)
    had: set[tuple[str, str]] = field(default_factory=set)

    def put(self, ids):
        self.order += ids
        self.keys |= {i: {"prompts"} for i in ids}

    def ready(self, call):
        return [
            i for i in self.order if {*READS[call]} <= self.keys[i] and (call, i) not in self.had
        ]

    def take(self, call):
        if len(self.ready(call)) < self.n_seqs[call]:
            return None
        batch = self.ready(call)[: self.n_seqs[call]]
        self.had |= {(call, i) for i in batch}
        return tuple(batch)

    def pop_used(self):
        used = [i for i in self.order if all((call, i) in self.had for call in READS)]
        self.order = [i for i in self.order if i not in used]
        return used


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), sizes=st.tuples(*[st.integers(1, 4)] * 3))
def test_any_interleaving_agrees_with_brute_force(seed, sizes):
    rng, n_seqs = random.Random(seed), dict(zip(READS, sizes, strict=True))
    buffer, model = SequenceBufferCore(input_keys=READS, n_seqs=n_seqs), Model(n_seqs)
    running: list[tuple[str, str]] = []  # (key, id): made by a call that has not replied yet
    born = 0
    for _ in range(60):
        action = rng.choice(["put", "take", "take", "take", "reply", "reply", "pop"])
        if action == "put":
            ids = [f"i{born + i}" for i in range(rng.randint(1, 4))]
            born += len(ids)
            buffer.put(meta(ids, "prompts"))
            model.put(ids)
        elif action == "take":
            call = rng.choice(list(READS))
            assert len(buffer._ready[call]) == len(model.ready(call))
            batch, expected = buffer.take(call), model.take(call)
            assert (batch.ids if batch else None) == expected
            if batch and call in MAKES:
                running += [(MAKES[call], i) for i in batch.ids]
        elif action == "reply" and running:
            key, name = running.pop(rng.randrange(len(running)))
            buffer.amend(meta([name], key))
            model.keys[name].add(key)
        else:
            here = list(model.order)
            assert buffer.pop_used(here) == model.pop_used()
            assert len(buffer) == len(model.order)


# ---- cost: lines run, not seconds -----------------------------------------------------------------


def lines_run(work) -> int:
    """Lines of the buffer's module that ``work`` runs."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if not frame.f_code.co_filename.endswith("buffer_core.py"):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def one_walk(buffer, ids):
    """One batch through all calls and out."""
    buffer.put(meta(ids, "prompts"))
    buffer.take("gen")
    buffer.amend(meta(ids, "answers"))
    buffer.take("reward")
    buffer.amend(meta(ids, "scores"))
    buffer.take("train")
    assert buffer.pop_used(ids) == list(ids)


def test_a_step_costs_the_same_after_hundreds_of_others():
    buffer = core(n_seqs=4)
    first = lines_run(lambda: one_walk(buffer, [f"0-{i}" for i in range(4)]))
    for step in range(1, 300):
        one_walk(buffer, [f"{step}-{i}" for i in range(4)])
    assert lines_run(lambda: one_walk(buffer, [f"last-{i}" for i in range(4)])) == first


def test_a_step_costs_the_same_beside_a_thousand_waiting_datapoints():
    buffer = core(n_seqs=4)
    alone = lines_run(lambda: one_walk(buffer, list("abcd")))
    crowded = core(n_seqs=4)
    crowded.put(meta([f"w{i}" for i in range(1000)], "other"))  # nobody can take these yet
    assert lines_run(lambda: one_walk(crowded, list("abcd"))) == alone


# ---- waiting --------------------------------------------------------------------------------------


def graph():
    def call(name):
        return MFCDef(
            name=name,
            n_seqs=2,
            interface_type=ModelInterfaceType.INFERENCE,
            interface_impl=ModelInterfaceAbstraction("test"),
            model_name=ModelName(name),
            input_keys=READS[name],
            output_keys=(MAKES[name],) if name in MAKES else (),
        )

    return build_graph([call(name) for name in READS], dataset_keys=["prompts"])


def test_a_waiting_call_wakes_when_its_last_key_comes():
    async def scenario():
        buffer = AsyncIOSequenceBuffer(graph())
        waiting = asyncio.create_task(buffer.get_batch_for_rpc("reward", timeout_s=60))
        await buffer.put_batch(meta("ab", "prompts"))
        await buffer.amend_batch(meta("b", "answers"))
        await asyncio.sleep(0)
        assert not waiting.done()
        await buffer.amend_batch(meta("a", "answers"))
        return await waiting

    assert asyncio.run(scenario()).ids == ("a", "b")


def test_independent_calls_wake_together():
    async def scenario():
        buffer = AsyncIOSequenceBuffer(graph())
        both = asyncio.gather(
            buffer.get_batch_for_rpc("gen", timeout_s=60),
            buffer.get_batch_for_rpc("reward", timeout_s=60),
        )
        await asyncio.sleep(0)
        await buffer.put_batch(meta("ab", "prompts", "answers"))
        return await both

    assert [batch.keys for batch in asyncio.run(scenario())] == [{"prompts"}, {"answers"}]


def test_a_batch_that_is_there_is_given_without_waiting():
    async def scenario():
        buffer = AsyncIOSequenceBuffer(graph())
        await buffer.put_batch(meta("ab", "prompts"))
        return await buffer.get_batch_for_rpc("gen", timeout_s=0)

    assert asyncio.run(scenario()).ids == ("a", "b")


def test_a_deadline_tells_how_far_every_call_is():
    async def scenario():
        buffer = AsyncIOSequenceBuffer(graph())
        await buffer.put_batch(meta("abc", "prompts"))
        await buffer.get_batch_for_rpc("reward", timeout_s=0.01)

    with golden.raises(WaitTimeout) as late:
        asyncio.run(scenario())
    for part in ("'gen': '3/2'", "'reward': '0/2'", "'train': '0/2'"):
        assert part in late.value.what


def test_a_call_waits_while_its_datapoints_are_on_their_way():
    """What loads them has a limit of its own: answers may arrive for longer than a call may take."""

    async def scenario():
        buffer = AsyncIOSequenceBuffer(graph())
        with buffer.loading():
            waiting = asyncio.create_task(buffer.get_batch_for_rpc("gen", timeout_s=60))
            await asyncio.sleep(1000)
            await buffer.put_batch(meta("ab", "prompts"))
        batch = await waiting
        with pytest.raises(WaitTimeout):
            await buffer.get_batch_for_rpc("reward", timeout_s=60)
        return batch.ids

    assert run_virtually(scenario()) == ("a", "b")


def test_after_a_deadline_the_buffer_goes_on():
    async def scenario():
        buffer = AsyncIOSequenceBuffer(graph())
        with pytest.raises(WaitTimeout):
            await buffer.get_batch_for_rpc("gen", timeout_s=0.01)
        await buffer.put_batch(meta("ab", "prompts"))
        batch = await buffer.get_batch_for_rpc("gen", timeout_s=60)
        return batch.ids, len(buffer), buffer.pop_used(["a", "b"])

    assert asyncio.run(scenario()) == (("a", "b"), 2, [])


def test_a_cancelled_wait_takes_nothing():
    async def scenario():
        buffer = AsyncIOSequenceBuffer(graph())
        waiting = asyncio.create_task(buffer.get_batch_for_rpc("gen", timeout_s=60))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await buffer.put_batch(meta("ab", "prompts"))
        return await buffer.get_batch_for_rpc("gen", timeout_s=60)

    assert asyncio.run(scenario()).ids == ("a", "b")
