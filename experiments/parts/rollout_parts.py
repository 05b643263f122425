"""Rollout workers and generation servers: their settings, and the workers to start (pure)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from experiments.parts.worker_resources import mem_of_task
from realsys.api import registry
from realsys.api.errors import ConfigError
from realsys.api.model import DatasetAbstraction, GenerationHyperparameters, ModelName
from realsys.api.options import MOST_WORKERS, option
from realsys.api.scheduling import ExperimentScheduling, Scheduling, TasksGroup
from realsys.api.worker_configs import (
    SCHEDULE_POLICIES,
    UPDATE_MODES,
    GenerationServer,
    GserverManager,
    RolloutControl,
    RolloutWorker,
)
from realsys.models.shape import DTYPE_BYTES
from realsys.planner.memory.copy_memory import Terms

# Keys of a datapoint from a rollout worker.
ROLLOUT_KEYS = (
    "packed_input_ids",
    "prompt_mask",
    "packed_logprobs",
    "packed_versions",
    "seq_no_eos_mask",
    "rewards",
)
MADE_BY_ROLLOUTS = ("actor_gen", "rew_inf")  # calls that an asynchronous run does not need


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Generation servers, rollout workers, and how old experience may be (mode ``async``)."""

    staleness_policy: str = option(
        "wait",
        "which answers a step trains on: wait: those of its own questions; window: what is finished "
        "first, but so that nothing gets too old; drop: what is finished first, what got too old is made "
        "again",
        choices=("wait", "window", "drop"),
    )
    servers: int = option(1, "generation servers", ge=1, le=MOST_WORKERS)
    server_backend: str = option(
        "embedded",
        "engine of the servers: our own, or a real one as its child process",
        choices=("embedded", "sglang", "vllm"),
    )
    server_args: Mapping[str, Any] = option({}, "arguments of the engine, see docs")
    schedule_policy: str = option(
        "least_tokens", "which server gets a request", choices=SCHEDULE_POLICIES
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
    workers: int = option(1, "rollout workers", ge=1, le=MOST_WORKERS)
    agent: str = option("math_single_step", "registered agent")
    agent_args: Mapping[str, Any] = option({}, "its arguments")
    env: str = option("math_verify", "registered environment")
    env_args: Mapping[str, Any] = option({}, "its arguments")
    max_concurrent_rollouts: int = option(
        64, "questions that one rollout worker is at, at a time", ge=1
    )
    max_in_flight: int | None = option(
        None, "questions that are answered at a time; none: as the staleness allows", ge=1
    )
    new_tokens_per_chunk: int | None = option(
        None, "longest piece of an answer that is asked for at once; none: the whole", ge=1
    )
    rollout_request_timeout: float = option(
        600.0, "an answer that takes longer is given up and made again", unit="seconds", gt=0
    )
    success_rate_lb: float = option(
        0.0, "questions with a lower mean reward are not trained on", ge=-1e9, le=1e9
    )
    success_rate_ub: float = option(
        1e9, "questions with a higher mean reward are not trained on", ge=-1e9, le=1e9
    )
    filter_by_success: bool = option(
        False, "leave out questions outside success_rate_lb … success_rate_ub (dynamic sampling)"
    )
    dump: bool = option(
        True, "keep what was trained on in the trial's folder, so that it can be replayed"
    )
    dump_limit_gib: float = option(
        20.0,
        "largest dump; rollouts that come later are not kept, and a replay ends there",
        unit="GiB",
        gt=0,
    )
    cpus_per_server: int = option(1, "cores and compute threads of a generation server", ge=1)
    gpus_per_server: float = option(0.0, "GPUs of a generation server", ge=0)
    mem_per_server: int | None = option(
        None,
        "memory of a generation server; none: 4096, with GPUs what new weights need on their way",
        unit="MiB",
        ge=1,
    )
    cpus_per_worker: int = option(1, "cores of a rollout worker", ge=1)
    mem_per_worker: int = option(2048, "memory of a rollout worker", unit="MiB", ge=1)

    def problems(self, *, path: str = "rollout.") -> Iterator[ConfigError]:
        """Yields unknown names and inconsistent settings."""
        for kind, name in (("agent", self.agent), ("environment", self.env)):
            where = path + ("agent" if kind == "agent" else "env")
            if problem := registry.check(kind, name, where=where):
                yield problem
        device = str(self.server_args.get("device", ""))
        if device.startswith("cuda") and not self.gpus_per_server:
            yield ConfigError(
                f"generation servers are set to compute on {device}, but their tasks have no GPU",
                where=f"{path}server_args.device and {path}gpus_per_server",
                fix=f"set {path}gpus_per_server=1 (then they use it without server_args.device)",
            )
        if self.weights_through == "disk" and (self.delta or self.wire_dtype):
            yield ConfigError(
                "weights travel through the trial's folder in the format of saved models",
                where=f"{path}delta and {path}wire_dtype",
                fix=f"use {path}weights_through=stream, or leave them out",
            )
        if self.filter_by_success and not self.success_rate_lb < self.success_rate_ub:
            yield ConfigError(
                f"success_rate_lb is {self.success_rate_lb}, success_rate_ub {self.success_rate_ub}: "
                "no question would be trained on",
                where=f"{path}success_rate_lb and {path}success_rate_ub",
                fix="use lb < ub, e.g. 0.01 and 0.99",
            )

    def control(self, max_staleness: int, *, trains: bool = True) -> RolloutControl:
        """Builds the master's rollout settings."""
        return RolloutControl(
            trains=trains,
            model_name=ModelName("actor"),
            max_staleness=max_staleness,
            policy=self.staleness_policy,
            max_in_flight=self.max_in_flight,
            weights_through=self.weights_through,
            wire_dtype=self.wire_dtype or self._half_precision,
            delta=self.delta,
        )

    @property
    def _half_precision(self) -> str:
        """The servers' dtype if it has two bytes: wider weights need not be sent."""
        dtype = str(self.server_args.get("dtype", ""))
        return dtype if self.weights_through == "stream" and DTYPE_BYTES.get(dtype) == 2 else ""

    def generation_servers(
        self, *, seed: int, model_path: str, dtype: str, longest: int
    ) -> tuple[GenerationServer, ...]:
        """Builds the servers, which all start from ``model_path``.

        Args:
            longest: maximum tokens of a prompt and its answer.
        """
        embedded = self.server_backend == "embedded"
        own: dict[str, Any] = {"dtype": dtype, "num_threads": self.cpus_per_server}
        if self.gpus_per_server:
            own["least_tokens"] = longest
        args = {**(own if embedded else {}), **self.server_args}
        server = GenerationServer(
            base_seed=seed,
            backend_type=self.server_backend,
            backend_args=args,
            model_path=model_path,
            tp_size=1 if embedded else max(1, int(self.gpus_per_server)),
        )
        return (server,) * self.servers

    def manager(self, *, max_staleness: int, batch_size: int) -> GserverManager:
        """Builds the servers' manager."""
        return GserverManager(
            model_name=ModelName("actor"),
            n_servers=self.servers,
            schedule_policy=self.schedule_policy,
            max_head_offpolicyness=max_staleness,
            train_batch_size=batch_size,
            flush_request_timeout=self.flush_request_timeout,
            max_concurrent_rollouts=self.workers * self.max_concurrent_rollouts,
            update_mode=self.update_mode,
        )

    def rollout_workers(
        self,
        *,
        seed: int,
        tokenizer_path: str,
        gen: GenerationHyperparameters,
        group_size: int,
        reward: str,
        dataset: DatasetAbstraction,
        all_texts: bool = False,
    ) -> tuple[RolloutWorker, ...]:
        """Builds the rollout workers; they keep a few texts of each weight version, or all."""
        texts: dict[str, Any] = {"dump_texts": sys.maxsize} if all_texts else {}
        worker = RolloutWorker(
            **texts,
            base_seed=seed,
            model_name=ModelName("actor"),
            tokenizer_path=tokenizer_path,
            new_tokens_per_chunk=self.new_tokens_per_chunk,
            rollout_request_timeout=self.rollout_request_timeout,
            env=self.env,
            env_args={"reward": reward, **self.env_args},
            agent=self.agent,
            agent_args=dict(self.agent_args),
            gconfig=replace(gen, n=1),
            group_size=group_size,
            max_concurrent_rollouts=self.max_concurrent_rollouts,
            success_rate_lb=self.success_rate_lb if self.filter_by_success else None,
            success_rate_ub=self.success_rate_ub if self.filter_by_success else None,
            datasets=(dataset,),
            dump=self.dump,
            # All texts are kept if rollouts are the run's only product.
            dump_limit_gib=None if all_texts else self.dump_limit_gib / self.workers,
        )
        return (worker,) * self.workers

    def scheduling(
        self, base: ExperimentScheduling, *, needs: Callable[[], Terms | None]
    ) -> ExperimentScheduling:
        """Adds the tasks of servers, manager and rollout workers to ``base``.

        Args:
            needs: host memory of a server with GPUs; None: unknown.
        """
        mem = mem_of_task(self.mem_per_server, gpu=self.gpus_per_server, needs=needs)
        server = Scheduling.generation_server_default(
            cpu=self.cpus_per_server, gpu=self.gpus_per_server, mem=mem
        )
        manager = Scheduling.gserver_manager_default(cpu=1, mem=1024)
        worker = Scheduling.rollout_worker_default(
            cpu=self.cpus_per_worker, mem=self.mem_per_worker
        )
        return replace(
            base,
            generation_server=TasksGroup(count=self.servers, scheduling=server),
            gserver_manager=TasksGroup(count=1, scheduling=manager),
            rollout_worker=TasksGroup(count=self.workers, scheduling=worker),
        )
