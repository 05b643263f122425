"""Calls of a function that may run for ever or take all memory, in a process of its own with limits.

    compare = Guarded("package.module:function", cpu_s=3.0)
    compare.call(known="4", readings=["$2^2$"])

The function is given by name and imported there, not here. Arguments and result are what JSON holds. Calls
are made one at a time; what the function does in one of them must not matter to the next.
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

_START_S = 300.0  # a machine may be busy, and a library large
_PATIENCE_S = 10.0  # beyond the wall time that the kernel over there enforces
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")  # no secrets
CPU_TIME, WALL_TIME, MEMORY, RAISED, DIED = "cpu_time", "wall_time", "memory", "raised", "died"


class CallFailed(Exception):
    """The function gave no result. The next call finds a fresh process.

    Attributes:
        why: ``cpu_time``, ``wall_time``, ``memory``, ``raised`` (an exception of the function) or ``died``.
        text: in words.
    """

    def __init__(self, why: str, text: str) -> None:
        super().__init__(text)
        self.why, self.text = why, text


class Guarded:
    """One function behind limits, for any number of threads. Its process starts with the first call.

    Args:
        target: ``module:function``.
        cpu_s: most seconds of computing a call, which do not depend on who else uses the machine.
        wall_s: most seconds by the clock, for functions that wait.
        memory_bytes: most address space of the process, loaded libraries included.
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
        self._owner = 0  # pid: a fork of the owner must not talk into its pipe
        self._received = bytearray()

    def call(self, **arguments: Any) -> Any:
        """The function's result.

        Raises:
            CallFailed: it raised, took too long or too much memory, or its process died.
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
            except BaseException:  # also Ctrl-C: an answer may still be on its way
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
        command = [sys.executable, "-m", "realsys.rewards.guarded_process", self.target]
        limits = [str(self.cpu_s), str(self.wall_s), str(self.memory_bytes)]
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        self._process = subprocess.Popen(
            [*command, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C in a terminal is for its owner
        )
        self._owner = os.getpid()
        self._received.clear()
        atexit.register(self.close)
        hello = self._next(self._process, _START_S)
        if hello is None or "ready" not in hello:
            self._end()
            raise ClusterError(
                "a process for reward rules can't be started: "
                + (hello or {}).get("broken", "it does not answer"),
                where=self.target,
                fix="try it: python -c 'import "
                + self.target.partition(":")[0]
                + "' in the environment of the workers",
            )
        return self._process

    def _reply(self, process: subprocess.Popen[bytes], number: int) -> dict[str, Any]:
        while reply := self._next(process, self.wall_s + _PATIENCE_S):
            if reply.get("id", number) == number:  # else of a call that was given up
                return reply
        self._end()
        return {"ended": "without a word"}

    def _next(self, process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any] | None:
        """The next message; None when there is none in time, or will be none."""
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
        process.kill()  # its fork ends by the pipe, or by its timers
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
