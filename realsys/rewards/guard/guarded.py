"""Calls a function in a guard: in a fork of its own for each call, behind walls, with limits.

    compare = Guarded("package.module:function", permissions=RulePermissions(cpu_s=3.0))
    compare.call(known="4", readings=["$2^2$"])

The function is given by name and imported only there, in a process with a clean environment. Arguments and
results are JSON values. Several calls run at once; what one of them does is seen by no other.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from realsys.api import errors
from realsys.api.basics.rule_permissions import CERTIFICATES, RulePermissions
from realsys.api.errors import ClusterError, RealsysError
from realsys.api.users_code.users_frames import shown_error
from realsys.rewards.guard import frames, inside
from realsys.rewards.guard.frames import BROKEN, CALL, ENDED, HELLO, RESULT, START, Frame

logger = logging.getLogger(__name__)

FORKING, SERVING = "realsys.rewards.guard.guard_host", "realsys.rewards.guard.service_host"
MOST_FORKS = 4  # of one guard at a time
START_S = 300.0  # allows for a busy machine and a large library
GRACE_S = 30.0  # beyond a call's deadline, which its host enforces
_END_S = 5.0
_LOOK_S = 10.0  # between two looks for calls that are overdue
_INHERITED = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONHASHSEED")  # no secrets
# Several answers at once share the cores; and a fork of a process with threads would lose them.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
CPU_TIME, WALL_TIME, MEMORY, RAISED, DIED = "cpu_time", "wall_time", "memory", "raised", "died"
HOST_ENDED = "host_ended"  # the process of all calls has ended: this one need not be why
_logged_lacking: set[str] = set()


class CallFailed(Exception):
    """The function returned no result.

    Attributes:
        why: ``cpu_time``, ``wall_time``, ``memory``, ``raised`` (an exception of the function), ``died`` or
            ``host_ended`` (the process that forks for all calls: no call need be at fault).
        text: description.
    """

    def __init__(self, why: str, text: str) -> None:
        super().__init__(text)
        self.why, self.text = why, text


@dataclass(frozen=True)
class Reply:
    """What came back from a call; ``notes``: as guard/inside.py has them."""

    result: Any
    notes: tuple[tuple[str, str], ...] = ()


class Guarded:
    """Calls one function behind the guard's walls, from any number of threads. Its process starts at the
    first call and ends with this one.

    Args:
        target: ``module:function``; with ``setup``, a function that makes the one to call from it.
        setup: JSON values; None: ``target`` itself is called.
        imports: plug-ins that are imported there first; None: not even those of entry points.
        own_file: file whose folder it may read.
        serves: the function is ``async``: one process for all calls.
        at_once: calls at a time; None: as many as this process has cores, ``MOST_FORKS`` at most.
        cpu_s, wall_s, memory_bytes: for ``RulePermissions``, where nothing else is to be permitted.
    """

    def __init__(
        self,
        target: str,
        *,
        permissions: RulePermissions | None = None,
        setup: Mapping[str, Any] | None = None,
        imports: Sequence[str] | None = None,
        own_file: str | None = None,
        serves: bool = False,
        at_once: int | None = None,
        cpu_s: float = 30.0,
        wall_s: float = 60.0,
        memory_bytes: int = 2 << 30,
    ) -> None:
        self.target, self._serves = target, serves
        self.shown = str((setup or {}).get("name", target))  # in messages
        self.permissions = permissions or RulePermissions(
            cpu_s=cpu_s, deadline_s=wall_s, memory_mib=memory_bytes >> 20
        )
        self._start = {
            "target": target,
            "setup": setup,
            "imports": None if imports is None else list(imports),
            "own_file": own_file,
            "permissions": self.permissions.plain(),
        }
        self.at_once = at_once or min(MOST_FORKS, len(os.sched_getaffinity(0)))
        # One thread, for callers that must not block: calls start in their order
        self.sender = ThreadPoolExecutor(1, thread_name_prefix=f"calls of {self.shown}")
        self._lock = threading.Lock()
        self._host: _HostProcess | None = None

    def call(self, **arguments: Any) -> Any:
        """Calls the function and returns its result.

        Raises:
            CallFailed: it raised, exceeded a limit, or its process died.
            ClusterError, ConfigError: the process can't be started; says why.
        """
        if inside.is_inside():
            return self._call_here(arguments)
        try:
            return self.submit(arguments).result().result
        except CallFailed as error:
            if error.why != HOST_ENDED:
                raise
            return self.submit(arguments).result().result

    def submit(self, arguments: Mapping[str, Any], *, num_answers: int = 1) -> Future[Reply]:
        """Starts a call; blocks while too many are under way. Its future raises CallFailed.

        Args:
            num_answers: that it is about, by which its limits are multiplied.
        Raises:
            ClusterError, ConfigError: the process can't be started; says why.
        """
        body = json.dumps({"arguments": arguments, "num_answers": num_answers}).encode()
        for _ in range(2):  # a host may have died since its last call
            if (future := self._running().submit(body, num_answers)) is not None:
                return future
        raise CallFailed(HOST_ENDED, f"the process of {self.shown} ends as soon as it is started")

    def close(self) -> None:
        """Ends the process; a later call starts another."""
        with self._lock:
            host, self._host = self._host, None
            if host is not None:
                atexit.unregister(self.close)
                host.end()

    def _call_here(self, arguments: dict[str, Any]) -> Any:
        """Calls the function in the guard that this process already is: the walls around it do."""
        module, _, name = self.target.partition(":")
        try:
            return getattr(import_module(module), name)(**arguments)
        except MemoryError:
            raise
        except Exception as error:
            raise CallFailed(RAISED, shown_error(error)[:500]) from error

    def _running(self) -> _HostProcess:
        with self._lock:
            if self._host is not None and self._host.is_usable:
                return self._host
            if self._host is not None:
                self._host.end()
                atexit.unregister(self.close)
            self._host = _HostProcess(
                SERVING if self._serves else FORKING,
                self._start,
                self.permissions,
                at_once=self.at_once,
                serves=self._serves,
            )
            atexit.register(self.close)
            return self._host


@dataclass
class _Waiting:
    """A call under way."""

    future: Future[Reply]
    num_answers: int
    since_s: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class _HostProcess:
    """One process and the calls that it has; started when it is made.

    Raises:
        ClusterError, ConfigError: it can't be started; says why.
    """

    module: str
    start: Mapping[str, Any]
    permissions: RulePermissions
    at_once: int
    serves: bool
    _calls: dict[int, _Waiting] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _received: bytearray = field(default_factory=bytearray)
    _is_ended: bool = False
    _reader: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._owner = os.getpid()  # a fork of the owner must not write to its pipe
        self._numbers = itertools.count(1)
        most = 64 if self.serves else 2 * self.at_once
        self._room = threading.BoundedSemaphore(most)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self.module, str(self.at_once)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment(),
            start_new_session=True,  # Ctrl-C in a terminal must reach only the owner
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        try:
            frames.send(self._in, Frame(0, START, json.dumps(self.start).encode()))
            hello = self._next(START_S)
        except BrokenPipeError:
            hello = None
        if hello is None or hello.kind != HELLO:
            self.end()
            raise self._start_error(hello)
        self._log_hello(json.loads(hello.body))
        self._reader = threading.Thread(
            target=self._read_replies, name=f"guard of {self.start['target']}", daemon=True
        )
        self._reader.start()

    def _environment(self) -> dict[str, str]:
        names = [n for n in os.environ if n in _INHERITED or n.startswith("LC_")]
        names += [n for n in self.permissions.env if n in os.environ]
        if self.permissions.network:
            names += [n for n in CERTIFICATES if n in os.environ]
        return {
            **dict.fromkeys(_ONE_THREAD, "1"),
            "PYTHONHASHSEED": "0",  # as workers have it: some questions are made again by it
            **{name: os.environ[name] for name in names},
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }

    @property
    def is_usable(self) -> bool:
        """False once it has ended, and in a fork of its owner."""
        return not self._is_ended and self._owner == os.getpid()

    def submit(self, body: bytes, num_answers: int) -> Future[Reply] | None:
        """Sends a call; None: the process has ended."""
        self._room.acquire()
        number, future = next(self._numbers), Future[Reply]()
        with self._lock:
            if self._is_ended:
                self._room.release()
                return None
            self._calls[number] = _Waiting(future, num_answers)
        try:
            with self._writing:
                if not self._is_ended:  # else the descriptor may be another's by now
                    frames.send(self._in, Frame(number, CALL, body))
        except (OSError, ValueError):  # it ended meanwhile: the reader settles the call
            self._process.kill()
        return future

    def end(self) -> None:
        """Ends the process; calls under way fail."""
        with self._lock:
            self._is_ended = True
        if self._owner != os.getpid():
            return
        is_free = self._writing.acquire(timeout=_END_S)
        if not is_free:  # a call is being written to a process that does not read
            self._process.kill()
            self._writing.acquire()
        try:
            if self._process.stdin is not None:
                with suppress(OSError):
                    self._process.stdin.close()  # it empties its folders and ends
        finally:
            self._writing.release()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its forks end with it
            self._process.wait()
        if self._reader is not None:
            self._reader.join()  # settles the calls under way
        elif self._process.stdout is not None:
            self._process.stdout.close()

    # ---- replies --------------------------------------------------------------------------------

    def _read_replies(self) -> None:
        failure = CallFailed(HOST_ENDED, "its process ended without a word")
        try:
            while (frame := self._next_reply()) is not None:
                with self._lock:
                    waiting = self._calls.pop(frame.number, None)
                if waiting is not None:
                    self._room.release()
                    self._resolve(waiting, frame)
        except Exception as error:
            failure = CallFailed(HOST_ENDED, f"its replies can't be read: {error}")
        with self._lock:
            self._is_ended = True
        self._process.kill()
        self._process.wait()
        self._fail_all(failure)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _next_reply(self) -> Frame | None:
        """Returns the next reply; None: the process has ended, or is silent beyond all deadlines."""
        since_s = time.monotonic()
        while (frame := self._next(_LOOK_S)) is None:
            with self._lock:
                calls = list(self._calls.values())
            if self._process.poll() is not None:
                return None
            if self.serves or not calls:  # of a service, the caller limits each call
                continue
            silent_s = time.monotonic() - max(since_s, min(one.since_s for one in calls))
            longest = max(one.num_answers for one in calls)
            if silent_s > self.permissions.deadline_of(longest) + GRACE_S:
                return None
        return frame

    def _next(self, timeout_s: float) -> Frame | None:
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        while (frame := frames.parse(self._received)) is None:
            if not poll.poll(timeout_s * 1000):
                return None
            if not (more := os.read(self._out, 1 << 16)):
                self._process.wait()
                return None
            self._received += more
        return frame

    def _resolve(self, waiting: _Waiting, frame: Frame) -> None:
        future = waiting.future
        if not future.set_running_or_notify_cancel():
            return
        if frame.kind == ENDED:
            future.set_exception(self._ended(frame.body.decode(errors="replace"), waiting))
            return
        try:
            reply = _read_reply(frame)
        except CallFailed as error:
            future.set_exception(error)
        else:
            future.set_result(reply)

    def _fail_all(self, error: CallFailed) -> None:
        with self._lock:
            failed = list(self._calls.values())
            self._calls.clear()
        for waiting in failed:
            self._room.release()
            if waiting.future.set_running_or_notify_cancel():
                waiting.future.set_exception(error)

    def _ended(self, why: str, waiting: _Waiting) -> CallFailed:
        may, number = self.permissions, waiting.num_answers
        texts = {
            CPU_TIME: f"it computed for more than {may.computing_of(number):g} s",
            WALL_TIME: f"it took more than {may.deadline_of(number):g} s",
            MEMORY: f"it wanted more than {may.memory_mib} MiB of memory",
        }
        if why in texts:
            return CallFailed(why, texts[why])
        return CallFailed(DIED, f"its process ended ({why})")

    @property
    def _shown(self) -> str:
        """Names it in messages: the rule, where it is one."""
        return str((self.start.get("setup") or {}).get("name", self.start["target"]))

    def _start_error(self, hello: Frame | None) -> RealsysError:
        reply = json.loads(hello.body) if hello is not None and hello.kind == BROKEN else {}
        made = getattr(errors, reply.get("kind") or "", None)
        if isinstance(made, type) and issubclass(made, RealsysError):
            return made(reply["what"], where=reply["where"], fix=reply["fix"])
        source = (self.start.get("setup") or {}).get("source")
        module = source or self.start["target"].partition(":")[0]
        return ClusterError(
            "the process for reward rules can't be started: "
            + reply.get("what", "it does not answer"),
            where=self._shown,
            fix=f"import {module} in the environment of the workers, and see what it says",
        )

    def _log_hello(self, hello: Mapping[str, Any]) -> None:
        if hello["threads"] > 1 and not self.serves:
            logger.warning(
                "%s has %d threads once it is imported, of which a fork has one: start them in the rule",
                self._shown,
                hello["threads"],
            )
        for name, text in hello["lacking"].items():
            if name not in _logged_lacking:
                _logged_lacking.add(name)
                logger.warning("this node has no %s: %s (docs/rewards.md)", name, text)


def _read_reply(frame: Frame) -> Reply:
    """Reads what the fork of an answer said, which may be anything. Raises CallFailed."""
    try:
        if frame.kind != RESULT:
            raise ValueError(f"a frame of kind {frame.kind!r}")
        reply = json.loads(frame.body)
        notes = tuple((str(a), str(b)) for a, b in reply.get("notes", ()))
        raised = reply.get("raised")
        if raised is None:
            return Reply(reply["result"], notes)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CallFailed(DIED, "its process gave no reply to its call") from error
    raise CallFailed(RAISED, str(raised)[:500])
