"""Sends a command to a worker of a running trial and waits for its result.

The command is a value in name resolution; the worker's heartbeat process reads it, and the worker's
status holds the reply (realsys/runtime/worker_commands.py says which command is accepted in which state).
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import closing

from launcher.sites.places import user_name
from launcher.trials.status import StatusReader
from realsys.api.errors import ConfigError, TrialError, UnknownName, WaitTimeout, did_you_mean
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import NameResolve
from realsys.name_resolve.trial_store import open_trial_store
from realsys.runtime.worker_commands import Command, Verb
from realsys.trial.records import WorkerStatus, dumps, loads
from realsys.trial.trial_state import State

POLL_S = 0.1


def send_command(
    reader: StatusReader, worker: str, verb: str, args: Sequence[str], *, timeout_s: float
) -> str:
    """Sends the command; returns the worker's state after it.

    Raises:
        ConfigError, UnknownName: no such worker, command or argument.
        TrialError: the trial does not run, or the worker refused, with its reason.
        WaitTimeout: it did not answer in time.
    """
    records, view = reader.records(), reader.view()
    known = [found.worker for found in view.workers]
    if view.state not in State.live() or records.attempt is None or reader.plan is None:
        raise TrialError(
            f"{view.trial} is {view.state.value}",
            where=worker,
            fix="only workers of a running trial accept commands",
        )
    if worker not in known:
        raise UnknownName(
            f"no worker {worker!r}", where=view.trial, fix=did_you_mean(worker, known)
        )
    if verb not in tuple(Verb):
        verbs = [known_verb.value for known_verb in Verb]
        raise UnknownName(f"no command {verb!r}", where=worker, fix=did_you_mean(verb, verbs))
    command = Command(
        id=secrets.token_hex(8),
        verb=Verb(verb),
        by=f"{user_name()}@{socket.gethostname()}",
        at=time.time(),
        attempt=records.attempt.number,
        token=records.attempt.token,
        args=_arguments(args),
    )
    with closing(open_trial_store(reader.plan, reader.files.attempt(command.attempt))) as store:
        return _send(store, TrialKeys.of(reader.plan), worker, command, timeout_s)


def _send(
    store: NameResolve, keys: TrialKeys, worker: str, command: Command, timeout_s: float
) -> str:
    kind, _, index = worker.partition("/")
    store.add(keys.command(kind, int(index)), dumps(command), replace=True)
    status_key = keys.worker_status(kind, int(index))
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        status = loads(WorkerStatus, store.get(status_key).value, where=status_key)
        if status.last_command == command.id:
            if status.command_refused:
                raise TrialError(
                    f"{worker} refused {command.verb}: {status.command_refused}",
                    where=worker,
                    fix="see docs/workers.md for the states in which a command is accepted",
                )
            return status.state
        time.sleep(POLL_S)
    raise WaitTimeout(
        f"{worker} did not reply to {command.verb} within {timeout_s:g} s",
        where=status_key,
        fix="it takes effect after the current request; check with `realsys status`",
    )


def _arguments(words: Sequence[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for name, equals, _ in pairs:
        if not equals:
            raise ConfigError(
                f"{name!r} is not an argument: it has no '='",
                where="command line",
                fix="write NAME=VALUE, e.g. log_level=debug",
            )
    return {name: value for name, _, value in pairs}
