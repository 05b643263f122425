"""`python server.py KIND SOCKET PARENT_PID PADDING`, started by forked.py: forks the processes of trials.

Importing torch and its like takes longer than most test trials need for all else, and most commands need
nothing but their imports. One server is for workers, one, without torch, for commands, one for what itself
forks for each answer, or does little: forking and ending is quicker where there is less. A process that a
test's trial starts with `python -m MODULE` asks here (sitecustomize.py, beside this file) and stays as a
stand-in: it passes on signals, ends as the forked process ends, and takes it along when it is killed. The
forked process has the asker's arguments, environment, folder, umask, open files, namespaces and control
groups; the first two also in /proc, where realsys looks for processes of a trial. Only its pid and its
parent are others.

What the tests show is realsys; how fast Python imports torch is not among it.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import marshal
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from sitecustomize import SERVERS, TIED

# What sitecustomize.py asks each server for has these modules already, and all of the packages below.
PRELOADED = {
    "workers": (
        *("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers", "numpy"),
        *("numpy.ctypeslib", "torch.utils.serialization", "encodings.idna", "math_verify"),
        *("transformers.models.auto.tokenization_auto", "transformers.generation.utils"),
        "transformers.models.llama.modeling_llama",
    ),
    "commands": (
        *("typer._adapters", "pydantic.fields", "submitit.local._local", "compileall"),
        *("numpy", "math_verify", "matplotlib.figure", "matplotlib.backends.backend_agg"),
        *("PIL.BmpImagePlugin", "PIL.GifImagePlugin", "PIL.JpegImagePlugin", "PIL.PpmImagePlugin"),
    ),
    "hosts": ("realsys.rewards.guarded_rules", "experiments.recipes"),
}
PACKAGES = {
    "workers": ("realsys", "experiments", "launcher"),
    "commands": (
        *("launcher", "experiments", "realsys.api", "realsys.slurm", "realsys.supervisor"),
        *("realsys.name_resolve", "realsys.trial", "realsys.config", "realsys.runtime"),
        *("realsys.heartbeat", "realsys.worker", "realsys.observability", "realsys.rewards"),
    ),
    "hosts": ("realsys.rewards.guard", "realsys.heartbeat", "realsys.name_resolve"),
}
# Each attempt of a trial ends with it. Most of its time goes into a picture that few tests look at: the
# others' trials end as where matplotlib is not installed.
PICTURES = "realsys.observability.report.artifacts"
PR_SET_PDEATHSIG = 1
CLONE_NEWNS, CLONE_NEWUTS = 0x00020000, 0x04000000
CGROUPS = Path("/sys/fs/cgroup")
MAX_FDS = 253  # SCM_MAX_FD of Linux


class Request(NamedTuple):
    """A process to become: as `python -m module arguments` would have been."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    umask: int
    fds: list[tuple[int, int]]  # (its number there, ours)


