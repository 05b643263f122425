"""Runs a function that may hang or exhaust memory in a process of its own with limits.

    compare = Guarded("package.module:function", cpu_s=3.0)
    compare.call(known="4", readings=["$2^2$"])

The function is given by name and imported only there. Arguments and result are JSON values. Calls are made
one at a time; calls must not depend on one another.
"""

from __future__ import annotations

import atexit
import itertools
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any

from realsys.api.errors import ClusterError
from realsys.rewards import guarded_frames

_START_S = 300.0  # allows for a busy machine and a large library
_GRACE_S = 10.0  # margin beyond the wall time that the kernel enforces in that process
_INHERITED_ENV = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")  # no secrets
CPU_TIME, WALL_TIME, MEMORY, RAISED, DIED = "cpu_time", "wall_time", "memory", "raised", "died"


class CallFailed(Exception):
    """The function returned no result. The next call gets a fresh process.

    Attributes:
        why: ``cpu_time``, ``wall_time``, ``memory``, ``raised`` (an exception of the function) or ``died``.
        text: description.
    """

    def __init__(self, why: str, text: str) -> None:
        super().__init__(text)
        self.why, self.text = why, text


class Guarded:
    """Calls one function under limits, from any number of threads. Its process starts at the first call.

    Args:
        target: ``module:function``.
        cpu_s: CPU time limit of a call, which does not depend on the machine's load.
        wall_s: wall clock limit of a call, for functions that wait.
        memory_bytes: address space limit of the process, loaded libraries included.
    """

    def __init__(
        self,
        target: str,
        *,
        cpu_s: float,
        wall_s: float = 60.0,
        memory_bytes: int = 2 << 30,
    ) -> None:
        self.target, self.cpu_s, self.wall_s = target, cpu_s, wall_s
        self.memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # pid: a fork of the owner must not write to its pipe
        self._received = bytearray()

    def call(self, **arguments: Any) -> Any:
        """Calls the function and returns its result.

        Raises:
            CallFailed: it raised, exceeded a limit, or its process died.
            ClusterError: the process can't be started.
        """
        with self._lock:
            process = self._started()
            number = next(self._ids)
            try:
                assert process.stdin is not None
                guarded_frames.send(process.stdin.fileno(), {"id": number, "arguments": arguments})
                reply = self._reply(process, number)
            except OSError as error:
                self._end()
                raise CallFailed(DIED, f"the process of {self.target} died: {error}") from error
            except BaseException:  # also for Ctrl-C: a reply may still arrive
                self._end()
                raise
        if "result" in reply:
            return reply["result"]
        if "raised" in reply:
            raise CallFailed(RAISED, reply["raised"])
        raise self._ended(reply["ended"])

    def close(self) -> None:
        """Ends the process; a later call starts another."""
        with self._lock:
            self._end()

    # ---- the process --------------------------------------------------------------------------

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid():
            if self._process.poll() is None:
                return self._process
            self._end()
        command = [sys.executable, "-P", "-m", "realsys.rewards.guarded_process", self.target]
        limits = [str(self.cpu_s), str(self.wall_s), str(self.memory_bytes)]
        environment = {name: os.environ[name] for name in _INHERITED_ENV if name in os.environ}
        self._process = subprocess.Popen(
            [*command, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C in a terminal must reach only the owner
        )
        self._owner = os.getpid()
        self._received.clear()
        atexit.register(self.close)
        hello = self._next(self._process, _START_S)
        if hello is None or "ready" not in hello:
            self._end()
            raise ClusterError(
                "the process for reward rules can't be started: "
                + (hello or {}).get("broken", "it does not answer"),
                where=self.target,
                fix="try it: python -c 'import "
                + self.target.partition(":")[0]
                + "' in the environment of the workers",
            )
        return self._process

    def _reply(self, process: subprocess.Popen[bytes], number: int) -> dict[str, Any]:
        while reply := self._next(process, self.wall_s + _GRACE_S):
            if reply.get("id", number) == number:  # otherwise of an abandoned call
                return reply
        self._end()
        return {"ended": "without a word"}

    def _next(self, process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any] | None:
        """Returns the next message; None if none arrives in time or the process has ended."""
        assert process.stdout is not None
        descriptor, deadline_s = process.stdout.fileno(), time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while (message := guarded_frames.parse(self._received)) is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                return None
            if not (more := os.read(descriptor, 1 << 16)):
                return None
            self._received += more
        return message

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        atexit.unregister(self.close)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.kill()  # its fork ends with the pipe, or by its timers
        process.wait()

    def _ended(self, why: str) -> CallFailed:
        texts = {
            CPU_TIME: f"it computed for more than {self.cpu_s:g} s",
            WALL_TIME: f"it took more than {self.wall_s:g} s",
            MEMORY: f"it wanted more than {self.memory_bytes >> 20} MiB of memory",
        }
        if why in texts:
            return CallFailed(why, texts[why])
        return CallFailed(DIED, f"its process ended ({why})")
