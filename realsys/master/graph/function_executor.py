"""Walks the dataflow graph once per step: loads data and runs every call as soon as its inputs exist.

Independent calls run at the same time because nothing here orders them. With a staleness of 1, loading
and generation of step i + 1 are issued before the rest of step i: they use the weights that step i starts
from, and run beside its training if they are on other workers.

With dynamic sampling the calls up to the rewards run in rounds first, until the step has its batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TypeVar

from realsys.api.basics.reward import MEAN_REWARD
from realsys.api.data import SequenceMeta
from realsys.api.dataflow import DataflowGraph
from realsys.api.errors import ConfigError
from realsys.api.model import ModelInterfaceType, ModelName
from realsys.master.graph.buffer import AsyncIOSequenceBuffer
from realsys.master.graph.dynamic_sampling import BatchNotFilled, DynamicSampling, SampledBatch
from realsys.master.graph.feeds import Feed
from realsys.master.graph.idle import Span, idle_shares
from realsys.master.graph.master_state import PrefetchedStep
from realsys.master.graph.model_function_call import CallReport, ModelFunctionCall
from realsys.master.graph.model_workers import ModelWorkers
from realsys.master.graph.storage_tracker import StorageTracker
from realsys.master.graph.weight_hooks import WeightHooks
from realsys.runtime.first_error import first_error
from realsys.transport.worker_requests import ClearData

CLEAR_TIMEOUT_S = 60.0
REFRESH_TIMEOUT_S = 1800.0
REWARDS = "rewards"  # the rule's, also beside a reward model


AfterCall = Callable[[str, int], Awaitable[None]]
_T = TypeVar("_T")


@dataclass(frozen=True)
class StepReport:
    """One walk over the graph."""

    step: int  # from 1
    started: float
    ended: float
    calls: dict[str, CallReport]
    ids: tuple[str, ...]  # datapoints that every call has had
    idle: Mapping[str, float] = field(default_factory=dict)  # pool of workers → share of the step
    sampled: SampledBatch | None = None  # with dynamic sampling

    @property
    def wall_s(self) -> float:
        """Seconds from the first request to the last reply."""
        return self.ended - self.started


@dataclass
class _IssuedStep:
    """A step whose first calls have been issued."""

    ids: asyncio.Future[tuple[str, ...]]
    calls: dict[str, asyncio.Future[CallReport]]
    sampled: SampledBatch | None = None


class FunctionExecutor:
    """Runs the graph. Its calls share one buffer. Use as ``async with``: it owns prefetched calls.

    Args:
        after_call: awaited when a call of a step is done, with its name and the step.
        sampling: chooses the questions of a step that it trains on; None: it trains on all.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        *,
        calls: list[ModelFunctionCall],
        buffer: AsyncIOSequenceBuffer,
        storage: StorageTracker,
        workers: ModelWorkers,
        hooks: WeightHooks,
        feed: Feed,
        after_call: AfterCall | None,
        pools: Mapping[str, tuple[int, ...]],
        max_staleness: int,
        last_step: int,
        sampling: DynamicSampling | None = None,
    ) -> None:
        self.graph, self._buffer = graph, buffer
        self._calls = {c.call.name: c for c in calls}
        self._storage, self._workers, self._hooks = storage, workers, hooks
        self._feed, self._after_call = feed, after_call
        self._pools, self._last_step = pools, last_step
        self._first_calls = prefetchable_calls(graph) if max_staleness else ()
        self._sampling = sampling
        self._begun: dict[int, _IssuedStep] = {}
        self._spans: list[Span] = []
        self._clearing: asyncio.Task[None] | None = None
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> FunctionExecutor:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        async with first_error():
            await self._tasks.__aexit__(kind, error, trace)

    async def run_step(self, step: int) -> StepReport:
        """Runs every call once, on the datapoints of step ``step`` (from 1)."""
        started = time.time()
        now = self._begun.pop(step, None) or await self._begin(step)
        if self._first_calls and step < self._last_step:
            self._begun[step + 1] = await self._begin(step + 1)
        rest = [name for name in self._calls if name not in now.calls]
        running = {**now.calls, **{name: self._start(name, step) for name in rest}}
        calls = {name: await running[name] for name in self._calls}
        ended = time.time()
        used = self._buffer.pop_used(await now.ids)
        await self._forget(used, step)
        await self._feed.trained(step)
        self._spans = [span for span in self._spans if span[2] > started]
        idle = idle_shares(self._spans, self._pools, start=started, end=ended)
        return StepReport(step, started, ended, calls, tuple(used), idle, now.sampled)

    async def _begin(self, step: int) -> _IssuedStep:
        """Loads a step's data and issues its prefetchable calls; returns when all are numbered."""
        if self._sampling is not None:
            return await self._fill(self._sampling, step)
        issued = {name: asyncio.Event() for name in self._first_calls}
        begun = _IssuedStep(
            self._tasks.create_task(self.load_data(step), name=f"load data {step}"),
            {name: self._start(name, step, issued[name]) for name in self._first_calls},
        )
        for event in issued.values():
            await event.wait()
        return begun

    async def _fill(self, sampling: DynamicSampling, step: int) -> _IssuedStep:
        """Asks questions in rounds until the buffer has those that the step trains on, and no others."""
        calls = calls_to_rewards(self.graph)
        runs: dict[str, tuple[CallReport, ...]] = dict.fromkeys(calls, ())
        sampling.begin(step)
        while sampling.batch is None:
            try:
                asked = await self.load_data(step)
            except BatchNotFilled:  # the checkpoint that follows has nothing of this step
                await self._drop(sampling.kept, step)
                raise
            started = {name: self._start(name, step, n_seqs=len(asked)) for name in calls}
            for name, task in started.items():
                runs[name] += (await task,)
            left_out = sampling.answered(mean_rewards(runs[calls[-1]][-1]))
            await self._drop(left_out, step)
        reports = {name: _known(replace(of[-1], earlier=of[:-1])) for name, of in runs.items()}
        return _IssuedStep(_known(sampling.batch.trained), reports, sampling.batch)

    async def _drop(self, ids: Sequence[str], step: int) -> None:
        self._buffer.drop(ids)
        await self._forget(ids, step)

    def _start(
        self,
        name: str,
        step: int,
        issued: asyncio.Event | None = None,
        *,
        n_seqs: int | None = None,
    ) -> asyncio.Task[CallReport]:
        running = self._run(name, step, issued, n_seqs)
        return self._tasks.create_task(running, name=f"{name} {step}")

    async def _run(
        self, name: str, step: int, issued: asyncio.Event | None, n_seqs: int | None
    ) -> CallReport:
        report = await self._calls[name].run(step, issued=issued, n_seqs=n_seqs)
        if self._after_call is not None:
            await self._after_call(name, step)
        self._spans += [(w, reply.started, reply.ended) for w, reply in report.replies.items()]
        for moved in report.moves.values():
            self._spans += [(w, move.started, move.ended) for w, move in moved.items()]
        return report

    async def load_data(self, step: int) -> tuple[str, ...]:
        """Loads this step's datapoints into the buffer; returns their ids."""
        with self._buffer.loading():
            held = await self._feed.load(step)
        for meta, worker in held:
            self._storage.add(meta, worker)
        whole = SequenceMeta.gather([meta for meta, _ in held])
        await self._buffer.put_batch(whole)
        return whole.ids

    async def _forget(self, ids: Sequence[str], step: int) -> None:
        """Makes the workers drop tensors, beside the next step; returns when the previous step's are
        dropped."""
        holders = sorted(self._storage.forget(ids))
        clear = ClearData(ids=tuple(ids))
        await self._cleared()
        self._clearing = self._tasks.create_task(
            self._workers.tell(holders, clear, timeout_s=CLEAR_TIMEOUT_S, what="clear data"),
            name=f"clear data {step}",
        )

    async def _cleared(self) -> None:
        if self._clearing is not None:
            await self._clearing

    async def refresh(self, models: Iterable[ModelName], *, step: int) -> None:
        """Updates the weights of ``models``, as the hooks of their calls would."""
        for model in models:
            for movement in self._hooks.refresh(model, self.graph.nodes, step=step):
                await self._workers.call(
                    movement.requests, timeout_s=REFRESH_TIMEOUT_S, what=movement.what
                )

    # ---- what has run ahead, for a checkpoint -------------------------------------------------

    async def prefetched(self) -> PrefetchedStep | None:
        """Returns the state of the prefetched step, after waiting for its prefetched calls.

        Also waits until the workers have dropped tensors of finished steps, since theirs go into the
        checkpoint.
        """
        await self._cleared()
        if not self._begun:
            return None
        ((step, begun),) = self._begun.items()
        ids = await begun.ids
        calls = {name: await task for name, task in begun.calls.items()}
        return PrefetchedStep(
            step=step,
            ids=ids,
            calls=calls,
            buffer=self._buffer.snapshot(),
            storage=self._storage.snapshot(),
        )

    def restore_prefetched(self, prefetched: PrefetchedStep) -> None:
        """Restores what ``prefetched`` returned; before the first step."""
        self._buffer.restore(prefetched.buffer)
        self._storage.restore(prefetched.storage)

        self._begun[prefetched.step] = _IssuedStep(
            _known(prefetched.ids), {n: _known(c) for n, c in prefetched.calls.items()}
        )


