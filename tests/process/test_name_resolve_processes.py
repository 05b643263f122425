"""The file store between real processes: contention, and holders and writers killed without warning."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from realsys.name_resolve.file.file_store import FileStore
from realsys.name_resolve.store import EventKind

pytestmark = pytest.mark.process

ROOT = "realsys/v1/site/anna/ppo-math/run1"
REPOSITORY = Path(__file__).parents[2]
Start = Callable[[str], subprocess.Popen[str]]

PRELUDE = f"""
import sys, time
from pathlib import Path
from realsys.api.errors import KeyExists
from realsys.name_resolve.file.file_store import FileStore
from realsys.name_resolve.store import Compare, Put
ROOT, folder = {ROOT!r}, Path(sys.argv[1])
store = FileStore(folder)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts a process that runs the given lines with ``store`` open."""
    started: list[subprocess.Popen[str]] = []

    def start_one(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code), str(folder)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_one_of_16_processes_wins_a_key(folder: Path, start: Start):
    contender = """
        print("ready", flush=True)
        store.wait([f"{ROOT}/go"], timeout_s=60)
        me = sys.argv[2] if len(sys.argv) > 2 else str(__import__("os").getpid())
        try:
            store.add(f"{ROOT}/leader", me.encode())
            print("won", me)
        except KeyExists as error:
            print("lost", error.what.rsplit("b'")[1].rstrip("'"))
    """
    processes = [start(contender) for _ in range(16)]
    assert [read_line(process) for process in processes] == ["ready"] * 16
    with_key = FileStore(folder)
    with_key.add(f"{ROOT}/go", b"")
    answers = [read_line(process).split() for process in processes]
    winner = with_key.get(f"{ROOT}/leader").value.decode()
    assert sorted(answers) == sorted([["won", winner]] + [["lost", winner]] * 15)
    with_key.close()


def test_a_killed_holder_is_seen_long_before_its_lease_ends(folder: Path, start: Start):
    holder = start("""
        lease = store.grant(ttl_s=300)
        store.add(f"{ROOT}/worker/0", b"x", lease=lease)
        print("ready", flush=True)
        time.sleep(300)
    """)
    assert read_line(holder) == "ready"
    store = FileStore(folder)
    with store.watch(ROOT) as watch:
        assert watch.poll(0.3) == []
        holder.send_signal(signal.SIGKILL)  # not waited for: a zombie counts as dead
        events = watch.poll(60)
        assert [(event.kind, event.value) for event in events] == [(EventKind.EXPIRE, b"x")]
    assert store.find_subtree(ROOT) == []
    store.close()


def test_a_stopped_holder_expires_by_its_counter(folder: Path, start: Start):
    holder = start("""
        lease = store.grant(ttl_s=2)
        store.add(f"{ROOT}/worker/0", b"x", lease=lease)
        print("ready", flush=True)
        while True:
            lease.keep_alive()
            time.sleep(0.1)
    """)
    assert read_line(holder) == "ready"
    store = FileStore(folder)
    with store.watch(ROOT) as watch:
        assert watch.poll(0.3) == []
        holder.send_signal(signal.SIGSTOP)  # it is alive: only its counter tells
        events = watch.poll(60)
    assert [(event.kind, event.value) for event in events] == [(EventKind.EXPIRE, b"x")]
    store.close()


def test_values_are_whole_wherever_the_writer_is_killed(folder: Path, start: Start):
    store = FileStore(folder)
    for attempt in range(8):
        writer = start("""
            import os
            letters = [bytes([65 + i]) for i in range(26)]
            print("ready", flush=True)
            while True:
                for letter in letters:
                    puts = [Put(f"{ROOT}/a", letter * 50_000), Put(f"{ROOT}/b", letter)]
                    store.transaction([], puts=puts)
        """)
        assert read_line(writer) == "ready"
        random.seed(attempt)
        deadline_s = time.monotonic() + random.uniform(0.05, 0.3)
        killed = False
        while not killed or time.monotonic() < deadline_s:
            if not killed and time.monotonic() > deadline_s:
                writer.send_signal(signal.SIGKILL)
                killed, deadline_s = True, time.monotonic() + 0.1
            found = {entry.key[-1]: entry.value for entry in store.get_subtree(ROOT)}
            if found:
                assert len(found["a"]) == 50_000
                assert found["a"] == found["b"] * 50_000
        writer.wait()
        store.add(f"{ROOT}/after", b"%d" % attempt, replace=True)  # its lock is free
        store.delete(f"{ROOT}/after")
    fresh = FileStore(folder)
    assert fresh.get_subtree(ROOT) == store.get_subtree(ROOT)
    fresh.close()
    store.close()


def test_two_supervisors_never_take_the_same_attempt(folder: Path, start: Start):
    taker = """
        for _ in range(50):
            while True:
                held = store.get_subtree(f"{ROOT}/attempt")
                n = int(held[0].value) if held else 0
                seen = Compare.at_revision(f"{ROOT}/attempt", held[0].revision if held else 0)
                if store.transaction([seen], puts=[Put(f"{ROOT}/attempt", b"%d" % (n + 1))]):
                    print(n + 1, flush=True)
                    break
        print("end", flush=True)
    """
    taken: list[int] = []
    for process in [start(taker) for _ in range(3)]:
        while (line := read_line(process)) != "end":
            taken.append(int(line))
    assert sorted(taken) == list(range(1, 151))
