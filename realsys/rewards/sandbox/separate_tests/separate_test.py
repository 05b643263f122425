"""Runs a test on a program, each in a process of its own: what is compared, the program can't touch.

    test (trusted; its memory and descriptors are closed to others)
      │ forks, before it has read anything
      ▼
    program ── runs program.py, then serves the test's requests (remote_objects.py)

A name that the test does not define, and that is none of Python's builtins, is the program's. The line that
shows that a test came to its end is written by the test's process, from a secret that it alone has read.
"""

from __future__ import annotations

import builtins
import codecs
import hashlib
import json
import os
import select
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from realsys.rewards.sandbox.separate_tests.remote_objects import ObjectExchange, OtherEnded, Side

_PIECE_BYTES = 1 << 16
_CONNECTION = 3  # descriptor of the program's end


def reached_line(secret: str) -> str:
    """Returns what a test prints last that came to its end."""
    return hashlib.sha256(secret.encode() + b"reached").hexdigest()


def run_separate_test(
    path: str, *, show_memory: Callable[[bool], None], writable: Sequence[str]
) -> NoReturn:
    """Runs the test in the JSON ``[secret, test]`` of standard input on the program in a file.

    Ends as the program did where that ended first; with status 1 where the test raised.

    Args:
        show_memory: opens this process's memory and descriptors to others of its user, or closes them.
        writable: folders that the program can write.
    """
    show_memory(False)  # before the fork: there is no moment in which it can be looked into
    ours, theirs = socket.socketpair()
    printed, prints = os.pipe()
    if (program := os.fork()) == 0:
        try:
            _be_program(path, theirs, prints, show_memory)
        finally:
            os._exit(1)
    theirs.close()
    os.close(prints)
    sys.path[:] = _closed_path(sys.path, writable)
    os._exit(
        _exit_status(
            ObjectExchange(ours, Side.TEST, wait=_Printed(ours, printed).wait), program, path
        )
    )


def _be_program(
    path: str, connection: socket.socket, prints: int, show_memory: Callable[[bool], None]
) -> NoReturn:
    """Runs the program, then serves the test. The test was not read yet: nothing of it is here."""
    empty = os.open("/dev/null", os.O_RDONLY)
    for number, descriptor in enumerate((empty, prints, 2, connection.fileno())):
        os.dup2(descriptor, number)
    os.closerange(_CONNECTION + 1, 1 << 16)
    connection.detach()
    show_memory(True)
    exchange = ObjectExchange(socket.socket(fileno=_CONNECTION), Side.PROGRAM, wait=lambda: None)
    main: Any = types.ModuleType("__main__")
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    sys.path.insert(0, os.getcwd())
    sys.argv[:] = [path]
    try:
        with open(path, "rb") as file:
            source = file.read()
        exec(compile(source, path, "exec"), main.__dict__)
    except SystemExit as stop:
        _flush()
        os._exit((stop.code or 0) & 0xFF if isinstance(stop.code, int | None) else 1)
    except BaseException:
        traceback.print_exc()
        _flush()
        os._exit(1)
    exchange.serve_names(main.__dict__, _flush)
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the program may have put anything there
            pass


def _exit_status(exchange: ObjectExchange, program: int, path: str) -> int:
    stdout = sys.stdout
    secret, test = json.load(sys.stdin)
    sys.argv[:] = [path]
    for name in ("__main__", "program"):
        sys.modules[name] = _ProgramModule(name, exchange)
    names = _TestNames(exchange)
    try:
        exchange.call("ready")
        exec(compile(test, "test", "exec"), names)
    except OtherEnded:
        stdout.flush()
        return _status_of(program)
    except SystemExit as stop:
        return (stop.code or 0) & 0xFF if isinstance(stop.code, int | None) else 1
    except BaseException:  # reported as Python reports it
        traceback.print_exc()
        return 1
    stdout.flush()
    os.write(1, f"\n{reached_line(secret)}\n".encode())
    return 0


def _status_of(program: int) -> int:
    """Returns the program's exit status; ends this process by the signal that ended the program."""
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pause()
    return code


class _TestNames(dict[str, Any]):
    """Global names of a test, behind which are those of the program."""

    def __init__(self, exchange: ObjectExchange) -> None:
        super().__init__({"__name__": "__main__", "__builtins__": builtins})
        self._exchange = exchange

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):  # of Python: a program's own could say that all is right
            raise KeyError(name)
        return self._exchange.named(name)

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        try:
            self._exchange.named(str(name))
        except KeyError:
            return False
        return True


class _ProgramModule(types.ModuleType):
    """The program, for a test that imports it."""

    def __init__(self, name: str, exchange: ObjectExchange) -> None:
        super().__init__(name)
        self.__dict__["_exchange"] = exchange

    def __getattr__(self, name: str) -> Any:
        exchange: ObjectExchange = self.__dict__["_exchange"]
        if name == "__all__":
            return exchange.call("names")
        try:
            return exchange.named(name)
        except KeyError:
            raise AttributeError(name) from None


class _Printed:
    """Passes on what the program prints, to where the test's own output goes now."""

    def __init__(self, connection: socket.socket, printed: int) -> None:
        self._connection, self._printed = connection.fileno(), printed
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        os.set_blocking(printed, False)
        self._poll = select.poll()
        for descriptor in (self._connection, printed):
            self._poll.register(descriptor, select.POLLIN)

    def wait(self) -> None:
        """Blocks until a message, or its end, is there; before that, all that was printed is passed on."""
        while True:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            if self._printed in ready:
                self._pass_on()
            if self._connection in ready:
                return

    def _pass_on(self) -> None:
        try:
            while piece := os.read(self._printed, _PIECE_BYTES):
                sys.stdout.write(self._decoder.decode(piece))
        except BlockingIOError:
            return
        self._poll.unregister(self._printed)  # closed by all that had it


def _closed_path(folders: Sequence[str], writable: Sequence[str]) -> list[str]:
    """Returns where this process imports from, without what the program can write or put elsewhere."""
    found: list[str] = []
    for folder in folders:
        if not os.path.isdir(folder) or os.access(folder, os.W_OK):
            continue
        is_below = any(folder == top or folder.startswith(f"{top}/") for top in writable)
        # A descriptor stays what it is when a folder above is given another name.
        found.append(f"/proc/self/fd/{os.open(folder, os.O_PATH)}" if is_below else folder)
    return found
