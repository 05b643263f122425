"""What the supervisor sees of the workers it has started, however they were started.

``Steps`` is the one thing that differs between a laptop (local_steps.py) and Slurm (slurm_steps.py).
A ``Task`` is one worker process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from realsys.api.plan import PhasePlan


class Task(Protocol):
    """One worker process.

    Attributes:
        worker: ``model_worker/3``.
        host, pid: where it runs or ran; "" and 0 while that is not known.
        ended_at: when it was seen to end, seconds since the epoch.
        hint: what the one who started it says of its end, "" if nothing.
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
        """Return code (negative: a signal), or None while it runs. Does not block."""


class Steps(Protocol):
    """Starts a phase's workers and ends them."""

    def start(self, phase: PhasePlan) -> list[Task]:
        """Starts all workers of the phase; returns without waiting for them.

        Raises:
            ClusterError: they can't be started.
        """

    def kill(self, task: Task) -> None:
        """Has the worker of a task that still runs killed, it alone; returns without waiting for it.

        Raises:
            ClusterError: it can't be killed from here.
        """

    def restart(self, task: Task) -> Task:
        """Starts the worker of a task that has ended again, where it was; returns its new task.

        Raises:
            ClusterError: it can't be started.
        """

    def add(
        self, worker: str, *, like: Task, running: Sequence[Task], left: Sequence[Task]
    ) -> Task:
        """Starts a worker that the phase's plan does not have, with what ``like`` has.

        Args:
            like: of the same type, and in the plan.
            running, left: the tasks of its type that run, and those that have left for good: what they
                had of a node may be taken.
        Raises:
            ClusterError: it can't be started, or nothing is free for it.
        """

    def end(self, tasks: Iterable[Task], *, grace_s: float) -> None:
        """Ends what still runs, politely for ``grace_s`` where that is possible; returns when all are
        gone."""
