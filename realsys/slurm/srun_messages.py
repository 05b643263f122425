"""Parses srun's messages about its step's start and its tasks' ends from its log (pure).

srun prints a line for a failed task as soon as it learns of it, long before its own end: the fastest way
to know, and the only one if the node is gone. It prints nothing about tasks that ended well. It keeps
trying to start a step for which nothing is free, and reports that only after SlurmctldTimeout (120 s by
default, and up to 10 more).
"""

from __future__ import annotations

import re
import signal

BUSY_S = 180.0  # KillWait, UnkillableStepTimeout and an epilog of the step before, with room
LONGEST_S = 900.0  # a prolog that still runs on some node

_TASKS = re.compile(r"srun: error: (?P<host>[^\s:]+): tasks? (?P<ids>[\d,-]+): (?P<how>.+)")
_CODE = re.compile(r"Exited with exit code (\d+)")
_TROUBLE = re.compile(r"(?:srun|slurmstepd[\w.-]*): (?:error|fatal): (?P<text>.+)")
_WAITS = re.compile(r"srun: (?P<text>.*step creation (?:temporarily|still) disabled.*)")
_CREATED = re.compile(r"srun: Step created for ")
_NOTICE = re.compile(  # of srun, about nothing that went wrong
    r"srun: (?:launch/slurm: |Step created|Cancelled pending|Terminating|Force Terminated|job \d+ |"
    r"Job step aborted|interrupt|.*step creation |cluster configuration lacks)|Try \"srun"
)
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
    """Returns task → (host, return code, srun's own words); a negative code is the signal that ended it."""
    found: dict[int, tuple[str, int, str]] = {}
    for match in _TASKS.finditer(text):
        how = match["how"].strip()
        for task in _numbers(match["ids"]):
            found.setdefault(task, (match["host"], return_code(how), how))
    return found


def return_code(how: str) -> int:
    """Converts srun's words for the end of a task to a return code: 1 if they contain no number."""
    if match := _CODE.search(how):
        code = int(match[1])
        # The task wrapper passes a worker's signal on as 128 + signal, as shells do.
        return 128 - code if 128 < code < 160 else code
    for words, number in _SIGNALS.items():
        if how.startswith(words):
            return -int(number)
    return 1


def last_trouble(text: str) -> str:
    """Returns the last error of srun or a node's slurmstepd that is about no single task; "" if none.

    If none is marked as an error (``srun: unrecognized option …``, a failing wrapper of the site), the
    last line of the log that is not a notice.
    """
    found = [m["text"].strip() for m in _TROUBLE.finditer(text) if not _TASKS.search(m[0])]
    if not found:
        lines = [line for line in map(str.strip, text.splitlines()) if line]
        found = [line for line in lines if not (_TASKS.search(line) or _NOTICE.match(line))]
    return found[-1].removeprefix("srun: ") if found else ""


def step_wait(text: str) -> str:
    """Returns srun's message while it can't start its step: ``Job 7 step creation temporarily disabled,
    retrying (Requested nodes are busy)``; "" if it does not wait (any more)."""
    sentence = ""
    for line in text.splitlines():
        if match := _WAITS.match(line):
            sentence = match["text"].strip()
        elif _CREATED.match(line):
            sentence = ""
    return sentence


def patience_s(sentence: str) -> float:
    """Returns how long a step may wait for its start, by srun's message about the reason.

    Steps keep what they were given: a step whose nodes are busy waits for the clean-up of a step of an
    earlier phase, or for ever.
    """
    return BUSY_S if "busy" in sentence else LONGEST_S


def what_to_do(words: str) -> str:
    """Returns the fix for srun's message; "" if nothing more than its words is known."""
    if "step creation" in words and "busy" in words:
        return (
            "the job's other steps hold the CPUs or GPUs that this one needs: give the workers fewer CPUs "
            "(scheduling.<worker type>.cpu), or correct the nodes' CPUs in the "
            "cluster spec (realsys doctor), then launch again"
        )
    if "unrecognized option" in words or "invalid option" in words:
        return (
            "srun here does not know that option: correct `container` or `slurm.extra_srun` in the cluster "
            "spec (realsys doctor), then launch anew"
        )
    return ""


def _numbers(ids: str) -> list[int]:
    found: list[int] = []
    for part in ids.split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            found += range(int(low), int(high or low) + 1)
    return found
