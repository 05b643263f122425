"""Events of a streamed Anthropic message, and the parts that they share with a whole one (pure)."""

from __future__ import annotations

from typing import Any

import msgspec

from realsys.api.errors import RealsysError
from realsys.rollout.conversation.chat_messages import (
    ChatMessage,
    ChatReply,
    ChatResult,
    FinishReason,
)
from realsys.rollout.dialects.error_bodies import anthropic_error
from realsys.rollout.dialects.server_sent_events import encoded, named_event, unsent

# The API can't carry arguments that are no JSON object: such a text is the one value of an object, and
# anthropic_messages.py takes it out again when the client sends the message back.
INVALID_JSON = "INVALID_JSON"
# Clients drop thoughts that nobody signed before they send the conversation back. We check none.
SIGNATURE = "realsys"

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


class AnthropicStream:
    """Encodes the events of one message: blocks of thinking, text and tool use, one after another."""

    def __init__(self) -> None:
        self._sent: dict[str, list[str]] = {"thinking": [], "text": []}
        self._index = -1  # of the newest block
        self._kind = ""  # of the open block

    def opening(
        self, id: str, created: int, model: str, *, num_prompt_tokens: int = 0, num_cached: int = 0
    ) -> bytes:
        """Returns the message without content, with the counts of the tokens before it."""
        del created
        message: dict[str, Any] = {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(num_prompt_tokens, num_cached, 0),
        }
        return named_event({"type": "message_start", "message": message})

    def reasoning(self, index: int, text: str) -> bytes:
        """Returns more of a block of thinking, if there is more."""
        del index
        return self._more("thinking", text)

    def text(self, index: int, text: str) -> bytes:
        """Returns more of a block of text, if there is more."""
        del index
        return self._more("text", text)

    def closing(self, result: ChatResult) -> bytes:
        """Returns the rest of the message, why it ended, and the counts of tokens."""
        reply = result.replies[0]
        whole = {"thinking": reply.message.reasoning, "text": reply.message.content}
        # The open block goes on before the other one begins.
        kinds = ("text", "thinking") if any(self._sent["text"]) else ("thinking", "text")
        events = [self._more(kind, unsent(whole[kind], self._sent[kind])) for kind in kinds]
        if not reply.message.content and not reply.message.tool_calls:
            events += [self._stop(), self._start("text", {"type": "text", "text": ""})]
        events.append(self._stop())
        for block in content_blocks(reply.message):
            if block["type"] == "tool_use":
                events += [
                    self._start("tool_use", {**block, "input": {}}),
                    self._delta(
                        "input_json_delta", "partial_json", encoded(block["input"]).decode()
                    ),
                    self._stop(),
                ]
        end = {"type": "message_delta", "delta": stop_of(reply), "usage": message_usage(result)}
        return b"".join((*events, named_event(end), named_event({"type": "message_stop"})))

    def ping(self) -> bytes:
        """Returns the API's own event for it."""
        return named_event({"type": "ping"})

    def failed(self, error: RealsysError, status: int) -> bytes:
        """Returns an error event; Anthropic's clients raise it."""
        return named_event(anthropic_error(error, status))

    def _more(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        self._sent[kind].append(text)
        start = b""
        if self._kind != kind:
            empty = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            start = self._stop() + self._start(kind, empty)
        return start + self._delta(f"{kind}_delta", kind, text)

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        self._index, self._kind = self._index + 1, kind
        return named_event(
            {"type": "content_block_start", "index": self._index, "content_block": block}
        )

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        delta = {"type": kind, field: text}
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _stop(self) -> bytes:
        """Ends the open block, if there is one."""
        if not self._kind:
            return b""
        thinks, self._kind = self._kind == "thinking", ""
        signed = self._delta("signature_delta", "signature", SIGNATURE) if thinks else b""
        return signed + named_event({"type": "content_block_stop", "index": self._index})


def content_blocks(message: ChatMessage) -> list[dict[str, Any]]:
    """Returns thoughts, text and calls as blocks; an empty text if there is neither text nor call."""
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        values = tool_input(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": values})
    return blocks


def tool_input(arguments: str) -> dict[str, Any]:
    """Returns the values of a call's arguments; none if the policy wrote none."""
    if not arguments.strip():
        return {}
    try:
        values = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        values = None
    return values if isinstance(values, dict) else {INVALID_JSON: arguments}


def stop_of(reply: ChatReply) -> dict[str, Any]:
    """Returns why a reply ended."""
    if reply.finish is FinishReason.STOP and reply.stop_text:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_text}
    return {"stop_reason": _STOP_REASONS[reply.finish], "stop_sequence": None}


def message_usage(result: ChatResult) -> dict[str, Any]:
    """Returns the counts of tokens; here those of the input are without the cached ones."""
    return _usage(result.num_prompt_tokens, result.num_cached, result.replies[0].num_tokens)


def _usage(num_prompt_tokens: int, num_cached: int, num_sampled: int) -> dict[str, Any]:
    return {
        "input_tokens": num_prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_sampled,
    }
