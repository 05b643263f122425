"""Determines which worker failed first (pure, except for reading log tails).

A failure rarely stays alone: peers time out, lose their socket or are ended by the supervisor. Those
failures are *secondary* (peer_failures.py): they only report that another worker was missing. The first
failure is the earliest primary one; without any, the earliest of all.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from realsys.runtime import worker_exit_codes
from realsys.supervisor.health.peer_failures import LOST_PEER, is_secondary
from realsys.trial.last_lines import last_lines
from realsys.trial.records import Failure

# Last lines of a process that torch's NCCL watchdog has ended by SIGABRT: it leaves no failure record.
_WATCHDOG = "Process group watchdog thread terminated"
_BY_A_SOCKET = ("Connection closed by remote peer", "Connection reset by peer")
_BY_ANOTHER_RANK = "dump signal from another rank"
MAX_SAID_CHARS = 200
TAIL_LINES = 15
TAIL_BYTES = 16_384


def describe_exit(returncode: int) -> str:
    """Describes a process's end: exit code or signal, with its usual cause."""
    if returncode < 0:
        number = -returncode
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        hints = {
            "SIGKILL": "by hand, or by the kernel when memory ran out (see dmesg)",
            "SIGSEGV": "a crash in native code",
            "SIGBUS": "shared memory or a mapped file ran out",
            "SIGABRT": "a native library gave up",
        }
        hint = hints.get(name)
        shown = name if name.endswith(f" {number}") else f"{name} (signal {number})"
        return f"killed by {shown}" + (f": {hint}" if hint else "")
    meanings = {
        worker_exit_codes.FENCED: "its lease could not be renewed in time, so it stopped itself",
        worker_exit_codes.ORPHANED: "the workers it depends on were gone",
    }
    return f"exited with code {returncode}" + (
        f": {meanings[returncode]}" if returncode in meanings else ""
    )


def watchdog_words(log_lines: Sequence[str]) -> str:
    """Returns the NCCL watchdog's message about a missing peer; "" if there is none."""
    patterns: tuple[str, ...] = (*LOST_PEER[1:], _BY_ANOTHER_RANK)
    if any(_WATCHDOG in line for line in log_lines):
        patterns += _BY_A_SOCKET
    for line in log_lines:
        if starts := [line.find(words) for words in patterns if words in line]:
            return line[min(starts) :].strip()[:MAX_SAID_CHARS]
    return ""


def order_failures(
    failures: Iterable[Failure], peers: Collection[str] = ()
) -> tuple[Failure | None, tuple[Failure, ...]]:
    """Returns (the first failure, the others in time order).

    Args:
        peers: names and addresses of the workers' hosts (peer_failures.py).
    """
    judged = (replace(failure, secondary=is_secondary(failure, peers)) for failure in failures)
    ordered = sorted(judged, key=lambda f: (f.secondary, f.at))
    if not ordered:
        return None, ()
    return ordered[0], tuple(sorted(ordered[1:], key=lambda f: f.at))


def log_tail(path: Path, *, lines: int = TAIL_LINES) -> tuple[str, ...]:
    """Returns the last lines of a log; empty if there is none."""
    return tuple(last_lines(path, max_bytes=TAIL_BYTES)[-lines:])
