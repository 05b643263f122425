"""Runs untrusted programs, each in a box of its own, from any number of threads at once.

    with Sandbox() as sandbox:
        outcome = sandbox.run(python_argv("print(input())"), stdin=b"hello")

What the program does is an outcome, whatever it does. A SandboxFailure says that the box itself
failed and the program was not judged: try again, here or elsewhere, and never count it as wrong.
"""

from __future__ import annotations

import itertools
import os
import platform
import posixpath
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Self

import msgspec

from realsys.api.errors import ClusterError, ConfigError, SandboxFailure
from realsys.rewards.sandbox import box_messages as messages
from realsys.rewards.sandbox.box_archive import PACK_S, most_archive_bytes
from realsys.rewards.sandbox.box_init import LISTENS_PORT
from realsys.rewards.sandbox.box_limits import BoxLimits, BoxOutcome, Ended
from realsys.rewards.sandbox.box_program import WARM_PYTHON, WARM_TEST
from realsys.rewards.sandbox.box_root import (
    WRITABLE,
    interpreter_folders,
    outermost,
    refused_folders,
)
from realsys.rewards.sandbox.node_support import FIXES, INDISPENSABLE, NEEDED, node_support

_START_S = 300.0  # allows for a busy machine and large libraries in ``preload``
_GRACE_S = 60.0  # beyond the wall time that the box itself enforces
_ENV = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # a fork must have one thread
_FRAME_BYTES = 1 << 20  # of a reply, besides outputs and files
_FORK_SERVER = "realsys.rewards.sandbox.fork_server"
LISTENS_AT = ("127.0.0.1", LISTENS_PORT)
OnListening = Callable[[socket.socket, Callable[[], None]], None]
MOST_PROGRAMS = 256  # in one box: each holds a descriptor open


def python_argv(code: str, *arguments: str) -> list[str]:
    """Returns argv for Python code in an interpreter that is up; quicker than ``python -c``."""
    return [WARM_PYTHON, "-c", code, *arguments]


def python_file_argv(name: str, *arguments: str) -> list[str]:
    """Returns argv for a Python file of the box, in an interpreter that is up."""
    return [WARM_PYTHON, name, *arguments]


def python_test_argv(name: str) -> list[str]:
    """Returns argv for a test on a Python file of the box, apart from it; separate_test.py."""
    return [WARM_TEST, name]


