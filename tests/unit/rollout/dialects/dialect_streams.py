"""Replies of all shapes, and what a client makes of a stream's bytes: the whole answer again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from realsys.rollout.conversation.chat_messages import (
    ChatMessage,
    ChatReply,
    ChatRequest,
    ChatResult,
    FinishReason,
    ToolCall,
)
from realsys.rollout.dialects.dialect import Dialect

CALLS = (
    ToolCall(id="c1", name="weather", arguments='{"city":"Paris","n":[1,2.5],"u":"é"}'),
    ToolCall(id="c2", name="clock", arguments="{}"),
)
MESSAGES = {
    "text": ChatMessage(role="assistant", content="Hello\n\nwörld"),
    "thoughts": ChatMessage(role="assistant", content="yes", reasoning="let me\nsee"),
    "calls": ChatMessage(role="assistant", content="wait", reasoning="hm", tool_calls=CALLS),
    "calls alone": ChatMessage(role="assistant", tool_calls=CALLS),
    "thoughts alone": ChatMessage(role="assistant", reasoning="never done"),
    "nothing": ChatMessage(role="assistant"),
    "wrong call": ChatMessage(
        role="assistant", tool_calls=(ToolCall(id="c1", name="clock", arguments='{"a": '),)
    ),
}


def result_of(message: ChatMessage, finish: FinishReason | None = None, n: int = 1) -> ChatResult:
    """A result of ``n`` replies with this message."""
    if finish is None:
        finish = FinishReason.TOOL_CALLS if message.tool_calls else FinishReason.STOP
    replies = (ChatReply(message=message, finish=finish, num_tokens=7),) * n
    return ChatResult(
        id="r1",
        created=1700000000,
        model="policy",
        replies=replies,
        num_prompt_tokens=10,
        num_cached=4,
    )


def streamed(dialect: Dialect, result: ChatResult, request: ChatRequest, sent: str = "") -> bytes:
    """The bytes of a stream; ``sent``: what goes out letter by letter before the end."""
    encoder = dialect.stream(request)
    pieces = [encoder.ping(), encoder.opening(result.id, result.created, result.model)]
    for index, reply in enumerate(result.replies):
        if "reasoning" in sent:
            pieces += [encoder.reasoning(index, letter) for letter in reply.message.reasoning]
        if "text" in sent:
            pieces += [encoder.text(index, letter) for letter in reply.message.content[:-1]]
    return b"".join((*pieces, encoder.ping(), encoder.closing(result)))


def events(stream: bytes) -> Iterator[tuple[str, Any]]:
    """(name, data) of each event; comments are skipped, and [DONE] is None."""
    for block in stream.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if lines:
            data = lines["data"]
            yield lines.get("event", ""), None if data == "[DONE]" else json.loads(data)


def whole_chat(stream: bytes) -> dict[str, Any]:
    """The chat completion that the chunks make."""
    chunks = [data for _, data in events(stream)]
    assert chunks.pop() is None
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"], {"content": "", "reasoning": "", "calls": [], "logprobs": None}
            )
            delta = part["delta"]
            choice["content"] += delta.get("content", "")
            choice["reasoning"] += delta.get("reasoning_content", "")
            choice["calls"] += delta.get("tool_calls", [])
            choice["finish_reason"] = part["finish_reason"]
            choice["logprobs"] = part["logprobs"] or choice["logprobs"]
    head = {key: chunks[0][key] for key in ("id", "created", "model", "system_fingerprint")}
    return {
        **head,
        "object": "chat.completion",
        "choices": [_chat_choice(index, choice) for index, choice in choices.items()],
        "usage": usage,
    }


def _chat_choice(index: int, choice: dict[str, Any]) -> dict[str, Any]:
    calls = [{k: v for k, v in call.items() if k != "index"} for call in choice["calls"]]
    assert [call["index"] for call in choice["calls"]] == list(range(len(calls)))
    message: dict[str, Any] = {"role": "assistant", "refusal": None, "annotations": []}
    message["content"] = choice["content"] or (None if calls else "")
    message |= {"reasoning_content": choice["reasoning"]} if choice["reasoning"] else {}
    message |= {"tool_calls": calls} if calls else {}
    return {
        "index": index,
        "message": message,
        "logprobs": choice["logprobs"],
        "finish_reason": choice["finish_reason"],
    }


def whole_message(stream: bytes) -> dict[str, Any]:
    """The Anthropic message that the events make."""
    message: dict[str, Any] = {}
    text = ""
    ended = False
    for name, data in events(stream):
        assert name == data["type"]
        match name:
            case "message_start":
                message = data["message"]
            case "content_block_start":
                assert data["index"] == len(message["content"])
                message["content"].append(data["content_block"])
                text = ""
            case "content_block_delta":
                assert data["index"] == len(message["content"]) - 1
                delta, block = data["delta"], message["content"][-1]
                if delta["type"] == "input_json_delta":
                    text += delta["partial_json"]
                    block["input"] = json.loads(text)
                else:
                    field = delta["type"].removesuffix("_delta")
                    block[field] += delta[field]
            case "message_delta":
                message |= data["delta"]
                message["usage"] |= data["usage"]
            case "message_stop":
                ended = True
    assert ended
    return message


def whole_response(stream: bytes) -> dict[str, Any]:
    """The response of the last event, if the events before it made the same items."""
    items: list[dict[str, Any]] = []
    last: dict[str, Any] = {}
    deltas = ""
    for number, (name, data) in enumerate(events(stream)):
        assert (name, number) == (data["type"], data["sequence_number"])
        if "output_index" in data:
            assert data["output_index"] == len(items)
        if name == "response.output_item.added":
            deltas, added = "", data["item"]
        elif name.endswith(".delta"):
            assert data["item_id"] == added["id"]
            deltas += data["delta"]
        elif name in ("response.output_text.done", "response.reasoning_text.done"):
            assert data["text"] == deltas
        elif name == "response.function_call_arguments.done":
            assert data["arguments"] == deltas
        elif name == "response.output_item.done":
            item = data["item"]
            assert (item["id"], item["type"]) == (added["id"], added["type"])
            assert (
                item["arguments"] if "arguments" in item else item["content"][0]["text"]
            ) == deltas
            items.append(item)
        last = data
    assert last["response"]["output"] == items
    whole: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{whole['status']}"
    return whole
