"""Errors of the endpoint as replies: a status, a body in the form of the API that was asked, headers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from realsys.api.errors import (
    DataError,
    InternalError,
    RealsysError,
    TrialError,
    did_you_mean,
)
from realsys.rollout.dialects import (
    anthropic_messages,
    chat_completions,
    responses_api,
    text_completions,
)
from realsys.rollout.dialects.dialect import Dialect
from realsys.rollout.dialects.server_sent_events import encoded
from realsys.rollout.endpoint.session_registry import KeyInUse, NoRoom, UnknownKey

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# End of a path → the API of its clients. The first that fits; chat_completions where none does
_APIS: Mapping[str, Dialect] = {
    "/messages": anthropic_messages,
    "/count_tokens": anthropic_messages,
    "/responses": responses_api,
    "/chat/completions": chat_completions,
    "/completions": text_completions,
}


class SlowBody(DataError):
    """A request's body took too long."""


def status_of(error: RealsysError) -> int:
    """Returns the HTTP status of an error: whether, and after what, a client should try again."""
    match error:
        case UnknownKey():
            return 401
        case KeyInUse():
            return 409
        case NoRoom():
            return 429
        case SlowBody():
            return 408
        case DataError():
            return 400
        case TrialError():
            return 410
        case InternalError():
            return 500
        case _:  # a server, a weight update or a time limit: the next try may succeed
            return 502


@web.middleware
async def errors_as_replies(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers what a handler raises."""
    try:
        return await handler(request)
    except RealsysError as error:
        return _refusal(request, error)
    except web.HTTPNotFound:
        paths = {r.get_info().get("path", "") for r in request.app.router.resources()} - {""}
        what = f"no path {request.path}"
        lost = DataError(what, where="URL", fix=did_you_mean(request.path, paths))
        return _refusal(request, lost, status=404)
    except web.HTTPException as error:
        wrapped = DataError(
            error.text or error.reason, where=request.path, fix="see docs/agents_endpoint.md"
        )
        allowed = {k: v for k, v in error.headers.items() if k == "Allow"}
        return _refusal(request, wrapped, status=error.status, headers=allowed)
    except ConnectionError:
        raise  # the client has left
    except Exception as error:  # the outermost frame of a request
        logger.exception("request failed path=%s", request.path)
        return _refusal(request, as_ours(error))


def _refusal(
    request: web.Request,
    error: RealsysError,
    *,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.StreamResponse:
    status = status_of(error) if status is None else status
    found = (api for end, api in _APIS.items() if request.path.endswith(end))
    dialect: Dialect = next(found, chat_completions)
    retry = {"x-should-retry": "true" if status in (429, 502) else "false"}
    if isinstance(error, NoRoom):
        retry["Retry-After"] = f"{max(1, round(error.retry_s))}"
    return json_body(
        dialect.error(error, status), status=status, headers=retry | {**(headers or {})}
    )


def as_ours(error: BaseException) -> RealsysError:
    """Returns an error as it is, or as one of ours that does not say what is inside."""
    if isinstance(error, RealsysError):
        return error
    return InternalError(f"{type(error).__name__}: {error}", where="agents' endpoint")


def json_body(
    body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Returns a response of JSON values."""
    return web.Response(
        body=encoded(body), status=status, headers=headers, content_type="application/json"
    )
