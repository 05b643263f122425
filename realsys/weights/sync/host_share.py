"""Fetches new weights once per host: one server fetches, the others map the memory that it assembled.

Servers of one host that need the same trainers' weights use an abstract Unix socket, whose name is derived
from the trial's secret. The server that binds it first is the leader and fetches for all while it runs; the
others request a version from it and get descriptors of the memory with the complete, verified weights
(shared_arena.py). When it ends, another server binds the name. Both ends check that the peer is of the same
user. After any failure here, a server fetches for itself: sharing only saves work.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import socket as unix
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from realsys.api.errors import RealsysError, WaitTimeout
from realsys.data.transfer.shared_arena import ArenaPool, MappedArena
from realsys.runtime.process_identity import this_process
from realsys.transport.codec import MAX_MESSAGE_BYTES, ProtocolError, decode, encode
from realsys.transport.curve_keys import TrialKeypairs

logger = logging.getLogger(__name__)

PROGRESS_S = 1.0  # interval of the leader's progress messages
SILENCE_S = 30.0  # silence after which followers fetch for themselves
_RETRY_S = 0.02
_MAX_FDS = 200
_PURPOSE = b"realsys weights of a host"

T = TypeVar("T")


class PartSource(msgspec.Struct, frozen=True):
    """One trainer's part of a version: the manifest ``name`` at its tensor server."""

    endpoint: str
    name: str


class VersionSource(msgspec.Struct, frozen=True):
    """Location of all parts of a version."""

    version: int
    parts: tuple[PartSource, ...]


@dataclass(frozen=True, kw_only=True)
class WholeVersion:
    """A complete version, with base weights and adapters separate. ``scale``: alpha / rank; 0: no
    adapters.
    """

    source: VersionSource
    weights: Mapping[str, Tensor]
    scale: float


class _ShareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a follower: the version, its process (PID and start), and how long it waits."""

    source: VersionSource
    timeout_s: float
    pid: int
    start_ticks: int


class _SharedWeight(msgspec.Struct, frozen=True, array_like=True):
    name: str
    shape: tuple[int, ...]
    dtype: str
    arena: int  # of the arenas whose descriptors are attached
    offset: int


class _ShareReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of the leader: ``state`` is ``fetching``, ``refused`` (``why``) or ``whole``.

    Attributes:
        arenas: (size, flag) of each.
    """

    state: str
    why: str = ""
    scale: float = 0.0
    weights: tuple[_SharedWeight, ...] = ()
    arenas: tuple[tuple[int, int], ...] = ()


class _Ended(Exception):
    """The connection ended before the reply."""


class _Refused(Exception):
    """The leader refused, with its reason."""