def _known(value: _T) -> asyncio.Future[_T]:
    future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


def prefetchable_calls(graph: DataflowGraph) -> tuple[str, ...]:
    """Returns the calls that may run a step ahead: generation that reads only the data set."""
    return tuple(
        node.name for node in graph.sources if node.interface_type is ModelInterfaceType.GENERATE
    )


def calls_to_rewards(graph: DataflowGraph) -> tuple[str, ...]:
    """Returns the call that makes the rule's rewards, as the last, and all that it depends on.

    Raises:
        ConfigError: no call makes them.
    """
    last = graph.producers.get(REWARDS)
    if last is None:
        raise ConfigError(
            f"no call makes {REWARDS!r}, by which dynamic sampling chooses",
            where="schedule.success_range",
            fix="leave it out, or give the algorithm a call with that output key",
        )
    needed = {last}
    for level in reversed(graph.levels):
        for name in needed.intersection(level):
            needed |= graph.parents[name]
    return tuple(name for level in graph.levels for name in level if name in needed)


def mean_rewards(report: CallReport) -> dict[str, float | None]:
    """Returns the mean reward of each datapoint's answers, from the run of the call that scored them.

    Raises:
        ConfigError: its interface does not report it.
    """
    found: dict[str, float | None] = {}
    for reply in report.replies.values():
        if reply.is_head and reply.meta is not None:
            means = reply.meta.metadata.get(MEAN_REWARD, ())
            found |= zip(reply.meta.ids, means, strict=False)
    if len(found) != len(report.ids):
        raise ConfigError(
            f"call {report.name} does not report mean rewards, by which dynamic sampling chooses",
            where="schedule.success_range",
            fix=f"put them into the metadata of its output, as {MEAN_REWARD!r}",
        )
    return found
