"""Takes the next attempt of a trial: at most one incarnation runs, and each can be told apart.

The number is taken by a compare-and-set on the trial's ``attempt`` key; the record carries a random
token that everything written by this incarnation repeats, so that receivers can drop an older one's.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from pathlib import Path

from realsys.api.errors import KeyNotFound, TrialIsLive
from realsys.api.trial import (
    AttemptFiles,
    AttemptRecord,
    ExitMarker,
    TrialFiles,
    dumps,
    is_alive,
    loads,
    process_start,
    read_record,
    write_record,
)
from realsys.name_resolve.keys import TrialKeys
from realsys.name_resolve.store import Compare, NameResolve, Put

logger = logging.getLogger(__name__)


def take_attempt(
    files: TrialFiles, store: NameResolve, keys: TrialKeys, *, job_id: str
) -> tuple[AttemptRecord, AttemptFiles]:
    """Takes attempt n + 1 and makes its folder.

    Raises:
        TrialIsLive: attempt n still runs, or somebody else took n + 1 at the same moment.
    """
    try:
        entry = store.get(keys.attempt)
        previous = loads(AttemptRecord, entry.value, where=keys.attempt)
        compare = Compare.at_revision(keys.attempt, entry.revision)
        _refuse_if_live(files, previous)
        number = previous.number + 1
    except KeyNotFound:
        compare = Compare.absent(keys.attempt)
        number = 1
    if old := files.all_attempts():  # the store may be younger than the trial
        number = max(number, old[-1].number + 1)
    record = AttemptRecord(
        number=number,
        token=secrets.token_hex(16),
        host=socket.gethostname(),
        supervisor_pid=os.getpid(),
        supervisor_start=process_start(os.getpid()) or 0,
        started_at=time.time(),
        job_id=job_id,
    )
    if not store.transaction([compare], puts=[Put(keys.attempt, dumps(record))]):
        raise TrialIsLive(
            f"somebody else took attempt {number} at the same moment",
            where=str(files.root),
            fix="look at it: realsys status",
        )
    attempt = files.attempt(number)
    for folder in (attempt.logs, attempt.last_words):
        folder.mkdir(parents=True, exist_ok=True)
    write_record(attempt.record, record)
    _point_latest(files, attempt.root)
    _forget_older_attempts(store, keys)
    logger.info("attempt taken number=%d host=%s pid=%d", number, record.host, os.getpid())
    return record, attempt


def _refuse_if_live(files: TrialFiles, previous: AttemptRecord) -> None:
    marker = read_record(ExitMarker, files.attempt(previous.number).exit)
    here = socket.gethostname() == previous.host
    if marker is None and here and is_alive(previous.supervisor_pid, previous.supervisor_start):
        raise TrialIsLive(
            f"attempt {previous.number} runs as pid {previous.supervisor_pid} on {previous.host}",
            where=str(files.root),
            fix="watch it (realsys watch) or end it first (realsys stop)",
        )


def _point_latest(files: TrialFiles, attempt: Path) -> None:
    temporary = files.root / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(attempt.relative_to(files.root))
    os.replace(temporary, files.latest)


def _forget_older_attempts(store: NameResolve, keys: TrialKeys) -> None:
    for prefix in (keys.workers, keys.worker_statuses, keys.progress, keys.stop, keys.done):
        store.clear_subtree(prefix)