class HostShare:
    """One server's membership among the servers of its host.

    Args:
        attempt: identifies this attempt of the trial.
        fetch: returns a version for a neighbour, fetching it if needed; called in a thread of this object.
    """

    def __init__(
        self,
        keypairs: TrialKeypairs,
        *,
        attempt: str,
        fetch: Callable[[VersionSource, float], WholeVersion],
        silence_s: float = SILENCE_S,
    ) -> None:
        self._secret, self._attempt, self._fetch = keypairs.server_secret, attempt, fetch
        self._silence_s = silence_s
        self.arenas = ArenaPool()
        self._name = b""
        self._listener: unix.socket | None = None
        self._threads: set[threading.Thread] = set()
        self._connections: set[unix.socket] = set()
        self._fetching = ThreadPoolExecutor(1, thread_name_prefix="weights for neighbours")
        self._is_over = False

    def from_neighbour(self, source: VersionSource, deadline_s: float) -> WholeVersion | None:
        """Returns the version in memory of the host's leader; None if this server must fetch it itself."""
        name = self._name_of(source)
        if self._listener is not None and self._name == name:
            return None
        self._stop_listening()
        while not self._is_over and time.monotonic() < deadline_s:
            if self._bind(name):
                return None
            connection = _connect(name)
            if connection is None:  # between the end of one leader and the next
                time.sleep(_RETRY_S)
                continue
            with connection:
                if not _is_mine(connection):
                    logger.warning("weights not shared reason=another user has the socket name")
                    return None
                try:
                    return self._request(connection, source, deadline_s)
                except _Ended:
                    logger.info(
                        "neighbour that was fetching weights ended version=%d", source.version
                    )
                except Exception as error:  # after any error, fetching directly is correct
                    if self._is_over:
                        break
                    logger.warning("weights not shared version=%d reason=%s", source.version, error)
                    return None
        if self._is_over:
            raise WaitTimeout(
                "cancelled while another server of this host was fetching",
                where="weights of this host",
                fix="nothing: this server is ending",
            )
        return None

    def close(self) -> None:
        """Ends all threads; waiting neighbours find another leader."""
        self._is_over = True
        self._stop_listening()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(unix.SHUT_RDWR)
        self._fetching.shutdown(wait=False, cancel_futures=True)
        for thread in list(self._threads):
            thread.join(5.0)
        self.arenas.close()

    # ---- follower --------------------------------------------------------------------------

    def _request(
        self, connection: unix.socket, source: VersionSource, deadline_s: float
    ) -> WholeVersion:
        me = this_process()
        left_s = deadline_s - time.monotonic()
        asked = _ShareRequest(
            source=source,
            timeout_s=left_s,
            pid=me.pid,
            start_ticks=me.start_ticks,
        )
        connection.settimeout(self._silence_s)
        _send(connection, encode(asked))
        while True:
            reply, fds = _receive(connection, _ShareReply)
            try:
                if reply.state == "refused":
                    raise _Refused(reply.why)
                if reply.state == "whole":
                    found = _whole(reply, fds, source)
                    connection.sendall(b"k")
                    return found
            finally:
                for fd in fds:
                    os.close(fd)
            if self._is_over or time.monotonic() > deadline_s:
                raise _Refused("it takes too long")

    def _name_of(self, source: VersionSource) -> bytes:
        """Socket name shared by servers that need the same model from the same trainers."""
        givers = sorted((p.endpoint, p.name.rsplit("/", 2)[0]) for p in source.parts)
        what = hashlib.blake2b(_PURPOSE, key=self._secret, digest_size=24)
        what.update(encode((self._attempt, os.geteuid(), givers)))
        return b"\0realsys-weights-" + what.hexdigest().encode()

    # ---- leader ----------------------------------------------------------------------------

    def _bind(self, name: bytes) -> bool:
        listener = unix.socket(unix.AF_UNIX, unix.SOCK_STREAM)
        try:
            listener.bind(name)
            listener.listen(64)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                logger.warning("weights not shared error=%s", error)
                return True
            return False
        self._name, self._listener = name, listener
        self._start(self._accept, listener)
        return True

    def _stop_listening(self) -> None:
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(unix.SHUT_RDWR)  # closed by its thread
            self._listener = None

    def _start(self, work: Callable[[unix.socket], None], socket: unix.socket) -> None:
        def run() -> None:
            try:
                with socket:
                    work(socket)
            finally:
                self._connections.discard(socket)
                self._threads.discard(thread)

        thread = threading.Thread(target=run, name="weights of this host", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _accept(self, listener: unix.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # shut down
                return
            if self._is_over or not _is_mine(connection):
                connection.close()
                continue
            self._connections.add(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: unix.socket) -> None:
        """Serves one neighbour."""
        connection.settimeout(self._silence_s)
        try:
            asked, _ = _receive(connection, _ShareRequest)
            if _peer(connection)[0] != asked.pid:
                raise _Refused("it sees other processes")
            coming = self._fetching.submit(self._fetch, asked.source, asked.timeout_s)
            whole = self._wait(connection, coming)
            self._share(connection, whole, (asked.pid, asked.start_ticks))
        except (_Refused, RealsysError) as error:
            with suppress(OSError):
                _send(connection, encode(_ShareReply(state="refused", why=str(error)[:2000])))
        except (_Ended, OSError, RuntimeError, CancelledError) as error:
            logger.info("neighbour got no weights error=%s", error)

    def _wait(self, connection: unix.socket, future: Future[WholeVersion]) -> WholeVersion:
        beat = encode(_ShareReply(state="fetching"))
        while True:
            try:
                return future.result(PROGRESS_S)
            except NotYet:
                if future.done():
                    raise _Refused("it could not be fetched in time") from None
                _send(connection, beat)

    def _share(self, connection: unix.socket, whole: WholeVersion, reader: tuple[int, int]) -> None:
        shared = self.arenas.add_reader(list(whole.weights.values()), reader)
        if shared is None:
            raise _Refused("its weights are not in memory that can be shared")
        arenas, places = shared
        reply = _ShareReply(
            state="whole",
            scale=whole.scale,
            weights=tuple(
                _SharedWeight(name, tuple(x.shape), str(x.dtype).removeprefix("torch."), *place)
                for (name, x), place in zip(whole.weights.items(), places, strict=True)
            ),
            arenas=tuple((arena.size, flag) for arena, flag in arenas),
        )
        has_it = False
        try:
            if len(arenas) > _MAX_FDS:
                raise _Refused("its weights are in too many pieces")
            _send(connection, encode(reply), [arena.fd for arena, _ in arenas])
            has_it = connection.recv(1) != b""
        except TimeoutError:
            # Possibly in use: its flag is cleared when its process ends at the latest.
            has_it = True
            raise
        finally:
            if not has_it:
                for arena, flag in arenas:
                    arena.remove_reader(flag)


def _whole(reply: _ShareReply, fds: list[int], source: VersionSource) -> WholeVersion:
    """Maps tensors over the received memory; raises if sizes are inconsistent."""
    if len(fds) != len(reply.arenas):
        raise ProtocolError(
            f"{len(fds)} descriptors arrived for {len(reply.arenas)} arenas",
            where="weights of this host",
            fix="report this as a bug",
        )
    shared = [
        MappedArena(fd, size=size, flag=flag)
        for fd, (size, flag) in zip(fds, reply.arenas, strict=True)
    ]
    weights = {}
    try:
        for weight in reply.weights:
            dtype = getattr(torch, weight.dtype)
            num_bytes = math.prod(weight.shape) * dtype.itemsize
            x = shared[weight.arena].tensor(weight.offset, num_bytes)
            weights[weight.name] = x.view(dtype).view(weight.shape)
    finally:
        for arena in shared:
            arena.release()
    return WholeVersion(source=source, weights=weights, scale=reply.scale)


def _connect(name: bytes) -> unix.socket | None:
    connection = unix.socket(unix.AF_UNIX, unix.SOCK_STREAM)
    try:
        connection.connect(name)
    except OSError:
        connection.close()
        return None
    return connection


def _peer(connection: unix.socket) -> tuple[int, int, int]:
    """PID, user and group of the other end, as reported by the kernel."""
    size = struct.calcsize("3i")
    pid, uid, gid = struct.unpack(
        "3i", connection.getsockopt(unix.SOL_SOCKET, unix.SO_PEERCRED, size)
    )
    return pid, uid, gid


def _is_mine(connection: unix.socket) -> bool:
    return _peer(connection)[1] == os.geteuid()


def _send(connection: unix.socket, data: bytes, fds: list[int] | None = None) -> None:
    head = struct.pack(">I", len(data))
    try:
        if fds:
            unix.send_fds(connection, [head], fds)
        else:
            connection.sendall(head)
        connection.sendall(data)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise _Ended from error


def _receive(connection: unix.socket, kind: type[T]) -> tuple[T, list[int]]:
    """Receives the next message and its descriptors, which the caller must close.

    Raises:
        _Ended: the connection ended.
    """
    fds: list[int] = []
    try:
        head, fds, _, _ = unix.recv_fds(connection, 4, _MAX_FDS)
        head += _exactly(connection, 4 - len(head)) if head else b""
        if not head:
            raise _Ended
        (length,) = struct.unpack(">I", head)
        if length > MAX_MESSAGE_BYTES:
            raise _Ended
        found: T = decode(_exactly(connection, length), kind)
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, ConnectionResetError):
            raise _Ended from error
        raise
    return found, list(fds)


def _exactly(connection: unix.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(min(count - len(data), 1 << 20))
        if not more:
            raise _Ended
        data += more
    return data
