"""`pytest --at-once N`: the tests are collected once, and N forks of this process run them, file by file.

`pytest -n N` collects in each of its workers: of ours that is most of a minute of computing, and what two
files share (``pytest.mark.together``) is made twice. Forks take the next file when they have done one: two
of five begin with those that mostly wait, the others with those that compute, so that something computes at
all times, and few forks start a Slurm. Session fixtures live as long as their fork. Its reports are those
of this process, as far as other plug-ins see.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest
from _pytest.nodes import Node
from time_spent import ProcessorClock, TimeSpent

CHILD = "REALSYS_TESTS_CHILD"  # in the environment of a fork
PR_SET_PDEATHSIG = 1
_NUMBER = struct.Struct("=H")
WAITING = ("slurm", "etcd")  # markers of tests that wait more than they compute


def pytest_addoption(parser: pytest.Parser) -> None:
    help_ = "run the tests in so many processes"
    parser.addoption("--at-once", type=int, default=1, metavar="N", help=help_)
    parser.addoption("--every", type=int, default=1, metavar="N", help="run each n-th test alone")
    help_ = "append a line of JSON for each test: its name, seconds of wall time, of processors"
    parser.addoption("--spent-to", metavar="FILE", help=help_)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    num_children = session.config.getoption("at_once")
    if num_children <= 1 or session.testsfailed or session.config.option.collectonly:
        return None
    _run(session, num_children)
    return True


def files_of(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """What one process runs without a break: the tests of a file, or of those that go together."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("together")
        name = mark.args[0] if mark else item.nodeid.partition("::")[0]
        groups.setdefault(name, []).append(item)
    return list(groups.values())


@dataclass
class _Child:
    """A fork, as this process sees it."""

    pid: int
    reports: int  # the end of a pipe
    received: bytes = b""
    group: int = -1
    running: str = ""
    is_done: bool = False
    reported: set[str] = field(default_factory=set)

    def messages(self, data: bytes) -> Iterator[dict[str, Any]]:
        *lines, self.received = (self.received + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


def _run(session: pytest.Session, num_children: int) -> None:
    assert threading.active_count() == 1, "a thread would not be there in the forks"
    groups = files_of(session.items)
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all
    waits = [any(map(group[0].get_closest_marker, WAITING)) for group in groups]
    queues = [_queue([i for i, one in enumerate(waits) if one is kind]) for kind in (True, False)]
    num_children = min(num_children, len(groups))
    session.config.stash[TimeSpent.KEY] = TimeSpent(session.config.option.spent_to)
    children = [
        _fork(session, groups, queues if 5 * i < 2 * num_children else queues[::-1])
        for i in range(num_children)
    ]
    for queue in queues:
        os.close(queue)
    try:
        _listen(session, groups, children)
    finally:
        for child in children:
            if not child.is_done:
                os.kill(child.pid, signal.SIGINT)
        for child in children:
            os.waitpid(child.pid, 0)
            ProcessorClock.remove(child.pid)


def _queue(numbers: list[int]) -> int:
    """A pipe from which the next number is read."""
    queue, end = os.pipe()
    os.write(end, b"".join(map(_NUMBER.pack, numbers)))
    os.close(end)
    return queue


def _listen(
    session: pytest.Session, groups: list[list[pytest.Item]], children: list[_Child]
) -> None:
    """Until all forks have ended, or a failure ends the run."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.reports, selectors.EVENT_READ, child)
        while selector.get_map():
            for key, _ in selector.select():
                if data := os.read(key.data.reports, 1 << 20):
                    _hear(session, key.data, data)
                else:
                    selector.unregister(key.data.reports)
                    _gone(session, key.data, groups)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)


def _hear(session: pytest.Session, child: _Child, data: bytes) -> None:
    config = session.config
    for message in child.messages(data):
        match message:
            case {"group": number}:
                child.group = number
            case {"begins": nodeid}:
                child.running = nodeid
            case {"report": plain}:
                report = config.hook.pytest_report_from_serializable(config=config, data=plain)
                if isinstance(report.longrepr, list):  # of a skip: JSON has no tuples
                    report.longrepr = tuple(report.longrepr)
                child.reported.add(report.nodeid)
                config.hook.pytest_runtest_logreport(report=report)
            case {"spent": [nodeid, wall_s, processor_s]}:
                config.stash[TimeSpent.KEY].add(nodeid, wall_s, processor_s)
            case {"done": _}:
                child.is_done = True


def _gone(session: pytest.Session, child: _Child, groups: list[list[pytest.Item]]) -> None:
    """Its pipe has ended: what it had to do has failed, unless it was done."""
    os.close(child.reports)
    if not child.is_done:
        child.is_done = True
        for report in _of_the_lost(child, groups):
            session.config.hook.pytest_runtest_logreport(report=report)


def _of_the_lost(child: _Child, groups: list[list[pytest.Item]]) -> Iterator[pytest.TestReport]:
    """Failures of what a fork had to do when it ended."""
    for item in groups[child.group]:
        if item.nodeid == child.running or item.nodeid not in child.reported:
            why = f"the process that runs {child.running} has ended"
            yield pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")


def _fork(session: pytest.Session, groups: list[list[pytest.Item]], queues: list[int]) -> _Child:
    reports, end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    if pid := os.fork():
        os.close(end)
        return _Child(pid, reports)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.close(reports)
    os.environ[CHILD] = str(os.getpid())
    _work(session, groups, queues, end)


def _work(
    session: pytest.Session, groups: list[list[pytest.Item]], queues: list[int], end: int
) -> NoReturn:
    """What a fork does: the next file in the queues, until there is none."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it

    def send(**message: Any) -> None:
        data = memoryview(json.dumps(message, default=str).encode() + b"\n")
        while data:
            data = data[os.write(end, data) :]

    def next_group() -> int | None:
        for queue in queues:
            if data := os.read(queue, _NUMBER.size):
                return int(_NUMBER.unpack(data)[0])
        return None

    plugins = session.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(_Teller(session.config, send))
    clock = ProcessorClock()
    try:
        following = _Following(groups, next_group)
        while (number := following.take()) is not None:
            send(group=number)
            items = groups[number]
            for item, after in zip(items, [*items[1:], following], strict=True):
                began = clock.now()
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                wall_s, processor_s = (b - a for a, b in zip(began, clock.now(), strict=True))
                send(spent=[item.nodeid, round(wall_s, 3), round(processor_s, 3)])
        send(done=True)
    except KeyboardInterrupt:
        session._setupstate.teardown_exact(None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class _Following:
    """The first test of the file to come: to a test that ends, what pytest calls its ``nextitem``.

    It is taken when fixtures are about to be torn down, since what both need is kept, and no sooner: a fork
    that takes it before its last test runs would keep it from the others for minutes.
    """

    def __init__(
        self, groups: list[list[pytest.Item]], next_group: Callable[[], int | None]
    ) -> None:
        self._groups, self._next_group = groups, next_group
        self._number: int | None = None
        self._is_known = False

    def take(self) -> int | None:
        """The number of the file; from now on it is the one after it that follows."""
        number = self._known()
        self._is_known = False
        return number

    def listchain(self) -> list[Node]:
        """As of a test: the collectors that it needs."""
        number = self._known()
        return [] if number is None else self._groups[number][0].listchain()

    def _known(self) -> int | None:
        if not self._is_known:
            self._number, self._is_known = self._next_group(), True
        return self._number


class _Teller:
    """Tells the process that has forked us."""

    def __init__(self, config: pytest.Config, send: Any) -> None:
        self._config, self._send = config, send

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._send(begins=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        plain = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._send(report=plain)
