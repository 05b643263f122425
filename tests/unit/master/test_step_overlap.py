"""The order in which a step's calls are issued, with and without a step ahead, and a resume between."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import golden
import msgspec
import pytest

from realsys.api.data import SequenceMeta
from realsys.api.dataflow import MFCDef, ParamReallocHook, build_graph
from realsys.api.model import (
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    ModelShardID,
    ProcessTopology,
)
from realsys.api.worker_configs import DynamicSamplingControl
from realsys.master.graph.buffer import AsyncIOSequenceBuffer
from realsys.master.graph.data_schedule import Datapoint, DataSchedule
from realsys.master.graph.dynamic_sampling import BatchNotFilled, DynamicSampling
from realsys.master.graph.feeds import StoredFeed
from realsys.master.graph.function_executor import FunctionExecutor
from realsys.master.graph.idle import pools_of
from realsys.master.graph.master_state import (
    Delivered,
    MasterState,
    PrefetchedStep,
    Rollouts,
    read_state,
)
from realsys.master.graph.model_function_call import ModelFunctionCall
from realsys.master.graph.model_workers import RequestOrder
from realsys.master.graph.storage_tracker import StorageTracker
from realsys.master.graph.weight_hooks import WeightHooks
from realsys.transport import worker_requests as rq

BATCH, STEPS = 2, 4
COPY = ModelName("actor", 1)
ONE = ProcessTopology()
SHARDS = tuple(
    (ModelShardID(model_name=name, topo=ONE), worker)
    for name, worker in ((ModelName("actor"), 0), (COPY, 1), (ModelName("reward"), 0))
)


def call(name, model, kind, reads, makes=(), **hooks):
    return MFCDef(
        name=name,
        n_seqs=BATCH,
        interface_type=ModelInterfaceType(kind),
        interface_impl=ModelInterfaceAbstraction("test"),
        model_name=model,
        input_keys=reads,
        output_keys=makes,
        **hooks,
    )


CALLS = (
    call(
        "gen",
        COPY,
        "generate",
        ("prompts",),
        ("answers",),
        pre_hooks=(ParamReallocHook(source=ModelName("actor")),),
    ),
    call("rew", ModelName("reward"), "inference", ("answers",), ("rewards",)),
    call("train", ModelName("actor"), "train_step", ("answers", "rewards")),
)


def meta(ids, key):
    return SequenceMeta(
        ids=tuple(ids),
        seqlens={key: ((1,),) * len(ids)},
        dtypes={key: "int64"},
        trailing_shapes={key: ()},
    )


class Workers:
    """The connections' place: answers at once, and keeps what was asked in the order of numbering."""

    def __init__(self, num=2):
        self.records = [
            SimpleNamespace(worker=f"model_worker/{i}", host="here") for i in range(num)
        ]
        self.order, self.log = RequestOrder(num), []

    def number(self, requests):
        bodies = self.order.number(requests)
        body = next(iter(bodies.values()))
        what = "weights" if isinstance(body, rq.Reallocate) else getattr(body, "call", "fetch")
        self.log.append((what, getattr(body, "step", None)))
        return bodies

    async def call(self, requests, *, timeout_s, what):
        return await self.exchange(self.number(requests), timeout_s=timeout_s, what=what)

    async def exchange(self, bodies, *, timeout_s, what):
        for _ in range(3):
            await asyncio.sleep(0)
        return {worker: self.answer(body) for worker, body in bodies.items()}

    def answer(self, body):
        if isinstance(body, rq.Fetch):
            return rq.Fetched(meta=meta(body.ids, "prompts"))
        if isinstance(body, rq.Reallocate):
            return rq.Moved(started=0.0, ended=0.0)
        made = {"gen": "answers", "rew": "rewards"}.get(body.call)
        found = meta(body.meta.ids, made) if made else None
        if body.call == "rew":
            found = replace(found, metadata={"mean_reward": self.rewards(body.meta.ids)})
        return rq.CallDone(meta=found, kept=found is not None, stats={"x": float(body.step)})

    def rewards(self, ids):
        return (0.5,) * len(ids)

    async def tell(self, workers, body, *, timeout_s, what):
        pass


