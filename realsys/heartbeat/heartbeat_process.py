"""The heartbeat process of a worker: ``python -m realsys.heartbeat.heartbeat_process``, its small child.

It represents the worker in name resolution, so that a worker that computes, waits in a collective
or holds the GIL for minutes keeps its lease, and the end of one is noticed at once. It holds the
lease, writes registration and status, receives stop requests, commands and newer attempts, and
watches two things separately: that the worker's process exists (its pidfd), and that it makes
progress (its ticks, stall.py).

Threads: the main one checks the worker and ends everything within bounded time; others exchange
messages with the worker (``_listen``), write the newest status (``_publish``), renew the lease
(lease_renewer.py) and watch keys (key_watcher.py). Any of these may hang in the store; the main one
never calls it.

It ends with the worker: it marks the worker as lost in the store, unless it deregistered itself,
and exits within three seconds. It kills a worker that must exit and does not.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from realsys.api.errors import LeaseLost, RealsysError, StoreError
from realsys.heartbeat.bounded import within
from realsys.heartbeat.heartbeat_messages import (
    CommandReceived,
    Deregister,
    Deregistered,
    HeartbeatMemory,
    Init,
    PacketSocket,
    Register,
    Registered,
    RegistrationRefused,
    StatusUpdate,
    Terminate,
    ToWorker,
)
from realsys.heartbeat.key_watcher import KeyWatcher
from realsys.heartbeat.progress_watch import ProgressWatch
from realsys.heartbeat.stack_dumps import StackDumps
from realsys.heartbeat.worker_keys import WorkerKeys
from realsys.name_resolve.lease_renewer import LeaseRenewer
from realsys.name_resolve.lease_validity import LeaseStatus
from realsys.name_resolve.retry import RETRY_S, retry_while_unavailable
from realsys.name_resolve.store import Lease, NameResolve
from realsys.name_resolve.trial_store import open_store_at
from realsys.observability.worker_logs import configure_logging
from realsys.runtime import worker_exit_codes
from realsys.runtime.failures import failure_by_order
from realsys.runtime.lifecycle import FINAL, WorkerState
from realsys.runtime.linux import pidfd_send_signal
from realsys.runtime.worker_commands import Verb, parse_command, refusal
from realsys.trial.records import AttemptFiles, WorkerStatus, write_record

if TYPE_CHECKING:
    from realsys.api.cluster import EtcdSpec

logger = logging.getLogger("realsys.heartbeat.heartbeat_process")  # it runs as __main__

LOOK_S = 0.5
PUBLISH_EVERY_S = 0.2
# In a folder store a status is a file: the current activity is published at most this often; a change of
# state, a stall or an executed command at once.
LAZY_S = 1.0
EXIT_IN_S = 2.0  # time limit of a worker that must exit
REPORT_EXIT_IN_S = 2.5  # time limit of reporting the worker's exit
GONE = "its process ended without deregistering"


class HeartbeatProcess:
    """One worker's heartbeat process. ``run`` is called once, in the main thread."""

    def __init__(
        self,
        begin: Init,
        line: PacketSocket,
        pulse: HeartbeatMemory,
        *,
        worker_fd: int,
        stacks_fd: int,
    ):
        self.begin, self._line, self._pulse, self._worker_fd = begin, line, pulse, worker_fd
        self._files = AttemptFiles(Path(begin.attempt_dir))
        dumps = StackDumps(stacks_fd, self._files.stacks_of(begin.name))
        self._progress = ProgressWatch(begin.pid, pulse, dumps)
        self._status = WorkerStatus(state=WorkerState.STARTING.value)  # newest one received
        self._changed = threading.Condition()  # guards that and the fields below
        self._is_published = True
        self._published: tuple[object, ...] = ()  # the urgent part of the last published status
        self._keys: WorkerKeys | None = None
        self._renewer: LeaseRenewer | None = None
        self._watcher: KeyWatcher | None = None
        self._terminate: Terminate | None = None
        self._kill_at_s = float("inf")
        self._command: tuple[str, str] | None = None  # id and refusal of one executed here
        self._leaving = self._left = False
        self._ended = os.eventfd(0)

    def run(self) -> None:
        """Runs until the worker has ended or deregistered."""
        for task in (self._listen, self._publish):
            threading.Thread(target=task, name=task.__name__.strip("_"), daemon=True).start()
        poll = select.poll()
        poll.register(self._worker_fd, select.POLLIN)
        poll.register(self._ended, select.POLLIN)
        while not poll.poll(LOOK_S * 1000):
            self._check_worker()
        if not self._left:
            within(REPORT_EXIT_IN_S, self._report_exit)

    # ---- messages from the worker -----------------------------------------------------------

    def _listen(self) -> None:
        try:
            while (message := self._line.receive_from_worker()) is not None:
                if isinstance(message, Register):
                    self._answer(self._register(message))
                elif isinstance(message, StatusUpdate):
                    self._on_status(message)
                elif isinstance(message, Deregister):
                    self._answer(self._deregister(message))
        except Exception:  # outermost frame of the thread
            logger.exception("heartbeat failed")
        os.eventfd_write(self._ended, 1)

    def _register(self, message: Register) -> ToWorker:
        self._on_status(StatusUpdate(status=message.status), publish=False)

        def acquire() -> Lease:
            return self._open_keys().register(
                message.record, self._current_status(), ttl_s=message.ttl_s
            )

        def start() -> LeaseRenewer:
            return LeaseRenewer(
                acquire,
                name=self.begin.name,
                on_change=self._on_lease_status,
                on_renewed=self._pulse.renewed,
                give_up_s=self.begin.patience_s,
            ).start()

        try:
            renewer = retry_while_unavailable(
                start, timeout_s=message.timeout_s, what="registering"
            )
        except RealsysError as error:
            kind = type(error).__name__
            return RegistrationRefused(kind=kind, what=error.what, where=error.where, fix=error.fix)
        self._watcher = KeyWatcher(
            self._open_keys(), watch_keys=message.watch_keys, on_message=self._on_message
        )
        with self._changed:
            self._renewer = renewer
            self._changed.notify_all()
        self._watcher.start()
        return Registered()

    def _on_status(self, update: StatusUpdate, *, publish: bool = True) -> None:
        self._progress.on_status(update)
        status = update.status
        with self._changed:
            if status.last_command != self._status.last_command:
                self._command = None
            self._status = status
            self._is_published = not publish
            self._changed.notify_all()

    def _current_status(self) -> WorkerStatus:
        status = self._status
        if status.state not in FINAL:
            status = self._progress.completed(status)
        if self._command is None:
            return status
        return replace(status, last_command=self._command[0], command_refused=self._command[1])

    def _deregister(self, message: Deregister) -> ToWorker:
        with self._changed:
            self._status, self._leaving = message.status, True
        if self._watcher is not None:
            self._watcher.stop()
        try:
            retry_while_unavailable(
                self._write_deregistration, timeout_s=message.timeout_s, what="deregistering"
            )
        except RealsysError as error:
            return Deregistered(trouble=error.what)
        return Deregistered()

    def _write_deregistration(self) -> None:
        self._open_keys().deregister(self._current_status())
        self._left = True
        if self._renewer is not None:
            self._renewer.stop(timeout_s=1.0)

    # ---- messages to the worker ---------------------------------------------------------------

    def _on_message(self, message: ToWorker) -> None:
        if isinstance(message, Terminate):
            return self._end(message)
        if isinstance(message, CommandReceived) and self._handles_dump(message):
            return None
        self._answer(message)

    def _answer(self, message: ToWorker) -> None:
        deadline_s = time.monotonic() + EXIT_IN_S
        try:
            while not self._line.try_send(message) and time.monotonic() < deadline_s:
                time.sleep(0.05)
        except OSError:
            return  # it has ended; the main thread detects that

    def _on_lease_status(self, lease_status: LeaseStatus, reason: str) -> None:
        if lease_status is LeaseStatus.EXPIRED:
            self._end(Terminate(code=worker_exit_codes.FENCED, kind="Fenced", why=reason))

    def _end(self, terminate: Terminate) -> None:
        """Makes the worker exit: sends it the reason; the main thread kills it if it does not."""
        with self._changed:
            if self._terminate is not None or self._leaving:
                return
            self._terminate, self._kill_at_s = terminate, time.monotonic() + EXIT_IN_S
        logger.error("worker must exit code=%d reason=%s", terminate.code, terminate.why)
        self._answer(terminate)

    def _handles_dump(self, message: CommandReceived) -> bool:
        """Executes a dump command here, because the worker may be unable to; returns whether it was
        one."""
        command = parse_command(message.value, where=self.begin.name)
        if command.verb is not Verb.DUMP:
            return False
        with self._changed:
            state = WorkerState(self._status.state)
        why = refusal(command, attempt=self.begin.attempt, token=self.begin.token, state=state)
        if why:
            logger.warning("command refused verb=dump by=%s reason=%s", command.by, why)
        else:
            self._progress.dump(f"command of {command.by}")
        with self._changed:
            self._command, self._is_published = (command.id, why), False
            self._changed.notify_all()
        return True

    # ---- checks of the main thread ------------------------------------------------------------

    def _check_worker(self) -> None:
        now_s = time.monotonic()
        self._pulse.note_check()
        if now_s > self._kill_at_s and self._terminate is not None:
            self._kill_at_s = float("inf")
            within(1.0, partial(self._write_failure_record, self._terminate))
            with suppress(ProcessLookupError):
                pidfd_send_signal(self._worker_fd, signal.SIGKILL)
            return
        if self._progress.check(now_s):
            with self._changed:
                self._is_published = False
                self._changed.notify_all()

    def _write_failure_record(self, terminate: Terminate) -> None:
        why = f"{terminate.why}; it did not exit by itself and was killed"
        record = failure_by_order(self.begin.name, why, terminate.kind, pid=self.begin.pid)
        path = self._files.failure_record(self.begin.name)
        if not path.exists():
            write_record(path, record)

    def _report_exit(self) -> None:
        """Deregisters a worker that exited without deregistering. Keeps its last status if that was
        final, otherwise marks it LOST."""
        with self._changed:
            status, self._leaving = self._status, True
        if status.state not in FINAL:
            reason = self._terminate.why if self._terminate is not None else GONE
            status = replace(status, state=WorkerState.LOST.value, reason=reason, since=time.time())
            logger.error("worker lost reason=%s", reason)
        if self._watcher is not None:
            self._watcher.stop()
        self._status = status
        retry_while_unavailable(
            self._write_deregistration,
            timeout_s=REPORT_EXIT_IN_S,
            what="reporting the worker's exit",
        )

    # ---- the store --------------------------------------------------------------------------

    def _open_keys(self) -> WorkerKeys:
        """Opens the store on first use. Raises StoreUnavailable while it does not answer."""
        if self._keys is None:
            self._keys = WorkerKeys(_open_store(self.begin), self.begin)
        return self._keys

    def _publish(self) -> None:
        """Writes the newest status, at most five times a second, whenever the store answers."""
        while True:
            with self._changed:
                self._changed.wait_for(self._is_urgent, timeout=LAZY_S - PUBLISH_EVERY_S)
                self._changed.wait_for(lambda: self._renewer is not None and not self._is_published)
                if self._leaving:
                    return
                status, renewer, self._is_published = self._current_status(), self._renewer, True
                self._published = _urgent_part(status)
            assert renewer is not None
            try:
                self._open_keys().publish(status, renewer.lease)
            except LeaseLost:
                self._mark_unpublished()  # the renewer acquires another lease, or ends the worker
            except StoreError as error:
                logger.warning("status not published error=%s", error.what)
                self._mark_unpublished()
            except Exception:  # outermost frame of the thread
                logger.exception("status not published")
            time.sleep(PUBLISH_EVERY_S)

    def _is_urgent(self) -> bool:
        """Returns whether the newest status has changes that others wait for. Called with
        ``_changed`` held."""
        is_new = self._published != _urgent_part(self._current_status())
        return self._leaving or (self._renewer is not None and not self._is_published and is_new)

    def _mark_unpublished(self) -> None:
        with self._changed:
            self._is_published = False
        time.sleep(RETRY_S)


