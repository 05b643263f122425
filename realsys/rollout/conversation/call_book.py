"""Requests of one episode, each answered once although clients may send it several times (pure).

Clients retry: after a time-out, a broken connection, half of a stream. Sampling again would train on an
answer that the agent never saw, so a request that was sent before gets the answer of before::

    claim ──▶ RUNNING ──ended──▶ ANSWERED ──delivered──▶ READ
                 │ nobody listens any more     │ nobody has read it
                 └────────── claimed by the next equal request ──────┘

Who leaves a stream before its end has got a part (LEFT): the next equal request gets the rest, too.

An equal request whose former answer *was* read is a new one (an agent that samples again), unless the
client says that it is a retry: by an idempotency key, or by the count that the official clients send.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from realsys.api.errors import DataError
from realsys.rollout.conversation.chat_messages import CHAT_PREFIX, ChatRequest

T = TypeVar("T")


class CallState(StrEnum):
    """What became of a request."""

    RUNNING = "running"
    ANSWERED = "answered"
    READ = "read"
    LEFT = "left"
    FAILED = "failed"


_ABANDONED = (CallState.RUNNING, CallState.ANSWERED, CallState.LEFT)  # with nobody there


@dataclass(eq=False, kw_only=True)
class ChatCall(Generic[T]):
    """A request of an episode.

    Attributes:
        number: place among the episode's requests, from 0.
        prefix: of its id, as the API has it.
        listeners: connections that wait for the answer.
        work: of whoever answers it.
        was_left: nobody waits for it any more, since before it was answered.
    """

    number: int
    key: str
    digest: bytes
    prefix: str = CHAT_PREFIX
    listeners: int = 0
    state: CallState = CallState.RUNNING
    work: T | None = None
    was_left: bool = False


@dataclass
class CallBook(Generic[T]):
    """All requests of an episode, in order."""

    calls: list[ChatCall[T]] = field(default_factory=list)

    def claim(self, request: ChatRequest) -> tuple[ChatCall[T], bool]:
        """Returns the call that answers ``request``, and whether it is new.

        Raises:
            DataError: the idempotency key belongs to another request.
        """
        digest = request_digest(request)
        call = self._former(request, digest)
        is_new = call is None
        if call is None:
            call = ChatCall(
                number=len(self.calls),
                key=request.idempotency_key,
                digest=digest,
                prefix=request.id_prefix,
            )
            self.calls.append(call)
        call.listeners += 1
        call.was_left = False
        return call, is_new

    def left(self, call: ChatCall[T], *, read: bool) -> None:
        """Notes that a connection has ended. ``read``: the whole answer was written to it."""
        call.listeners -= 1
        call.was_left = call.state is CallState.RUNNING and not call.listeners
        if read and call.state is CallState.ANSWERED:
            call.state = CallState.READ

    def _former(self, request: ChatRequest, digest: bytes) -> ChatCall[T] | None:
        if request.idempotency_key:
            found = [
                c
                for c in self.calls
                if c.key == request.idempotency_key and c.state is not CallState.FAILED
            ]
            if found and found[-1].digest != digest:
                raise DataError(
                    "the idempotency key was sent with another request before",
                    where="header Idempotency-Key",
                    fix="use a new key for each request, and the same one for its retries",
                )
            return found[-1] if found else None
        equal = [c for c in self.calls if c.digest == digest and not c.key]
        for call in equal:
            if not call.listeners and call.state in _ABANDONED:
                return call
        # What is retried is the newest. If that has failed, an older answer is not its answer.
        retried = equal[-1] if request.retries and equal else None
        return retried if retried and retried.state is not CallState.FAILED else None


def request_digest(request: ChatRequest) -> bytes:
    """Returns what is equal for a request and its retries, and for no others."""
    asked = _plain(request)
    for name in ("retries", "idempotency_key"):
        del asked[name]
    text = json.dumps(asked, sort_keys=True, default=_plain)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _plain(value: Any) -> Any:
    if not is_dataclass(value):
        return str(value)
    return {f.name: getattr(value, f.name) for f in fields(value)}
