"""The conformance suite over all stores in real time, and between real processes.

The cases are in tests/support/name_resolve_cases.py; each has a trial of its own on the session's etcd.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from etcd_server import EtcdCluster
from name_resolve_cases import *  # noqa: F403 (the suite)
from name_resolve_cases import EXPIRE, collect

from realsys.name_resolve.file.file_store import FileStore
from realsys.name_resolve.memory_store import MemoryStore, SharedMemory
from realsys.name_resolve.open import open_store
from realsys.name_resolve.store import Lease, NameResolve

_numbers = itertools.count(1)


class RealTime:
    """See Passing in the cases. etcd's leases end up to a second late."""

    def __init__(self, *, ttl_s: float, late_s: float) -> None:
        self.ttl_s, self._late_s = ttl_s, late_s

    def most_of(self, lease: Lease) -> None:
        time.sleep(0.3 * lease.ttl_s)

    def all_of(self, lease: Lease) -> None:
        time.sleep(lease.ttl_s + self._late_s)


@pytest.fixture(params=["memory", "file", "etcd"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_another(
    kind: str, tmp_path: Path, etcd: EtcdCluster
) -> Iterator[Callable[[], NameResolve]]:
    shared, opened = SharedMemory(), []

    def open_one() -> NameResolve:
        store: NameResolve
        if kind == "memory":
            store = MemoryStore(shared)
        elif kind == "file":
            store = FileStore(tmp_path / "store", poll_s=0.005)
        else:
            store = open_store(etcd.url)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_another: Callable[[], NameResolve]) -> NameResolve:
    return open_another()


@pytest.fixture
def root() -> str:
    return f"realsys/v1/site/anna/ppo-{next(_numbers)}/run1"


@pytest.fixture
def passing(kind: str) -> RealTime:
    return RealTime(ttl_s=2, late_s=1.6) if kind == "etcd" else RealTime(ttl_s=1.5, late_s=0.1)


# --- between processes; the file store's are in tests/process ------------------------------------

IMPORTS = """
import os, sys, time
from realsys.api.errors import KeyExists, StoreUnavailable
from realsys.name_resolve.open import open_store
from realsys.name_resolve.store import Compare, Put
"""
OPENING = """
url, root = sys.argv[1:3]
for _ in range(20):  # 64 of them start at once, on two cores
    try:
        store = open_store(url)
        break
    except StoreUnavailable:
        pass
"""
# Imports take longer than what a contender does: they are done once.
COPIES = """
import realsys.name_resolve.etcd.etcd_store
from realsys.runtime.child_processes.parent_death import die_with_parent
parent = os.getpid()
for _ in range(int(sys.argv[3])):
    if os.fork() == 0:
        die_with_parent(parent)
        break
else:
    sys.exit(any(os.wait()[1] for _ in range(int(sys.argv[3]))))
"""


class Processes:
    """Python processes that run a piece of code with ``store`` open at the same address."""

    def __init__(self, url: str, root: str) -> None:
        self._arguments = [url, root]
        self._started: list[subprocess.Popen[str]] = []

    def start(self, code: str, *, copies: int = 0) -> subprocess.Popen[str]:
        """Starts one, or one whose ``copies`` all write to its output."""
        whole = IMPORTS + (COPIES if copies else "") + OPENING + textwrap.dedent(code)
        process = subprocess.Popen(
            [sys.executable, "-c", whole, *self._arguments, str(copies)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def processes(etcd: EtcdCluster, root: str) -> Iterator[Processes]:
    group = Processes(etcd.url, root)
    yield group
    group.end()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_one_of_64_processes_wins_a_key(processes: Processes, etcd: EtcdCluster, root: str):
    contender = """
        def say(line):  # in one piece: all write to one pipe
            os.write(1, line.encode() + b"\\n")
        say("ready")
        store.wait([f"{root}/go"], timeout_s=200)
        me = b"%d" % os.getpid()
        try:
            store.add(f"{root}/leader", me)
            say(f"won {os.getpid()}")
        except KeyExists as error:
            say("lost " + error.what.rsplit("b'")[1].rstrip("'"))
    """
    contenders = processes.start(contender, copies=64)
    assert [read_line(contenders) for _ in range(64)] == ["ready"] * 64
    store = open_store(etcd.url)
    store.add(f"{root}/go", b"")
    answers = [read_line(contenders).split() for _ in range(64)]
    winner = store.get(f"{root}/leader").value.decode()
    assert sorted(answers) == sorted([["won", winner]] + [["lost", winner]] * 63)
    store.close()


def test_values_are_whole_wherever_the_writer_is_killed(
    processes: Processes, etcd: EtcdCluster, root: str
):
    store = open_store(etcd.url)
    for pause_s in (0.05, 0.13, 0.22):
        writer = processes.start("""
            print("ready", flush=True)
            while True:
                for letter in [bytes([65 + i]) for i in range(26)]:
                    puts = [Put(f"{root}/a", letter * 50_000), Put(f"{root}/b", letter)]
                    store.transaction([], puts=puts)
        """)
        assert read_line(writer) == "ready"
        time.sleep(pause_s)
        writer.kill()
        for _ in range(20):
            found = {entry.key[-1]: entry.value for entry in store.get_subtree(root)}
            assert not found or found["a"] == found["b"] * 50_000
    store.close()


def test_a_killed_holders_keys_expire(processes: Processes, etcd: EtcdCluster, root: str):
    holder = processes.start("""
        lease = store.grant(ttl_s=3)
        store.add(f"{root}/worker", b"x", lease=lease)
        print("ready", flush=True)
        while True:
            lease.keep_alive()
            time.sleep(0.2)
    """)
    assert read_line(holder) == "ready"
    store = open_store(etcd.url)
    with store.watch(root) as watch:
        assert watch.poll(4) == []
        holder.kill()
        assert [(e.kind, e.value) for e in collect(watch, 1)] == [(EXPIRE, b"x")]
    store.close()
