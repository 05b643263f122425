"""A node whose cable is pulled: what the supervisor concludes, and what the worker there does by itself.

The node is a network namespace, the worker a real one with its heartbeat process (the stand-in of
tests/process). ``benchmarks/bench_detection.py cut-off`` measures the same with many.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from etcd_server import ADDRESS, EtcdCluster

from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.name_resolve.store import NameResolve
from realsys.runtime import worker_exit_codes
from realsys.runtime.lifecycle import WorkerState
from realsys.supervisor.attempt.attempt import end_attempt
from realsys.supervisor.health.worker_leases import WorkerLeases
from realsys.trial.records import AttemptRecord, WorkerStatus, dumps, loads

WORKER_PROGRAM = Path(__file__).parent.parent / "process" / "heartbeat_worker.py"
KEYS = TrialKeys(cluster="here", user="anna", experiment="ppo", trial="run")  # the program's
ATTEMPT = AttemptRecord(
    number=1, token="ours", host="node1", supervisor_pid=1, supervisor_start=1, started_at=0.0
)
WORKER = "model_worker/0"
TTL_S = 4.0
OUR_END, FAR_END = "10.214.77.1", "10.214.77.2"  # of the cable

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root and iproute2 (apt-get install iproute2)",
)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=240)


class Node:
    """A network namespace, and the end of its cable that is on our side."""

    def __init__(self) -> None:
        self.name = f"rscut{os.getpid()}"  # an interface's name has 15 letters at most

    def cut(self) -> None:
        ip("link", "set", self.name, "down")

    def heal(self) -> None:
        ip("link", "set", self.name, "up")


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    far = f"{node.name}x"
    ip("netns", "add", node.name)
    try:
        ip("link", "add", node.name, "type", "veth", "peer", "name", far, "netns", node.name)
        ip("addr", "add", f"{OUR_END}/30", "dev", node.name)
        ip("link", "set", node.name, "up")
        ip("-n", node.name, "addr", "add", f"{FAR_END}/30", "dev", far)
        ip("-n", node.name, "link", "set", far, "up")
        yield node
    finally:
        # The cable by itself: a namespace takes its own down some time after it is gone, and the next node
        # of this process has the same names.
        subprocess.run(["ip", "link", "del", node.name], check=False, timeout=240)
        ip("netns", "del", node.name)


class Worker:
    """The worker on the node; what it says, with when it did."""

    def __init__(self, node: Node, url: str, folder: Path) -> None:
        plan = {"ttl_s": TTL_S, "for_s": 600.0}
        self.process = subprocess.Popen(
            [
                *("ip", "netns", "exec", node.name),
                *(sys.executable, str(WORKER_PROGRAM), url, str(folder), json.dumps(plan)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[tuple[float, str]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def says(self, start: str, *, within_s: float) -> float:
        """When it says a line that begins so."""
        deadline_s = time.monotonic() + within_s
        said: list[str] = []
        while True:
            try:
                at_s, line = self._lines.get(timeout=max(0.01, deadline_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{start!r} was not said, but {said}") from None
            if line.startswith(start):
                return at_s
            said.append(line)

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)
        self._reader.join(60)  # the heartbeat process has our end of the pipe for a moment longer

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put((time.monotonic(), line.strip()))


class Task:
    """The worker as srun shows it to the supervisor: running."""

    worker, host, pid, ended_at, hint = WORKER, "node2", 1, None, ""

    def poll(self) -> int | None:
        return None


@pytest.fixture
def etcd_url(start_etcd: Callable[..., EtcdCluster], node: Node) -> Iterator[tuple[str, str]]:
    """Address of an etcd for us, and for the node."""
    cluster = start_etcd()
    (member,) = cluster.members
    listen = ",".join(f"http://{host}:{member.port}" for host in (ADDRESS, OUR_END))
    member._flags.append(f"--listen-client-urls={listen}")
    with cluster:
        yield cluster.url, f"etcd://{OUR_END}:{member.port}"


@pytest.fixture
def store(etcd_url: tuple[str, str]) -> Iterator[NameResolve]:
    store = open_store(etcd_url[0])
    store.add(KEYS.attempt, dumps(ATTEMPT))
    yield store
    store.close()


@pytest.fixture
def worker(
    node: Node, store: NameResolve, etcd_url: tuple[str, str], tmp_path: Path
) -> Iterator[Worker]:
    worker = Worker(node, etcd_url[1], tmp_path)
    worker.says("lease_status valid", within_s=240)
    yield worker
    worker.end()


@pytest.fixture
def leases(store: NameResolve) -> Iterator[WorkerLeases]:
    """The supervisor's eyes."""
    made = WorkerLeases(store, KEYS, ATTEMPT, judges_leases=True, has_left=lambda task: False)
    made.begin_phase(1)
    yield made
    made.end_phase()


def seconds_until_lost(leases: WorkerLeases, *, within_s: float) -> float | None:
    """When the supervisor declares the worker lost; None if it does not."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if leases.lost([Task()]):
            return time.monotonic()
        time.sleep(0.05)
    return None


def test_a_cut_off_worker_stops_its_side_effects_before_it_is_declared_lost_and_is_fenced_when_back(
    node: Node, store: NameResolve, worker: Worker, leases: WorkerLeases
) -> None:
    assert seconds_until_lost(leases, within_s=2.0) is None
    node.cut()
    lost_s = seconds_until_lost(leases, within_s=100)
    assert lost_s is not None
    suspended_s = worker.says("lease_status uncertain", within_s=240)
    assert suspended_s < lost_s
    end_attempt(store, KEYS, ATTEMPT)  # as the supervisor does, whom this worker can't hear
    node.heal()
    worker.says(f"over {worker_exit_codes.FENCED} Fenced", within_s=240)
    assert worker.process.wait(60) == worker_exit_codes.FENCED
    assert store.find_subtree(KEYS.workers) == []


def test_a_cut_that_is_healed_in_time_ends_nothing(
    node: Node, store: NameResolve, worker: Worker, leases: WorkerLeases
) -> None:
    for _ in range(2):
        node.cut()
        assert seconds_until_lost(leases, within_s=0.4 * TTL_S) is None
        node.heal()
        assert seconds_until_lost(leases, within_s=TTL_S) is None
    assert worker.process.poll() is None
    status = store.get(KEYS.worker_status("model_worker", 0))
    assert loads(WorkerStatus, status.value, where=status.key).state == WorkerState.READY
    node.cut()  # the connection that lived through two cuts ends like any other
    assert worker.says("lease_status uncertain", within_s=240) > 0
