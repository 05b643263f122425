"""Creates the first user of a new etcd and turns on authentication.

For job_etcd/private_etcd.py, which has just started an etcd that no other process can reach yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from realsys.api.errors import StoreError, StoreUnavailable
from realsys.name_resolve.etcd import protocol
from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.name_resolve.etcd.channels import credentials_of

ADMINISTRATOR = "root"  # etcd's name for the user and the role that may do everything
OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # the server is on this node
    ("grpc.initial_reconnect_backoff_ms", 50),  # it has just been started
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)
LOOK_EVERY_S = 0.2
CALL_TIMEOUT_S = 20.0  # each is a write: a busy disk may take its time


def make_administrator(
    access: EtcdAccess, *, timeout_s: float, still_there: Callable[[], None]
) -> None:
    """Creates the user ``root`` with the password of ``access`` and turns on authentication.

    Args:
        timeout_s: for connecting.
        still_there: called while connecting; raises to give up.
    Raises:
        StoreUnavailable: no answer in time, or from a server with another authority's certificate.
        StoreError: etcd refused, because it is not new.
    """
    assert access.user == ADMINISTRATOR, access.user
    grpc = protocol.grpc
    with grpc.secure_channel(access.endpoints[0], credentials_of(access), OPTIONS) as channel:
        if not _connects(channel, time.monotonic() + timeout_s, still_there):
            raise StoreUnavailable(
                f"etcd did not answer in {timeout_s:g} s",
                where=access.where,
                fix="check its log, and whether another program listens there",
            )
        try:
            for method, request in _calls(access):
                call = channel.unary_unary(method.path, method.to_bytes, method.from_bytes)
                call(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise StoreError(
                f"etcd refused its first user: {error.details()}",  # names no password
                where=access.where,
                fix="check its log",
            ) from error


def _connects(channel: Any, deadline: float, still_there: Callable[[], None]) -> bool:
    ready = protocol.grpc.channel_ready_future(channel)
    try:
        while True:
            try:
                ready.result(timeout=LOOK_EVERY_S)
                return True
            except protocol.grpc.FutureTimeoutError:
                still_there()
                if time.monotonic() > deadline:
                    return False
    finally:
        ready.cancel()


def _calls(access: EtcdAccess) -> Iterator[tuple[protocol.Method, Any]]:
    user = protocol.AuthUserAddRequest(name=ADMINISTRATOR, password=access.password)
    role = protocol.AuthUserGrantRoleRequest(user=ADMINISTRATOR, role=ADMINISTRATOR)
    yield protocol.USER_ADD, user
    yield protocol.USER_GRANT_ROLE, role
    yield protocol.AUTH_ENABLE, protocol.AuthEnableRequest()
