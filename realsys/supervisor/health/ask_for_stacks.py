"""Requests the stacks of workers' threads, by a command to each heartbeat process.

They write ``attempts/<n>/stacks/<type>-<i>.txt`` (realsys/heartbeat/heartbeat_process.py), also if the
worker itself hangs. Nothing here waits for them, and an unavailable store costs only the stacks.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable

from realsys.api.errors import StoreError
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import NameResolve
from realsys.runtime.worker_commands import Command, Verb
from realsys.trial.records import AttemptRecord, dumps

logger = logging.getLogger(__name__)


def ask_for_stacks(
    store: NameResolve, keys: TrialKeys, attempt: AttemptRecord, workers: Iterable[str]
) -> None:
    """Sends ``dump`` to each of ``workers``."""
    for worker in workers:
        worker_type, _, index = worker.partition("/")
        command = Command(
            id=secrets.token_hex(8),
            verb=Verb.DUMP,
            by="supervisor",
            at=time.time(),
            attempt=attempt.number,
            token=attempt.token,
        )
        try:
            store.add(keys.command(worker_type, int(index)), dumps(command), replace=True)
        except StoreError as error:
            logger.warning("stack request failed worker=%s error=%s", worker, error.what)
            return  # each further request would wait for its own deadline
