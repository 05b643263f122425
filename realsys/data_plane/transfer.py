"""Tensors from worker to worker: raw buffers with a small header, authenticated, no pickle.

``TensorServer`` answers from a thread of its own, so that peers can fetch while this worker computes.
``TensorClient`` is used by the compute thread only, and blocks with a deadline. Buffers travel in
frames of about 1 MiB, which a loopback measurement found fastest; dtypes arrive exact.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import torch
import zmq
import zmq.asyncio

from realsys.api.errors import ClusterError, InternalError, RealsysError, RemoteError, WaitTimeout
from realsys.data_plane.tensor_store import TensorStore
from realsys.transport.authentication import (
    DOMAIN,
    HANDSHAKE_MS,
    Authenticator,
    Refusals,
    count_failed_handshakes,
    open_monitor,
)
from realsys.transport.binding import bind
from realsys.transport.codec import MAX_MESSAGE_BYTES, ProtocolError, decode, encode
from realsys.transport.keys import TrialKeypairs

logger = logging.getLogger(__name__)

FRAME_BYTES = 1 << 20
MAX_ERROR_CHARS = 20_000  # an error that quotes a request must not outgrow a message


class TensorRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Give me ``key`` of these datapoints."""

    trial: str
    attempt: int
    token: str
    key: str
    ids: tuple[str, ...]


class TensorReply(msgspec.Struct, frozen=True, kw_only=True):
    """Header of the buffers that follow; ``error`` instead of them."""

    dtype: str = ""
    trailing_shape: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    error: str = ""