class Sandbox:
    """Boxes on this node, and the warm process that they are cloned from.

    Args:
        limits: of boxes that ``run`` gives none of their own.
        allow_missing: features that this node may lack, of ``net``, ``ipc``, ``uts``, ``seccomp``.
        read_only: folders that boxes may read besides the system's and this interpreter's.
        preload: modules that warm Python has imported, for programs that would import them.
        boxes_at_once: further callers wait; their limits do not run meanwhile.
    """

    def __init__(
        self,
        limits: BoxLimits | None = None,
        *,
        allow_missing: Collection[str] = (),
        read_only: Sequence[str] = (),
        preload: Sequence[str] = (),
        boxes_at_once: int = 32,
    ) -> None:
        self._limits = limits or BoxLimits()
        self._allow_missing, self._preload = tuple(allow_missing), tuple(preload)
        self._read_only = outermost([*interpreter_folders(), *map(os.path.abspath, read_only)])
        self._free = threading.BoundedSemaphore(boxes_at_once)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._server: _ForkServer | None = None
        self._without: list[str] = []  # features that are missing, by allowance

    def usable_folders(self, folders: Sequence[str]) -> list[str]:
        """Returns those of the folders that boxes on this node can make writable, each by itself."""
        return [f for f in folders if not refused_folders([f], self._read_only)]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Starts the warm process unless it is up. ``run`` does it too, and again if it has died.

        Raises:
            ClusterError: this node lacks what is needed, or the process can't be started.
        """
        with self._lock:
            if self._server is not None and not self._server.alive():
                self._server.end()
                self._server = None
            if self._server is None:
                self._without = without = self._missing()
                self._server = _ForkServer(
                    messages.ServerStart(
                        worker_pid=os.getpid(),
                        read_only=self._read_only,
                        preload=list(self._preload),
                        without=without,
                    )
                )

    def _missing(self) -> list[str]:
        """Returns what is missing by allowance; refuses what else is missing."""
        if unknown := set(self._allow_missing) - (set(NEEDED) - set(INDISPENSABLE)):
            raise ConfigError(
                f"a sandbox can't do without {', '.join(sorted(unknown))}",
                where="allow_missing",
                fix="name some of " + ", ".join(sorted(set(NEEDED) - set(INDISPENSABLE))),
            )
        missing = node_support().missing
        refused = {name: why for name, why in missing.items() if name not in self._allow_missing}
        if refused:
            allowed = sorted(set(refused) - set(INDISPENSABLE))
            fixes = [FIXES[name] for name in refused]
            if len(allowed) == len(refused):
                fixes.append(f"or accept weaker boxes: allow_missing={allowed}")
            listed = "; ".join(f"{name} ({why})" for name, why in refused.items())
            raise ClusterError(
                f"this node can't contain untrusted code; missing: {listed}",
                where=platform.node(),
                fix="; ".join(dict.fromkeys(fixes)),
            )
        return sorted(missing)

    def run(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        limits: BoxLimits | None = None,
        collect: Sequence[str] = (),
    ) -> BoxOutcome:
        """Runs one program in a new box and returns what became of it.

        Args:
            argv: program and arguments; python_argv for Python code.
            files: by name, relative to the work folder, where the program starts.
            env: added to a fixed environment; nothing of this process's is in it.
            collect: names of files to return, if they are there at the end; no links.
        Raises:
            SandboxFailure: the box failed; nothing is known about the program.
            ClusterError: the sandbox can't be started. ConfigError: a bad argument.
        """
        programs = [(argv, stdin)]
        return self.run_each(programs, files=files, env=env, limits=limits, collect=collect)[0]

    def run_each(
        self,
        programs: Sequence[tuple[Sequence[str], bytes]],
        *,
        files: Mapping[str, str | bytes] | None = None,
        env: Mapping[str, str] | None = None,
        limits: BoxLimits | None = None,
        collect: Sequence[str] = (),
        stop_after: Collection[Ended] = (),
        folders: Sequence[str] = (),
        archive: Sequence[str] = (),
        anew: bool = False,
        on_listening: OnListening | None = None,
    ) -> list[BoxOutcome]:
        """Runs programs, each argv and standard input, one after another in one box.

        Cheaper than a box for each. Between two of them everything is killed; the files that one
        leaves stay for the next. Times, memory and output are limited for each by itself.

        Args:
            anew: each program finds ``files`` as they were given, and no others.
            stop_after: ways to end after which no further program is run: the list is shorter then.
            folders: further folders that may be written, e.g. ``/app``; empty at first.
            archive: writable folders whose files are returned, as tar, to be unpacked in another box by
                the program ``UNPACK`` (box_archive.py) with the same folders.
            on_listening: is given a socket that listens at ``LISTENS_AT`` within the box, which has no
                other network: whoever accepts its connections, outside, serves the programs. It is the
                callee's. Also a function that ends the box at once, from any thread, as a failure. Called
                once, before the first program: a box in doubt is not tried again by itself, as who serves
                it has seen the first try.
            Others, errors: as ``run``. ConfigError: this node has no network namespaces to listen in.
        """
        limits = limits or self._limits
        given = {n: c.encode() if isinstance(c, str) else c for n, c in (files or {}).items()}
        _check_arguments([argv for argv, _ in programs], [*given, *collect], env or {})
        _check_folders(list(folders), archive, self._read_only)
        request = messages.BoxRequest(
            programs=[messages.BoxProgram(argv=list(a), stdin=stdin) for a, stdin in programs],
            files=given,
            env=dict(env or {}),
            collect=list(collect),
            folders=list(folders),
            archive=list(archive),
            limits=asdict(limits),
            stop_after=list(stop_after),
            anew=anew,
            listens=on_listening is not None,
        )
        if on_listening is not None:
            self._check_listening()
        with self._free:
            reply = self._reply(request, limits, on_listening)
            if reply.is_doubtful and on_listening is None:
                reply = self._reply(request, limits, on_listening)
        if reply.failure:
            raise _failure(reply.failure)
        return [
            BoxOutcome(**msgspec.structs.asdict(outcome), files=reply.files, archive=reply.archive)
            for outcome in reply.outcomes
        ]

    def _check_listening(self) -> None:
        self.start()
        if "net" in self._without:
            raise ConfigError(
                "a box can't listen on a node without network namespaces, which allow_missing accepts",
                where="allow_missing",
                fix="use other nodes; see `python -m realsys.rewards.sandbox.node_support`",
            )

    def _reply(
        self,
        request: messages.BoxRequest,
        limits: BoxLimits,
        on_listening: OnListening | None,
    ) -> messages.BoxReply:
        self.start()
        server, number = self._server, next(self._numbers)
        if server is None:
            raise _failure("the sandbox was closed")
        ours, theirs = socket.socketpair()
        with ours:
            try:
                with theirs:
                    server.command(messages.RUN, number, [theirs.fileno()])
                count = len(request.programs)
                ours.settimeout(count * limits.wall_s + PACK_S + _GRACE_S)
                messages.send(ours, request)
                most = 2 * count * limits.output_bytes + limits.file_bytes + _FRAME_BYTES
                most += most_archive_bytes(limits) if request.archive else 0
                head = b"" if on_listening is None else _listening(ours, on_listening)
                reply: messages.BoxReply = messages.receive(
                    ours, messages.BoxReply, most, head=head
                )
                return reply
            except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:
                server.command(messages.KILL, number)
                raise _failure(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Ends the warm process and, with it, all boxes. A later ``run`` starts another."""
        with self._lock:
            if self._server is not None:
                self._server.end()
                self._server = None


