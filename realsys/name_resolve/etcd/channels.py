"""Connections to etcd's servers: choice of server, login, retries.

For etcd_client.py. One gRPC channel per server, shared by all threads. A call goes to the server
that answered last and moves to the next if that one does not answer. Each attempt has a deadline of
its own, so a dead server costs only part of the call's time. A channel whose calls time out is
replaced: its connection may lead to a host that disappeared without closing it. This module knows
no keys.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

from realsys.api.errors import StoreDenied, StoreError
from realsys.name_resolve.etcd import protocol
from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.name_resolve.etcd.etcd_failures import (
    FailureVerdict,
    final_error,
    is_hopeless,
    judge,
    unavailable,
)
from realsys.name_resolve.etcd.protocol import Method, grpc
from realsys.name_resolve.store_refusals import closed

logger = logging.getLogger(__name__)

PAUSES_S = (0.02, 0.05, 0.1, 0.2)  # after each round over all servers; then always the last
SHORTEST_TRY_S = 0.5
DENIED_S = 4.0  # minimum time between a refused login and the next, unless the password changed
MAX_LOGINS = 3  # within one call; a token that is refused right after login stays refused
OPTIONS = {
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    "grpc.min_reconnect_backoff_ms": 5000,  # despite its name: the time limit of one connect
    "grpc.keepalive_time_ms": 10_000,  # etcd disconnects clients that ping more often than every 5 s
    "grpc.keepalive_timeout_ms": 4_000,
    "grpc.http2.max_pings_without_data": 0,  # idle watches are checked, too
    "grpc.use_local_subchannel_pool": 1,  # a replaced channel must not reuse the old connection
    "grpc.enable_http_proxy": 0,  # a site's web proxy does not serve the cluster's own network
    "grpc.max_receive_message_length": -1,
    "grpc.max_send_message_length": -1,
}


class Unsure(Exception):
    """Raised if a write was sent but not answered: it may have happened, or may still happen."""

    def __init__(self, details: str) -> None:
        super().__init__(details)
        self.details = details


class Channels:
    """The servers of one EtcdAccess, shared by all threads of the process that created it."""

    def __init__(self, access: EtcdAccess) -> None:
        self.access = access
        self._pid, self._closed = os.getpid(), False
        self._lock, self._login_lock = threading.Lock(), threading.RLock()
        self._channels: list[Channel | None] = [None] * len(access.endpoints)
        self._now = random.randrange(len(access.endpoints))  # spreads a site's clients
        self._token: str | None = None
        self._denied: StoreDenied | None = None  # the last login, if it was refused
        self._denied_until_s = 0.0

    def call(self, method: Method, request: Any, *, deadline_s: float, resend: bool = True) -> Any:
        """Returns the reply of the first server that answers.

        Args:
            deadline_s: on ``time.monotonic()``.
            resend: the request is idempotent and may reach etcd twice.
        Raises:
            Unsure: without ``resend``, if it is unknown whether the write happened.
            StoreUnavailable: no server answered in time. StoreError, LeaseLost: etcd refused.
        """
        began_s, tries, logins, details = time.monotonic(), 0, 0, ""
        while (left_s := deadline_s - time.monotonic()) > 0 or tries == 0:
            channel, token, try_s = self._channel(), self._token, time.monotonic()
            try:
                if token is None and self.access.user is not None and method is not _LOGIN:
                    token = self._log_in(deadline_s)
                timeout_s = self._try_s(left_s, deadline_s - began_s)
                reply = channel.stub(method)(request, timeout=timeout_s, metadata=_metadata(token))
                channel.heard_s = time.monotonic()
                return reply
            except _FAILURES as error:
                code, details = _read(error)
                verdict = judge(code, details)
                tries += 1
                is_silent = code == "DEADLINE_EXCEEDED" and channel.was_silent_since(try_s)
                if verdict is FailureVerdict.LOG_IN and self.access.user and logins < MAX_LOGINS:
                    logins += 1
                    self._forget_token(token)
                    continue
                if verdict in (FailureVerdict.FINAL, FailureVerdict.LOG_IN):
                    raise self._refusal(code, details) from error
                self.move_on(channel, is_silent=is_silent)
                if verdict is FailureVerdict.UNSURE and not resend:
                    raise Unsure(details) from error
                if is_hopeless(details) and tries >= 2 * len(self._channels):
                    if self._read_files_again():
                        continue
                    break
                self._pause(tries, deadline_s)
        raise unavailable(
            details,
            waited_s=time.monotonic() - began_s,
            where=self.access.where,
            is_encrypted=self.access.is_encrypted,
        )

    def stream(self, method: Method, request: Any, *, deadline_s: float) -> Stream:
        """Starts a streaming call on the current server, without retries."""
        channel, token = self._channel(), self._token
        if token is None and self.access.user is not None:
            token = self._log_in(deadline_s)
        return Stream(self, channel, method, request, token)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channels, self._channels = self._channels, [None] * len(self._channels)
        if os.getpid() == self._pid:  # in a forked child the channels belong to the parent
            _close(channels)

    def move_on(self, channel: Channel, *, is_silent: bool) -> None:
        """Switches to the next server, unless another thread has already done so."""
        with self._lock:
            index = channel.index
            if self._channels[index] is not channel:
                return
            if index == self._now:
                self._now = (index + 1) % len(self._channels)
            if not is_silent:
                return
            self._channels[index] = None
        logger.warning(
            "etcd connection replaced endpoint=%s reason=no answer", self.access.endpoints[index]
        )
        channel.grpc_channel.close()

    def _channel(self) -> Channel:
        if os.getpid() != self._pid:
            raise StoreError(
                "an etcd client of a parent process can't be used in its forked child",
                where=self.access.where,
                fix="open the store after the fork: gRPC's threads do not live on in a child",
            )
        with self._lock:
            if self._closed:
                raise closed(where=self.access.where)
            if (channel := self._channels[self._now]) is None:
                channel = self._channels[self._now] = Channel(self.access, self._now)
            return channel

    def _try_s(self, left_s: float, whole_s: float) -> float:
        """Returns the time limit of one attempt: a share of the call's time that leaves a second
        attempt, or one for each other server."""
        part_s = whole_s / (len(self._channels) + 1)
        return max(0.001, min(left_s, max(part_s, SHORTEST_TRY_S)))

    def _pause(self, tries: int, deadline_s: float) -> None:
        rounds, place = divmod(tries, len(self._channels))
        if place == 0:
            pause_s = PAUSES_S[min(rounds, len(PAUSES_S)) - 1]
            time.sleep(max(0.0, min(pause_s, deadline_s - time.monotonic())))

    def _log_in(self, deadline_s: float) -> str:
        with self._login_lock:
            if self._token is None:
                if self._read_files_again():
                    self._denied = None
                elif self._denied is not None and time.monotonic() < self._denied_until_s:
                    # Each attempt costs etcd a tenth of a second.
                    raise self._denied.with_traceback(None)
                request = protocol.AuthenticateRequest(
                    name=self.access.user, password=self.access.password
                )
                try:
                    self._token = self.call(_LOGIN, request, deadline_s=deadline_s).token
                except StoreDenied as error:
                    self._denied, self._denied_until_s = error, time.monotonic() + DENIED_S
                    raise
                self._denied = None
            return str(self._token)

    def _read_files_again(self) -> bool:
        """Rereads password and certificates, which are renewed under the same names during a run,
        and drops the connections if they changed. Returns whether they did."""
        access = self.access.reread()
        with self._lock:
            if access == self.access or self._closed:
                return False
            self.access = access
            old, self._channels = self._channels, [None] * len(self._channels)
        logger.warning("etcd credentials reloaded where=%s", access.where)
        _close(old)
        return True

    def _forget_token(self, refused: str | None) -> None:
        with self._login_lock:
            if self._token == refused:
                self._token = None

    def _refusal(self, code: str, details: str) -> Exception:
        return final_error(code, details, where=self.access.where, user=self.access.user)


class Channel:
    """The connection to one server."""

    def __init__(self, access: EtcdAccess, index: int) -> None:
        self.index, self.heard_s = index, 0.0
        options: dict[str, object] = {**OPTIONS}
        target = access.endpoints[index]
        if not access.is_encrypted:
            self.grpc_channel = grpc.insecure_channel(target, list(options.items()))
        else:
            if access.server_name is not None:
                options["grpc.ssl_target_name_override"] = access.server_name
            self.grpc_channel = grpc.secure_channel(
                target, credentials_of(access), list(options.items())
            )
        self._stubs: dict[str, Any] = {}

    def was_silent_since(self, try_s: float) -> bool:
        """Returns whether a connection that has worked before received nothing since ``try_s``, for
        long enough to count.

        A connection that never worked is still being established, which takes a while on a busy
        machine.

        One that never worked is still being connected; on a busy machine that takes its time.
        """
        is_long = time.monotonic() - try_s >= SHORTEST_TRY_S * 0.9
        return is_long and 0 < self.heard_s < try_s

    def stub(self, method: Method) -> Any:
        """Returns the call as one request and one reply.

        This also serves calls that etcd defines as bidirectional streams, such as keep-alives: on the
        wire they differ only in which side ends the stream, and no feeding thread is needed.
        """
        if (stub := self._stubs.get(method.path)) is None:
            stub = self.grpc_channel.unary_unary(method.path, method.to_bytes, method.from_bytes)
            self._stubs[method.path] = stub
        return stub


class Stream:
    """Replies of one streaming call, until the connection breaks or ``cancel`` is called."""

    def __init__(
        self, channels: Channels, channel: Channel, method: Method, request: Any, token: str | None
    ) -> None:
        self._channels, self._channel, self._token = channels, channel, token
        start = channel.grpc_channel.unary_stream(method.path, method.to_bytes, method.from_bytes)
        self._call = start(request, metadata=_metadata(token))

    def __iter__(self) -> Iterator[Any]:
        """Yields replies. Raises Unsure if the connection breaks, StoreError if etcd refuses."""
        try:
            yield from self._call
        except _FAILURES as error:
            code, details = _read(error)
            verdict = judge(code, details)
            if verdict is FailureVerdict.LOG_IN and self._channels.access.user:
                self.log_in_again()
            elif verdict in (FailureVerdict.FINAL, FailureVerdict.LOG_IN):
                raise self._channels._refusal(code, details) from error
            else:
                self._channels.move_on(self._channel, is_silent=False)
            raise Unsure(details) from error

    def log_in_again(self) -> None:
        """Makes the next stream log in first."""
        self._channels._forget_token(self._token)

    def cancel(self) -> None:
        self._call.cancel()


_LOGIN = protocol.AUTHENTICATE
# A channel that another thread closed raises ValueError.
_FAILURES = (grpc.RpcError, ValueError)


def _read(error: Any) -> tuple[str, str]:
    if isinstance(error, grpc.RpcError):
        return error.code().name, error.details() or ""
    if "closed channel" in str(error).lower():
        return "CANCELLED", str(error)
    raise error


def _close(channels: list[Channel | None]) -> None:
    for channel in filter(None, channels):
        channel.grpc_channel.close()


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    # A member that has lost its quorum must refuse at once and end its watches.
    needed = (("hasleader", "true"),)
    return needed if token is None else (*needed, ("token", token))


def credentials_of(access: EtcdAccess) -> Any:
    """Returns gRPC's credentials for an encrypted connection."""
    pems = (access.ca_pem, access.key_pem, access.cert_pem)
    return grpc.ssl_channel_credentials(*(None if pem is None else pem.encode() for pem in pems))
