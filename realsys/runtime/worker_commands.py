"""Commands to a worker: their format, and which a worker accepts in which state (pure).

A command is JSON at the key ``command/<type>/<index>``; the worker's heartbeat process removes it and
passes it on. The reply is the worker's status: ``last_command`` is the command's id once it took effect,
or with ``command_refused`` once it was refused.

=========== =====================================================================================
configure   ``args`` ``log_level``: debug, info, warning or error
pause       waits before its next request, after the current one
resume      continues; ``start`` is an alias
interrupt   drops waiting requests and exits after the current one (exit code STOPPED)
exit        the same, as if the master had requested it (exit code DONE)
dump        writes the stacks of all threads into the attempt's folder, in any state
=========== =====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from realsys.runtime.lifecycle import FINAL, WorkerState
from realsys.trial.records import loads

LOG_LEVELS = ("debug", "info", "warning", "error")


class Verb(StrEnum):
    """Commands that a worker accepts."""

    CONFIGURE = "configure"
    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    INTERRUPT = "interrupt"
    EXIT = "exit"
    DUMP = "dump"


@dataclass(frozen=True, kw_only=True)
class Command:
    """Name-resolution value of a command. ``attempt`` and ``token`` identify the addressed
    incarnation."""

    id: str
    verb: Verb
    by: str
    at: float
    attempt: int
    token: str
    args: Mapping[str, str] = field(default_factory=dict)


S, V = WorkerState, Verb
_ALIVE = frozenset(WorkerState) - FINAL

ALLOWED: dict[Verb, frozenset[WorkerState]] = {
    V.CONFIGURE: _ALIVE,
    V.PAUSE: frozenset({S.READY, S.RUNNING, S.PAUSED}),
    V.START: frozenset({S.READY, S.RUNNING, S.PAUSED}),
    V.RESUME: frozenset({S.READY, S.RUNNING, S.PAUSED}),
    V.INTERRUPT: frozenset({S.READY, S.RUNNING, S.PAUSED}),
    V.EXIT: frozenset({S.READY, S.RUNNING, S.PAUSED}),
    V.DUMP: _ALIVE,
}


def parse_command(data: bytes, *, where: str) -> Command:
    """Decodes a command. Raises TrialError for invalid data."""
    return loads(Command, data, where=where)


def refusal(command: Command, *, attempt: int, token: str, state: WorkerState) -> str:
    """Returns why a worker refuses the command; "" if it accepts it."""
    if (command.attempt, command.token) != (attempt, token):
        return f"it is for attempt {command.attempt}, this is attempt {attempt}"
    if state not in ALLOWED[command.verb]:
        return f"a worker that is {state} can't take {command.verb}"
    if command.verb is Verb.CONFIGURE and (bad := _bad_args(command.args)):
        return bad
    return ""


def _bad_args(args: Mapping[str, str]) -> str:
    if unknown := sorted(set(args) - {"log_level"}):
        return f"nothing called {unknown[0]!r} can be configured, only log_level"
    if args.get("log_level") not in LOG_LEVELS:
        return f"log_level is {args.get('log_level')!r}, not one of {', '.join(LOG_LEVELS)}"
    return ""
