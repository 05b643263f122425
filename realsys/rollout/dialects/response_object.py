"""The response object of Responses and its output items (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realsys.rollout.conversation.chat_messages import (
    ChatReply,
    ChatRequest,
    ChatResult,
    FinishReason,
    ToolCall,
    ToolChoice,
)
from realsys.rollout.dialects.body_fields import tokens_of_bytes
from realsys.rollout.dialects.chat_stream import MIN_LOGPROB


def response_object(id: str, created: int, model: str, request: ChatRequest) -> dict[str, Any]:
    """Returns a response in progress, without output. What the request left open is told as its default."""
    choice: str | dict[str, Any] = request.tool_choice.value
    if request.tool_choice is ToolChoice.ONE:
        choice = {"type": "function", "name": request.tool_name}
    elif request.allowed_tools:
        named = [{"type": "function", "name": name} for name in request.allowed_tools]
        choice = {"type": "allowed_tools", "mode": request.tool_choice.value, "tools": named}
    text: dict[str, Any] = {"type": "text"}
    if request.schema is not None:
        text = {"type": "json_schema", "name": "schema", "schema": dict(request.schema)}
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": not request.one_call,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": request.sampling.get("temperature"),
        "text": {"format": text},
        "tool_choice": choice,
        "tools": [_flat_tool(tool["function"]) for tool in request.tools],
        "top_p": request.sampling.get("top_p"),
        "truncation": "disabled",
        "usage": None,
        "user": None,
    }


def finished_response(
    result: ChatResult, request: ChatRequest, output: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the response at its end, with its output items."""
    reply = result.replies[0]
    cut = reply.finish is FinishReason.LENGTH
    return {
        **response_object(result.id, result.created, result.model, request),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(output),
        "usage": {
            "input_tokens": result.num_prompt_tokens,
            # Newer clients need the count of written ones, too.
            "input_tokens_details": {"cached_tokens": result.num_cached, "cache_write_tokens": 0},
            "output_tokens": reply.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},  # not counted apart
            "total_tokens": result.num_prompt_tokens + reply.num_tokens,
        },
    }


def output_items(result: ChatResult, request: ChatRequest) -> list[dict[str, Any]]:
    """Returns reasoning, message and calls of the first reply; a message if there is no call."""
    reply = result.replies[0]
    items: list[dict[str, Any]] = []
    if reply.message.reasoning:
        items.append(reasoning_item(result.id, len(items), reply.message.reasoning))
    if reply.message.content or not reply.message.tool_calls:
        items.append(message_item(result.id, len(items), reply, request))
    for call in reply.message.tool_calls:
        items.append(call_item(result.id, len(items), call, status_of(reply)))
    return items


def reasoning_item(id: str, position: int, text: str) -> dict[str, Any]:
    """Returns an item of thoughts. ``id``: of the response."""
    return {
        "id": f"rs_{id}_{position}",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "status": "completed",
    }


def message_item(id: str, position: int, reply: ChatReply, request: ChatRequest) -> dict[str, Any]:
    """Returns the item of a reply's content. ``id``: of the response."""
    logprobs = text_logprobs(reply) if request.logprobs else []
    text = {
        "type": "output_text",
        "text": reply.message.content,
        "annotations": [],
        "logprobs": logprobs,
    }
    return {
        "id": f"msg_{id}_{position}",
        "type": "message",
        "role": "assistant",
        "status": status_of(reply),
        "content": [text],
    }


def call_item(id: str, position: int, call: ToolCall, status: str) -> dict[str, Any]:
    """Returns the item of a call. ``id``: of the response."""
    return {
        "id": f"fc_{id}_{position}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


def status_of(reply: ChatReply) -> str:
    """Returns the status of a reply's message and calls."""
    return "incomplete" if reply.finish is FinishReason.LENGTH else "completed"


def text_logprobs(reply: ChatReply) -> list[dict[str, Any]]:
    """Returns the log-probs of all tokens of a reply, those of its reasoning and calls too."""
    return [
        {
            "token": token.text,
            "logprob": max(token.logprob, MIN_LOGPROB),
            "bytes": tokens_of_bytes(token.text) or [],
            "top_logprobs": [],
        }
        for token in reply.logprobs
    ]


def _flat_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
        "strict": function.get("strict"),
    }