def make_executor(workers, max_staleness, sampling=None):
    graph = build_graph(CALLS, dataset_keys=["prompts"])
    buffer, storage, hooks = AsyncIOSequenceBuffer(graph), StorageTracker(), WeightHooks(SHARDS)
    placement = {shard.model_name: worker for shard, worker in SHARDS}
    schedule = DataSchedule(dataset_size=100, batch_size=BATCH, seed=1, shuffle=False)
    calls = [
        ModelFunctionCall(
            node,
            topo=ONE,
            placement={0: placement[node.model_name]},
            buffer=buffer,
            storage=storage,
            workers=workers,
            hooks=hooks,
            on_change=lambda name, names: None,
        )
        for node in graph.nodes
    ]
    return FunctionExecutor(
        graph,
        calls=calls,
        buffer=buffer,
        storage=storage,
        workers=workers,
        hooks=hooks,
        feed=StoredFeed(
            sampling.ask if sampling else schedule.indexed_ids, workers, data_workers=[1]
        ),
        after_call=None,
        pools=pools_of(SHARDS),
        max_staleness=max_staleness,
        last_step=STEPS,
        sampling=sampling,
    )


async def run_steps(executor, steps):
    async with executor:
        return [await executor.run_step(step) for step in steps]


def issued(max_staleness):
    workers = Workers()
    asyncio.run(run_steps(make_executor(workers, max_staleness), range(1, STEPS + 1)))
    return [entry for entry in workers.log if entry[0] != "fetch"]


def test_without_staleness_a_step_ends_before_the_next_begins():
    steps = [entry[1] for entry in issued(0)]
    assert steps == sorted(steps)


def test_with_staleness_one_generation_is_issued_before_the_training_of_the_step_before():
    log = issued(1)
    for step in range(1, STEPS):
        assert log.index(("gen", step + 1)) < log.index(("rew", step))
        assert log.index(("rew", step)) < log.index(("train", step))
    weights = [step for what, step in log if what == "weights"]
    assert weights == [1, 3, 4], (
        "step 2 is generated with the first weights, as nothing was trained"
    )
    for step in (3, 4):  # never two trainings behind
        trained = [s for what, s in log[: log.index(("weights", step))] if what == "train"]
        assert trained == list(range(1, step - 1))


def test_each_step_has_its_own_datapoints():
    reports = asyncio.run(run_steps(make_executor(Workers(), 1), range(1, STEPS + 1)))
    assert [r.ids for r in reports] == [
        ("0-0", "0-1"),
        ("0-2", "0-3"),
        ("0-4", "0-5"),
        ("0-6", "0-7"),
    ]
    assert [r.calls["gen"].stats["x"] for r in reports] == [1.0, 2.0, 3.0, 4.0]


class SlowToForget(Workers):
    """Drops tensors when it is let."""

    def __init__(self):
        super().__init__()
        self.may_drop, self.dropped = asyncio.Event(), []

    async def tell(self, workers, body, *, timeout_s, what):
        await self.may_drop.wait()
        self.dropped += body.ids


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_tensors_are_dropped_beside_the_next_step_and_before_a_checkpoint(max_staleness):
    async def main():
        workers = SlowToForget()
        async with make_executor(workers, max_staleness) as executor:
            async with asyncio.timeout(60):
                await executor.run_step(1)  # ends without them
            checkpoint = asyncio.create_task(executor.prefetched())
            await asyncio.sleep(0.01)
            assert not checkpoint.done()
            workers.may_drop.set()
            await checkpoint
            assert workers.dropped == ["0-0", "0-1"]
            await executor.run_step(2)
        assert workers.dropped == ["0-0", "0-1", "0-2", "0-3"]

    asyncio.run(main())


def test_a_step_waits_until_those_of_the_step_before_are_dropped():
    async def main():
        workers = SlowToForget()
        async with make_executor(workers, 0) as executor:
            await executor.run_step(1)
            second = asyncio.create_task(executor.run_step(2))
            async with asyncio.timeout(60):
                while ("train", 2) not in workers.log:
                    await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            assert not second.done()
            workers.may_drop.set()
            await second

    asyncio.run(main())


