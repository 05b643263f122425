"""A worker's end of its heartbeat process (heartbeat_process.py), which it starts before any heavy
import.

One thread receives messages. Sending a status never blocks and needs no thread, so a status sent
before a call that holds the GIL for minutes arrives. If the heartbeat process ends, the worker can
no longer prove that it is alive, and exits.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from realsys.api import errors
from realsys.api.errors import LeaseLost, RealsysError, StoreError, WaitTimeout
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
    StopRequested,
    Terminate,
    ToWorker,
    WatchedProcess,
)
from realsys.heartbeat.stack_dumps import arm
from realsys.name_resolve.lease_validity import LeaseStatus, ProcessPauses
from realsys.runtime import worker_exit_codes
from realsys.runtime.linux import pidfd_open
from realsys.trial.records import StopRequest, WorkerRecord, WorkerStatus

logger = logging.getLogger(__name__)

ARGV = (sys.executable, "-P", "-m", "realsys.heartbeat.heartbeat_process")
BEHIND_S = 0.2  # interval of resending a status while the heartbeat process lags
WATCH_S = 1.0
STILL_S = 120.0  # a heartbeat process that makes no check for this long is considered hung
CHECK_EVERY_S = 0.05
ANSWER_S = 5.0  # beyond a request's own deadline, for its answer to arrive


class Heartbeat:
    """The heartbeat process of this one, from ``start`` on.

    Args:
        on_stop, on_command: called from the receiving thread; must not block.
        on_terminate: called before this process exits by ``os._exit``, to record the reason.
        on_watched: called with whether any key of ``register``'s ``watch_keys`` exists, on change.
    """

    process: subprocess.Popen[bytes]
    _line: PacketSocket
    _pulse: HeartbeatMemory

    def __init__(
        self,
        begin: Init,
        *,
        on_stop: Callable[[StopRequest], None],
        on_command: Callable[[bytes], None],
        on_terminate: Callable[[Terminate], None],
        on_watched: Callable[[bool], None] = lambda present: None,
    ) -> None:
        self.name, self._begin = begin.name, begin
        self._on_stop, self._on_command, self._on_terminate = on_stop, on_command, on_terminate
        self._on_watched = on_watched
        self._answer: ToWorker | None = None
        self._answered = threading.Event()
        self._unsent: StatusUpdate | None = None  # the newest status, while the other side lags
        self._sending, self._judging = threading.Lock(), threading.Lock()
        self._registered = self._leaving = False
        self._checks, self._still_s, self._turned_s = 0, 0.0, time.monotonic()
        self._naps = ProcessPauses(time.monotonic(), every_s=WATCH_S)
        self._thread = threading.Thread(target=self._listen, name="heartbeat", daemon=True)

    def start(self, *, argv: Sequence[str] = ARGV) -> Self:
        """Starts the process and returns at once; it is ready a tenth of a second later."""
        self._line, there = PacketSocket.pair()
        self._pulse = HeartbeatMemory.make(give_up_s=self._begin.patience_s)
        stacks_fd, worker_fd = arm(), pidfd_open(os.getpid())
        fds = {
            "line": there.fileno(),
            "pulse": self._pulse.fd,
            "worker": worker_fd,
            "stacks": stacks_fd,
        }
        # Slurm sends SIGTERM to every process of a step: blocked until the child ignores it itself.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        try:
            self.process = subprocess.Popen(
                [*argv, *(f"--{name}={fd}" for name, fd in fds.items())],
                stdin=subprocess.DEVNULL,
                pass_fds=tuple(fds.values()),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        there.close()
        os.close(worker_fd)
        self._line.try_send(self._begin)
        self._thread.start()
        return self

    def register(
        self,
        record: WorkerRecord,
        status: WorkerStatus,
        *,
        ttl_s: float,
        timeout_s: float,
        watch_keys: Sequence[str] = (),
    ) -> None:
        """Publishes this worker's addresses under a lease that is renewed from now on.

        Raises:
            StaleAttempt: another attempt has taken over.
            StoreUnavailable: the store did not answer in ``timeout_s``.
        """
        message = Register(
            record=record,
            status=status,
            ttl_s=ttl_s,
            timeout_s=timeout_s,
            watch_keys=tuple(watch_keys),
        )
        answer = self._ask(message, timeout_s=timeout_s + ANSWER_S)
        if isinstance(answer, RegistrationRefused):
            raise _error(answer)
        self._registered = True

    def publish_status(
        self, status: WorkerStatus, *, may_take_s: float = 0.0, ticks_within_s: float = 0.0
    ) -> None:
        """Publishes the newest status soon, without blocking or failing. Args: as in
        ``StatusUpdate``."""
        with self._sending:
            self._unsent = StatusUpdate(
                status=status, may_take_s=may_take_s, ticks_within_s=ticks_within_s
            )
            self._send_newest()

    def deregister(self, status: WorkerStatus, *, timeout_s: float) -> None:
        """Deregisters in a final status, and ends the heartbeat process.

        Raises:
            StoreError: the deregistration was not written.
        """
        with self._sending:
            self._unsent, self._leaving = None, True
        try:
            answer = self._ask(
                Deregister(status=status, timeout_s=timeout_s), timeout_s=timeout_s + 1.0
            )
        finally:
            with suppress(OSError):  # it has already ended
                # Wakes both receivers and ends the process
                self._line.end.shutdown(socket.SHUT_RDWR)
        if isinstance(answer, Deregistered) and answer.trouble:
            raise StoreError(
                answer.trouble, where=self.name, fix="none is needed: the lease expires"
            )
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("heartbeat process did not end pid=%d", self.process.pid)

    @property
    def lease_status(self) -> LeaseStatus:
        """What this worker may do now."""
        with self._judging:
            self._naps.awake(now_s := time.monotonic())
            return self._pulse.lease_status(now_s, self._naps)

    def check(self, *, timeout_s: float) -> None:
        """Waits while the lease is uncertain. Call it before a side effect that others see.

        Raises:
            LeaseLost: it has expired, this process is about to exit.
            WaitTimeout: it stayed uncertain for ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        while (lease_status := self.lease_status) is not LeaseStatus.VALID:
            if lease_status is LeaseStatus.EXPIRED:
                raise LeaseLost(
                    "the lease has expired",
                    where=self.name,
                    fix="exit; the supervisor decides what follows",
                )
            if time.monotonic() > deadline_s:
                raise WaitTimeout(
                    f"the lease could not be renewed for {timeout_s:g} s",
                    where=self.name,
                    fix="check that the name-resolution store answers (realsys doctor)",
                )
            time.sleep(CHECK_EVERY_S)

    # ---- sending ----------------------------------------------------------------------------

    def _ask(self, message: Register | Deregister, *, timeout_s: float) -> ToWorker:
        self._answered.clear()
        deadline_s = time.monotonic() + timeout_s
        try:
            while not self._line.try_send(message):
                if time.monotonic() > deadline_s:
                    break
                time.sleep(CHECK_EVERY_S)
        except OSError:
            pass  # it has ended: no answer will arrive
        if not self._answered.wait(max(0.0, deadline_s - time.monotonic())) or not self._answer:
            raise WaitTimeout(
                f"the heartbeat process did not answer for {timeout_s:g} s",
                where=self.name,
                fix="check the worker's log; the name-resolution store may hang",
            )
        return self._answer

    def _send_newest(self) -> None:
        """Sends the unsent status. Called with ``_sending`` held."""
        try:
            if self._unsent is not None and self._line.try_send(self._unsent):
                self._unsent = None
        except OSError:
            self._unsent = None  # the receiver detects that it has ended

    # ---- listening --------------------------------------------------------------------------

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._line.fileno(), select.POLLIN)
        while True:
            if poll.poll((BEHIND_S if self._unsent is not None else WATCH_S) * 1000):
                message = self._line.receive_to_worker()
                if message is None:
                    return self._ended()
                self._on_message(message)
            with self._sending:
                self._send_newest()
            lease_status = self.lease_status  # always read, to detect pauses of this process
            if self._registered and (self._is_hung() or lease_status is LeaseStatus.EXPIRED):
                why = "its heartbeat process hung and could not renew the lease"
                self._terminate(Terminate(code=worker_exit_codes.FENCED, kind="Fenced", why=why))

    def _is_hung(self) -> bool:
        """Returns whether the heartbeat process has made no check for too long. Counts only time in
        which this thread ran: whatever stops both processes stops that clock too."""
        now_s, checks = time.monotonic(), self._pulse.checks
        awake_s, self._turned_s = min(now_s - self._turned_s, 2 * WATCH_S), now_s
        self._still_s = self._still_s + awake_s if checks == self._checks else 0.0
        self._checks = checks
        return self._still_s > STILL_S

    def _on_message(self, message: ToWorker) -> None:
        try:
            if isinstance(message, Registered | RegistrationRefused | Deregistered):
                self._answer = message
                self._answered.set()
            elif isinstance(message, StopRequested):
                self._on_stop(message.request)
            elif isinstance(message, CommandReceived):
                self._on_command(message.value)
            elif isinstance(message, WatchedProcess):
                self._on_watched(message.present)
            else:
                self._terminate(message)
        except Exception:  # outermost frame: the thread must keep receiving
            logger.exception("heartbeat message failed")

    def _ended(self) -> None:
        self._answered.set()
        if not self._leaving:
            code = self.process.poll()
            why = "its heartbeat process ended" + (f" with code {code}" if code is not None else "")
            self._terminate(Terminate(code=worker_exit_codes.FENCED, kind="Fenced", why=why))

    def _terminate(self, terminate: Terminate) -> None:
        if self._leaving:
            return
        logger.error("worker must exit code=%d reason=%s", terminate.code, terminate.why)
        try:
            self._on_terminate(terminate)
        finally:
            os._exit(terminate.code)


def _error(refused: RegistrationRefused) -> RealsysError:
    """Rebuilds the error that the heartbeat process caught."""
    kind = getattr(errors, refused.kind, StoreError)
    made: RealsysError = kind(refused.what, where=refused.where, fix=refused.fix)
    return made
