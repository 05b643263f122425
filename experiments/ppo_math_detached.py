"""``ppo-math-detached``: named makers and trainers with an explicit transmission graph.

    maker_0 ──experience──▶ trainer_0      trainers are the data-parallel ranks of actor, critic and
    maker_1 ──experience──▶    ┆           reference; a maker is a generation server with a rollout
        ◀───────weights────────┘           worker of its own

``detached.makers`` and ``detached.trainers`` define the edges; they are checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from experiments.parts.detached import DetachedOptions
from experiments.ppo_math_async import PPOMathAsyncExperiment
from realsys.api.errors import ConfigError
from realsys.api.model import DatasetAbstraction
from realsys.api.options import option
from realsys.api.scheduling import ExperimentScheduling


@dataclass(frozen=True, kw_only=True)
class PPOMathDetachedExperiment(PPOMathAsyncExperiment):
    """PPO on math questions with detached makers and trainers."""

    detached: DetachedOptions = option(DetachedOptions(), "the transmission graph")

    def problems(self) -> Iterator[ConfigError]:
        """Yields the problems of an asynchronous run, and those of the graph."""
        if not self.is_async:
            yield ConfigError(
                f"mode is {self.mode}, but makers need generation servers",
                where="mode",
                fix="leave it out, or use ppo-math",
            )
            return
        yield from super().problems()
        size, made = self.dataset.train_bs_n_seqs, self.dataset.path is None
        epochs = self.exp_ctrl.total_train_epochs
        total = self.dataset.train_size * epochs // size * size if made else None
        if total is not None and self.exp_ctrl.benchmark_steps is not None:
            total = min(total, self.exp_ctrl.benchmark_steps * size)
        yield from self.detached.problems(
            max_staleness=self.staleness, batch_size=size, total_prompts=total
        )
        yield from self._trainer_problems()

    def _trainer_problems(self) -> Iterator[ConfigError]:
        graph = self.detached.graph
        degrees = {
            role: self._allocated.calls[call].topology
            for role, call in (("actor", "actor_train"), ("critic", "critic_train"))
        }
        for role, topology in degrees.items():
            if topology.data != len(graph.trainers) or topology.world_size != topology.data:
                yield ConfigError(
                    f"{len(graph.trainers)} trainers are named, but {role} trains on {topology}: a trainer "
                    "is one data-parallel rank",
                    where=f"detached.trainers and {role}.parallel",
                    fix=f"use {role}.parallel=d{len(graph.trainers)}, or leave it out",
                )
        if self.actor.backend == "fsdp" and len(graph.trainers) > 1:
            for maker in graph.makers:
                if len(graph.sources(maker)) < len(graph.trainers):
                    missing = sorted(set(graph.trainers) - set(graph.sources(maker)))
                    yield ConfigError(
                        f"{maker} gets no weights from {', '.join(missing)}, but with backend fsdp each "
                        f"trainer holds a part of them",
                        where="detached.trainers",
                        fix=f"add {maker} to {', '.join(missing)}, or use actor.backend=megatron, whose "
                        "data-parallel ranks hold all of them",
                    )

    def _rollout_fields(self, prompts: DatasetAbstraction) -> dict[str, Any]:
        side = super()._rollout_fields(prompts)
        servers = self.detached.servers(side["generation_server"])
        control = self.detached.control(side["rollout"])
        (manager,) = side["gserver_manager"]
        routes = tuple(
            (f"rollout_worker/{worker}", route.servers)
            for route in control.makers
            for worker in route.rollout_workers
        )
        return {
            **side,
            "rollout": control,
            "generation_server": servers,
            "gserver_manager": (replace(manager, n_servers=len(servers), routes=routes),),
            "rollout_worker": self.detached.workers(side["rollout_worker"]),
        }

    def scheduling_setup(self) -> ExperimentScheduling:
        """Schedules two tasks for each maker."""
        num_makers = len(self.detached.graph.makers)
        rollout = replace(self.rollout, servers=num_makers, workers=num_makers)
        return replace(self, rollout=rollout)._scheduling()

    def _layout(self, role: str) -> str | None:
        """Returns the role's parallel layout: as set, else one data-parallel rank per trainer."""
        given: str | None = getattr(self, role).parallel
        return given or f"d{len(self.detached.trainers) or 1}"