def test_a_run_goes_on_with_what_had_run_ahead(tmp_path):
    async def first():
        executor = make_executor(Workers(), 1)
        async with executor:
            for step in (1, 2):
                await executor.run_step(step)
            return await executor.prefetched()

    ahead = asyncio.run(first())
    assert ahead.step == 3
    (tmp_path / "master.json").write_bytes(msgspec.json.encode(MasterState(ahead=ahead)))
    assert read_state(tmp_path / "master.json").ahead == ahead
    assert msgspec.json.decode(msgspec.json.encode(ahead), type=PrefetchedStep) == ahead

    async def second():
        workers = Workers()
        executor = make_executor(workers, 1)
        executor.restore_prefetched(ahead)
        return await run_steps(executor, (3, 4)), workers.log

    reports, log = asyncio.run(second())
    assert [r.ids for r in reports] == [("0-4", "0-5"), ("0-6", "0-7")]
    assert ("gen", 3) not in log, "step 3 was generated before the resume"
    assert log.index(("gen", 4)) < log.index(("train", 3))


def test_a_worker_keeps_what_was_delivered_to_it_and_without_rollouts_all():
    delivered = tuple(
        Delivered(number=i, holder=holder, meta=meta([name], "answers"))
        for i, (name, holder) in enumerate([("a", 0), ("b", 1), ("c", 0)])
    )
    state = MasterState(rollouts=Rollouts(ledger={}, delivered=delivered, dataset_size=3))
    assert [state.kept(worker) for worker in range(3)] == [("a", "c"), ("b",), ()]
    assert MasterState().kept(0) is None


def test_nothing_has_run_ahead_without_staleness():
    async def run():
        executor = make_executor(Workers(), 0)
        async with executor:
            await executor.run_step(1)
            return await executor.prefetched()

    assert asyncio.run(run()) is None


def test_the_first_error_of_what_runs_ahead_comes_out_as_itself():
    class Failing(Workers):
        def answer(self, body):
            if getattr(body, "call", "") == "gen" and body.step == 2:
                raise LookupError("generation failed")
            return super().answer(body)

    with golden.raises(LookupError):
        asyncio.run(run_steps(make_executor(Failing(), 1), (1, 2)))


def test_a_call_over_several_ranks_tells_each_its_part_and_knows_who_holds_what_after_it():
    asked, changes, topo = {}, [], ProcessTopology(data=2, tensor=2)
    gen = call("gen", COPY, "generate", ("prompts",), ("answers",))
    graph = build_graph([gen], dataset_keys=["prompts"])

    class Ranks(Workers):
        async def exchange(self, bodies, *, timeout_s, what):
            asked.update({worker: (body.meta.ids, body.sources) for worker, body in bodies.items()})
            replies = await super().exchange(bodies, timeout_s=timeout_s, what=what)
            return {  # worker 0 keeps nothing, as ranks of a pipeline's other stages
                w: msgspec.structs.replace(reply, kept=w > 0, stats={"of": float(w)})
                for w, reply in replies.items()
            }

    async def main():
        buffer, storage, ids = AsyncIOSequenceBuffer(graph), StorageTracker(), list("abcde")
        await buffer.put_batch(meta(ids, "prompts"))
        storage.add(meta(ids, "prompts"), 3)
        run = ModelFunctionCall(
            gen,
            topo=topo,
            placement={rank: 3 - rank for rank in range(4)},
            buffer=buffer,
            storage=storage,
            workers=Ranks(4),
            hooks=WeightHooks(()),
            on_change=lambda *change: changes.append(change),
        )
        issued = asyncio.Event()
        report = await run.run(7, issued=issued, n_seqs=5)
        assert issued.is_set()
        return report, storage

    report, storage = asyncio.run(main())
    ab, cde = tuple("ab"), tuple("cde")
    assert asked == {
        3: (ab, ()),
        2: (ab, ((3, "prompts", ab),)),
        1: (cde, ((3, "prompts", cde),)),
        0: (cde, ((3, "prompts", cde),)),
    }
    held = {
        (key, name): storage.owners(key, name) for key in ("prompts", "answers") for name in "ac"
    }
    assert held == {
        ("prompts", "a"): {2, 3},
        ("prompts", "c"): {0, 1, 3},
        ("answers", "a"): {2, 3},
        ("answers", "c"): {1},
    }
    names = tuple(f"model_worker/{i}" for i in (3, 2, 1, 0))
    assert changes == [("gen", names), ("gen", ())]
    assert (report.name, report.stats, report.ids) == ("gen", {"of": 3.0}, tuple("abcde"))
    assert sorted(report.replies) == [0, 1, 2, 3]


