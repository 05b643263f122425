"""System calls under a Python that was built without them, as uv's and conda-forge's are.

A worker and its heartbeat process under such a Python are in tests/process/test_heartbeat.py.
"""

import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import golden
import pytest

from realsys.api.errors import ClusterError
from realsys.runtime import linux

LACKING = ((os, "memfd_create"), (os, "pidfd_open"), (signal, "pidfd_send_signal"))


@pytest.fixture(params=["python has them", "python lacks them"])
def either_python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python lacks them":
        for module, name in LACKING:
            monkeypatch.delattr(module, name)
        for name in ("MFD_CLOEXEC", "MFD_ALLOW_SEALING"):
            monkeypatch.delattr(os, name)
        for name in [n for n in dir(fcntl) if "SEAL" in n]:
            monkeypatch.delattr(fcntl, name)
    return str(request.param)


def test_memory_without_a_name_can_be_sealed(either_python: str) -> None:
    fd = linux.memfd_create("realsys-test", linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING)
    try:
        assert os.readlink(f"/proc/self/fd/{fd}") == "/memfd:realsys-test (deleted)"
        assert not os.get_inheritable(fd)
        os.ftruncate(fd, 10)
        fcntl.fcntl(fd, linux.F_ADD_SEALS, linux.F_SEAL_SHRINK | linux.F_SEAL_GROW)
        seals = linux.F_SEAL_SHRINK | linux.F_SEAL_GROW
        assert fcntl.fcntl(fd, linux.F_GET_SEALS) == seals
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 5)
    finally:
        os.close(fd)


def test_a_process_is_waited_for_and_ended_by_its_descriptor(either_python: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        fd = linux.pidfd_open(child.pid)
        try:
            assert not os.get_inheritable(fd)
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            assert not poll.poll(0)
            linux.pidfd_send_signal(fd, signal.SIGKILL)
            assert poll.poll(60_000)
            assert child.wait() == -signal.SIGKILL
            with pytest.raises(ProcessLookupError):
                linux.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)
    with pytest.raises(ProcessLookupError):
        linux.pidfd_open(child.pid)


def test_a_kernel_without_pidfd_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(linux, "_syscall", refuse)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with golden.raises(ClusterError):
        linux.pidfd_open(os.getpid())


def test_only_one_file_knows_them() -> None:
    """A new call site goes through linux.py."""
    root = Path(linux.__file__).parents[2]
    named = [
        str(path.relative_to(root))
        for folder in ("realsys", "launcher", "experiments")
        for path in sorted((root / folder).rglob("*.py"))
        if any(f"{module.__name__}.{name}" in path.read_text() for module, name in LACKING)
    ]
    assert named == ["realsys/runtime/linux.py"]
