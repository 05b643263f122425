"""JSON over HTTP to one server, with pinned certificate, bearer key and named errors.

For http_client.py and for the children of sglang.py and vllm.py. Plain HTTP only on loopback: the key would
travel in the clear.
"""

from __future__ import annotations

import asyncio
import io
import ipaddress
import weakref
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urldefrag, urlsplit

import aiohttp
import msgspec

from realsys.api.errors import ConfigError, RealsysError, WaitTimeout, WorkerLost
from realsys.generation.http.http_answers import read_error

MAX_CONNECTIONS = 512
MAX_EVENT_BYTES = 32 << 20
_CONNECT_S = 10.0
_LARGE_BYTES = 1 << 20


class HttpSession:
    """Connection pool to one server, opened at first use, within one event loop.

    Args:
        url: ``https://host:port#sha256=<hex>``, or ``http://127.0.0.1:port``.
        key: bearer key; "" sends none.
        name: of the server, for errors.
        unix_socket: path to connect to in place of the URL's host.
        limit: connections at a time, more calls wait for one; 0: any number. Calls that must get through
            need a separate session from long calls.
        idle_s: a connection that was idle for longer is not used again; must be less than the server's own.
    Raises:
        ConfigError: the URL does not identify the server.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        name: str,
        unix_socket: str = "",
        limit: int | None = None,
        idle_s: float = 15.0,
    ) -> None:
        self.url, fragment = urldefrag(url)
        self.name = name
        self._key, self._unix_socket = key, unix_socket
        self._idle_s = idle_s
        self._limit = MAX_CONNECTIONS if limit is None else limit
        self._pin = _pin(self.url, fragment)
        self._session: aiohttp.ClientSession | None = None

    async def call(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> bytes:
        """Sends a request; returns the body of a response with status 200.

        Raises:
            WaitTimeout: no complete response in ``timeout_s``.
            WorkerLost: no connection, or it broke.
            RemoteError, DataError: the server refused, with its reason.
        """
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._open().request(method, self.url + path, data=_encoded(body)) as response,
            ):
                data = await response.read()
                if response.status != 200:
                    raise self.refusal(data, response.status, path)
                return data
        except aiohttp.ServerTimeoutError as error:  # of connecting
            raise self._lost(path, error) from None
        except TimeoutError:
            raise self._late(path, timeout_s) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, error) from None

    async def events(self, path: str, body: Any, *, timeout_s: float) -> AsyncIterator[bytes]:
        """Yields the data of each server-sent event, until ``[DONE]``. Raises as ``call``."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline_s):
                response = await self._open().post(self.url + path, data=_encoded(body))
            async with response:
                while True:
                    # Not while the caller processes an event
                    async with asyncio.timeout_at(deadline_s):
                        if response.status != 200:
                            raise self.refusal(await response.read(), response.status, path)
                        line = await response.content.readline()
                    if not line:
                        raise self._lost(path, "the stream ended early")
                    data = line.removeprefix(b"data: ").strip()
                    if data == b"[DONE]":
                        return
                    if data and line.startswith(b"data: "):
                        yield data
        except aiohttp.ServerTimeoutError as error:
            raise self._lost(path, error) from None
        except TimeoutError:
            raise self._late(path, timeout_s) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._lost(path, error) from None

    def refusal(self, data: bytes, status: int, path: str) -> RealsysError:
        """Returns the error in a response."""
        return read_error(data, status=status, server=self.name, where=self.url + path)

    async def close(self) -> None:
        """Closes the connections, also if the server is silent; calls in progress raise WorkerLost."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=self._connector(),
                headers={
                    "Content-Type": "application/json",
                    **({"Authorization": f"Bearer {self._key}"} if self._key else {}),
                },
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                read_bufsize=MAX_EVENT_BYTES,
            )
        return self._session

    def _connector(self) -> aiohttp.BaseConnector:
        if self._unix_socket:
            return aiohttp.UnixConnector(
                self._unix_socket, limit=self._limit, keepalive_timeout=self._idle_s
            )
        return _ClosingConnector(
            ssl=self._pin or True, limit=self._limit, keepalive_timeout=self._idle_s
        )

    def _late(self, path: str, timeout_s: float) -> WaitTimeout:
        return WaitTimeout(
            f"no answer from {self.name} to {path} in {timeout_s:g} s",
            where=self.url,
            fix=f"see the log of {self.name}; raise the timeout if it is only slow",
        )

    def _lost(self, path: str, why: object) -> WorkerLost:
        text = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
        if isinstance(why, aiohttp.ServerFingerprintMismatch):
            text = "it has not the certificate that it registered: something else listens there"
        return WorkerLost(
            f"{self.name} was lost, no answer to {path}: {text}",
            where=self.url,
            fix=f"see the end of the log of {self.name}; the supervisor restarts it",
        )


class _ClosingConnector(aiohttp.TCPConnector):
    """A connector whose close leaves no socket open.

    aiohttp's own forgets the connection of a cancelled call at once, while TLS still waits for the
    server's part of the goodbye: its socket would outlive the event loop.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._opened: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()

    async def connect(self, *args: Any, **options: Any) -> Any:
        connection = await super().connect(*args, **options)
        if connection.transport is not None:
            self._opened.add(connection.transport)
        return connection

    def close(self, **options: Any) -> Any:
        closing = super().close(**options)
        for transport in list(self._opened):
            transport.abort()
        return closing


def _encoded(body: Any) -> bytes | io.BytesIO | None:
    if body is None:
        return None
    data = msgspec.json.encode(body)
    # A large one as a file: aiohttp would hold up the loop with bytes, and warns of it.
    return io.BytesIO(data) if len(data) > _LARGE_BYTES else data


def _pin(url: str, fragment: str) -> aiohttp.Fingerprint | None:
    parts = urlsplit(url)
    if parts.scheme == "https":
        digest = fragment.removeprefix("sha256=")
        try:
            return aiohttp.Fingerprint(bytes.fromhex(digest if digest != fragment else "?"))
        except ValueError:
            raise ConfigError(
                "the URL does not name the server's certificate",
                where=f"{url}#{fragment}",
                fix="use the URL that the server registered: https://host:port#sha256=…",
            ) from None
    if parts.scheme != "http" or not _is_loopback(parts.hostname or ""):
        raise ConfigError(
            "without https the key could be intercepted",
            where=url,
            fix="use https://host:port#sha256=…; http:// only to 127.0.0.1",
        )
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
