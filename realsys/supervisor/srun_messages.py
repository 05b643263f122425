"""What srun says of its tasks' ends, read from its log (pure).

srun prints a line for a task that failed as soon as it hears of it, long before its own end: the
quickest way to know, and the only one when the node is gone. It says nothing of tasks that ended well.
"""

from __future__ import annotations

import re
import signal

_TASKS = re.compile(r"srun: error: (?P<host>[^\s:]+): tasks? (?P<ids>[\d,-]+): (?P<how>.+)")
_CODE = re.compile(r"Exited with exit code (\d+)")
_TROUBLE = re.compile(r"(?:srun: error|slurmstepd[\w.-]*: error): (?P<text>.+)")
_SIGNALS = {  # strsignal(3)
    "Hangup": signal.SIGHUP,
    "Interrupt": signal.SIGINT,
    "Illegal instruction": signal.SIGILL,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating point exception": signal.SIGFPE,
    "Killed": signal.SIGKILL,
    "Segmentation fault": signal.SIGSEGV,
    "Terminated": signal.SIGTERM,
    "Out Of Memory": signal.SIGKILL,
}


def failed_tasks(text: str) -> dict[int, tuple[str, int, str]]:
    """Task → (host, return code, srun's own words); a negative code is the signal that ended it."""
    found: dict[int, tuple[str, int, str]] = {}
    for match in _TASKS.finditer(text):
        how = match["how"].strip()
        for task in _numbers(match["ids"]):
            found.setdefault(task, (match["host"], return_code(how), how))
    return found


def return_code(how: str) -> int:
    """srun's words for the end of a task as a return code: 1 where they say no number."""
    if match := _CODE.search(how):
        code = int(match[1])
        # The task wrapper passes a worker's signal on as 128 + signal, as shells do.
        return 128 - code if 128 < code < 160 else code
    for words, number in _SIGNALS.items():
        if how.startswith(words):
            return -int(number)
    return 1


def last_trouble(text: str) -> str:
    """The last complaint of srun or a node's slurmstepd that is about no single task; "" if none."""
    found = [m["text"].strip() for m in _TROUBLE.finditer(text) if not _TASKS.search(m[0])]
    return found[-1] if found else ""


def _numbers(ids: str) -> list[int]:
    found: list[int] = []
    for part in ids.split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            found += range(int(low), int(high or low) + 1)
    return found
