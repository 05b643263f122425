"""Chunks of a streamed chat completion, and the parts that they share with a whole one (pure)."""

from __future__ import annotations

from typing import Any

from realsys.api.errors import RealsysError
from realsys.rollout.conversation.chat_messages import ChatReply, ChatRequest, ChatResult, ToolCall
from realsys.rollout.dialects.body_fields import tokens_of_bytes
from realsys.rollout.dialects.error_bodies import openai_error
from realsys.rollout.dialects.server_sent_events import COMMENT, DONE, data_event, unsent

MIN_LOGPROB = -9999.0  # JSON has no infinity


class ChatStream:
    """Encodes the chunks of one chat completion, of ``request.n`` replies."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._head: dict[str, Any] = {}
        self._content: list[list[str]] = [[] for _ in range(request.n)]  # what went out, by reply
        self._reasoning: list[list[str]] = [[] for _ in range(request.n)]

    def opening(
        self, id: str, created: int, model: str, *, num_prompt_tokens: int = 0, num_cached: int = 0
    ) -> bytes:
        """Returns a chunk with the role for each reply."""
        del num_prompt_tokens, num_cached  # told at the end
        self._head = {
            "id": id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
            "system_fingerprint": None,
        }
        start = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, start) for index in range(self._request.n))

    def reasoning(self, index: int, text: str) -> bytes:
        """Returns a chunk of more reasoning, if there is any."""
        self._reasoning[index].append(text)
        return self._chunk(index, {"reasoning_content": text}) if text else b""

    def text(self, index: int, text: str) -> bytes:
        """Returns a chunk of more content, if there is any."""
        self._content[index].append(text)
        return self._chunk(index, {"content": text}) if text else b""

    def closing(self, result: ChatResult) -> bytes:
        """Returns the rest of each reply, its end, and the counts of tokens if they were asked for."""
        chunks = [self._rest(index, reply) for index, reply in enumerate(result.replies)]
        if self._request.stream_usage:
            chunks.append(data_event({**self._head, "choices": [], "usage": chat_usage(result)}))
        return b"".join((*chunks, DONE))

    def ping(self) -> bytes:
        """Returns a comment."""
        return COMMENT

    def failed(self, error: RealsysError, status: int) -> bytes:
        """Returns an error in place of a chunk; OpenAI's clients raise it."""
        return data_event(openai_error(error, status)) + DONE

    def _rest(self, index: int, reply: ChatReply) -> bytes:
        message = reply.message
        chunks = [
            self.reasoning(index, unsent(message.reasoning, self._reasoning[index])),
            self.text(index, unsent(message.content, self._content[index])),
        ]
        for i, call in enumerate(message.tool_calls):
            delta = {"tool_calls": [{"index": i, **tool_call_body(call)}]}
            chunks.append(self._chunk(index, delta))
        logprobs = content_logprobs(reply) if self._request.logprobs else None
        chunks.append(self._chunk(index, {}, ended=reply, logprobs=logprobs))
        return b"".join(chunks)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        ended: ChatReply | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        finish = None if ended is None else ended.finish.value
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        more: dict[str, Any] = {"usage": None} if self._request.stream_usage else {}
        if ended is not None and self._request.token_ids:
            choice["token_ids"] = list(ended.token_ids)
            more["prompt_token_ids"] = list(ended.prompt_ids)
        return data_event({**self._head, "choices": [choice], **more})


def tool_call_body(call: ToolCall) -> dict[str, Any]:
    """Returns a tool call of an assistant message."""
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def chat_usage(result: ChatResult) -> dict[str, Any]:
    """Returns the counts of tokens; the prompt counts once, however many replies there are."""
    sampled = sum(reply.num_tokens for reply in result.replies)
    return {
        "prompt_tokens": result.num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": result.num_prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": result.num_cached, "audio_tokens": 0},
    }


def content_logprobs(reply: ChatReply) -> dict[str, Any]:
    """Returns the log-probs of all tokens of a reply, those of its reasoning and calls too."""
    entries = [
        {
            "token": token.text,
            "logprob": max(token.logprob, MIN_LOGPROB),
            "bytes": tokens_of_bytes(token.text),
            "top_logprobs": [],
        }
        for token in reply.logprobs
    ]
    return {"content": entries, "refusal": None}
