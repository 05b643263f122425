"""OpenAI's older Completions: POST /v1/completions, of texts or tokens as they are (pure). A dialect, see
dialect.py.

No chat template is applied, and there is no conversation. ``echo``, ``suffix`` and log-probs of a prompt
are refused: the engine computes none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realsys.api.errors import RealsysError
from realsys.rollout.conversation.chat_messages import (
    ChatReply,
    ChatRequest,
    ChatResult,
    FinishReason,
    Prompt,
    Unserved,
)
from realsys.rollout.dialects import body_fields, error_bodies, request_extras
from realsys.rollout.dialects.body_fields import refused
from realsys.rollout.dialects.chat_stream import MIN_LOGPROB
from realsys.rollout.dialects.held_replies import held_fields
from realsys.rollout.dialects.server_sent_events import COMMENT, DONE, data_event, unsent

DEFAULT_MAX_TOKENS = 16  # as the API has it
MAX_PROMPTS = 1024
_MAX_ID = 2**31 - 1


class CompletionBody(request_extras.ExtraFields, kw_only=True):
    """A request's body."""

    prompt: str | list[Any]
    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None


def read(
    body: bytes, headers: Mapping[str, str], *, unserved: Unserved = Unserved.REFUSE
) -> ChatRequest:
    """Returns what the client asks for: ``n`` replies to each of the prompts.

    Raises:
        DataError: the body is malformed, or asks for what isn't served.
    """
    del unserved  # there are neither tools nor pictures
    fields = body_fields.decoded(body, CompletionBody)
    _refuse_what_is_not_served(fields)
    n = body_fields.positive(fields.n, "n", body_fields.MAX_REPLIES) or 1
    if fields.best_of is not None and fields.best_of != n:
        raise refused("only as many as n are served", where="best_of", fix="leave it out")
    prompts = _prompts(fields.prompt)
    body_fields.bounded(prompts, MAX_PROMPTS, "prompt")
    retries, key = body_fields.retries_and_key(headers)
    schema = body_fields.response_schema(fields.response_format)
    return ChatRequest(
        messages=(),
        prompts=prompts,
        model=fields.model or "",
        n=n,
        max_tokens=body_fields.positive(fields.max_tokens, "max_tokens") or DEFAULT_MAX_TOKENS,
        stop=body_fields.stop_texts(fields.stop, "stop"),
        logprobs=fields.logprobs is not None and fields.logprobs is not False,
        token_ids=bool(fields.return_token_ids),
        stream=bool(fields.stream),
        stream_usage=(fields.stream_options or {}).get("include_usage") is True,
        sampling=body_fields.sampling_of(fields),
        **held_fields(fields, schema, "response_format"),
        retries=retries,
        idempotency_key=key,
        id_prefix="cmpl-",
    )


def _refuse_what_is_not_served(fields: CompletionBody) -> None:
    if fields.echo:
        raise refused(
            "log-probs of a prompt are not computed",
            where="echo",
            fix="send false, or leave it out",
        )
    if fields.suffix:
        raise refused("text between others is not served", where="suffix", fix="leave it out")
    request_extras.refuse_extras(fields, has_token_ids=True, begins_texts=True)
    if name := next(iter(request_extras.template_args_of(fields)), None):
        where = name if name == "enable_thinking" else f"chat_template_kwargs.{name}"
        raise refused("no chat template is filled here", where=where, fix="leave it out")
    if type(fields.logprobs) is int and not 0 <= fields.logprobs <= 1:
        raise refused(
            "alternatives to the sampled tokens are not known",
            where="logprobs",
            fix="send 1 for those that were sampled, or leave it out",
        )


def _prompts(given: str | list[Any]) -> tuple[Prompt, ...]:
    """Reads a text, a list of them, tokens, or a list of lists of tokens."""
    if isinstance(given, str):
        return (given,)
    if given and all(isinstance(prompt, str) for prompt in given):
        return tuple(given)
    if given and all(_is_token(token) for token in given):
        return (tuple(given),)
    if given and all(
        isinstance(prompt, list) and prompt and all(map(_is_token, prompt)) for prompt in given
    ):
        return tuple(map(tuple, given))
    raise refused(
        "neither texts nor lists of token ids",
        where="prompt",
        fix="send a text, a list of texts, a list of token ids, or a list of such lists",
    )


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_ID


