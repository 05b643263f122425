"""A function behind limits: whatever it does, the caller gets an answer, the next call a fresh process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden
import pytest

from realsys.api.errors import ClusterError
from realsys.rewards.guard import guarded as guarded_module
from realsys.rewards.guard.frames import Frame
from realsys.rewards.guard.guarded import (
    CPU_TIME,
    DIED,
    HOST_ENDED,
    MEMORY,
    RAISED,
    WALL_TIME,
    CallFailed,
    Guarded,
)

FUNCTIONS = """
import os, signal, time

def act(what, number=0):
    if what == "add":
        return number + 1
    if what == "spin":
        while True:
            pass
    if what == "count":
        return 9 ** 9 ** 9 ** 9  # one operation of the interpreter: no signal handler of Python's would run
    if what == "sleep":
        time.sleep(3600)
    if what == "hoard":
        return len(bytearray(1 << 40))
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "leave":
        raise SystemExit(3)
    if what == "signal":
        os.kill(os.getpid(), 40)  # one that Python has no name for
    if what == "close":
        os.closerange(3, 100)
        time.sleep(3600)
    if what == "print":
        print("not a reply", flush=True)
        return "said"
    if what == "whoami":
        return [os.getpid(), os.getppid()]
    if what == "environment":
        return sorted(os.environ)
    raise ValueError(f"no {what}")
"""


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    (tmp_path / "acting.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Guarded("acting:act", cpu_s=0.2, wall_s=60.0, memory_bytes=512 << 20)
    yield made
    made.close()


def test_results_come_back(guarded: Guarded) -> None:
    assert guarded.call(what="add", number=1) == 2
    assert guarded.call(what="print") == "said"
    first, second = guarded.call(what="whoami"), guarded.call(what="whoami")
    assert first[1] == second[1], "one process for all calls"
    assert first[0] != second[0], "which forks for each"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("spin", CPU_TIME),
        ("count", CPU_TIME),
        ("hoard", MEMORY),
        ("die", DIED),
        ("signal", DIED),
        ("close", DIED),
        ("leave", RAISED),
        ("unknown", RAISED),
    ],
)
def test_a_call_that_fails_says_why_and_the_next_one_works(
    guarded: Guarded, what: str, why: str
) -> None:
    with pytest.raises(CallFailed) as caught:
        guarded.call(what=what)
    assert caught.value.why == why
    assert caught.value.text
    assert guarded.call(what="add", number=41) == 42


def test_a_call_that_waits_ends_at_its_deadline(guarded: Guarded) -> None:
    guarded = Guarded("acting:act", wall_s=1.0)  # of the fixture's file
    with pytest.raises(CallFailed) as caught:
        guarded.call(what="sleep")
    assert caught.value.why == WALL_TIME
    guarded.close()


def test_it_is_called_from_many_threads(guarded: Guarded) -> None:
    found: dict[int, int] = {}

    def ask(number: int) -> None:
        found[number] = guarded.call(what="add", number=number)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: i + 1 for i in range(8)}


def test_no_secret_goes_there(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert "WANDB_API_KEY" not in guarded.call(what="environment")


def test_a_function_that_is_not_there_is_named(guarded: Guarded) -> None:
    for target in ("acting:nothing", "no_such_module:act"):
        with golden.raises(ClusterError):
            Guarded(target, cpu_s=1.0).call()


def test_it_ends_with_its_parent_however_that_ends(tmp_path: Path) -> None:
    (tmp_path / "acting.py").write_text(FUNCTIONS)
    script = """
        import os, signal, sys
        sys.path.insert(0, sys.argv[1])
        from realsys.rewards.guard.guarded import Guarded
        guarded = Guarded("acting:act", cpu_s=5.0)
        print(*guarded.call(what="whoami"), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    while any(map(_is_running, pids)):  # the test's own time limit ends this
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    """Not gone and not a zombie, which somebody else has to collect."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter: it went after the file was opened
        return False
    return state not in "ZX"


def test_a_host_that_ends_is_no_fault_of_a_call(guarded: Guarded) -> None:
    waiting = guarded.submit({"what": "sleep"})
    host = guarded.call(what="whoami")[1]
    os.kill(host, signal.SIGKILL)
    with pytest.raises(CallFailed) as caught:
        waiting.result()
    assert caught.value.why == HOST_ENDED
    assert guarded.call(what="whoami")[1] != host


def test_a_fork_of_its_owner_ends_nothing(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what such a fork runs at its exit would; also where a call was being written when it was made."""
    host = guarded.call(what="whoami")[1]
    assert guarded._host is not None
    monkeypatch.setattr("realsys.rewards.guard.guarded._END_S", 0.0)
    with guarded._host._writing:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)  # a fork that waits for that call would wait for ever
            status = 1
            try:
                guarded.close()
                status = 0
            finally:
                os._exit(status)
    monkeypatch.undo()
    assert os.waitpid(child, 0)[1] == 0
    assert guarded.call(what="whoami")[1] == host
    assert os.getsid(host) != os.getsid(0), "Ctrl-C in a terminal reaches only the owner"


def test_it_may_be_closed_twice_and_called_again(guarded: Guarded) -> None:
    host = guarded.call(what="whoami")[1]
    guarded.close()
    assert not _is_running(host)
    guarded.close()
    assert guarded.call(what="whoami")[1] != host


@pytest.mark.parametrize(
    ("since_s", "ended", "serves", "ends_s"),
    [
        ([0.0], False, False, 60.0),  # two answers' deadline and the grace, looked for each 10 s
        ([-500.0], False, False, 60.0),  # of the silence, not of the call
        ([15.0], False, False, 70.0),
        ([], False, False, None),
        ([0.0], False, True, None),  # of a service, the caller limits each call
        ([0.0], True, False, 10.0),
    ],
)
def test_a_host_that_is_silent_beyond_the_oldest_calls_deadline_is_given_up(
    since_s: list[float], ended: bool, serves: bool, ends_s: float | None, monkeypatch: Any
) -> None:
    """Calls keep coming, one a look."""
    now, said = [0.0], Frame(1, b"R", b"")
    monkeypatch.setattr(guarded_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    calls = {-i: SimpleNamespace(since_s=s, num_answers=2) for i, s in enumerate(since_s)}

    def next_reply(wait_s: float) -> Frame | None:
        now[0] += wait_s
        if since_s:
            calls[len(calls)] = SimpleNamespace(since_s=now[0], num_answers=1)
        return said if now[0] > 200 else None

    host: Any = SimpleNamespace(
        _next=next_reply,
        _lock=threading.Lock(),
        _calls=calls,
        _process=SimpleNamespace(poll=lambda: 0 if ended else None),
        permissions=SimpleNamespace(deadline_of=lambda number: 10.0 * number),
        serves=serves,
    )
    found = guarded_module._HostProcess._next_reply(host)
    assert (found, now[0]) == ((said, 210.0) if ends_s is None else (None, ends_s))
