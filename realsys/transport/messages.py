"""Frames around requests and replies, and errors in them.

For server.py and client.py, which fill the frames, and for authors of new requests. Every version
must be able to parse a frame far enough to refuse it with a reason; ``body`` is a separately
encoded, tagged Struct, so that a frame can be checked (trial, attempt, version) before its body is
read. Pure.
"""

from __future__ import annotations

import traceback
from typing import Annotated

import msgspec

from realsys.api.errors import RealsysError, RemoteError
from realsys.api.users_code.users_frames import users_place
from realsys.runtime.failures import what_of

PROTOCOL_VERSION = 3  # incremented whenever a frame or a body changes its meaning

MAX_TRACEBACK_CHARS = 20_000

# Names are quoted in refusals and logs, so their length is bounded.
Name = Annotated[str, msgspec.Meta(max_length=1000)]


class RequestFrame(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request on the wire."""

    version: int
    trial: Name  # "<experiment>/<trial>"; a server drops other trials' frames
    attempt: int  # of the sender; older ones are refused (fencing)
    token: Name  # the attempt's: distinguishes two incarnations that both count as attempt 2
    request_id: Name  # the same in each resend: the server runs it once
    sender: Name  # worker name, e.g. "master_worker/0"
    deadline_s: float  # remaining seconds; relative, since hosts' clocks are never compared
    body: bytes


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An exception on the wire."""

    kind: str  # name of its class
    what: str
    where: str
    fix: str
    traceback: str


class ReplyFrame(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to one request: a body if ``ok``, otherwise an error."""

    version: int
    request_id: str
    attempt: int  # of the answering worker
    ok: bool
    body: bytes = b""
    error: ErrorInfo | None = None


class FrameHead(msgspec.Struct, frozen=True, kw_only=True, tag="RequestFrame"):
    """The fields of a request that no version may change: enough to refuse it with a reason."""

    version: int
    trial: Name
    request_id: Name


def error_to_info(error: BaseException) -> ErrorInfo:
    """Converts ``error``, with its traceback, for sending."""
    text = "".join(traceback.format_exception(error))
    what, where, fix = str(error), users_place(error), ""
    if isinstance(error, RealsysError):
        what, where, fix = what_of(error), error.where, error.fix
    return ErrorInfo(
        kind=type(error).__name__,
        what=_sendable(what[:MAX_TRACEBACK_CHARS]),
        where=_sendable(where[:MAX_TRACEBACK_CHARS]),
        fix=_sendable(fix[:MAX_TRACEBACK_CHARS]),
        traceback=_sendable(text[-MAX_TRACEBACK_CHARS:]),
    )


def info_to_error(info: ErrorInfo, worker: str) -> RealsysError:
    """Returns the error to raise here for one that was raised on ``worker``.

    A RealsysError keeps its class, with the worker in ``where`` and the remote traceback as a note;
    anything else becomes a RemoteError with the traceback in ``what``.
    """
    kind = _error_classes().get(info.kind)
    if kind is not None:
        try:
            error = kind(info.what, where=f"{info.where} (on {worker})", fix=info.fix)
        except TypeError:  # a class with a constructor of its own
            pass
        else:
            error.from_worker = worker
            error.add_note(f"traceback on {worker}:\n{info.traceback}")
            return error
    place = f"{info.where}: " if info.where else ""  # in a user's file
    return RemoteError(
        f"{place}{worker} failed: {info.kind}: {info.what}\n{info.traceback}".rstrip(),
        where=worker,
        fix=info.fix or f"the traceback above is {worker}'s; its log shows what led to it",
    )


def _error_classes() -> dict[str, type[RealsysError]]:
    found: dict[str, type[RealsysError]] = {}
    left = [RealsysError]
    while left:
        kind = left.pop()
        found[kind.__name__] = kind
        left.extend(kind.__subclasses__())
    return found


def _sendable(text: str) -> str:
    """Returns ``text`` without lone surrogates, which UTF-8 (and so msgpack) can't encode."""
    return text.encode("utf-8", "backslashreplace").decode()