def _check_arguments(
    commands: list[Sequence[str]], names: list[str], env: Mapping[str, str]
) -> None:
    """Refuses what can't be run because the caller is wrong."""
    if not 0 < len(commands) <= MOST_PROGRAMS:
        raise ConfigError(
            f"{len(commands)} programs for one box",
            where="Sandbox.run_each",
            fix=f"give between 1 and {MOST_PROGRAMS}, and use several boxes for more",
        )
    texts = [text for argv in commands for text in argv]
    if not all(commands) or any("\0" in text for text in [*texts, *env, *env.values()]):
        raise ConfigError(
            "argv is empty, or a text in argv or env has a zero byte",
            where="Sandbox.run",
            fix="put data into files or stdin",
        )
    wrong = [
        n for n in names if "\0" in n or posixpath.normpath(n) != n or n.startswith((".", "/"))
    ]
    if wrong:
        raise ConfigError(
            f"names of files must be relative, below the work folder, and not hidden: {wrong}",
            where="Sandbox.run",
            fix="use names like 'main.py' or 'tests/case.txt'",
        )


def _check_folders(folders: list[str], archive: Sequence[str], read_only: list[str]) -> None:
    """Refuses folders that a box can't have, or can't pack."""
    wrong = refused_folders(folders, read_only)
    wrong += [folder for folder in archive if folder not in (*WRITABLE, *folders)]
    if wrong:
        raise ConfigError(
            f"folders that a box can't make writable, or that are not and can't be packed: {wrong}",
            where="Sandbox.run_each",
            fix="name absolute folders beside the system's, such as /app; none within another",
        )


def _listening(channel: socket.socket, on_listening: OnListening) -> bytes:
    """Hands on the socket that a box listens with; returns what was read of its reply, if it has none."""
    head, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if not descriptors:
        return head  # the box has failed, and says why

    def end() -> None:
        with suppress(OSError):  # it has ended
            channel.shutdown(socket.SHUT_RDWR)

    on_listening(socket.socket(fileno=descriptors[0]), end)
    return b""


def _failure(what: str) -> SandboxFailure:
    return SandboxFailure(
        f"a sandbox's box failed; its program was not judged: {what}",
        where=platform.node(),
        fix="run it again, here or on another node; never count it as wrong",
    )


class _ForkServer:
    """This end of the fork server's process."""

    def __init__(self, start: messages.ServerStart) -> None:
        self._owner = os.getpid()
        self._sending = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, sys.path))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _FORK_SERVER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**_ENV, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal must reach only the owner
            )
        try:
            self._control.settimeout(_START_S)
            self._control.send(msgspec.msgpack.encode(start))
            answer = self._control.recv(1 << 20)
            failure = msgspec.msgpack.decode(answer, type=messages.ServerReady).failure
        except (OSError, msgspec.DecodeError) as error:
            failure = f"it does not answer: {error}"
        if failure:
            self.end()
            raise ClusterError(
                f"the process that boxes are cloned from can't be started: {failure}",
                where=platform.node(),
                fix="`python -m realsys.rewards.sandbox.node_support` on that node says what it lacks",
            )

    def alive(self) -> bool:
        """Returns whether it runs, as this process's own: not after a fork of this process."""
        return self._owner == os.getpid() and self._process.poll() is None

    def command(self, what: bytes, number: int, descriptors: Sequence[int] = ()) -> None:
        """Sends a command about a box. A fork server that has died says nothing here."""
        message = what + messages.NUMBER.pack(number)
        try:
            with self._sending:
                socket.send_fds(self._control, [message], descriptors)
        except OSError:
            pass  # the box's own connection ends

    def end(self) -> None:
        """Kills the keeper, and with it the fork server and all boxes."""
        self._control.close()
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
