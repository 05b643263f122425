"""Which processes are a trial's, and how they are ended: in virtual time, but for one real process."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from realsys.trial import liveness
from realsys.trial.last_lines import last_lines, last_log_line
from realsys.trial.liveness import TRIAL_VARIABLE, Process, end_processes, processes_of
from realsys.trial.records import process_start


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the trial, which names its folder by a link."""
    (tmp_path / "trial").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "trial")
    environ = {"A": "b", TRIAL_VARIABLE: str(tmp_path / "link")}
    with subprocess.Popen(["/bin/sleep", "300"], env=environ) as process:
        yield process
        process.kill()


def test_processes_of_a_trial(
    tmp_path: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = process_start(child.pid)
    assert start is not None
    mine = Process(child.pid, start)
    for folder in ("trial", "link"):
        assert processes_of(tmp_path / folder) == [mine]
    assert processes_of(tmp_path) == []
    monkeypatch.setattr(os, "getpid", lambda: child.pid)
    assert processes_of(tmp_path / "trial") == []  # its own
    monkeypatch.undo()
    assert not Process(child.pid, start + 1).send(signal.SIGKILL)  # another one of that pid
    assert mine.send(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
    assert (mine.is_alive(), mine.send(signal.SIGTERM)) == (False, False)
    monkeypatch.setattr(Process, "is_alive", lambda self: True)  # it ended in between
    assert not mine.send(signal.SIGTERM)


@dataclass
class Stubborn:
    """A process that ends ``after_s`` a signal; it can't be signalled if it ``is_gone`` already."""

    pid: int
    clock: SimpleNamespace
    after_s: dict[signal.Signals, float] = field(default_factory=dict)
    is_gone: bool = False
    end_s: float = float("inf")
    got: list[signal.Signals] = field(default_factory=list)

    def send(self, number: signal.Signals) -> bool:
        self.got.append(number)
        self.end_s = min(self.end_s, self.clock.now_s + self.after_s.get(number, float("inf")))
        return not self.is_gone


def test_processes_are_asked_to_end_then_killed_and_those_that_remain_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now_s=100.0)
    clock.monotonic, clock.slept_s = lambda: clock.now_s, []

    def sleep(seconds: float) -> None:
        clock.slept_s.append(seconds)
        clock.now_s += 0.5

    clock.sleep = sleep
    monkeypatch.setattr(liveness, "time", clock)
    term, kill = signal.SIGTERM, signal.SIGKILL
    quick, slow = Stubborn(1, clock, {term: 0.5}), Stubborn(2, clock, {term: 9.0, kill: 1.0})
    gone, hung = Stubborn(3, clock, is_gone=True, end_s=100.0), Stubborn(4, clock)
    late = Stubborn(5, clock, {kill: 0.0})  # one of the others has started it meanwhile

    def find() -> list[Stubborn]:
        there = [p for p in (quick, slow, gone, hung) if p.end_s >= clock.now_s]
        return there + [late] * (clock.now_s > 101 and late.end_s > clock.now_s)

    assert end_processes(find, term_s=2.0) == ([1, 2, 4, 5], [2, 4, 5], [4])  # type: ignore[arg-type]
    assert (slow.got, quick.got) == ([term, kill], [term])
    assert set(clock.slept_s) == {0.05}
    assert clock.now_s == 108.0  # 2 s are over at 102.5, then 5 at 108
    assert end_processes(list, term_s=2.0) == ([], [], [])
    assert clock.now_s == 108.0


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert (last_lines(log), last_log_line(log)) == ([], "(it printed nothing)")
    log.write_bytes("abc\ndéf\n".encode())
    for max_bytes, first in ((99, "abc"), (9, "abc"), (8, "bc"), (6, "")):
        assert last_lines(log, max_bytes=max_bytes) == [first, "déf"]
    assert last_lines(log, max_bytes=3) == ["\ufffdf"]  # within a letter
    log.write_text("first\n a word \n\n \n")
    assert (last_log_line(log), last_log_line(log, most_chars=3)) == ("a word", "a w")
    log.write_text("x" * 301)
    assert last_log_line(log) == "x" * 300
