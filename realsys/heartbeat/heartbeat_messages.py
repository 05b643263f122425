"""Messages between a worker and its heartbeat process, and the memory that they share.

Messages are tagged Structs, one per packet of a socket pair: the kernel keeps their boundaries, a
packet is sent whole or not at all, and the end of either process ends the stream. Values that must
be readable while the other side is busy or stopped are in shared memory: the worker's ticks, and
when the lease was last renewed. Both read the machine's monotonic clock.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import struct
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import msgspec

from realsys.api.errors import ConfigError
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.lease_validity import GIVE_UP_S, LeaseStatus, LeaseValidity, ProcessPauses
from realsys.runtime.linux import memfd_create
from realsys.runtime.progress import count_in, ticks
from realsys.trial.records import StopRequest, WorkerRecord, WorkerStatus

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_PACKET = 128 * 1024
PULSE_BYTES = 4096
_RENEWED_AT = 64  # the ticks are at 0, in a cache line of their own
_RENEWED = struct.Struct("<dd")  # when the newest acknowledged renewal was sent; the lease's TTL
_LOOKS_AT = 128
_LOOKS = struct.Struct("<Q")  # number of checks that the heartbeat process has made


class Init(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message to a heartbeat process: its worker, and where the store is."""

    worker_type: str
    index: int
    pid: int
    attempt: int
    token: str
    store_url: str
    keys: TrialKeys
    attempt_dir: str  # for the failure record and stacks
    etcd: dict[str, str | None] = {}  # EtcdSpec as plain values
    patience_s: float = GIVE_UP_S  # how long the store may be unavailable
    log_level: int = 20

    @property
    def name(self) -> str:
        """``model_worker/3``."""
        return f"{self.worker_type}/{self.index}"


class Register(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Acquires a lease and publishes the worker. Answered by Registered or RegistrationRefused."""

    record: WorkerRecord
    status: WorkerStatus
    ttl_s: float
    timeout_s: float
    watch_keys: tuple[str, ...] = ()  # whole keys


class StatusUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker's newest status.

    Attributes:
        may_take_s: how long the current activity may take without a tick, whatever the steps take:
            writing a checkpoint, creating models. 0: judged by step times.
        ticks_within_s: interval in which a healthy worker ticks, whether it has work or not. 0: it has
            steps, and is judged by them.
    """

    status: WorkerStatus
    may_take_s: float = 0.0
    ticks_within_s: float = 0.0


class Deregister(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Deregisters the worker in this final status. Answered by Deregistered; then the process ends."""

    status: WorkerStatus
    timeout_s: float


class Registered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Confirms the registration."""


class RegistrationRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reports why the registration failed: the error to raise."""

    kind: str
    what: str
    where: str
    fix: str


class StopRequested(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Passes on a request to stop this attempt."""

    request: StopRequest


class CommandReceived(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Passes on a command, as its sender wrote it."""

    value: bytes


class WatchedProcess(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reports whether any of the watched keys that existed before exists again, or all are gone."""

    present: bool


class Terminate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Makes the worker exit with ``code`` at once. ``kind`` and ``why`` go into its failure record."""

    code: int
    kind: str
    why: str


class Deregistered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Confirms the deregistration; ``trouble`` is the reason if it failed."""

    trouble: str = ""


FromWorker = Init | Register | StatusUpdate | Deregister
ToWorker = (
    Registered
    | RegistrationRefused
    | StopRequested
    | CommandReceived
    | WatchedProcess
    | Terminate
    | Deregistered
)

_from_worker = msgspec.msgpack.Decoder(FromWorker)
_to_worker = msgspec.msgpack.Decoder(ToWorker)


@dataclass
class PacketSocket:
    """One end of the socket pair."""

    end: socket.socket

    @classmethod
    def pair(cls) -> tuple[PacketSocket, PacketSocket]:
        """Returns two connected ends, not inherited by children unless passed explicitly."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(here), cls(there)

    def fileno(self) -> int:
        """Returns the descriptor, for polling and passing on."""
        return self.end.fileno()

    def try_send(self, message: FromWorker | ToWorker) -> bool:
        """Sends without blocking; returns False if the other side lags.

        Raises:
            OSError: the other side has closed.
        """
        try:
            self.end.send(msgspec.msgpack.encode(message), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def receive_from_worker(self) -> FromWorker | None:
        """Blocks for the next message; returns None at the end of the stream, or if it can't be
        decoded."""
        return _decoded(_from_worker, data) if (data := self._receive()) else None

    def receive_to_worker(self) -> ToWorker | None:
        """Blocks for the next message; returns None at the end of the stream, or if it can't be
        decoded."""
        return _decoded(_to_worker, data) if (data := self._receive()) else None

    def close(self) -> None:
        """Ends the stream for both sides."""
        self.end.close()

    def _receive(self) -> bytes:
        try:
            return self.end.recv(MAX_PACKET)
        except ConnectionResetError:
            return b""


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T | None:
    """Decodes a message. None ends the stream: after an undecodable message the peer can't be
    trusted."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, ConfigError):
        logger.exception("message not decoded bytes=%d", len(data))
        return None


class HeartbeatMemory:
    """The shared memory: created by ``make`` in the worker, mapped by its heartbeat process."""

    def __init__(self, fd: int, *, give_up_s: float = GIVE_UP_S) -> None:
        self.fd, self._give_up_s = fd, give_up_s
        self._memory: Any = mmap.mmap(fd, PULSE_BYTES)

    @classmethod
    def make(cls, *, give_up_s: float = GIVE_UP_S) -> Self:
        """Creates the memory, not inherited by other children, and counts this process's ticks in
        it from now on."""
        fd = memfd_create("realsys-pulse")
        os.ftruncate(fd, PULSE_BYTES)
        pulse = cls(fd, give_up_s=give_up_s)
        count_in(pulse._memory)
        return pulse

    @property
    def ticks(self) -> int:
        """Number of progress ticks of the worker."""
        return ticks(self._memory)

    def renewed(self, sent_s: float, ttl_s: float) -> None:
        """Records a renewal."""
        _RENEWED.pack_into(self._memory, _RENEWED_AT, sent_s, ttl_s)

    def note_check(self) -> None:
        """Records one more check by the heartbeat process, which shows that it is not hung."""
        _LOOKS.pack_into(self._memory, _LOOKS_AT, (self.checks + 1) % 2**64)

    @property
    def checks(self) -> int:
        """Number of checks of the heartbeat process."""
        return int(_LOOKS.unpack_from(self._memory, _LOOKS_AT)[0])

    def lease_status(self, now_s: float, pauses: ProcessPauses | None = None) -> LeaseStatus:
        """Returns the lease status at ``now_s``; uncertain until the worker is registered.

        Args:
            naps: pauses of the worker: suspending a job stops both processes.
        """
        sent_s, ttl_s = _RENEWED.unpack_from(self._memory, _RENEWED_AT)
        if not ttl_s:
            return LeaseStatus.UNCERTAIN
        paused_s = pauses.since(sent_s) if pauses is not None else 0.0
        judge = LeaseValidity(ttl_s, granted_s=sent_s, give_up_s=self._give_up_s)
        return judge.lease_status(now_s, paused_s=paused_s)
