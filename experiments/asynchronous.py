"""Schedules with generation servers: they sample all the time, and rollout workers make the experience.

rollout workers ⇄ generation servers
      └─ answers, scored ─▶ ref_inf ────┐
                            actor_inf ──┼─ actor_train ─▶ new weights to the servers
                            critic_inf ─┴─ critic_train
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from experiments.schedule import Filtering
from experiments.task import Task
from realsys.api.errors import ConfigError
from realsys.api.model import GenerationHyperparameters, ModelName
from realsys.api.options import MOST_WORKERS, option
from realsys.api.scheduling import Scheduling, WorkerType
from realsys.api.worker_configs import (
    FAILED_SHARE,
    FAILED_WINDOW,
    SCHEDULE_POLICIES,
    UPDATE_MODES,
    GenerationServer,
    GserverManager,
    RolloutControl,
    RolloutWorker,
)
from realsys.models.shape import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True)
class Serving(Filtering):
    """Base of schedules with generation servers: their settings, and the workers to start."""

    is_async = True
    has_servers = True

    server_backend: str = option(
        "embedded",
        "engine of the servers: our own, or a real one as its child process",
        choices=("embedded", "sglang", "vllm"),
    )
    server_args: Mapping[str, Any] = option({}, "arguments of the engine, see docs")
    schedule_policy: str = option(
        "least_tokens", "which server gets a request", choices=SCHEDULE_POLICIES
    )
    max_in_flight: int | None = option(
        None, "questions that are answered at a time; none: as the staleness allows", ge=1
    )
    new_tokens_per_chunk: int | None = option(
        None,
        "longest piece of an answer that is asked for at once; none: the whole, of one that may have more "
        "than 8192 tokens 4096",
        ge=1,
    )
    rollout_request_timeout: float = option(
        600.0,
        "an answer that gets no new token for so long is given up and made again; one that grows is never "
        "cut",
        unit="seconds",
        gt=0,
    )
    failed_share: float = option(
        FAILED_SHARE,
        f"most of the last {FAILED_WINDOW} episodes (or of two steps', if more) that may fail three times "
        "in a row, outages not counted; more ends the run",
        ge=0,
        le=1,
    )
    dump: bool = option(
        True, "keep what was trained on in the trial's folder, so that it can be replayed"
    )
    dump_texts: int = option(
        2, "questions of each weight version whose texts are kept for realsys samples", ge=0
    )

    @property
    def environment_s(self) -> float:
        """``rollout_request_timeout``."""
        return self.rollout_request_timeout

    @property
    @abc.abstractmethod
    def num_servers(self) -> int:
        """Generation servers."""

    @property
    @abc.abstractmethod
    def num_workers(self) -> int:
        """Rollout workers."""

    @property
    @abc.abstractmethod
    def questions_per_worker(self) -> int:
        """Questions that a rollout worker is at, at a time."""

    def device_problems(self, server: Scheduling) -> Iterator[ConfigError]:
        """Yields servers that are to compute on a GPU that their tasks don't have."""
        device = str(self.server_args.get("device", ""))
        if device.startswith("cuda") and not server.gpu:
            yield ConfigError(
                f"generation servers are set to compute on {device}, but their tasks have no GPU",
                where="schedule.server_args.device and scheduling.generation_server.gpu",
                fix="set scheduling.generation_server.gpu=1 (then they use it without server_args.device)",
            )

    def records_kept(self, gen: GenerationHyperparameters, *, by_schema: bool = False) -> bool:
        """True if answers come with the sets of tokens that they were sampled from.

        A run that trains needs them; ``sampling_problems`` says where it can't have them.

        Args:
            by_schema: answers may be held to JSON schemas.
        """
        return by_schema or (gen.restricts and (self.server_backend == "embedded" or self.trains))

    def sampling_problems(
        self, gen: GenerationHyperparameters, *, by_schema: bool = False
    ) -> Iterator[ConfigError]:
        """Yields settings of sampling that servers can't follow, or whose log-probs can't be trained on."""
        if by_schema and self.server_backend != "embedded":
            yield ConfigError(
                f"{self.server_backend} does not hold answers to JSON schemas for a run",
                where="task.agent_args.schema and schedule.server_backend",
                fix="use schedule.server_backend=embedded, or task.agent_args.schema=ignore",
            )
        if self.trains and gen.restricts and self.server_backend != "embedded":
            # Sampled from fewer tokens; neutral value, whether it is set
            narrowing = {
                "top_p": (1, gen.top_p < 1),
                "top_k": (0, gen.top_k > 0),
                "min_new_tokens": (0, gen.min_new_tokens > 0),
            }
            named = [name for name, (_, is_on) in narrowing.items() if is_on]
            neutral = " ".join(f"gen.{name}={narrowing[name][0]}" for name in named)
            yield ConfigError(
                f"{self.server_backend} does not tell which tokens {' and '.join(named)} left over, so the "
                "trainer can't compute the probabilities that answers were sampled with",
                where=" and ".join([*(f"gen.{name}" for name in named), "schedule.server_backend"]),
                fix=f"use schedule.server_backend=embedded, or sample from all tokens: {neutral}",
            )

    @property
    def counts(self) -> dict[WorkerType, int]:
        """How many workers the schedule needs beside model workers."""
        return {
            WorkerType.GENERATION_SERVER: self.num_servers,
            WorkerType.GSERVER_MANAGER: 1,
            WorkerType.ROLLOUT_WORKER: self.num_workers,
        }

    def control(self) -> RolloutControl:
        """Builds the master's rollout settings."""
        return RolloutControl(
            trains=self.trains,
            model_name=ModelName("actor"),
            max_staleness=self.staleness,
            max_in_flight=self.max_in_flight,
            failed_share=self.failed_share,
        )

    def generation_servers(
        self, *, seed: int, model_path: str, dtype: str, longest: int, task: Scheduling
    ) -> tuple[GenerationServer, ...]:
        """Builds the servers, which all start from ``model_path``.

        Args:
            longest: maximum tokens of a prompt and its answer.
            task: of a server: its threads, and the GPUs over which a real engine splits the model.
        """
        embedded = self.server_backend == "embedded"
        own: dict[str, Any] = {"dtype": dtype, "num_threads": task.cpu}
        if task.gpu:
            own["least_tokens"] = longest
        args = {**(own if embedded else {}), **self.server_args}
        server = GenerationServer(
            base_seed=seed,
            backend_type=self.server_backend,
            backend_args=args,
            model_path=model_path,
            tp_size=1 if embedded else max(1, int(task.gpu)),
        )
        return (server,) * self.num_servers

    def manager(self, *, batch_size: int) -> GserverManager:
        """Builds the servers' manager."""
        return GserverManager(
            model_name=ModelName("actor"),
            n_servers=self.num_servers,
            schedule_policy=self.schedule_policy,
            max_head_offpolicyness=self.staleness,
            train_batch_size=batch_size,
            max_concurrent_rollouts=self.num_workers * self.questions_per_worker,
        )

    def rollout_workers(
        self,
        *,
        seed: int,
        tokenizer_path: str,
        gen: GenerationHyperparameters,
        group_size: int,
        task: Task,
    ) -> tuple[RolloutWorker, ...]:
        """Builds the rollout workers; they keep a few texts of each weight version, or all."""
        low, high = self.success_range or (None, None)
        worker = task.player(
            "train",
            base_seed=seed,
            model_name=ModelName("actor"),
            tokenizer_path=tokenizer_path,
            new_tokens_per_chunk=self.new_tokens_per_chunk,
            rollout_request_timeout=self.rollout_request_timeout,
            gconfig=replace(gen, n=1),
            kept_sets=self.records_kept(gen, by_schema=task.holds_to_schemas),
            group_size=group_size,
            max_concurrent_rollouts=self.questions_per_worker,
            success_rate_lb=low,
            success_rate_ub=high,
            dump=self.dump,
            dump_texts=self.dump_texts,
        )
        return (worker,) * self.num_workers


