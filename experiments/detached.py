"""``schedule=detached``: named makers and trainers with an explicit transmission graph.

    maker_0 ──experience──▶ trainer_0      trainers are the data-parallel ranks of actor, critic and
    maker_1 ──experience──▶    ┆           reference; a maker is a generation server with a rollout
        ◀───────weights────────┘           worker of its own

``makers`` and ``trainers`` define the edges; they are checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from experiments.asynchronous import OffPolicy
from realsys.api.errors import ConfigError, ConfigErrors, did_you_mean
from realsys.api.model import ProcessTopology
from realsys.api.options import option
from realsys.api.worker_configs import GenerationServer, GserverManager, MakerRoute, RolloutControl
from realsys.rollout.staleness.transmission import TransmissionGraph, balance, parse_graph

MIN_USED_SHARE = 0.5  # minimum used share of the makers' work; below it the graph is refused


@dataclass(frozen=True, kw_only=True)
class Detached(OffPolicy):
    """Makers sample, trainers train, each at its own pace within ``max_staleness``."""

    kind = "detached"

    makers: Mapping[str, str] = option(
        {"maker_0": "trainer_0", "maker_1": "trainer_0"},
        "maker → the trainers that it sends experience to, in turn",
    )
    trainers: Mapping[str, str] = option(
        {"trainer_0": "maker_0, maker_1"}, "trainer → the makers that it sends weights to"
    )
    experience_batch_size: int = option(
        32, "questions that a maker is at, at a time", unit="questions", ge=1
    )
    experience_steps: int | None = option(
        None,
        "batches of experience that a maker makes in the whole run; none: as many as are needed",
        ge=1,
    )
    buffer_limit: int | None = option(
        None,
        "questions that wait for one trainer at most, those in the making among them: a maker waits "
        "for room; none: as many as the staleness allows",
        ge=1,
    )
    update_steps: int = option(1, "training steps between two transmissions of weights", ge=1)
    maker_args: Mapping[str, Any] = option(
        {}, "maker → arguments of its engine, e.g. {maker_1: {quantize: int8}}; others: server_args"
    )

    @cached_property
    def graph(self) -> TransmissionGraph:
        """The checked graph. Raises ConfigErrors."""
        return parse_graph(self.makers, self.trainers, path="schedule.")

    @property
    def num_servers(self) -> int:
        """One a maker."""
        return len(self.graph.makers)

    @property
    def num_workers(self) -> int:
        """One a maker."""
        return len(self.graph.makers)

    @property
    def questions_per_worker(self) -> int:
        """``experience_batch_size``."""
        return self.experience_batch_size

    @property
    def default_layout(self) -> str:
        """One data-parallel rank a trainer."""
        return f"d{len(self.trainers) or 1}"

    def problems(self, *, batch_size: int, num_prompts: int | None) -> Iterator[ConfigError]:
        """Yields graphs that would deadlock or leave makers idle, and inconsistent numbers."""
        yield from super().problems(batch_size=batch_size, num_prompts=num_prompts)
        try:
            graph = self.graph
        except ConfigErrors as errors:
            yield from errors.problems
            return
        found = balance(graph)
        if found.used < MIN_USED_SHARE:
            yield ConfigError(
                f"trainers step together, and only {', '.join(found.feeding)} can supply "
                f"{', '.join(found.short)}: {1 - found.used:.0%} of the makers' capacity would be unused",
                where="schedule.makers",
                fix=f"let more makers send to {', '.join(found.short)}",
            )
        if self.update_steps > self.max_staleness + 1:
            yield ConfigError(
                f"the makers get new weights every {self.update_steps} steps, but max_staleness is "
                f"{self.max_staleness}: every answer would be too stale for the last of these steps",
                where="schedule.update_steps and schedule.max_staleness",
                fix=f"use max_staleness={self.update_steps - 1} or more, or update_steps="
                f"{self.max_staleness + 1} or less",
            )
        share = -(-batch_size // len(graph.trainers))
        if self.buffer_limit is not None and self.buffer_limit < share:
            yield ConfigError(
                f"a trainer needs {share} questions per step, but at most {self.buffer_limit} may wait",
                where="schedule.buffer_limit and train_bs_n_seqs",
                fix=f"use buffer_limit={share} or more, or none",
            )
        made = self._made
        if made is not None and num_prompts is not None and made < num_prompts:
            yield ConfigError(
                f"{len(graph.makers)} makers produce {made} questions together, but the run trains on "
                f"{num_prompts}",
                where="schedule.experience_steps",
                fix="use more steps, a larger experience_batch_size, or none",
            )
        for name in self.maker_args:
            if name not in self.makers:
                yield ConfigError(
                    f"no maker called {name!r}",
                    where="schedule.maker_args",
                    fix=did_you_mean(name, list(self.makers)),
                )

    @property
    def _made(self) -> int | None:
        if self.experience_steps is None:
            return None
        return len(self.makers) * self.experience_steps * self.experience_batch_size

    def layout_problems(
        self, trained: Mapping[str, ProcessTopology], *, backend: str
    ) -> Iterator[ConfigError]:
        """Yields trained roles that don't have one data-parallel rank a trainer, and makers without a part
        of the weights.
        """
        graph = self.graph
        for role, topology in trained.items():
            if topology.data != len(graph.trainers) or topology.world_size != topology.data:
                yield ConfigError(
                    f"{len(graph.trainers)} trainers are named, but {role} trains on {topology}: a trainer "
                    "is one data-parallel rank",
                    where=f"schedule.trainers and {role}.parallel",
                    fix=f"use {role}.parallel=d{len(graph.trainers)}, or leave it out",
                )
        if backend != "fsdp" or len(graph.trainers) < 2:
            return
        for maker in graph.makers:
            if missing := sorted(set(graph.trainers) - set(graph.sources(maker))):
                yield ConfigError(
                    f"{maker} gets no weights from {', '.join(missing)}, but with backend fsdp each "
                    f"trainer holds a part of them",
                    where="schedule.trainers",
                    fix=f"add {maker} to {', '.join(missing)}, or use actor.backend=megatron, whose "
                    "data-parallel ranks hold all of them",
                )

    def control(self) -> RolloutControl:
        """Builds the master's rollout settings: maker i is server i and rollout worker i."""
        graph, steps = self.graph, self.experience_steps
        rank = {trainer: i for i, trainer in enumerate(graph.trainers)}
        return replace(
            super().control(),
            update_steps=self.update_steps,
            buffer_limit=self.buffer_limit,
            makers=tuple(
                MakerRoute(
                    name=maker,
                    rollout_workers=(i,),
                    servers=(i,),
                    holders=tuple(rank[t] for t in graph.experience[maker]),
                    sources=tuple(rank[t] for t in graph.sources(maker)),
                    tickets=None if steps is None else steps * self.experience_batch_size,
                )
                for i, maker in enumerate(graph.makers)
            ),
        )

    def generation_servers(self, **of_run: Any) -> tuple[GenerationServer, ...]:
        """Builds one server a maker, with its own arguments."""
        (base, *_) = super().generation_servers(**of_run)
        return tuple(
            replace(base, backend_args={**base.backend_args, **dict(self.maker_args.get(m, {}))})
            for m in self.graph.makers
        )

    def manager(self, *, batch_size: int) -> GserverManager:
        """Builds the servers' manager: a rollout worker uses its own server."""
        routes = tuple((f"rollout_worker/{i}", (i,)) for i in range(self.num_workers))
        return replace(super().manager(batch_size=batch_size), routes=routes)
