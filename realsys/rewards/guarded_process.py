"""Worker process of guarded.py: loads everything once and runs calls in a fork.

`python -m realsys.rewards.guarded_process MODULE:FUNCTION CPU_S WALL_S MEMORY_BYTES`

    guarded.py ── request ──▶ the fork ── reply ──▶ guarded.py
                                 │ killed by a timer, or ended
                                 ▼
                  this process reports it, and forks again (milliseconds)

Limits are enforced by the kernel with its default actions, so the function's code need not cooperate. Both
processes end with the pipe, that is when the process that started them has ended.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from realsys.rewards import guarded_frames

REQUESTS, REPLIES = 0, 1
_OVER, _OUT_OF_MEMORY = 0, 77
_ENDED_BY = {signal.SIGPROF: "cpu_time", signal.SIGALRM: "wall_time"}


def main() -> int:
    target, cpu_s, wall_s, memory_bytes = sys.argv[1:]
    replies = os.dup(REPLIES)
    # A library's prints must not be taken for a reply
    os.dup2(os.open(os.devnull, os.O_WRONLY), REPLIES)
    for death in (signal.SIGINT, signal.SIGTERM, signal.SIGPROF, signal.SIGALRM):
        signal.signal(death, signal.SIG_DFL)
    try:
        module, _, name = target.partition(":")
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # an import may raise anything; the other end reports it
        guarded_frames.send(replies, {"broken": f"{type(error).__name__}: {error}"})
        return 1
    guarded_frames.send(replies, {"ready": True})
    while True:
        if (child := os.fork()) == 0:
            _serve(function, replies, float(cpu_s), float(wall_s), int(memory_bytes))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == _OVER:
            return 0
        guarded_frames.send(replies, {"ended": _why(code)})


def _why(code: int) -> str:
    if code == _OUT_OF_MEMORY:
        return "memory"
    return _ENDED_BY.get(signal.Signals(-code), f"signal {-code}") if code < 0 else f"exit {code}"


def _serve(
    function: Callable[..., Any], replies: int, cpu_s: float, wall_s: float, memory_bytes: int
) -> NoReturn:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    received = bytearray()
    try:
        while True:
            while (request := guarded_frames.parse(received)) is None:
                if not (more := os.read(REQUESTS, 1 << 16)):
                    os._exit(_OVER)
                received += more
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            signal.setitimer(signal.ITIMER_REAL, wall_s)
            reply: dict[str, Any]
            try:
                reply = {"result": function(**request["arguments"])}
            except (Exception, SystemExit) as error:  # reported by the other end
                if isinstance(error, MemoryError):
                    os._exit(_OUT_OF_MEMORY)  # this process can't be used any more
                reply = {"raised": f"{type(error).__name__}: {error}"[:500]}
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            guarded_frames.send(replies, {"id": request["id"], **reply})
    except BrokenPipeError:
        os._exit(_OVER)
    except BaseException:  # a fork must never return
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
