"""Answers: values ↔ JSON, by SGLang's field names and shapes (pure). Requests are in http_json.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import msgspec

from realsys.api.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    RealsysError,
    RemoteError,
    WaitTimeout,
    WorkerLost,
)
from realsys.generation.http.served_engine import EngineAnswer
from realsys.transport.generation_messages import Finish

DONE = b"data: [DONE]\n\n"
UNAUTHORIZED, OVERLOADED = 401, 503


class TokenSpan(msgspec.Struct, frozen=True):
    """Tokens ``start`` … ``end`` - 1 of an answer come from weights ``version``."""

    version: str
    start: int
    end: int


class _Reason(msgspec.Struct):
    type: str


class _MetaInfo(msgspec.Struct):
    id: str = ""
    finish_reason: _Reason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str | int = "0"
    weight_versions: tuple[TokenSpan, ...] | None = None
    output_token_logprobs: list[tuple[float, int, str | None]] = []


class _Response(msgspec.Struct):
    """What of a response the client reads; a real SGLang says more."""

    output_ids: list[int]
    meta_info: _MetaInfo


class _ErrorBody(msgspec.Struct):
    message: str
    type: str = ""
    where: str = ""
    fix: str = ""


def answer_json(
    answer: EngineAnswer, *, seconds: float, index: int | None = None
) -> dict[str, Any]:
    """One answer as /generate tells it, finished or not.

    Args:
        seconds: since the request came.
        index: among those of a streamed batch.
    """
    spans = spans_of(answer.versions)
    meta = {
        "id": answer.rid,
        "finish_reason": _finish_json(answer),
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.output_ids),
        "cached_tokens": answer.cached_tokens,
        "weight_version": spans[-1].version if spans else None,
        "weight_versions": spans,
        "input_token_logprobs": [],
        "output_token_logprobs": [
            (logprob, token, None)
            for logprob, token in zip(answer.logprobs, answer.output_ids, strict=True)
        ],
        "output_token_logprobs_length": len(answer.output_ids),
        "e2e_latency": seconds,
    }
    if not spans:
        del meta["weight_version"]  # no token, no weights
    body: dict[str, Any] = {"output_ids": answer.output_ids, "meta_info": meta}
    return body if index is None else {**body, "index": index}


def _finish_json(answer: EngineAnswer) -> dict[str, Any] | None:
    match answer.finish:
        case None:
            return None
        case Finish.STOP:
            return {"type": "stop", "matched": answer.output_ids[-1] if answer.output_ids else None}
        case Finish.LENGTH:
            return {"type": "length", "length": len(answer.output_ids)}
        case Finish.ABORT:
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def event(body: Any) -> bytes:
    """``body`` as one server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def read_answer(data: bytes | dict[str, Any], *, rid: str) -> EngineAnswer:
    """What /generate answered, from our servers or from a real SGLang.

    Raises:
        DataError: the response has not this shape.
    """
    try:
        if isinstance(data, bytes):
            response = msgspec.json.decode(data, type=_Response)
        else:
            response = msgspec.convert(data, _Response)
        meta, count = response.meta_info, len(response.output_ids)
        spans = meta.weight_versions
        if len(meta.output_token_logprobs) != count:
            raise ValueError(f"{len(meta.output_token_logprobs)} log-probs for {count} tokens")
        whole = [TokenSpan(str(meta.weight_version), 0, count)]
        return EngineAnswer(
            rid=meta.id or rid,
            output_ids=response.output_ids,
            logprobs=[logprob for logprob, *_ in meta.output_token_logprobs],
            versions=versions_of(whole if spans is None else spans, count),
            finish=Finish(meta.finish_reason.type) if meta.finish_reason else None,
            prompt_tokens=meta.prompt_tokens,
            cached_tokens=meta.cached_tokens,
        )
    except (msgspec.MsgspecError, ValueError) as error:
        what = f"the response to request {rid!r} can't be read: {error}"
        raise DataError(what, where="/generate", fix="is it a generation server?") from None


def spans_of(versions: Sequence[int]) -> list[TokenSpan]:
    """Runs of equal versions.

    >>> [(s.version, s.start, s.end) for s in spans_of([3, 3, 4])]
    [('3', 0, 2), ('4', 2, 3)]
    """
    spans, start = [], 0
    for version, run in groupby(versions):
        end = start + sum(1 for _ in run)
        spans.append(TokenSpan(str(version), start, end))
        start = end
    return spans


def versions_of(spans: Iterable[TokenSpan], count: int) -> list[int]:
    """One version for each of ``count`` tokens: ``spans_of`` undone.

    Raises:
        ValueError: a token is in no span or in two, or a version is no number.
    """
    versions: list[int] = []
    for span in sorted(spans, key=lambda s: s.start):
        if span.start != len(versions) and span.end > span.start:
            raise ValueError(f"weight_versions: {span} begins after {len(versions)} tokens")
        versions += [version_number(span.version)] * (span.end - span.start)
    if len(versions) != count:
        raise ValueError(f"weight_versions tells of {len(versions)} tokens, there are {count}")
    return versions


def version_number(text: str | int) -> int:
    """A weight version as we count them; SGLang's ``default``, before any update, is 0.

    Raises:
        ValueError: no whole number.
    """
    return 0 if text == "default" else int(text)


# ---- errors ---------------------------------------------------------------------------------------


def status_of(error: RealsysError) -> int:
    """HTTP status of an error: 400 where the caller can repair it."""
    if isinstance(error, DataError | ConfigError | CheckpointError):
        return 400
    if isinstance(error, WaitTimeout):
        return 504
    return OVERLOADED if isinstance(error, WorkerLost) else 500


def error_json(error: RealsysError, *, status: int) -> dict[str, Any]:
    """SGLang's shape, with what, where and fix apart."""
    return {
        "error": {
            "message": error.what,
            "type": type(error).__name__,
            "code": status,
            "where": error.where,
            "fix": error.fix,
        }
    }


def read_error(data: bytes, *, status: int, server: str, where: str) -> RealsysError:
    """The error that an HTTP response tells, naming the server: ours, SGLang's or vLLM's.

    ``from_worker`` is the server's name. ``WorkerLost`` and ``DataError`` stay what they were.
    """
    body: Any
    try:
        body = msgspec.json.decode(data)
        body = body.get("error", body)
        told = _ErrorBody(body) if isinstance(body, str) else msgspec.convert(body, _ErrorBody)
    except (msgspec.MsgspecError, AttributeError):
        told = _ErrorBody(data[:500].decode(errors="replace").strip() or f"HTTP status {status}")
    kinds: dict[str, type[RealsysError]] = {"WorkerLost": WorkerLost, "DataError": DataError}
    error = kinds.get(told.type, RemoteError)(
        f"{server} refused ({status}): {told.message}",
        where=f"{where}: {told.where}" if told.where else where,
        fix=told.fix or f"the log of {server} says more",
    )
    error.from_worker = server
    return error
