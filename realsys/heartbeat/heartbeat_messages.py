"""What a worker and its heartbeat process say to each other, and the memory that both see.

Messages are tagged Structs, one a packet of a socket pair: the kernel keeps their borders, a packet is
sent whole or not at all, and an end of either process is an end of the stream. What must be seen however
busy or stopped the other side is stands in shared memory: the worker's ticks, and when the lease was
last renewed. Both read one monotonic clock, the machine's.
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

from realsys.name_resolve.lease_validity import GIVE_UP_S, LeaseStatus, LeaseValidity, ProcessPauses
from realsys.runtime.linux import memfd_create
from realsys.runtime.progress import count_in, ticks
from realsys.trial.records import StopRequest, WorkerRecord, WorkerStatus

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_PACKET = 128 * 1024
PULSE_BYTES = 4096
_RENEWED_AT = 64  # the ticks stand at 0, in a cache line of their own
_RENEWED = struct.Struct("<dd")  # when the newest acknowledged renewal was sent; the lease's ttl
_LOOKS_AT = 128
_LOOKS = struct.Struct("<Q")  # how often the heartbeat process has looked at its worker


class Init(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message to a heartbeat process: whose it is, and where the store is."""

    worker_type: str
    index: int
    pid: int
    attempt: int
    token: str
    store_url: str
    cluster: str  # the four that make a trial's keys
    user: str
    experiment: str
    trial: str
    attempt_dir: str  # for last words and stacks
    etcd: dict[str, str | None] = {}  # EtcdSpec as plain values
    patience_s: float = GIVE_UP_S  # with a store that does not answer
    log_level: int = 20

    @property
    def name(self) -> str:
        """``model_worker/3``."""
        return f"{self.worker_type}/{self.index}"


class Register(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take a lease and publish the worker. Answered by Registered or Refused."""

    record: WorkerRecord
    status: WorkerStatus
    ttl_s: float
    timeout_s: float
    watch_keys: tuple[str, ...] = ()  # whole keys


class Tell(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker's newest status.

    Attributes:
        may_take_s: what it does now may go on for so long without a tick, whatever its steps take: a
            checkpoint is written, models are made. 0: judged by its steps.
        ticks_within_s: it ticks at least so often while it is well, whether it has work or not. 0: it has
            steps, and is judged by them.
    """

    status: WorkerStatus
    may_take_s: float = 0.0
    ticks_within_s: float = 0.0


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker leaves in this final status. Answered by GoodbyeSaid; then the process ends."""

    status: WorkerStatus
    timeout_s: float


class Registered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker is registered."""


class RegistrationRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It is not: the error to raise."""

    kind: str
    what: str
    where: str
    fix: str


class StopAsked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Somebody asks this attempt to stop."""

    request: StopRequest


class Commanded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A command came, as its sender wrote it."""

    value: bytes


class WatchedProcess(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Of the keys that the worker watches, which were there, one is there again, or all are gone."""

    present: bool


class Terminate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker must exit with ``code``, now. ``kind`` and ``why`` are its last words."""

    code: int
    kind: str
    why: str


class Deregistered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The store knows that the worker has left; ``trouble`` says why not."""

    trouble: str = ""


FromWorker = Init | Register | Tell | Goodbye
ToWorker = (
    Registered
    | RegistrationRefused
    | StopAsked
    | Commanded
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
        """Two ends, kept from children unless passed on by number."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(here), cls(there)

    def fileno(self) -> int:
        """For polls, and to pass it on."""
        return self.end.fileno()

    def try_send(self, message: FromWorker | ToWorker) -> bool:
        """Sends unless the other side is behind; False then. Never blocks.

        Raises:
            OSError: the other side is gone.
        """
        try:
            self.end.send(msgspec.msgpack.encode(message), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def receive_from_worker(self) -> FromWorker | None:
        """The next message; None at the end of the stream, and when it can't be read. Blocks."""
        return _decoded(_from_worker, data) if (data := self._receive()) else None

    def receive_to_worker(self) -> ToWorker | None:
        """The next message; None at the end of the stream, and when it can't be read. Blocks."""
        return _decoded(_to_worker, data) if (data := self._receive()) else None

    def close(self) -> None:
        """Ends the stream for both."""
        self.end.close()

    def _receive(self) -> bytes:
        try:
            return self.end.recv(MAX_PACKET)
        except ConnectionResetError:
            return b""


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T | None:
    """None ends the stream: who can't be understood can't be trusted to say what comes next."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        logger.exception("message of the other end not understood bytes=%d", len(data))
        return None


class HeartbeatMemory:
    """The shared memory. ``make`` in the worker, ``at`` in its heartbeat process."""

    def __init__(self, fd: int, *, give_up_s: float = GIVE_UP_S) -> None:
        self.fd, self._give_up_s = fd, give_up_s
        self._memory: Any = mmap.mmap(fd, PULSE_BYTES)

    @classmethod
    def make(cls, *, give_up_s: float = GIVE_UP_S) -> Self:
        """New memory, not seen by other children; from now on this process's ticks count in it."""
        fd = memfd_create("realsys-pulse")
        os.ftruncate(fd, PULSE_BYTES)
        pulse = cls(fd, give_up_s=give_up_s)
        count_in(pulse._memory)
        return pulse

    @property
    def ticks(self) -> int:
        """How often the worker said that it gets on."""
        return ticks(self._memory)

    def renewed(self, sent_s: float, ttl_s: float) -> None:
        """Notes a renewal."""
        _RENEWED.pack_into(self._memory, _RENEWED_AT, sent_s, ttl_s)

    def looked(self) -> None:
        """The heartbeat process has looked at its worker once more: it does not stand still."""
        _LOOKS.pack_into(self._memory, _LOOKS_AT, (self.looks + 1) % 2**64)

    @property
    def looks(self) -> int:
        """How often it has."""
        return int(_LOOKS.unpack_from(self._memory, _LOOKS_AT)[0])

    def lease_status(self, now_s: float, naps: ProcessPauses | None = None) -> LeaseStatus:
        """How the worker stands at ``now_s``; suspended until it is registered.

        Args:
            naps: of the worker: a job that is suspended stops both.
        """
        sent_s, ttl_s = _RENEWED.unpack_from(self._memory, _RENEWED_AT)
        if not ttl_s:
            return LeaseStatus.UNCERTAIN
        paused_s = naps.since(sent_s) if naps is not None else 0.0
        judge = LeaseValidity(ttl_s, granted_s=sent_s, give_up_s=self._give_up_s)
        return judge.lease_status(now_s, paused_s=paused_s)
