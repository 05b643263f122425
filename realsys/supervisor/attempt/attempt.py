"""Claims the next attempt of a trial, so that at most one incarnation runs and each is distinguishable.

The number is claimed twice: by creating the attempt's folder, which only one process can do, and by a
compare-and-set on the trial's ``attempt`` key. The folder decides if each attempt has a store of its own,
the key decides for everything that is published. The record carries a random token that this incarnation
repeats in everything it writes, and the folder its own keys for sockets: an older incarnation's keys are
refused.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from realsys.api.errors import StoreError, TrialError, TrialIsLive
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.lease_validity import MANY_TTL_S
from realsys.name_resolve.retry import retry_while_unavailable
from realsys.name_resolve.store import Compare, Entry, NameResolve, Put, find
from realsys.transport.curve_keys import TrialKeypairs
from realsys.trial.machine_identity import Whereabouts, this_machine, whereabouts
from realsys.trial.records import (
    AttemptFiles,
    AttemptRecord,
    ExitMarker,
    TrialFiles,
    TrialRecord,
    dumps,
    is_alive,
    loads,
    process_start,
    read_record,
    replace_symlink,
    write_record,
)

logger = logging.getLogger(__name__)

LEASE_SLACK_S = 5.0
MOST_AT_ONCE = 100  # keys of one transaction
PATIENCE_S = 60.0  # how long the store may be unavailable when a job starts
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job in which the supervisor runs, from Slurm's variables.

    Attributes:
        job_id: Slurm's (``123``, ``123_4`` in an array), or of submitit's local executor.
        restart_count: how often Slurm has requeued it. The same job id with another count is another
            incarnation of the same request, so the former one is over, or cut off and fenced.
        nodes: hostlist of its nodes; empty on one machine.
    """

    job_id: str = ""
    restart_count: int = 0
    nodes: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Job:
        """Returns the job of the batch step that this process is."""
        array = environ.get("SLURM_ARRAY_JOB_ID")
        job_id = environ.get("SLURM_JOB_ID") or environ.get("SUBMITIT_LOCAL_JOB_ID") or ""
        if array:
            job_id = f"{array}_{environ['SLURM_ARRAY_TASK_ID']}"
        size = int(environ.get("SLURM_HET_SIZE") or 1)
        groups = [environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", "") for i in range(size)]
        nodes = (
            ",".join(filter(None, groups)) if size > 1 else environ.get("SLURM_JOB_NODELIST", "")
        )
        return cls(
            job_id=job_id, restart_count=int(environ.get("SLURM_RESTART_COUNT") or 0), nodes=nodes
        )


def claim_attempt(
    files: TrialFiles,
    store: NameResolve,
    keys: TrialKeys,
    *,
    job: Job,
    former: Callable[[AttemptFiles], NameResolve | None] | None = None,
    patience_s: float = PATIENCE_S,
) -> tuple[AttemptRecord, AttemptFiles]:
    """Claims attempt n + 1 and creates its folder.

    If an attempt of another host has left no exit marker, waits until its workers' leases have ended.
    A damaged key is overwritten: the folder shows how far the trial is. So is the key of a removed trial
    of the same name, whose other keys are cleared.

    Args:
        patience_s: how long the store may be unavailable.
        former: returns the store in which an earlier attempt's workers are registered, if that is
            another one (closed here); None if that one no longer exists.
    Raises:
        TrialIsLive: attempt n still runs, or another process claimed n + 1 at the same moment.
    """
    insist = partial(retry_while_unavailable, timeout_s=patience_s, what="taking the attempt")
    before = insist(lambda: _before(files, store, keys))
    if (previous := before.attempt) is not None:
        found = former(files.attempt(previous.number)) if former else store
        try:
            _refuse_if_live(files, previous, job, found, keys)
        finally:
            if found is not None and found is not store:
                found.close()
    record = AttemptRecord(
        number=before.next_number,
        token=secrets.token_hex(16),
        host=socket.gethostname(),
        supervisor_pid=os.getpid(),
        supervisor_start=process_start(os.getpid()) or 0,
        started_at=time.time(),
        job_id=job.job_id,
        restart_count=job.restart_count,
        nodes=job.nodes,
        machine=None if job.nodes else this_machine(),  # on Slurm, Slurm says what lives
    )
    attempt = _claim_folder(files, record)
    if not insist(lambda: _put(store, keys, before.compare, record)):
        shutil.rmtree(attempt.root)
        raise _taken(files, record.number)
    replace_symlink(files.latest, str(attempt.root.relative_to(files.root)))
    fence = AttemptFence(store, keys, record)  # a newer one may take over meanwhile
    left = insist(lambda: _left_behind(store, keys, all_of_it=before.is_of_removed_trial))
    for start in range(0, len(left), MOST_AT_ONCE):
        page = left[start : start + MOST_AT_ONCE]
        insist(partial(fence.write, [], deletes=page))
    logger.info("attempt claimed number=%d host=%s pid=%d", record.number, record.host, os.getpid())
    return record, attempt


@dataclass(frozen=True, kw_only=True)
class _Before:
    """What folder and store contain of earlier attempts.

    Attributes:
        compare: holds while the attempt's key is as it was seen.
        is_of_removed_trial: the key is one of an earlier trial of the same name.
    """

    attempt: AttemptRecord | None
    next_number: int
    compare: Compare
    is_of_removed_trial: bool = False


def _before(files: TrialFiles, store: NameResolve, keys: TrialKeys) -> _Before:
    old = files.all_attempts()
    number = old[-1].number + 1 if old else 1
    newest = read_record(AttemptRecord, old[-1].record) if old else None
    entry = find(store, keys.attempt)
    if entry is None:  # the store may be younger than the trial
        return _Before(attempt=newest, next_number=number, compare=Compare.absent(keys.attempt))
    compare, recorded = Compare.at_revision(keys.attempt, entry.revision), _understood(entry)
    if recorded is None or (newest is not None and recorded.number < newest.number):
        return _Before(attempt=newest, next_number=number, compare=compare)
    removed = is_of_removed_trial(files, recorded)
    next_number = number if removed else recorded.number + 1
    return _Before(
        attempt=recorded, next_number=next_number, compare=compare, is_of_removed_trial=removed
    )


def is_of_removed_trial(files: TrialFiles, recorded: AttemptRecord) -> bool:
    """Returns whether an attempt in the store is older than this trial: it belongs to a removed trial of
    the same name."""
    trial = read_record(TrialRecord, files.record)
    return trial is not None and recorded.started_at < trial.created_at


def _understood(entry: Entry) -> AttemptRecord | None:
    try:
        return loads(AttemptRecord, entry.value, where=entry.key)
    except TrialError as error:
        logger.error("damaged key overwritten reason=%s", error.what)
        return None


def _put(store: NameResolve, keys: TrialKeys, compare: Compare, record: AttemptRecord) -> bool:
    """Writes the attempt key; also returns true if an earlier try whose answer was lost did it."""
    value = dumps(record)
    if store.transaction([compare], puts=[Put(keys.attempt, value)]):
        return True
    return store.get(keys.attempt).value == value


def _claim_folder(files: TrialFiles, record: AttemptRecord) -> AttemptFiles:
    """Builds the attempt's folder under a temporary name, then renames it: only one process succeeds, and
    the folder never exists without its record."""
    files.attempts.mkdir(exist_ok=True)
    made = AttemptFiles(files.attempts / f".{record.number:04d}.{record.token}")
    for folder in (made.logs, made.failure_records):
        folder.mkdir(parents=True)
    for folder in (made.secrets, made.history):  # each row of the history has the token
        folder.mkdir(mode=0o700)
    TrialKeypairs.create(made.curve_keys)
    write_record(made.record, record)
    attempt = files.attempt(record.number)
    try:
        os.rename(made.root, attempt.root)
    except OSError as error:
        shutil.rmtree(made.root)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise _taken(files, record.number) from None
    return attempt


def _taken(files: TrialFiles, number: int) -> TrialIsLive:
    return TrialIsLive(
        f"another process claimed attempt {number} at the same moment",
        where=str(files.root),
        fix="see realsys status",
    )


def _refuse_if_live(
    files: TrialFiles,
    previous: AttemptRecord,
    job: Job,
    store: NameResolve | None,
    keys: TrialKeys,
) -> None:
    if read_record(ExitMarker, files.attempt(previous.number).exit) is not None:
        return
    former = (previous.job_id, previous.restart_count)
    if job.job_id == previous.job_id and (job.job_id, job.restart_count) != former:
        return  # Slurm requeued us: it runs one incarnation, and the token fences a cut-off one
    if whereabouts(previous.host, previous.machine) is Whereabouts.HERE:
        live = is_alive(previous.supervisor_pid, previous.supervisor_start)
    else:
        live = store is not None and not _leases_end(
            store, keys, timeout_s=MANY_TTL_S + LEASE_SLACK_S
        )
    if live:
        raise TrialIsLive(
            f"attempt {previous.number} runs as pid {previous.supervisor_pid} on {previous.host}",
            where=str(files.root),
            fix="watch it (realsys watch) or end it first (realsys stop)",
        )


def _leases_end(store: NameResolve, keys: TrialKeys, *, timeout_s: float) -> bool:
    """Waits until no worker holds a lease; returns False if some still do after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while retry_while_unavailable(
        lambda: store.find_subtree(keys.workers), timeout_s=PATIENCE_S, what="leases to end"
    ):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def _left_behind(store: NameResolve, keys: TrialKeys, *, all_of_it: bool) -> list[str]:
    """Returns keys left by earlier attempts; ``all_of_it``: also those that outlive an attempt."""
    if all_of_it:
        logger.warning("keys of a removed trial of this name are cleared root=%s", keys.root)
        return [key for key in store.find_subtree(keys.root) if key != keys.attempt]
    prefixes = (
        *(keys.workers, keys.worker_statuses, keys.commands, keys.progress, keys.stop, keys.done),
        *(keys.scaling, keys.components, keys.component_order, keys.component_reports),
    )
    return [key for prefix in prefixes for key in store.find_subtree(prefix)]


def end_attempt(store: NameResolve, keys: TrialKeys, record: AttemptRecord) -> None:
    """Marks the attempt as ended, so that any remaining process of it exits. Best effort."""
    ended = dumps(replace(record, ended_at=time.time()))
    try:
        store.transaction(
            [Compare.holds(keys.attempt, dumps(record))], puts=[Put(keys.attempt, ended)]
        )
    except StoreError as error:
        logger.warning("attempt end not recorded error=%s", error.what)