@dataclass(frozen=True, kw_only=True)
class OwnCounts(Serving):
    """Base of schedules whose servers and rollout workers are counted apart."""

    servers: int = option(1, "generation servers", ge=1, le=MOST_WORKERS)
    workers: int = option(1, "rollout workers", ge=1, le=MOST_WORKERS)
    max_concurrent_rollouts: int = option(
        64, "questions that one rollout worker is at, at a time", ge=1
    )

    @property
    def num_servers(self) -> int:
        """``servers``."""
        return self.servers

    @property
    def num_workers(self) -> int:
        """``workers``."""
        return self.workers

    @property
    def questions_per_worker(self) -> int:
        """``max_concurrent_rollouts``."""
        return self.max_concurrent_rollouts


@dataclass(frozen=True, kw_only=True)
class OffPolicy(Serving):
    """Base of schedules that train on answers of older weights while the servers get new ones."""

    max_staleness: int = option(
        1,
        "most updates between the weights that sampled an answer and those that it trains; 0: as sync",
        unit="steps",
        ge=0,
    )
    staleness_policy: str = option(
        "wait",
        "which answers a step trains on: wait: those of its own questions; window: what is finished "
        "first, but so that nothing gets too old; drop: what is finished first, what got too old is made "
        "again",
        choices=("wait", "window", "drop"),
    )
    update_mode: str = option(
        "all_at_once", "how new weights come to the servers", choices=UPDATE_MODES
    )
    weights_through: str = option(
        "stream",
        "how new weights travel: from process to process, or through the trial's folder",
        choices=("stream", "disk"),
    )
    wire_dtype: str | None = option(
        None,
        "dtype in which streamed weights travel; none: what the actor computes in",
        choices=("bfloat16", "float32"),
    )
    delta: bool = option(
        False, "stream only what changed since the version before, where that is little"
    )
    flush_request_timeout: float = option(
        120.0, "a server that takes longer for new weights is left out", unit="seconds", gt=0
    )
    dump_limit_gib: float = option(
        20.0,
        "largest dump; rollouts that come later are not kept, and a replay ends there",
        unit="GiB",
        gt=0,
    )

    @property
    def staleness(self) -> int:
        """``max_staleness``."""
        return self.max_staleness

    def problems(self, *, batch_size: int, num_prompts: int | None) -> Iterator[ConfigError]:
        """Yields inconsistent settings."""
        yield from super().problems(batch_size=batch_size, num_prompts=num_prompts)
        if self.weights_through == "disk" and (self.delta or self.wire_dtype):
            yield ConfigError(
                "weights travel through the trial's folder in the format of saved models",
                where="schedule.delta and schedule.wire_dtype",
                fix="use schedule.weights_through=stream, or leave them out",
            )

    def control(self) -> RolloutControl:
        """Builds the master's rollout settings."""
        return replace(
            super().control(),
            policy=self.staleness_policy,
            weights_through=self.weights_through,
            wire_dtype=self.wire_dtype or self._half_precision,
            delta=self.delta,
        )

    @property
    def _half_precision(self) -> str:
        """The servers' dtype if it has two bytes: wider weights need not be sent."""
        dtype = str(self.server_args.get("dtype", ""))
        return dtype if self.weights_through == "stream" and DTYPE_BYTES.get(dtype) == 2 else ""

    def manager(self, *, batch_size: int) -> GserverManager:
        """Builds the servers' manager."""
        return replace(
            super().manager(batch_size=batch_size),
            flush_request_timeout=self.flush_request_timeout,
            update_mode=self.update_mode,
        )

    def rollout_workers(self, **of_run: Any) -> tuple[RolloutWorker, ...]:
        """Builds the rollout workers, with a limit on what they keep."""
        limit = self.dump_limit_gib / self.num_workers
        (worker, *_) = super().rollout_workers(**of_run)
        return (replace(worker, dump_limit_gib=limit),) * self.num_workers


@dataclass(frozen=True, kw_only=True)
class Async(OwnCounts, OffPolicy):
    """Generation servers sample while the model workers train; ``max_staleness`` bounds how far apart."""

    kind = "async"


@dataclass(frozen=True, kw_only=True)
class RolloutOnly(OwnCounts):
    """Generation servers sample with the weights that they start from, and nothing trains."""

    kind = "rollout"
    trains = False

    def rollout_workers(self, **of_run: Any) -> tuple[RolloutWorker, ...]:
        """Builds the rollout workers; they keep all texts, the run's only product."""
        (worker, *_) = super().rollout_workers(**of_run)
        worker = replace(worker, dump_texts=sys.maxsize, dump_limit_gib=None)
        return (worker,) * self.num_workers
