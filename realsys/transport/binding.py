"""Binds a ZMQ socket to a free port: any, or one of the site's range.

The port is reserved by binding, never looked up before: another process could take it in between.
"""

from __future__ import annotations

import socket as tcp
from collections.abc import Iterable
from typing import Any

import zmq

from realsys.api.errors import ClusterError


def bind(socket: Any, host: str, ports: Iterable[int] | None = None) -> str:
    """Binds to the first free port; returns ``tcp://<host>:<port>``.

    Args:
        host: name or address of an interface of this host.
        ports: to try in this order; None for any free one.
    Raises:
        ClusterError: all of them are taken.
        OSError: no such interface (zmq.ZMQError is one).
    """
    # libzmq takes addresses only.
    family, address = address_of(host)
    if family == tcp.AF_INET6:
        socket.setsockopt(zmq.IPV6, 1)
    tried = 0
    for port in (0,) if ports is None else ports:
        tried += 1
        try:
            socket.bind(f"tcp://{in_url(address)}:{port}")
        except zmq.ZMQError as error:
            if ports is not None and error.errno == zmq.EADDRINUSE:
                continue
            raise
        bound = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0").rsplit(":", 1)[1]
        return f"tcp://{in_url(host)}:{bound}"
    raise ClusterError(
        f"none of {tried} ports is free",
        where=f"{address}, port_range of the cluster spec",
        fix="widen port_range: every model worker needs three ports of its node",
    )


def connect(socket: Any, endpoint: str) -> None:
    """Connects, in the background, to an endpoint returned by ``bind``."""
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(endpoint)


def address_of(host: str) -> tuple[tcp.AddressFamily, str]:
    """Resolves a name or address to (family, address), preferring IPv4."""
    found = tcp.getaddrinfo(host, None, type=tcp.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda info: info[0] != tcp.AF_INET)
    return family, str(address[0])


def in_url(host: str) -> str:
    """Returns the host as written in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
