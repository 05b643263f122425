"""Attempts to break out of a sandbox's box, as the worker's own user and as an ordinary one.

The table is tests/support/sandbox_attacks.py. After each attempt nothing of the box is left, the
worker and what it serves are untouched, and the next box works.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sandbox_attacks import ATTACKS, PRELUDE, Attack

from realsys.rewards.sandbox.box_limits import BoxLimits, BoxOutcome
from realsys.rewards.sandbox.box_root import interpreter_folders
from realsys.rewards.sandbox.sandbox import Sandbox, python_argv

LIMITS = BoxLimits(
    memory_bytes=256 << 20,
    processes=24,
    output_bytes=1 << 16,
    file_bytes=8 << 20,
    files=500,
    open_files=128,
)
ORDINARY = 64001
# What the clock or a flood of output ends is watched from outside the box, whoever its user is.
WATCHED = {("output",), ("cpu_time",), ("wall_time",)}
OF_ORDINARY = [attack for attack in ATTACKS if attack.ended not in WATCHED]
ROOT = Path(__file__).parents[2]


class Host:
    """What a box is to keep its hands off: a service, sockets and a file of the worker's."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "secret"
        self.file.write_text("hush")
        self.services = [socket.socket(), socket.socket(socket.AF_UNIX)]
        self.services += [socket.socket(socket.AF_UNIX)]
        self.services[0].bind(("127.0.0.1", 0))
        self.abstract = f"realsys-test-{os.getpid()}"
        self.services[1].bind("\0" + self.abstract)
        self.services[2].bind(str(folder / "socket"))
        for service in self.services:
            service.listen()
            service.setblocking(False)
        self.environment = {
            "HOST_FILE": str(self.file),
            "HOST_HOME": os.path.expanduser("~"),
            "HOST_PID": str(os.getpid()),
            "HOST_PORT": str(self.services[0].getsockname()[1]),
            "HOST_ABSTRACT": self.abstract,
            "HOST_SOCKET": str(folder / "socket"),
        }

    def visited(self) -> bool:
        for service in self.services:
            try:
                service.accept()[0].close()
            except BlockingIOError:
                continue
            return True
        return False

    def close(self) -> None:
        for service in self.services:
            service.close()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made = Host(tmp_path_factory.mktemp("host"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    os.environ["A_SECRET"] = "hush"
    with Sandbox(LIMITS) as made:
        yield made
    del os.environ["A_SECRET"]


def processes_left(sandbox: Any) -> list[str]:
    """Children of the fork server, which is the keeper's only child."""
    server = children(sandbox._server._process.pid)
    assert len(server) == 1
    return children(int(server[0]))


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def wait_until_nothing_is_left(sandbox: Sandbox) -> None:
    deadline_s = time.monotonic() + 240
    while left := processes_left(sandbox):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.02)


def attempt(sandbox: Sandbox, attack: Attack, host: Host) -> BoxOutcome:
    argv = ["/bin/bash", "-c", attack.code] if attack.shell else python_argv(PRELUDE + attack.code)
    # A limit that is to be met first has all the time; the others' rows last as long as theirs.
    patient = {("exit",), ("memory",), ("output",)}
    wall_s, cpu_s = (60, 60) if attack.ended in patient else (2, 2)
    if attack.ended == ("cpu_time",):
        wall_s, cpu_s = 60, 1
    limits = replace(LIMITS, wall_s=wall_s, cpu_s=cpu_s, memory_bytes=attack.memory_bytes)
    return sandbox.run_each(
        [(argv, b"")],
        env=host.environment,
        limits=limits,
        collect=attack.collect,
        folders=attack.folders,
    )[0]


@pytest.mark.parametrize(
    "attack",
    OF_ORDINARY if os.getuid() == ORDINARY else ATTACKS,
    ids=lambda attack: attack.name.replace(" ", "_"),
)
def test_contained(sandbox: Sandbox, host: Host, attack: Attack) -> None:
    before = (host.file.read_text(), socket.gethostname(), os.sched_getaffinity(0))
    outcome = attempt(sandbox, attack, host)
    text = outcome.stdout.decode(errors="replace")
    assert "ESCAPED" not in text
    assert outcome.ended in attack.ended, (outcome.ended, text[-2000:], outcome.stderr[-2000:])
    if outcome.ended == "exit" and attack.exit_code is not None:
        assert outcome.exit_code == attack.exit_code, (text[-2000:], outcome.stderr[-2000:])
    if "done" in attack.code and outcome.ended == "exit":
        assert "done" in text, (text[-2000:], outcome.stderr[-2000:])
    assert len(outcome.stdout) <= 1 << 20
    assert all(len(content) <= 8 << 20 for content in outcome.files.values())
    assert not {"link", "folder/passwd", "fifo", "real"} & set(outcome.files)
    assert before == (host.file.read_text(), socket.gethostname(), os.sched_getaffinity(0))
    assert not host.visited()
    wait_until_nothing_is_left(sandbox)
    assert sandbox.run(python_argv("print('alive')")).stdout == b"alive\n"


def test_what_one_box_was_given_is_in_no_other(sandbox: Sandbox, host: Host) -> None:
    secret = b"box_one_from_another_box"
    given = sandbox.run(python_argv("import sys; print(len(sys.stdin.read()))"), stdin=secret * 100)
    assert given.stdout == b"2400\n"
    (search,) = (attack for attack in ATTACKS if "in its own memory" in attack.name)
    assert attempt(sandbox, search, host).stdout.split() == [b"not", b"found", b"done"]


def test_two_boxes_do_not_find_each_other(sandbox: Sandbox) -> None:
    listen = """
import socket, time
with socket.socket(socket.AF_UNIX) as s:
    s.bind("\\0box")
    s.listen()
    s.settimeout(3)
    open("/tmp/from_before", "w").close()
    try:
        s.accept()
        print("ESCAPED")
    except TimeoutError:
        print("alone")
"""
    outcomes: list[BoxOutcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(sandbox.run(python_argv(listen))))
    thread.start()
    time.sleep(0.5)
    connect = "import socket, os; s = socket.socket(socket.AF_UNIX); "
    connect += "assert not os.path.exists('/tmp/from_before'); "
    tried = sandbox.run(python_argv(connect + "s.connect('\\0box')"))
    thread.join()
    assert b"ConnectionRefusedError" in tried.stderr
    assert outcomes[0].stdout == b"alone\n"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
@pytest.mark.timeout(900)
def test_an_ordinary_user_contains_the_same() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        test = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider"]
        test += ["-k", "contained or boxes or box_was", "--basetemp", f"{folder}/home/pytest"]
        done = subprocess.run(
            ["unshare", "--mount", "bash", "-ec", as_ordinary_user(Path(folder), test)],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"{len(OF_ORDINARY) + 2} passed" in done.stdout


def as_ordinary_user(folder: Path, command: list[str]) -> str:
    """A script that runs a command as ORDINARY, which can read no more than the code and Python.

    Where they lie in a folder that is closed to others, in root's home say, an open one is mounted
    over it, with only these in it. In a mount namespace of its own.
    """
    needed = [*interpreter_folders(), str(ROOT)]
    lines = [f"mkdir -p {folder}/kept", f"install -d -o {ORDINARY} -m 700 {folder}/home"]
    closed = sorted({top for path in needed if (top := first_closed(Path(path)))})
    hidden = [path for path in needed if first_closed(Path(path))]
    for number, path in enumerate(hidden):
        lines.append(f"mkdir {folder}/kept/{number}")
        lines.append(f"mount --rbind {shlex.quote(path)} {folder}/kept/{number}")
    lines += [f"mount -t tmpfs -o mode=755 none {shlex.quote(top)}" for top in closed]
    for number, path in enumerate(hidden):
        lines.append(f"mkdir -p {shlex.quote(path)}")
        lines.append(f"mount --rbind {folder}/kept/{number} {shlex.quote(path)}")
    user = f"setpriv --reuid={ORDINARY} --regid={ORDINARY} --clear-groups"
    environment = f"env -i PATH=/usr/bin:/bin HOME={folder}/home TMPDIR={folder}/home"
    words = f"PYTHONDONTWRITEBYTECODE=1 {shlex.join(command)}"
    return "\n".join([*lines, f"exec {user} {environment} {words}"])


def first_closed(path: Path) -> str:
    """The uppermost folder on the way to a path that others can't enter; empty if there is none."""
    for folder in [*reversed(path.parents), path]:
        if not folder.stat().st_mode & 0o001:
            return str(folder)
    return ""
