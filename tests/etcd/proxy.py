"""A bad network between a client and one server: a TCP proxy whose faults a test switches on and off.

What is held back arrives after ``heal``, as TCP would send it again; nothing is lost from the middle of a
stream. Each connection has two threads; all end with the ``with`` block.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress
from enum import StrEnum
from types import TracebackType
from typing import Self

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST
_PIECE = 65536


class Way(StrEnum):
    """Which direction a black hole swallows."""

    TO_SERVER = "to server"
    TO_CLIENT = "to client"


class Proxy:
    """A context manager; passes everything on at first.

    Args:
        target: ``host:port`` of the server.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._changed = threading.Condition()
        self._held: frozenset[Way] = frozenset()
        self._delay_s = 0.0
        self._half_open = self._dropping = self._closed = False
        self._sockets: set[socket.socket] = set()
        self._waiting: list[socket.socket] = []  # accepted while half open: led nowhere
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.num_accepted = 0

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def delay(self, seconds: float) -> None:
        """Every piece, both ways, comes later by this."""
        self._set(delay_s=seconds)

    def drop(self) -> None:
        """Resets all connections, and every new one."""
        self._set(dropping=True)
        self._reset_all()

    def reset_once(self) -> None:
        """Resets all connections; new ones work."""
        self._reset_all()

    def half_open(self) -> None:
        """New connections are accepted and lead nowhere; on those that are open nothing moves."""
        self._set(half_open=True, held=frozenset(Way))

    def black_hole(self, way: Way) -> None:
        """Nothing arrives that way; the other one works."""
        self._set(held=frozenset({way}))

    def heal(self) -> None:
        """Everything passes again; connections that led nowhere are reset."""
        self._set()
        with self._changed:
            waiting, self._waiting = self._waiting, []
        for one in waiting:
            _reset(one)

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        self._reset_all()
        for one in self._waiting:
            _reset(one)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), f"{thread.name} of the proxy does not end"

    def _set(
        self,
        *,
        delay_s: float = 0.0,
        dropping: bool = False,
        half_open: bool = False,
        held: frozenset[Way] = frozenset(),
    ) -> None:
        """One fault at a time: what is not named is off."""
        with self._changed:
            self._delay_s, self._dropping = delay_s, dropping
            self._half_open, self._held = half_open, held
            self._changed.notify_all()

    def _spawn(self, target: object, *args: object) -> None:
        assert callable(target)
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.num_accepted += 1
            with self._changed:
                dropping, half_open = self._dropping or self._closed, self._half_open
                if half_open and not dropping:
                    self._waiting.append(client)
            if dropping:
                _reset(client)
            elif not half_open:
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target, timeout=60)
        except OSError:
            _reset(client)
            return
        for one in (client, server):
            one.settimeout(None)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            self._sockets |= {client, server}
        self._spawn(self._pump, client, server, Way.TO_SERVER)
        self._spawn(self._pump, server, client, Way.TO_CLIENT)

    def _pump(self, source: socket.socket, sink: socket.socket, way: Way) -> None:
        with suppress(OSError):
            while piece := source.recv(_PIECE):
                if self._delay_s:
                    time.sleep(self._delay_s)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or way not in self._held)
                sink.sendall(piece)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        with self._changed:
            ours = self._sockets & {source, sink}
            self._sockets -= ours
        for one in ours:
            one.close()

    def _reset_all(self) -> None:
        """The pumps see it and close what they hold."""
        with self._changed:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            _reset(one)


def _reset(one: socket.socket) -> None:
    with suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    with suppress(OSError):
        one.shutdown(socket.SHUT_RD)  # wakes a recv() that close() alone would leave waiting
    one.close()
