"""What control messages are made of: the frames around requests and replies, and errors in them.

For server.py and client.py, which fill the frames, and for whoever adds a request. A frame is what every
version must be able to refuse politely; ``body`` is a tagged Struct of its own, encoded apart, so that
a frame can be judged (trial, attempt, version) before anything else of it is read. Pure.
"""

from __future__ import annotations

import traceback
from typing import Annotated

import msgspec

from realsys.api.errors import RealsysError, RemoteError

PROTOCOL_VERSION = 2  # taken up by one whenever a frame or a body changes its meaning

MAX_TRACEBACK_CHARS = 20_000

# Names are quoted in refusals and logs: a frame may not make those as large as itself.
Name = Annotated[str, msgspec.Meta(max_length=1000)]


class RequestFrame(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request as it travels."""

    version: int
    trial: Name  # "<experiment>/<trial>"; a server drops other trials' frames
    attempt: int  # of the sender; older ones are refused (fencing)
    token: (
        Name  # the attempt's: two incarnations that both call themselves attempt 2 are told apart
    )
    request_id: Name  # the same in each re-sending: the server runs it once
    sender: Name  # worker name, e.g. "master_worker/0"
    deadline_s: float  # remaining seconds; relative, since hosts' clocks are never compared
    body: bytes


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An exception as it travels."""

    kind: str  # name of its class
    what: str
    where: str
    fix: str
    traceback: str


class ReplyFrame(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to one request: a body if ``ok``, else an error."""

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
    """Describes ``error`` with its traceback."""
    text = "".join(traceback.format_exception(error))
    what, where, fix = str(error), "", ""
    if isinstance(error, RealsysError):
        what, where, fix = error.what, error.where, error.fix
    return ErrorInfo(
        kind=type(error).__name__,
        what=_sendable(what[:MAX_TRACEBACK_CHARS]),
        where=_sendable(where[:MAX_TRACEBACK_CHARS]),
        fix=_sendable(fix[:MAX_TRACEBACK_CHARS]),
        traceback=_sendable(text[-MAX_TRACEBACK_CHARS:]),
    )


def info_to_error(info: ErrorInfo, worker: str) -> RealsysError:
    """The error to raise here for one that happened on ``worker``.

    A RealsysError comes back as its own class, with the worker in ``where`` and the remote traceback
    as a note; anything else is a RemoteError that carries the traceback in ``what``.
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
    return RemoteError(
        f"{worker} failed: {info.kind}: {info.what}\n{info.traceback}".rstrip(),
        where=worker,
        fix=info.fix or f"the traceback above is {worker}'s; its log has what led there",
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
    """``text`` without lone surrogates, which UTF-8 (and so msgpack) can't hold."""
    return text.encode("utf-8", "backslashreplace").decode()
