"""Workers as child processes on this machine.

Each is tied to the supervisor (realsys/runtime/child_processes/parent_death.py), so that none outlives
a killed one.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from realsys.api.plan import LaunchPlan, PhasePlan
from realsys.api.scheduling import WorkerType
from realsys.runtime.child_processes.parent_death import PARENT_PID_VARIABLE
from realsys.runtime.oom_evidence import OomCounts, oom_evidence, read_oom_counts
from realsys.supervisor.steps.steps import StepTask
from realsys.trial.records import AttemptFiles
from realsys.worker.environment import gpu_variables, worker_environment
from realsys.worker.live_scaling import index_of
from realsys.worker.local_gpus import assign_gpus, devices_for_added_worker, gpus_needed
from realsys.worker.machine_gpus import gpu_entries
from realsys.worker.main import command

logger = logging.getLogger(__name__)


@dataclass
class LocalTask:
    """One child process. ``like``: for an added worker, index of the planned one of the same
    configuration."""

    worker: str
    phase: PhasePlan
    process: subprocess.Popen[bytes]
    host: str
    memory: OomCounts
    ended_at: float | None = None
    hint: str = ""
    like: int | None = None

    @property
    def pid(self) -> int:
        """Of the worker itself."""
        return self.process.pid

    def poll(self) -> int | None:
        """Returns the return code, or None while it runs; records when it was seen to end."""
        code = self.process.poll()
        if code is not None and self.ended_at is None:
            self.ended_at = time.time()
            if code == -signal.SIGKILL:
                self.hint = oom_evidence(self.memory, read_oom_counts())
        return code


@dataclass
class LocalSteps:
    """Worker processes on this machine."""

    plan: LaunchPlan
    plan_hash: str
    attempt_files: AttemptFiles
    _devices: dict[str, str] = field(default_factory=dict)  # worker → its CUDA_VISIBLE_DEVICES

    def start(self, phase: PhasePlan) -> list[StepTask]:
        """Starts every worker, appending its output to its log.

        Raises:
            ClusterError: they need more GPUs than the machine has; none is started.
        """
        needed = gpus_needed(phase.scheduling)
        self._devices = assign_gpus(phase.scheduling, self._gpus() if needed else ())
        return [
            self._start(phase, kind, index)
            for kind, group in phase.scheduling.groups().items()
            for index in range(group.count)
        ]

    def kill(self, task: StepTask) -> None:
        """Sends SIGKILL."""
        assert isinstance(task, LocalTask)
        task.process.kill()

    def restart(self, task: StepTask) -> StepTask:
        """Starts a new process that continues the same log."""
        assert isinstance(task, LocalTask)
        kind, _, index = task.worker.partition("/")
        return self._start(task.phase, WorkerType(kind), int(index), task.like)

    def add(
        self, worker: str, *, like: StepTask, running: Sequence[StepTask], left: Sequence[StepTask]
    ) -> StepTask:
        """Starts a new process; fails only if it needs GPUs and none is free."""
        assert isinstance(like, LocalTask)
        kind, _, index = worker.partition("/")
        gpus = like.phase.scheduling.groups()[WorkerType(kind)].scheduling.gpu
        self._devices[worker] = devices_for_added_worker(
            worker,
            gpus,
            assigned=self._devices,
            gone=[task.worker for task in left],
            entries=self._gpus() if gpus else (),
        )
        return self._start(like.phase, WorkerType(kind), int(index), index_of(like.worker))

    def end(self, tasks: Iterable[StepTask], *, grace_s: float) -> None:
        """Sends SIGTERM, and after ``grace_s`` SIGKILL."""
        left = [t for t in tasks if isinstance(t, LocalTask) and t.poll() is None]
        for task in left:
            task.process.terminate()
        deadline = time.monotonic() + grace_s
        while left and time.monotonic() < deadline:
            left = [t for t in left if t.poll() is None]
            time.sleep(0.02)
        for task in left:
            logger.warning("worker killed worker=%s after_s=%g", task.worker, grace_s)
            task.process.kill()
        for task in left:
            task.process.wait()  # SIGKILL: the kernel ends it; no deadline can help otherwise
            task.poll()

    def _gpus(self) -> tuple[str, ...]:
        """Returns the GPUs of this machine, as restricted by the shell or the site's variables."""
        return gpu_entries({**os.environ, **self.plan.cluster.env_vars})

    def _start(
        self, phase: PhasePlan, kind: WorkerType, index: int, like: int | None = None
    ) -> LocalTask:
        worker = f"{kind}/{index}"
        argv = command(
            trial_dir=self.plan.trial_dir,
            plan_hash=self.plan_hash,
            phase=phase.name,
            attempt=self.attempt_files.number,
            worker_type=kind.value,
            index=index,
            like=like,
        )
        log = self.attempt_files.log(worker)
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            **worker_environment(self.plan, os.environ, kind),
            **phase.scheduling.groups()[kind].scheduling.env_vars,
        }
        environment |= {
            **gpu_variables(phase, kind, environment),
            "CUDA_VISIBLE_DEVICES": self._devices.get(worker, ""),
            PARENT_PID_VARIABLE: str(os.getpid()),
        }
        memory = read_oom_counts()
        with log.open("ab") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        logger.info("worker started worker=%s pid=%d", worker, process.pid)
        return LocalTask(worker, phase, process, socket.gethostname(), memory, like=like)