def _urgent_part(status: WorkerStatus) -> tuple[object, ...]:
    """Returns the part of a status that others wait for. READY and RUNNING alternate a dozen times
    a step and count as one state."""
    state = "up" if status.state in (WorkerState.READY, WorkerState.RUNNING) else status.state
    return state, status.reason, status.last_command, status.command_refused, status.stalled_s > 0


def _open_store(begin: Init) -> NameResolve:
    def etcd() -> EtcdSpec:
        from realsys.api.cluster import EtcdSpec

        return EtcdSpec(**begin.etcd)

    access_file = AttemptFiles(Path(begin.attempt_dir)).etcd_access
    return open_store_at(begin.store_url, etcd=etcd, access_file=access_file)


def main() -> None:
    """Runs the process; its descriptors are in argv."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the worker, not before
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("line", "pulse", "worker", "stacks"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    line = PacketSocket(socket.socket(fileno=args.line))
    begin = line.receive_from_worker()
    if not isinstance(begin, Init):
        return
    configure_logging(begin.name, level=begin.log_level)
    process = HeartbeatProcess(
        begin, line, HeartbeatMemory(args.pulse), worker_fd=args.worker, stacks_fd=args.stacks
    )
    try:
        process.run()
    except Exception:  # outermost frame
        logger.exception("heartbeat failed")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that hang in the store must not delay the exit