class Children:
    """The forked processes, by the connection of their stand-in."""

    def __init__(self) -> None:
        self.pids: dict[socket.socket, int] = {}

    def reap(self) -> list[tuple[socket.socket, int]]:
        """Those that ended, with their wait status."""
        ended = []
        for connection, pid in list(self.pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self.pids[connection]
                ended.append((connection, status))
        return ended

    def kill(self, connection: socket.socket) -> None:
        """Of a stand-in that is gone."""
        if pid := self.pids.get(connection):
            os.kill(pid, signal.SIGKILL)


def listen(path: str) -> socket.socket:
    """From now on stand-ins can ask; they wait until they are answered."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    return listener


def serve(listener: socket.socket) -> Request:
    """Answers stand-ins; returns in each forked process with what it is to become."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    children = Children()
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _address = listener.accept()
                selector.register(connection, selectors.EVENT_READ)
            elif key.fileobj == wake_read:
                os.read(wake_read, 4096)
            else:
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj in children.pids:  # it never speaks again: it is gone
                    children.kill(key.fileobj)
                    selector.unregister(key.fileobj)
                elif (request := receive(key.fileobj)) is None:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                else:
                    pid = os.fork()
                    if pid == 0:
                        end_with_parent(os.getppid())
                        try:
                            join(peer_of(key.fileobj))
                        except (FileNotFoundError, ProcessLookupError):  # the stand-in is gone
                            os._exit(0)
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        close_all(selector)
                        return request
                    for _there, here in request.fds:
                        os.close(here)
                    children.pids[key.fileobj] = pid
                    with contextlib.suppress(OSError):
                        key.fileobj.send(struct.pack("=i", pid))
        for connection, status in children.reap():
            with contextlib.suppress(OSError):
                connection.send(struct.pack("=i", status))
            with contextlib.suppress(KeyError):
                selector.unregister(connection)
            connection.close()


def close_all(selector: selectors.BaseSelector) -> None:
    """At once, not when they are collected: their numbers are then those of other files."""
    for key in list(selector.get_map().values()):
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
    selector.close()


def end_with_parent(expected_pid: int) -> None:
    """The kernel kills us when our parent ends; at once when it has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != expected_pid:
        os._exit(0)


def peer_of(connection: socket.socket) -> int:
    """Pid of the stand-in."""
    size = struct.calcsize("=iII")
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("=iII", content)[0])


def join(pid: int) -> None:
    """Goes where that process is: a node of the tests' Slurm has a host name, a mount table and, for each
    step, control groups of its own."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        tasks = CGROUPS / names.removeprefix("name=") / path.lstrip("/") / "cgroup.procs"
        if names and path != "/" and tasks.exists():
            tasks.write_text(str(os.getpid()))
    for name, flag in (("uts", CLONE_NEWUTS), ("mnt", CLONE_NEWNS)):
        theirs = Path(f"/proc/{pid}/ns/{name}")
        if os.readlink(theirs) == os.readlink(f"/proc/self/ns/{name}"):
            continue
        fd = os.open(theirs, os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(fd, flag) != 0:
            raise OSError(ctypes.get_errno(), f"setns({name})")
        os.close(fd)


def receive(connection: socket.socket) -> Request | None:
    """A stand-in's request; None when there is none to come."""
    fds = array.array("i")
    try:
        data, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(MAX_FDS * 4))
    except OSError:
        return None
    if not data:
        return None
    for _level, _kind, content in ancillary:
        fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    fields: dict[str, Any] = marshal.loads(data)
    return Request(**{**fields, "fds": list(zip(fields["fds"], fds, strict=True))})


def become(request: Request) -> None:
    """The asker's files, environment, folder and umask; our own files are closed."""
    held = {here for _, here in request.fds}
    top = max([*held, *(there for there, _ in request.fds)]) + 1
    moved = [(there, os.dup2(here, top + i)) for i, (there, here) in enumerate(request.fds)]
    os.closerange(0, top)
    for there, here in moved:
        os.dup2(here, there, inheritable=True)
        os.close(here)
    os.closerange(top, top + len(moved) + 64)
    environment = dict(request.environment)
    if request.module in TIED:  # the stand-in is tied to that one, and we to ours
        environment["REALSYS_PARENT_PID"] = str(os.getppid())
    os.environ.clear()
    os.environ.update(environment)
    show_in_proc(["python", "-m", request.module, *request.arguments], environment)
    if "COUNT_FILES_TO" in environment:
        ctypes.CDLL(None).begin_counting()  # of file_calls.c
    os.chdir(request.folder)
    os.umask(request.umask)
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        line = unbuffered or number == 2 or os.isatty(number)
        errors = "backslashreplace" if number == 2 else "strict"
        text = io.TextIOWrapper(raw, "utf-8", errors, line_buffering=line, write_through=unbuffered)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), "utf-8")
    sys.argv = [request.module, *request.arguments]
    further = [p for p in environment.get("PYTHONPATH", "").split(":") if p]
    sys.path[:0] = [request.folder, *(p for p in further if p not in sys.path)]


def show_in_proc(argv: list[str], environment: dict[str, str]) -> None:
    """Puts both where /proc/PID/cmdline and environ read them (proc(5)), over what exec put there."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = (int(field) for field in stat[45:49])
    pairs = sorted(environment.items(), key=lambda pair: not pair[0].startswith("REALSYS_"))
    for start, end, words in (
        (arg_start, arg_end, argv),
        (env_start, env_end, [f"{name}={value}" for name, value in pairs]),
    ):
        room = end - start
        block = b"".join(os.fsencode(word) + b"\0" for word in words)[: room - 1]
        ctypes.memmove(start, block + bytes(room - len(block)), room)


def run(request: Request) -> NoReturn:
    """What `python -m` does from here on, but that the interpreter's memory is not taken down object by
    object: of all that is imported here that would take longer than most commands."""
    become(request)
    if request.module == PICTURES and "DRAW_PICTURES" not in os.environ:
        sys.modules.update(dict.fromkeys(("matplotlib", "matplotlib.figure")))
    sys.modules.pop(request.module, None)  # another program may have imported it
    status = 0
    try:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            sys.stderr.write(f"{exit_.code}\n")
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except Exception:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads as the interpreter does
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # nobody may read it any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status & 0xFF)


def modules_of(packages: tuple[str, ...]) -> Iterator[str]:
    """All but those that `python -m` is to run."""
    for package in packages:
        folders = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(folders, f"{package}."):
            if module.name not in SERVERS:
                yield module.name


def main() -> None:
    kind, path, parent, *_padding = sys.argv[1:]
    end_with_parent(int(parent))
    listener = listen(path)
    gc.disable()  # as workers do while they import
    for name in (*PRELOADED[kind], *modules_of(PACKAGES[kind])):
        importlib.import_module(name)
    if kind == "workers":  # a table that the first model of a process makes
        mapping = importlib.import_module("transformers.conversion_mapping")
        mapping.get_checkpoint_conversion_mapping("llama")
    gc.freeze()
    gc.enable()
    request = serve(listener)  # once in this process, for ever; once in each forked one
    run(request)


if __name__ == "__main__":
    main()
