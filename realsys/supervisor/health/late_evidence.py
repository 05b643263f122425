"""Waits for the cause where all failures so far only report that somebody was missing.

A node that reboots resets its peers' connections at once; its leases end 15 seconds later, and Slurm may
take minutes. Whoever judged at the first reset would blame a healthy node and keep the ill one. Used from
the supervisor's thread; Slurm is asked in another one.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from realsys.name_resolve.lease_validity import lease_ttl_s
from realsys.runtime import worker_exit_codes
from realsys.slurm.hostlist import compress, short_name
from realsys.slurm.unreachable_nodes import node_states_argv, unreachable_nodes
from realsys.supervisor.health.failure_report import LEASE_ENDED
from realsys.supervisor.health.peer_failures import UNOBSERVED
from realsys.supervisor.health.store_poller import StorePoller
from realsys.supervisor.health.worker_leases import WorkerLeases
from realsys.supervisor.steps.steps import StepTask

POLL_S = 0.05
NODES_EVERY_S = 5.0  # between questions to Slurm
ANSWER_S = 10.0  # time limit of one
TOGETHER_S = 3.0
MARGIN_S = 7.0  # polls, files that are seen late, a busy machine


def ask_slurm(nodes: str) -> dict[str, str]:
    """Returns node → why, of the nodes that Slurm can't reach; none where it does not answer, which says
    nothing about a node."""
    argv = node_states_argv(nodes)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return unreachable_nodes(done.stdout) if done.returncode == 0 else {}


def is_unseen(task: StepTask) -> bool:
    """Returns whether nobody saw the worker end: it runs, or its step is over and neither its parent nor
    srun told of it."""
    code = task.poll()
    return code is None or (code != worker_exit_codes.NOT_STARTED and UNOBSERVED in task.hint)


NEVER_REGISTERED = "nobody saw its end, and it had not registered: its node is lost or was rebooted"


@dataclass(frozen=True)
class Silent:
    """A worker whose node can't be reached, and how that is known."""

    task: StepTask
    why: str = LEASE_ENDED


@dataclass
class LateEvidence:
    """Which nodes of the attempt fell silent, by its leases and by Slurm.

    Args:
        ask: hostlist → node → why, of the nodes that Slurm can't reach.
        timeout_s: how long to wait; None: as long as a lease takes to be seen to end.
    """

    leases: WorkerLeases
    ask: Callable[[str], dict[str, str]] = ask_slurm
    timeout_s: float | None = None

    def hosts(self, tasks: Iterable[StepTask]) -> set[str]:
        """Returns the short names of the workers' hosts."""
        return {host for task in tasks if (host := self._host(task))}

    def wait(
        self,
        tasks: Callable[[], list[StepTask]],
        *,
        is_explained: Callable[[], bool],
        goes_on: Callable[[], bool],
    ) -> list[Silent]:
        """Returns the workers whose nodes fell silent; none if that did not happen in time, the failures
        are explained otherwise, or a stop was requested and Slurm calls no node down.

        Args:
            tasks: the workers whose end or silence matters now.
            is_explained: whether a worker has failed for a reason of its own meanwhile.
            goes_on: called repeatedly; does what must not wait.
        """
        hosts = compress(sorted({name for task in tasks() if (name := self._node(task))}))
        poller = StorePoller(lambda: self.ask(hosts), every_s=NODES_EVERY_S, name="nodes").start()
        began_s, wait_s = time.monotonic(), 0.0
        try:
            # Leases that are in doubt once are judged later
            while time.monotonic() - began_s < (wait_s := max(wait_s, self._wait_s(len(tasks())))):
                if not goes_on():  # by Slurm, perhaps: it ends jobs of nodes that it calls down
                    return self._on(self.ask(hosts), tasks())
                if is_explained():
                    return []
                if silent := self._silent(tasks(), poller):
                    return self.rest_of(silent, tasks, poller)
                time.sleep(POLL_S)
        finally:
            poller.stop()
        return self._ended_unregistered(tasks())

    def rest_of(
        self,
        silent: list[Silent],
        tasks: Callable[[], list[StepTask]],
        poller: StorePoller[dict[str, str]] | None = None,
    ) -> list[Silent]:
        """Returns ``silent`` and the workers that fall silent right after: the leases of a node, or of a
        rack, end within two seconds of each other."""
        found = {one.task.worker: one for one in silent}
        deadline_s = time.monotonic() + TOGETHER_S
        while time.monotonic() < deadline_s:
            for one in self._silent(tasks(), poller):
                found.setdefault(one.task.worker, one)
            time.sleep(POLL_S)
        return list(found.values())

    def _silent(
        self, tasks: list[StepTask], poller: StorePoller[dict[str, str]] | None
    ) -> list[Silent]:
        unseen = {t.worker for t in tasks if is_unseen(t)}
        found = [Silent(task) for task in self.leases.lost(tasks, unseen=unseen)]
        poll = poller.latest() if poller is not None else None
        if poll and poll.value:
            found += self._on(poll.value, tasks)
        return found

    def _wait_s(self, num_workers: int) -> float:
        if self.timeout_s is not None:
            return self.timeout_s
        detector = self.leases.detector
        wait_s = lease_ttl_s(num_workers) + detector.lost_s + MARGIN_S
        return wait_s + (detector.settle_s + MARGIN_S if self.leases.is_frozen else 0.0)

    def _on(self, nodes: dict[str, str], tasks: Sequence[StepTask]) -> list[Silent]:
        """Returns the workers on these nodes, those first that nobody saw end."""
        words = {short_name(node): why for node, why in nodes.items()}
        why = "Slurm can't reach its node: {}"
        found = [Silent(t, why.format(words[h])) for t in tasks if (h := self._host(t)) in words]
        return sorted(found, key=lambda silent: not is_unseen(silent.task))

    def _ended_unregistered(self, tasks: Sequence[StepTask]) -> list[Silent]:
        """Returns the workers that ended unseen before they had a lease, on nodes of which no worker ever
        registered or was seen to end."""
        observed = {self._host(t) for t in tasks if not is_unseen(t)}
        observed |= {short_name(r.node or r.host) for r in self.leases.registered.values()}
        return [
            Silent(task, NEVER_REGISTERED)
            for task in tasks
            if task.poll() is not None and is_unseen(task) and self._host(task) not in observed
        ]

    def _host(self, task: StepTask) -> str:
        return short_name(self._node(task))

    def _node(self, task: StepTask) -> str:
        """Returns Slurm's name of the worker's node, as far as it is known."""
        known = self.leases.registered.get(task.worker)
        return (known.node or known.host) if known else task.host