def body(result: ChatResult, request: ChatRequest) -> dict[str, Any]:
    """Returns the whole answer; its choices: all replies to the first prompt, to the second, …"""
    choices = [_choice(i, reply.message.content, reply, request) for i, reply in _numbered(result)]
    return {
        **_head(result.id, result.created, result.model),
        "choices": choices,
        "usage": _usage(result),
    }


def _numbered(result: ChatResult) -> list[tuple[int, ChatReply]]:
    return list(enumerate(result.replies))


def _head(id: str, created: int, model: str) -> dict[str, Any]:
    return {"id": id, "object": "text_completion", "created": created, "model": model}


def _choice(index: int, text: str, ended: ChatReply | None, request: ChatRequest) -> dict[str, Any]:
    """Returns a choice. ``ended``: the whole reply, behind its last text."""
    choice: dict[str, Any] = {
        "index": index,
        "text": text,
        "logprobs": _logprobs(ended) if ended is not None and request.logprobs else None,
        "finish_reason": None if ended is None else _finish(ended),
    }
    if ended is not None and request.token_ids:
        choice["prompt_token_ids"] = list(ended.prompt_ids)
        choice["token_ids"] = list(ended.token_ids)
    return choice


def _finish(reply: ChatReply) -> str:
    return "length" if reply.finish is FinishReason.LENGTH else "stop"


def _logprobs(reply: ChatReply) -> dict[str, Any]:
    offsets, place = [], 0
    texts = [token.text for token in reply.logprobs]
    for text in texts:
        offsets.append(place)
        place += len(text)
    logprobs = [max(token.logprob, MIN_LOGPROB) for token in reply.logprobs]
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        # Of the sampled tokens alone: those of others are not known.
        "top_logprobs": [{t: x} for t, x in zip(texts, logprobs, strict=True)],
        "text_offset": offsets,
    }


def _usage(result: ChatResult) -> dict[str, Any]:
    """Returns the counts of tokens; a prompt counts once, however many replies it has."""
    sampled = sum(reply.num_tokens for reply in result.replies)
    return {
        "prompt_tokens": result.num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": result.num_prompt_tokens + sampled,
    }


class CompletionStream:
    """Encodes one streamed answer: a chunk for each piece of text."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._head: dict[str, Any] = {}
        self._sent: dict[int, list[str]] = {}

    def opening(
        self, id: str, created: int, model: str, *, num_prompt_tokens: int = 0, num_cached: int = 0
    ) -> bytes:
        """Returns nothing: the first chunk is one of text."""
        del num_prompt_tokens, num_cached
        self._head = _head(id, created, model)
        return b""

    def reasoning(self, index: int, text: str) -> bytes:
        """Returns nothing: a completion has no thoughts."""
        del index, text
        return b""

    def text(self, index: int, text: str) -> bytes:
        """Returns a chunk of more text, if there is any."""
        self._sent.setdefault(index, []).append(text)
        return self._chunk(index, text, None) if text else b""

    def closing(self, result: ChatResult) -> bytes:
        """Returns the rest of each reply, why it ended, and the counts of tokens if asked for."""
        chunks = []
        for index, reply in _numbered(result):
            rest = unsent(reply.message.content, self._sent.get(index, []))
            chunks.append(self._chunk(index, rest, reply))
        if self._request.stream_usage:
            chunks.append(data_event({**self._head, "choices": [], "usage": _usage(result)}))
        return b"".join(chunks) + DONE

    def ping(self) -> bytes:
        """Returns a comment."""
        return COMMENT

    def failed(self, error: RealsysError, status: int) -> bytes:
        """Returns an error in place of a chunk; OpenAI's clients raise it."""
        return data_event(error_bodies.openai_error(error, status)) + DONE

    def _chunk(self, index: int, text: str, ended: ChatReply | None) -> bytes:
        choice = _choice(index, text, ended, self._request)
        return data_event({**self._head, "choices": [choice]})


def stream(request: ChatRequest) -> CompletionStream:
    """Returns the encoder of one streamed answer."""
    return CompletionStream(request)


def error(error: RealsysError, status: int) -> dict[str, Any]:
    """Returns the answer of a failed request."""
    return error_bodies.openai_error(error, status)
