"""The last steps of a box's first process before the untrusted program: descriptors, limits, exec.

Warm Python skips the exec: the process was forked from an interpreter that is up, and runs the
script in it, as ``python SCRIPT`` or ``python -c CODE`` would.
"""

from __future__ import annotations

import atexit
import os
import platform
import random
import resource
import signal
import sys
import threading
import traceback
import types
from math import ceil
from typing import Any, NoReturn

from realsys.rewards.sandbox import kernel_calls as kernel
from realsys.rewards.sandbox.box_limits import BoxLimits
from realsys.rewards.sandbox.box_root import WORK, WRITABLE
from realsys.rewards.sandbox.separate_tests.separate_test import run_separate_test

WARM_PYTHON = "python:warm"  # as argv[0]
WARM_TEST = "python:test"  # the file argv[1], and a test on it, each in a process of its own
_NO_PROGRAM, _NOT_EXECUTABLE = 127, 126  # as shells say it
_NPROC_BY_NAMESPACE = (5, 14)  # before, the kernel counts all of the user's processes on the node
# Address space that is reserved, or shared with files, is not memory: Node.js reserves 10 GiB for each of
# its WebAssembly memories, and a program may have several. What is touched counts, see box_usage.
_AS_ROOM_BYTES = 256 << 30


def resource_limits(limits: BoxLimits) -> dict[int, int]:
    """Returns the limits of each process by resource."""
    cpu_s = ceil(limits.cpu_s) + 1  # a second line: the box's init enforces the sum
    found = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_DATA: limits.memory_bytes,
        resource.RLIMIT_AS: limits.memory_bytes + _AS_ROOM_BYTES,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
        resource.RLIMIT_STACK: 8 << 20,
    }
    release = tuple(int(number) for number in platform.release().split(".")[:2])
    if release >= _NPROC_BY_NAMESPACE:
        found[resource.RLIMIT_NPROC] = limits.processes + 1  # and the box's init
    return found


def environment(given: dict[str, str]) -> dict[str, str]:
    """Returns the program's environment: nothing of the worker's."""
    path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    fixed = {"PATH": path, "HOME": WORK, "TMPDIR": "/tmp", "LANG": "C.UTF-8", "USER": "box"}
    return {**fixed, **given}


def run_program(
    argv: list[str], env: dict[str, str], limits: BoxLimits, streams: list[int]
) -> NoReturn:
    """Turns this process into the program; ``streams`` are its standard input, output and error."""
    try:
        os.setsid()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.closerange(3, 1 << 16)
        os.chdir(WORK)
        os.umask(0o022)
        _show_memory(True)
        for name, value in resource_limits(limits).items():
            hard = resource.getrlimit(name)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(name, (value, value))
        if argv[0] == WARM_PYTHON:
            _run_warm(argv[1:], env)
        if argv[0] == WARM_TEST:
            _become_python(env)
            run_separate_test(argv[1], show_memory=_show_memory, writable=WRITABLE)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode(errors="replace"))
        os._exit(_NO_PROGRAM if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)
    finally:  # whatever was raised: this process must not go on as a fork of the init
        os._exit(_NOT_EXECUTABLE)


def _show_memory(shown: bool) -> None:
    """Lets other processes of the user read this one's memory and descriptors, or not."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, int(shown))


def _become_python(env: dict[str, str]) -> None:
    """Gives this interpreter new streams and environment, and nothing of ours to import."""
    os.environ.clear()
    os.environ.update(env)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(  # noqa: SIM115  # for as long as the process lives
            number,
            "w" if number else "r",
            encoding="utf-8",
            errors="backslashreplace" if number == 2 else "surrogateescape",
            buffering=1 if number == 2 else -1,
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for name in [name for name in sys.modules if name.partition(".")[0] == "realsys"]:
        del sys.modules[name]
    random.seed()  # or every box would draw the same


def _run_warm(arguments: list[str], env: dict[str, str]) -> NoReturn:
    """Runs a Python script in this interpreter and exits as Python would."""
    _become_python(env)
    status = _exit_status(arguments)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python's exit
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # the program's own threads, exit functions and streams
        status = status or 120  # as Python, when standard output can't be flushed
    os._exit(status)


def _exit_status(arguments: list[str]) -> int:
    """Runs the script in a new ``__main__`` and returns its exit status."""
    main: Any = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    try:
        if arguments[0] == "-c":
            name, source, sys.argv = "<string>", arguments[1].encode(), ["-c", *arguments[2:]]
            sys.path.insert(0, "")
        else:
            name, sys.argv = arguments[0], arguments
            main.__file__ = name
            sys.path.insert(0, os.path.dirname(os.path.abspath(name)))
            with open(name, "rb") as file:
                source = file.read()
        exec(compile(source, name, "exec"), main.__dict__)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        sys.stderr.write(f"{stop.code}\n")
        return 1
    except BaseException as error:  # reported as Python reports it
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        try:
            traceback.print_exception(type(error), error, frames)
        except BaseException:  # no memory, or an exception that can't be printed
            os.write(2, f"{type(error).__name__}\n".encode())
        return 1
    return 0