class TensorServer:
    """Serves a worker's store to its peers. ``start`` returns when ``endpoint`` is known.

    Args:
        on_failure: called, from the server's thread, when it ends without having been asked to: peers
            would wait for its tensors. ``raise_failure`` then says why.
    """

    def __init__(
        self,
        store: TensorStore,
        *,
        name: str,
        trial: str,
        attempt: int,
        token: str = "",
        keypairs: TrialKeypairs,
        host: str = "127.0.0.1",
        ports: range | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.trial, self.attempt, self._token = name, trial, attempt, token
        self._on_failure = on_failure
        self._store, self._keypairs = store, keypairs
        self._host, self._ports = host, ports
        self._refusals = Refusals(f"{name} tensors")
        self._thread = threading.Thread(target=self._main, name=f"tensors {name}", daemon=True)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self.endpoint = ""

    def start(self) -> TensorServer:
        """Binds a free port and serves from now on."""
        self._thread.start()
        if not self._ready.wait(10.0):
            raise InternalError("the tensor server did not start in 10 s", where=self.name)
        self.raise_failure()
        return self

    def raise_failure(self) -> None:
        """Raises what ended the thread, if it did not end because it was asked to."""
        if self._failure is not None:
            raise ClusterError(
                f"{self.name} can't serve tensors: {self._failure}",
                where=f"tcp://{self._host}",
                fix="name an interface of this host",
            ) from self._failure

    def stop(self) -> None:
        """Ends the thread."""
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(5.0)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # told to whoever called start, and in the log
            while isinstance(error, BaseExceptionGroup):  # of the task group
                error = error.exceptions[0]
            self._failure = error
            logger.exception("tensor server ended name=%s", self.name)
            self._on_failure()
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        context = zmq.asyncio.Context()
        authenticator = Authenticator(
            context, client_public=self._keypairs.client_public, refusals=self._refusals
        )
        socket = context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_secretkey = self._keypairs.server_secret
        socket.zap_domain = DOMAIN
        socket.handshake_ivl = HANDSHAKE_MS
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        monitor = open_monitor(socket)
        socket.sndhwm, socket.linger = 0, 0
        socket.maxmsgsize = MAX_MESSAGE_BYTES  # holds for strangers too, before any handshake
        try:
            self.endpoint = bind(socket, self._host, self._ports)
            self._ready.set()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(authenticator.run(), name=f"tensor authenticator {self.name}")
                tasks.create_task(
                    count_failed_handshakes(monitor, self._refusals),
                    name=f"tensor handshakes {self.name}",
                )
                while True:
                    peer, request_id, *body = await socket.recv_multipart()
                    header, buffers = self._answer(body)
                    parts = [peer, request_id, encode(header), *buffers]
                    await socket.send_multipart(parts, copy=False)
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close()
            authenticator.close()
            context.term()

    def _answer(self, body: list[bytes]) -> tuple[TensorReply, list[memoryview]]:
        try:
            request: TensorRequest = decode(b"".join(body), TensorRequest)
            asked_by = (request.trial, request.attempt, request.token)
            if asked_by != (self.trial, self.attempt, self._token):
                self._refusals.count("stale", f"{request.trial!r} attempt {request.attempt}")
                raise ProtocolError(
                    f"asked by attempt {request.attempt} of {request.trial}",
                    where=f"{self.name}, attempt {self.attempt} of {self.trial}",
                    fix="the older attempt must exit",
                )
            if not request.ids:
                raise ProtocolError("asked for nothing", where=self.name, fix="name datapoints")
            rows = self._store.rows(request.key, request.ids)
            whole = torch.cat(rows).cpu()
            header = TensorReply(
                dtype=str(whole.dtype).removeprefix("torch."),
                trailing_shape=tuple(whole.shape[1:]),
                rows=tuple(len(x) for x in rows),
            )
            return header, _frames(whole)
        except RealsysError as error:
            return TensorReply(error=f"{error.what} ({error.where})"[:MAX_ERROR_CHARS]), []
        except Exception as error:  # whatever it is, the peer must hear it and others be served
            logger.exception("tensors not served name=%s", self.name)
            text = f"{type(error).__name__}: {error} ({self.name})"
            return TensorReply(error=text[:MAX_ERROR_CHARS]), []


class TensorClient:
    """Fetches tensors from peers by their index among the model workers."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        trial: str,
        attempt: int,
        token: str = "",
        keypairs: TrialKeypairs,
    ) -> None:
        self._endpoints, self._keypairs = list(endpoints), keypairs
        self.trial, self.attempt, self._token = trial, attempt, token
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}

    def fetch(
        self, worker: int, key: str, ids: Sequence[str], *, timeout_s: float
    ) -> list[torch.Tensor]:
        """The rows of ``ids`` under ``key``, from model worker ``worker``.

        Raises:
            WaitTimeout: names the peer. RemoteError: the peer refused, with its reason.
        """
        socket = self._socket(worker)
        request_id = uuid.uuid4().bytes
        request = TensorRequest(
            trial=self.trial, attempt=self.attempt, token=self._token, key=key, ids=tuple(ids)
        )
        socket.send_multipart([request_id, encode(request)])
        parts = self._receive(socket, request_id, worker, key, timeout_s)
        header: TensorReply = decode(parts[0], TensorReply)
        if header.error:
            raise RemoteError(
                f"model_worker/{worker} did not give {key!r}: {header.error}",
                where=self._endpoints[worker],
                fix="see that worker's log",
            )
        return list(torch.split(_joined(header, parts[1:]), list(header.rows)))

    def close(self) -> None:
        """Closes all connections."""
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._context.term()

    def _receive(
        self, socket: zmq.Socket[bytes], request_id: bytes, worker: int, key: str, timeout_s: float
    ) -> list[bytes]:
        while socket.poll(int(timeout_s * 1000)):
            received, *parts = socket.recv_multipart()
            if received == request_id:  # else: the late answer to a request that timed out
                return parts
        raise WaitTimeout(
            f"model_worker/{worker} did not send {key!r} in {timeout_s:g} s",
            where=self._endpoints[worker],
            fix=f"see the log of model_worker/{worker}",
        )

    def _socket(self, worker: int) -> zmq.Socket[bytes]:
        if worker not in self._sockets:
            socket = self._context.socket(zmq.DEALER)
            socket.curve_serverkey = self._keypairs.server_public
            socket.curve_publickey = self._keypairs.client_public
            socket.curve_secretkey = self._keypairs.client_secret
            socket.maxmsgsize = MAX_MESSAGE_BYTES
            socket.connect(self._endpoints[worker])
            self._sockets[worker] = socket
        return self._sockets[worker]


def _frames(x: torch.Tensor) -> list[memoryview]:
    if x.numel() == 0:
        return []
    buffer = memoryview(x.contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
    return [buffer[i : i + FRAME_BYTES] for i in range(0, len(buffer), FRAME_BYTES)]


def _joined(header: TensorReply, frames: Sequence[bytes]) -> torch.Tensor:
    dtype, num_bytes = getattr(torch, header.dtype, None), sum(map(len, frames))
    shape = (sum(header.rows), *header.trailing_shape)
    if (
        not isinstance(dtype, torch.dtype)
        or min((*header.rows, *header.trailing_shape), default=0) < 0
        or math.prod(shape) * dtype.itemsize != num_bytes
    ):
        raise ProtocolError(
            f"{num_bytes} bytes came for {header.dtype[:40]!r} of shape {shape[:8]}",
            where="receiving tensors",
            fix="both workers must run the same version of realsys; else report this as a bug",
        )
    x = torch.empty(shape, dtype=dtype)
    if x.numel():
        data = bytearray().join(frames)
        x.copy_(torch.frombuffer(data, dtype=dtype).view(x.shape))
    return x
