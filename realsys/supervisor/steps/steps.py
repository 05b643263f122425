"""The supervisor's interface to its workers, however they are started.

``Steps`` is the only difference between one machine (local_steps.py) and Slurm (slurm_steps.py). A
``StepTask`` is one worker process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from realsys.api.plan import PhasePlan


class StepTask(Protocol):
    """One worker process.

    Attributes:
        worker: ``model_worker/3``.
        host, pid: where it runs or ran; "" and 0 if unknown.
        ended_at: when it was seen to end, seconds since the epoch.
        hint: what its launcher reports about its end, "" if nothing.
    """

    @property
    def worker(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def ended_at(self) -> float | None: ...
    @property
    def hint(self) -> str: ...

    def poll(self) -> int | None:
        """Returns the return code (negative: a signal), or None while it runs. Does not block."""


class Steps(Protocol):
    """Starts a phase's workers and ends them."""

    def start(self, phase: PhasePlan) -> list[StepTask]:
        """Starts all workers of the phase without waiting for them.

        Raises:
            ClusterError: they can't be started.
        """

    def kill(self, task: StepTask) -> None:
        """Kills the worker of a running task, and only that one, without waiting for it.

        Raises:
            ClusterError: it can't be killed from here.
        """

    def restart(self, task: StepTask) -> StepTask:
        """Restarts the worker of an ended task where it was; returns its new task.

        Raises:
            ClusterError: it can't be started.
        """

    def add(
        self, worker: str, *, like: StepTask, running: Sequence[StepTask], left: Sequence[StepTask]
    ) -> StepTask:
        """Starts a worker that is not in the phase's plan, with the resources of ``like``.

        Args:
            like: a planned worker of the same type.
            running, left: the running tasks of its type, and those that have left for good, whose
                resources may be reused.
        Raises:
            ClusterError: it can't be started, or nothing is free for it.
        """

    def end(self, tasks: Iterable[StepTask], *, grace_s: float) -> None:
        """Ends all running tasks, gracefully for ``grace_s`` if possible; returns when all have ended."""
