"""Errors as OpenAI's and Anthropic's clients expect them (pure)."""

from __future__ import annotations

import re
from typing import Any

from realsys.api.errors import DataError, RealsysError
from realsys.rollout.conversation.full_context import ContextFull

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
MESSAGES = "messages"  # the field of the conversation in most APIs
_FIELD_PATH = re.compile(r"[A-Za-z_]\w*+(?:\.\w++|\[[\w.]++\])*+")


def message_of(error: RealsysError, *, conversation: str = MESSAGES) -> str:
    """Returns the field if there is one, what happened and what to do; no names of hosts or files.

    Args:
        conversation: as ``field_of``.
    """
    if isinstance(error, ContextFull) and error.num_prompt:
        return _with_fix(_openai_full_context(error), error.fix)
    field = field_of(error, conversation=conversation)
    return _with_fix(f"{field}: {error.what}" if field else error.what, error.fix)


def _with_fix(text: str, fix: str) -> str:
    return f"{text.rstrip('.')}. Fix: {fix}" if fix else text


def _openai_full_context(error: ContextFull) -> str:
    """Returns the words by which clients of OpenAI's APIs know a full context, and shorten theirs."""
    # A server that has not said its length has less than the prompt.
    most = str(error.context_length) if error.context_length else f"at most {error.num_prompt}"
    return (
        f"This model's maximum context length is {most} tokens. However, you requested "
        f"{error.num_prompt + error.num_answer} tokens ({error.num_prompt} in the messages, "
        f"{error.num_answer} in the completion). Please reduce the length of the messages"
    )


def _anthropic_full_context(error: ContextFull) -> str:
    """Returns the same for clients of Anthropic's API. One token at least is for the answer."""
    most = error.context_length or error.num_prompt
    return f"prompt is too long: {max(error.num_prompt, most + 1)} tokens > {most} maximum"


def field_of(error: RealsysError, *, conversation: str = MESSAGES) -> str | None:
    """Returns the path of the request's field that is wrong, if the error is about one.

    Args:
        conversation: the API's field of the messages. Its parts are no messages where it has another name.
    """
    if not isinstance(error, DataError) or not _FIELD_PATH.fullmatch(error.where):
        return None
    of_conversation = error.where.replace("[", ".").partition(".")[0] == MESSAGES
    return conversation if of_conversation and conversation != MESSAGES else error.where


def openai_error(
    error: RealsysError, status: int, *, conversation: str = MESSAGES
) -> dict[str, Any]:
    """Returns the body of a failed request to one of OpenAI's APIs. ``conversation``: as ``field_of``."""
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {
        "error": {
            "message": message_of(error, conversation=conversation),
            "type": kind,
            "param": field_of(error, conversation=conversation),
            "code": code_of(error, status),
        }
    }


def code_of(error: RealsysError, status: int) -> str | None:
    """Returns the code of an error, as OpenAI's APIs have it."""
    if isinstance(error, ContextFull):
        return "context_length_exceeded"
    if status == 429:
        return "rate_limit_exceeded"
    if status == 401:
        return "invalid_api_key"
    return "server_error" if status >= 500 else None


def anthropic_error(error: RealsysError, status: int) -> dict[str, Any]:
    """Returns the body of a failed request to Anthropic's API; also the data of a stream's error event."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if isinstance(error, ContextFull) and error.num_prompt:
        message = _with_fix(_anthropic_full_context(error), error.fix)
    else:
        message = message_of(error)
    return {"type": "error", "error": {"type": kind, "message": message}}
