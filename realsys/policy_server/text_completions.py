"""OpenAI's older Completions: POST /v1/completions, of texts or tokens as they are (pure).

No chat template is applied, and there is no conversation. ``echo``, ``suffix`` and log-probs of a prompt
are refused: the engine computes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from realsys.rollout.dialects import body_fields, request_extras
from realsys.rollout.dialects.body_fields import refused
from realsys.rollout.dialects.server_sent_events import DONE, data_event

DEFAULT_MAX_TOKENS = 16  # as the API has it
MAX_PROMPTS = 1024
MIN_LOGPROB = -9999.0  # JSON has no infinity
Prompt = str | list[int]


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


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """What a client asks for: ``n`` answers to each of the prompts. Other fields as of ``ChatRequest``."""

    prompts: tuple[Prompt, ...]
    n: int
    max_tokens: int
    stop: tuple[str, ...]
    logprobs: bool
    stream: bool
    stream_usage: bool
    sampling: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Completed:
    """One answer.

    Attributes:
        token_texts, token_logprobs: of each token of the text.
        num_tokens: that were sampled.
        stopped: by the end token or a stop text, not by the limit.
    """

    text: str
    stopped: bool
    num_tokens: int
    num_prompt_tokens: int
    token_texts: tuple[str, ...] = field(default=(), repr=False)
    token_logprobs: tuple[float, ...] = field(default=(), repr=False)

    @property
    def finish_reason(self) -> str:
        """Why it ended, as the API calls it."""
        return "stop" if self.stopped else "length"


def read(body: bytes) -> CompletionRequest:
    """Returns what the client asks for.

    Raises:
        DataError: the body is malformed, or asks for what isn't served.
    """
    fields = body_fields.decoded(body, CompletionBody)
    if fields.echo:
        raise refused(
            "log-probs of a prompt are not computed",
            where="echo",
            fix="send false, or leave it out",
        )
    if fields.suffix:
        raise refused("text between others is not served", where="suffix", fix="leave it out")
    request_extras.refuse_extras(fields)
    if name := next(iter(request_extras.template_args_of(fields)), None):
        where = name if name == "enable_thinking" else f"chat_template_kwargs.{name}"
        raise refused("no chat template is filled here", where=where, fix="leave it out")
    if fields.response_format is not None and fields.response_format.get("type") != "text":
        raise refused(
            "texts are not held to schemas",
            where="response_format",
            fix="leave it out, or use /v1/chat/completions",
        )
    if type(fields.logprobs) is int and not 0 <= fields.logprobs <= 1:
        raise refused(
            "alternatives to the sampled tokens are not known",
            where="logprobs",
            fix="send 1 for those that were sampled, or leave it out",
        )
    n = body_fields.positive(fields.n, "n", body_fields.MAX_REPLIES) or 1
    if fields.best_of is not None and fields.best_of != n:
        raise refused("only as many as n are served", where="best_of", fix="leave it out")
    prompts = _prompts(fields.prompt)
    body_fields.bounded(prompts, MAX_PROMPTS, "prompt")
    return CompletionRequest(
        prompts=prompts,
        n=n,
        max_tokens=body_fields.positive(fields.max_tokens, "max_tokens") or DEFAULT_MAX_TOKENS,
        stop=body_fields.stop_texts(fields.stop, "stop"),
        logprobs=fields.logprobs is not None and fields.logprobs is not False,
        stream=bool(fields.stream),
        stream_usage=(fields.stream_options or {}).get("include_usage") is True,
        sampling=body_fields.sampling_of(fields),
    )


def _prompts(given: str | list[Any]) -> tuple[Prompt, ...]:
    """Reads a text, a list of them, tokens, or a list of lists of tokens."""
    if isinstance(given, str):
        return (given,)
    if given and all(isinstance(prompt, str) for prompt in given):
        return tuple(given)
    if given and all(_is_token(token) for token in given):
        return (given,)
    if given and all(
        isinstance(prompt, list) and prompt and all(map(_is_token, prompt)) for prompt in given
    ):
        return tuple(given)
    raise refused(
        "neither texts nor lists of token ids",
        where="prompt",
        fix="send a text, a list of texts, a list of token ids, or a list of such lists",
    )


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def body(
    made: Sequence[Completed], asked: CompletionRequest, *, id: str, created: int, model: str
) -> dict[str, Any]:
    """Returns the whole answer; ``made``: all answers to the first prompt, to the second, …"""
    choices = [
        {
            "index": i,
            "text": one.text,
            "logprobs": _logprobs(one) if asked.logprobs else None,
            "finish_reason": one.finish_reason,
        }
        for i, one in enumerate(made)
    ]
    head = {"id": id, "object": "text_completion", "created": created, "model": model}
    return {**head, "choices": choices, "usage": _usage(made, asked)}


def _logprobs(one: Completed) -> dict[str, Any]:
    offsets, place = [], 0
    for text in one.token_texts:
        offsets.append(place)
        place += len(text)
    logprobs = [max(x, MIN_LOGPROB) for x in one.token_logprobs]
    return {
        "tokens": list(one.token_texts),
        "token_logprobs": logprobs,
        # Of the sampled tokens alone: those of others are not known.
        "top_logprobs": [{t: x} for t, x in zip(one.token_texts, logprobs, strict=True)],
        "text_offset": offsets,
    }


def _usage(made: Sequence[Completed], asked: CompletionRequest) -> dict[str, int]:
    sampled = sum(one.num_tokens for one in made)
    read_tokens = sum(one.num_prompt_tokens for one in made[:: asked.n])
    return {
        "prompt_tokens": read_tokens,
        "completion_tokens": sampled,
        "total_tokens": read_tokens + sampled,
    }


class CompletionStream:
    """Encodes one streamed answer: a chunk for each piece of text."""

    def __init__(self, asked: CompletionRequest, *, id: str, created: int, model: str) -> None:
        self._asked = asked
        self._head = {"id": id, "object": "text_completion", "created": created, "model": model}
        self._sent: dict[int, str] = {}

    def text(self, index: int, whole: str) -> bytes:
        """Returns a chunk of what ``whole``, the text of an answer so far, has more than was sent."""
        before = self._sent.get(index, "")
        if len(whole) <= len(before) or not whole.startswith(before):
            return b""
        self._sent[index] = whole
        return self._chunk(index, whole[len(before) :], None)

    def closing(self, made: Sequence[Completed]) -> bytes:
        """Returns the rest of each answer, why it ended, and the counts of tokens if asked for."""
        chunks = []
        for index, one in enumerate(made):
            rest = one.text[len(self._sent.get(index, "")) :]
            chunks.append(self._chunk(index, rest, one))
        if self._asked.stream_usage:
            usage = {**self._head, "choices": [], "usage": _usage(made, self._asked)}
            chunks.append(data_event(usage))
        return b"".join(chunks) + DONE

    def _chunk(self, index: int, text: str, ended: Completed | None) -> bytes:
        choice = {
            "index": index,
            "text": text,
            "logprobs": _logprobs(ended) if ended is not None and self._asked.logprobs else None,
            "finish_reason": None if ended is None else ended.finish_reason,
        }
        return data_event({**self._head, "choices": [choice]})