# ---- dynamic sampling: rounds of a step ----------------------------------------------------------


class Scoring(Workers):
    """Gives each question its reward, and keeps which tensors were dropped and what was trained on."""

    def __init__(self, rewards):
        super().__init__()
        self.by_index, self.dropped, self.trained = rewards, [], []

    def rewards(self, ids):
        return tuple(self.by_index[int(name.partition("-")[2])] for name in ids)

    def answer(self, body):
        if getattr(body, "call", "") == "train":
            self.trained.append(body.meta.ids)
        return super().answer(body)

    async def tell(self, workers, body, *, timeout_s, what):
        self.dropped += body.ids


def sampling_of(most=4):
    control = DynamicSamplingControl(lowest=0.1, highest=0.9, max_gen_batches=most)
    return DynamicSampling(
        lambda step, number: Datapoint(0, number), control=control, batch_size=BATCH
    )


def test_the_calls_up_to_the_rewards_run_in_rounds_and_the_others_once_on_what_was_kept():
    workers = Scoring([0.5, 0.0, 1.0, 0.5, 0.5, 0.5])
    reports = asyncio.run(run_steps(make_executor(workers, 0, sampling_of()), (1, 2)))
    assert workers.trained == [("0-0", "0-3"), ("0-4", "0-5")]
    first, second = reports
    assert first.ids == ("0-0", "0-3")
    assert [run.ids for run in first.calls["gen"].runs] == [("0-0", "0-1"), ("0-2", "0-3")]
    assert first.calls["gen"].runs[-1] is not first.calls["gen"].runs[0]
    assert len(first.calls["train"].runs) == 1
    assert first.sampled.filtered == ("0-1", "0-2")
    assert second.sampled.filtered == ()
    calls = [entry for entry in workers.log if entry[0] not in ("fetch", "weights")]
    rounds = [("gen", 1), ("rew", 1)]
    assert calls == [*rounds, *rounds, ("train", 1), ("gen", 2), ("rew", 2), ("train", 2)]
    assert [step for what, step in workers.log if what == "weights"] == [1, 2], "once a step"
    assert sorted(workers.dropped) == [f"0-{i}" for i in range(6)]


def test_given_back_questions_are_asked_again_by_the_next_weights():
    workers = Scoring([0.0, 0.5, 0.5, 0.5, 0.0, 0.5, 0.5])
    reports = asyncio.run(run_steps(make_executor(workers, 0, sampling_of()), (1, 2)))
    assert workers.trained == [("0-1", "0-2"), ("0-3", "0-5")]
    assert reports[0].sampled.returned == ("0-3",)
    assert reports[1].sampled.filtered == ("0-4",)
    assert workers.dropped.count("0-3") == 2


def test_a_batch_that_does_not_fill_leaves_nothing_behind():
    async def main():
        workers, sampling = Scoring([0.5] + [0.0] * 7), sampling_of(most=3)
        async with make_executor(workers, 0, sampling) as executor:
            with pytest.raises(BatchNotFilled):
                await executor.run_step(1)
            assert await executor.prefetched() is None
            assert sorted(workers.dropped) == [f"0-{i}" for i in range(6)]
            assert len(executor._buffer) == 0
            return sampling.snapshot()

    state = asyncio.run(main())
    assert [point.index for point in state.returned] == list(range(6))
