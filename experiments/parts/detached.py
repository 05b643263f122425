"""Settings for makers, trainers and their transmission graph (pure).

A maker is a generation server with its own rollout worker; a trainer is one data-parallel rank of the
trained models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from realsys.api.errors import ConfigError, did_you_mean
from realsys.api.options import option
from realsys.api.worker_configs import GenerationServer, MakerRoute, RolloutControl, RolloutWorker
from realsys.rollout.staleness.transmission import TransmissionGraph, balance, parse_graph

MIN_USED_SHARE = 0.5  # minimum used share of the makers' work; below it the graph is refused


@dataclass(frozen=True, kw_only=True)
class DetachedOptions:
    """Transmission graph and buffer limits."""

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
        {}, "maker → arguments of its engine, e.g. {maker_1: {quantize: int8}}; others as rollout's"
    )

    @cached_property
    def graph(self) -> TransmissionGraph:
        """The checked graph. Raises ConfigErrors."""
        return parse_graph(self.makers, self.trainers, path="detached.")

    def problems(
        self, *, max_staleness: int, batch_size: int, total_prompts: int | None
    ) -> Iterator[ConfigError]:
        """Yields graphs that would deadlock or leave makers idle, and inconsistent numbers.

        Args:
            total_prompts: number of prompts that the run trains on; None: unknown.
        """
        graph = self.graph
        found = balance(graph)
        if found.used < MIN_USED_SHARE:
            yield ConfigError(
                f"trainers step together, and only {', '.join(found.feeding)} can supply "
                f"{', '.join(found.short)}: {1 - found.used:.0%} of the makers' capacity would be unused",
                where="detached.makers",
                fix=f"let more makers send to {', '.join(found.short)}",
            )
        if self.update_steps > max_staleness + 1:
            yield ConfigError(
                f"the makers get new weights every {self.update_steps} steps, but max_staleness is "
                f"{max_staleness}: every answer would be too stale for the last of these steps",
                where="detached.update_steps and max_staleness",
                fix=f"use max_staleness={self.update_steps - 1} or more, or update_steps="
                f"{max_staleness + 1} or less",
            )
        share = -(-batch_size // len(graph.trainers))
        if self.buffer_limit is not None and self.buffer_limit < share:
            yield ConfigError(
                f"a trainer needs {share} questions per step, but at most {self.buffer_limit} may wait",
                where="detached.buffer_limit and dataset.train_bs_n_seqs",
                fix=f"use buffer_limit={share} or more, or none",
            )
        made = self._made
        if made is not None and total_prompts is not None and made < total_prompts:
            yield ConfigError(
                f"{len(graph.makers)} makers produce {made} questions together, but the run trains on "
                f"{total_prompts}",
                where="detached.experience_steps",
                fix="use more steps, a larger experience_batch_size, or none",
            )
        for name in self.maker_args:
            if name not in self.makers:
                yield ConfigError(
                    f"no maker called {name!r}",
                    where="detached.maker_args",
                    fix=did_you_mean(name, list(self.makers)),
                )

    @property
    def _made(self) -> int | None:
        if self.experience_steps is None:
            return None
        return len(self.makers) * self.experience_steps * self.experience_batch_size

    def control(self, base: RolloutControl) -> RolloutControl:
        """Adds the graph's routes to ``base``: maker i is server i and rollout worker i."""
        graph, steps = self.graph, self.experience_steps
        rank = {trainer: i for i, trainer in enumerate(graph.trainers)}
        return replace(
            base,
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

    def servers(self, servers: tuple[GenerationServer, ...]) -> tuple[GenerationServer, ...]:
        """Returns one server for each maker, with its own arguments."""
        (base, *_) = servers
        return tuple(
            replace(base, backend_args={**base.backend_args, **dict(self.maker_args.get(m, {}))})
            for m in self.graph.makers
        )

    def workers(self, workers: tuple[RolloutWorker, ...]) -> tuple[RolloutWorker, ...]:
        """Returns one rollout worker for each maker."""
        own = replace(workers[0], max_concurrent_rollouts=self.experience_batch_size)
        return (own,) * len(self.graph.makers)
