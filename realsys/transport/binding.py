"""Binds a ZMQ socket to a free port, of all or of the site's range.

The port is taken by binding, never looked up before: between a look and a bind somebody else takes it.
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
        ports: to try in this order; None for any that the kernel gives.
    Raises:
        ClusterError: all of them are taken.
        OSError: no such interface (zmq.ZMQError is one).
    """
    # libzmq takes addresses only.
    address = tcp.getaddrinfo(host, None, tcp.AF_INET, tcp.SOCK_STREAM)[0][4][0]
    tried = 0
    for port in (0,) if ports is None else ports:
        tried += 1
        try:
            socket.bind(f"tcp://{address}:{port}")
        except zmq.ZMQError as error:
            if ports is not None and error.errno == zmq.EADDRINUSE:
                continue
            raise
        bound = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0").rsplit(":", 1)[1]
        return f"tcp://{host}:{bound}"
    raise ClusterError(
        f"none of {tried} ports is free",
        where=f"{address}, port_range of the cluster spec",
        fix="widen port_range: every model worker needs three ports of its node",
    )
