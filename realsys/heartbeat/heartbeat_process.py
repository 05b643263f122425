"""The heartbeat process of a worker: ``python -m realsys.heartbeat.heartbeat_process``, its small child.

It speaks for the worker in name resolution, so that a worker that computes, waits in a collective or
holds the GIL for minutes keeps its lease, and one that is gone is missed at once. It holds the lease,
writes registration and status, hears of stop, commands and newer attempts, and watches two things
apart: that the worker's process is there (its pidfd), and that it gets on (its ticks, stall.py).

Threads: the main one looks at the worker and ends everything within bounded time; others talk to the
worker (``_listen``), write the newest status (``_publish``), renew (lease_renewer.py) and watch keys
(key_watcher.py). Any of these may hang in the store; the main one never calls it.

It dies with the worker: tells the store that the worker is lost, unless that said goodbye itself, and
exits within three seconds. A worker that must end and does not is killed here.
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
from realsys.heartbeat.heartbeat_messages import (
    Commanded,
    Deregistered,
    Goodbye,
    HeartbeatMemory,
    Init,
    PacketSocket,
    Register,
    Registered,
    RegistrationRefused,
    Tell,
    Terminate,
    ToWorker,
)
from realsys.heartbeat.key_watcher import KeyWatcher
from realsys.heartbeat.progress_watch import ProgressWatch
from realsys.heartbeat.stack_dumps import StackDumps
from realsys.heartbeat.worker_keys import WorkerKeys
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.lease_renewer import LeaseRenewer
from realsys.name_resolve.lease_validity import LeaseStatus
from realsys.name_resolve.retry import RETRY_S, retry_while_unavailable
from realsys.name_resolve.store import Lease, NameResolve
from realsys.name_resolve.trial_store import open_store_at
from realsys.observability.worker_logs import configure_logging
from realsys.runtime import worker_exit_codes
from realsys.runtime.bounded import within
from realsys.runtime.lifecycle import FINAL, WorkerState
from realsys.runtime.linux import pidfd_send_signal
from realsys.runtime.worker_commands import Verb, parse_command, refusal
from realsys.trial.records import AttemptFiles, Failure, WorkerStatus, write_record

if TYPE_CHECKING:
    from realsys.api.cluster import EtcdSpec

logger = logging.getLogger("realsys.heartbeat.heartbeat_process")  # it runs as __main__

LOOK_S = 0.5
PUBLISH_EVERY_S = 0.2
# A status is a file in a store that is a folder: what a worker computes is told at most so often; that its
# state has changed, that it stands still or has carried out a command, at once.
LAZY_S = 1.0
EXIT_IN_S = 2.0  # how long a worker that must end may take
BURY_IN_S = 2.5  # how long telling its end may take
GONE = "its process ended without a word"


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
        self._status = WorkerStatus(state=WorkerState.STARTING.value)  # newest that we were told
        self._changed = threading.Condition()  # of that, and of what follows
        self._is_published = True
        self._published: tuple[object, ...] = ()  # what was told at once, the last time
        self._keys: WorkerKeys | None = None
        self._keeper: LeaseRenewer | None = None
        self._watcher: KeyWatcher | None = None
        self._over: Terminate | None = None
        self._kill_at_s = float("inf")
        self._command: tuple[str, str] | None = None  # id and refusal of one carried out here
        self._leaving = self._left = False
        self._ended = os.eventfd(0)

    def run(self) -> None:
        """Until the worker is gone or has said goodbye."""
        for task in (self._listen, self._publish):
            threading.Thread(target=task, name=task.__name__.strip("_"), daemon=True).start()
        poll = select.poll()
        poll.register(self._worker_fd, select.POLLIN)
        poll.register(self._ended, select.POLLIN)
        while not poll.poll(LOOK_S * 1000):
            self._look()
        if not self._left:
            within(BURY_IN_S, self._report_exit)

    # ---- what the worker says ---------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while (message := self._line.receive_from_worker()) is not None:
                if isinstance(message, Register):
                    self._answer(self._register(message))
                elif isinstance(message, Tell):
                    self._told(message)
                elif isinstance(message, Goodbye):
                    self._answer(self._goodbye(message))
        except Exception:  # outermost frame of the thread
            logger.exception("heartbeat failed")
        os.eventfd_write(self._ended, 1)

    def _register(self, message: Register) -> ToWorker:
        self._told(Tell(status=message.status), publish=False)

        def take() -> Lease:
            return self._open_keys().take(message.record, self._told_status(), ttl_s=message.ttl_s)

        def start() -> LeaseRenewer:
            return LeaseRenewer(
                take,
                name=self.begin.name,
                on_change=self._standing_changed,
                on_renewed=self._pulse.renewed,
                give_up_s=self.begin.patience_s,
            ).start()

        try:
            keeper = retry_while_unavailable(start, timeout_s=message.timeout_s, what="registering")
        except RealsysError as error:
            kind = type(error).__name__
            return RegistrationRefused(kind=kind, what=error.what, where=error.where, fix=error.fix)
        self._watcher = KeyWatcher(
            self._open_keys(),
            attempt=self.begin.attempt,
            watch_keys=message.watch_keys,
            hear=self._hear,
        )
        with self._changed:
            self._keeper = keeper
            self._changed.notify_all()
        self._watcher.start()
        return Registered()

    def _told(self, told: Tell, *, publish: bool = True) -> None:
        self._progress.told(told)
        status = told.status
        with self._changed:
            if status.last_command != self._status.last_command:
                self._command = None
            self._status = status
            self._is_published = not publish
            self._changed.notify_all()

    def _told_status(self) -> WorkerStatus:
        status = self._status
        if status.state not in FINAL:
            status = self._progress.completed(status)
        if self._command is None:
            return status
        return replace(status, last_command=self._command[0], command_refused=self._command[1])

    def _goodbye(self, message: Goodbye) -> ToWorker:
        with self._changed:
            self._status, self._leaving = message.status, True
        if self._watcher is not None:
            self._watcher.stop()
        try:
            retry_while_unavailable(self._leave, timeout_s=message.timeout_s, what="the goodbye")
        except RealsysError as error:
            return Deregistered(trouble=error.what)
        return Deregistered()

    def _leave(self) -> None:
        self._open_keys().leave(self._told_status())
        self._left = True
        if self._keeper is not None:
            self._keeper.stop(timeout_s=1.0)

    # ---- what the worker must hear -----------------------------------------------------------

    def _hear(self, message: ToWorker) -> None:
        if isinstance(message, Terminate):
            return self._end(message)
        if isinstance(message, Commanded) and self._dumps_for(message):
            return None
        self._answer(message)

    def _answer(self, message: ToWorker) -> None:
        deadline_s = time.monotonic() + EXIT_IN_S
        try:
            while not self._line.try_send(message) and time.monotonic() < deadline_s:
                time.sleep(0.05)
        except OSError:
            return  # it is gone; the main thread sees that

    def _standing_changed(self, lease_status: LeaseStatus, reason: str) -> None:
        if lease_status is LeaseStatus.EXPIRED:
            self._end(Terminate(code=worker_exit_codes.FENCED, kind="Fenced", why=reason))

    def _end(self, over: Terminate) -> None:
        """The worker must exit: it is told, and killed by the main thread if it does not."""
        with self._changed:
            if self._over is not None or self._leaving:
                return
            self._over, self._kill_at_s = over, time.monotonic() + EXIT_IN_S
        logger.error("worker must exit code=%d why=%s", over.code, over.why)
        self._answer(over)

    def _dumps_for(self, message: Commanded) -> bool:
        """A command to dump is carried out here: the worker may be unable to."""
        command = parse_command(message.value, where=self.begin.name)
        if command.verb is not Verb.DUMP:
            return False
        with self._changed:
            state = WorkerState(self._status.state)
        why = refusal(command, attempt=self.begin.attempt, token=self.begin.token, state=state)
        if why:
            logger.warning("command refused verb=dump by=%s why=%s", command.by, why)
        else:
            self._progress.dump(f"command of {command.by}")
        with self._changed:
            self._command, self._is_published = (command.id, why), False
            self._changed.notify_all()
        return True

    # ---- the main thread's looks ------------------------------------------------------------

    def _look(self) -> None:
        now_s = time.monotonic()
        self._pulse.looked()
        if now_s > self._kill_at_s and self._over is not None:
            self._kill_at_s = float("inf")
            within(1.0, partial(self._last_words, self._over))
            with suppress(ProcessLookupError):
                pidfd_send_signal(self._worker_fd, signal.SIGKILL)
            return
        if self._progress.look(now_s):
            with self._changed:
                self._is_published = False
                self._changed.notify_all()

    def _last_words(self, over: Terminate) -> None:
        words = Failure(
            worker=self.begin.name,
            host=socket.gethostname(),
            pid=self.begin.pid,
            why=f"{over.why}; it did not exit by itself and was killed",
            at=time.time(),
            kind=over.kind,
        )
        path = self._files.failure_record(self.begin.name)
        if not path.exists():
            write_record(path, words)

    def _report_exit(self) -> None:
        """The worker is gone: the store is told, in what it said last if that was final."""
        with self._changed:
            status, self._leaving = self._status, True
        if status.state not in FINAL:
            reason = self._over.why if self._over is not None else GONE
            status = replace(status, state=WorkerState.LOST.value, reason=reason, since=time.time())
            logger.error("worker lost why=%s", reason)
        if self._watcher is not None:
            self._watcher.stop()
        self._status = status
        retry_while_unavailable(self._leave, timeout_s=BURY_IN_S, what="telling the worker's end")

    # ---- the store --------------------------------------------------------------------------

    def _open_keys(self) -> WorkerKeys:
        """Raises StoreUnavailable while the store does not answer."""
        begin = self.begin
        if self._keys is None:
            self._keys = WorkerKeys(
                _open_store(begin),
                TrialKeys(
                    cluster=begin.cluster,
                    user=begin.user,
                    experiment=begin.experiment,
                    trial=begin.trial,
                ),
                worker_type=begin.worker_type,
                index=begin.index,
                attempt=begin.attempt,
                token=begin.token,
            )
        return self._keys

    def _publish(self) -> None:
        """Writes the newest status, at most five times a second, whenever the store answers."""
        while True:
            with self._changed:
                self._changed.wait_for(self._is_urgent, timeout=LAZY_S - PUBLISH_EVERY_S)
                self._changed.wait_for(lambda: self._keeper is not None and not self._is_published)
                if self._leaving:
                    return
                status, keeper, self._is_published = self._told_status(), self._keeper, True
                self._published = _told_at_once(status)
            assert keeper is not None
            try:
                self._open_keys().publish(status, keeper.lease)
            except LeaseLost:
                self._put_back()  # the keeper takes another one, or ends us
            except StoreError as error:
                logger.warning("status not published error=%s", error.what)
                self._put_back()
            except Exception:  # outermost frame of the thread
                logger.exception("status not published")
            time.sleep(PUBLISH_EVERY_S)

    def _is_urgent(self) -> bool:
        """Whether the newest status says what others wait for. Called with ``_changed`` held."""
        is_new = self._published != _told_at_once(self._told_status())
        return self._leaving or (self._keeper is not None and not self._is_published and is_new)

    def _put_back(self) -> None:
        with self._changed:
            self._is_published = False
        time.sleep(RETRY_S)


def _told_at_once(status: WorkerStatus) -> tuple[object, ...]:
    """What others wait for. Between two calls a worker is ready, a dozen times a step."""
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
        signal.signal(number, signal.SIG_IGN)  # it ends when the worker does, not before
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
    os._exit(0)  # threads that hang in the store must not keep it
