"""Anthropic's Messages: POST /v1/messages and /v1/messages/count_tokens (pure). A dialect, see dialect.py.

``read`` serves both paths: a request to count tokens has the same fields, without ``max_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from realsys.api.errors import RealsysError
from realsys.rollout.conversation.chat_messages import (
    ChatMessage,
    ChatRequest,
    ChatResult,
    ToolCall,
    ToolChoice,
    Unserved,
)
from realsys.rollout.dialects import body_fields, error_bodies, request_extras
from realsys.rollout.dialects.anthropic_stream import (
    INVALID_JSON,
    AnthropicStream,
    content_blocks,
    message_usage,
    stop_of,
)
from realsys.rollout.dialects.body_fields import refused
from realsys.rollout.dialects.held_replies import held_fields
from realsys.rollout.dialects.turn_merger import TurnMerger
from realsys.rollout.dialects.unserved_parts import LeftOut


class AnthropicMessageBody(msgspec.Struct):
    """A message, of a user or of the assistant."""

    role: str
    content: body_fields.Content


class ContentBlock(msgspec.Struct):
    """A block of a content; which of the fields it has depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: body_fields.Content | None = None


class AnthropicBody(request_extras.ExtraFields, kw_only=True):
    """A request's body."""

    messages: list[AnthropicMessageBody]
    model: str | None = None
    system: body_fields.Content | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None


def read(
    body: bytes, headers: Mapping[str, str], *, unserved: Unserved = Unserved.REFUSE
) -> ChatRequest:
    """Returns what the client asks for, or what it wants counted.

    Raises:
        DataError: the body is malformed, or asks for what isn't served.
    """
    fields = body_fields.decoded(body, AnthropicBody)
    left = LeftOut(unserved)
    if fields.mcp_servers and not left.field("mcp_servers", fields.mcp_servers):
        raise refused(
            "remote tools are not served",
            where="mcp_servers",
            fix=f"offer tools instead, or {body_fields.HOW_TO_DROP}",
        )
    fields.system = left.content(fields.system)
    for message in fields.messages:
        message.content = left.content(message.content) or message.content
    request_extras.refuse_extras(fields)
    body_fields.bounded(fields.tools, body_fields.MAX_TOOLS, "tools")
    tools = tuple(
        _tool(tool, f"tools[{i}]")
        for i, tool in enumerate(fields.tools or ())
        if not left.tool(tool, ("custom",))
    )
    choice, tool_name = _tool_choice(fields.tool_choice, tools)
    retries, key = body_fields.retries_and_key(headers)
    messages = _messages(fields)
    # As the API has it: an answer that was begun goes on
    wanted, is_prefilled = fields.continue_final_message, messages[-1].role == "assistant"
    messages, continues = request_extras.prefilled(
        messages,
        continues=is_prefilled and not messages[-1].tool_calls if wanted is None else wanted,
        where="messages" if wanted is None else "continue_final_message",
    )
    return ChatRequest(
        messages=messages,
        continues=continues,
        template_args=request_extras.template_args_of(fields),
        template_hints=request_extras.template_hints_of(
            fields, more=(fields.output_config or {}).get("effort")
        ),
        model=fields.model or "",
        tools=tools,
        tool_choice=choice,
        tool_name=tool_name,
        one_call=(fields.tool_choice or {}).get("disable_parallel_tool_use") is True,
        max_tokens=body_fields.positive(fields.max_tokens, "max_tokens"),
        stop=body_fields.stop_texts(fields.stop_sequences, "stop_sequences"),
        stream=bool(fields.stream),
        sampling=body_fields.sampling_of(fields),
        **held_fields(
            fields,
            _schema(fields),
            "output_config.format" if fields.output_format is None else "output_format",
        ),
        left_out=tuple(left.kinds),
        retries=retries,
        idempotency_key=key,
        id_prefix="msg_",
    )


def _messages(fields: AnthropicBody) -> tuple[ChatMessage, ...]:
    body_fields.bounded(fields.messages, body_fields.MAX_MESSAGES, "messages")
    if not fields.messages:
        raise refused("there is no message", where="messages", fix="send one at least")
    merger = TurnMerger(merge=True)
    if system := body_fields.joined_text(fields.system, "system"):
        merger.add(ChatMessage(role="system", content=system))
    for i, body in enumerate(fields.messages):
        where = f"messages[{i}]"
        match body.role:
            case "user":
                for message in _of_user(body.content, f"{where}.content"):
                    merger.add(message)
            case "assistant":
                merger.add(_assistant(body.content, f"{where}.content"))
            case "system":  # newer clients put instructions between the turns
                content = body_fields.joined_text(body.content, f"{where}.content")
                merger.add(ChatMessage(role="system", content=content))
            case _:
                raise refused(
                    f"role {body.role!r} is unknown",
                    where=f"{where}.role",
                    fix="use user or assistant",
                )
    return merger.messages()


def _of_user(content: body_fields.Content, where: str) -> Iterator[ChatMessage]:
    """Yields a tool message for each result, then the rest of the user's message, if there is any."""
    if isinstance(content, str):
        yield ChatMessage(role="user", content=content)
        return
    rest = []
    for i, raw in enumerate(content):
        block = body_fields.converted(raw, ContentBlock, f"{where}[{i}]")
        if block.type == "tool_result":
            if block.tool_use_id is None:
                raise refused(
                    "a result without it",
                    where=f"{where}[{i}].tool_use_id",
                    fix="send the call's id",
                )
            text = body_fields.joined_text(block.content, f"{where}[{i}].content")
            yield ChatMessage(role="tool", content=text, tool_call_id=block.tool_use_id)
        else:
            rest.append(_text(block, f"{where}[{i}]"))
    if rest or not content:
        yield ChatMessage(role="user", content="".join(rest))


def _text(block: ContentBlock, where: str) -> str:
    if block.type != "text":
        raise body_fields.unreadable_part(block.type, where)
    if block.text is None:
        raise refused("a text block without its text", where=f"{where}.text", fix="add it")
    return block.text


def _assistant(content: body_fields.Content, where: str) -> ChatMessage:
    if isinstance(content, str):
        return ChatMessage(role="assistant", content=content)
    texts, thoughts, calls = [], [], []
    for i, raw in enumerate(content):
        path = f"{where}[{i}]"
        block = body_fields.converted(raw, ContentBlock, path)
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":  # another model's: its text is hidden from us
                pass
            case "tool_use":
                calls.append(_tool_call(block, path))
            case _:
                texts.append(_text(block, path))
    return ChatMessage(
        role="assistant",
        content="".join(texts),
        reasoning="".join(thoughts),
        tool_calls=tuple(calls),
    )


def _tool_call(block: ContentBlock, where: str) -> ToolCall:
    if block.id is None or block.name is None:
        raise refused("a tool_use block without id or name", where=where, fix="send both")
    values = block.input or {}
    invalid = values.get(INVALID_JSON)
    if len(values) == 1 and isinstance(invalid, str):
        return ToolCall(id=block.id, name=block.name, arguments=invalid)  # as the policy wrote it
    arguments = body_fields.compact_json(values, f"{where}.input")
    return ToolCall(id=block.id, name=block.name, arguments=arguments)


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        form = "offer tools with name, description and input_schema only"
        raise body_fields.unserved_tool(kind, where, form)
    if not isinstance(tool.get("input_schema", {}), dict):
        raise refused("expected an object", where=f"{where}.input_schema", fix="send a JSON schema")
    given = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return body_fields.function_tool({k: v for k, v in given.items() if v is not None}, where)


def _tool_choice(
    choice: Mapping[str, Any] | None, tools: tuple[Mapping[str, Any], ...]
) -> tuple[ToolChoice, str]:
    name = "" if choice is None else choice.get("name", "")
    match "auto" if choice is None else choice.get("type"):
        case "auto":
            return ToolChoice.AUTO, ""
        case "none":
            return ToolChoice.NONE, ""
        case "any":
            return body_fields.checked_choice(ToolChoice.REQUIRED, "", tools, "tool_choice")
        case "tool" if isinstance(name, str):
            return body_fields.checked_choice(ToolChoice.ONE, name, tools, "tool_choice.name")
    raise body_fields.unserved_choice(choice, "use type auto, any, tool or none")


def _schema(fields: AnthropicBody) -> Mapping[str, Any] | None:
    wanted = (fields.output_config or {}).get("format")
    if wanted is None:
        return body_fields.schema_of(fields.output_format, "output_format")
    if not isinstance(wanted, dict):
        raise refused(
            "expected an object", where="output_config.format", fix="send type and schema"
        )
    return body_fields.schema_of(wanted, "output_config.format")


def body(result: ChatResult, request: ChatRequest) -> dict[str, Any]:
    """Returns the whole answer."""
    del request
    reply = result.replies[0]
    return {
        "id": result.id,
        "type": "message",
        "role": "assistant",
        "model": result.model,
        "content": content_blocks(reply.message),
        **stop_of(reply),
        "usage": message_usage(result),
    }


def count_tokens_body(num_tokens: int) -> dict[str, Any]:
    """Returns the answer of /v1/messages/count_tokens."""
    return {"input_tokens": num_tokens}


def stream(request: ChatRequest) -> AnthropicStream:
    """Returns the encoder of one streamed answer."""
    del request
    return AnthropicStream()


def error(error: RealsysError, status: int) -> dict[str, Any]:
    """Returns the answer of a failed request."""
    return error_bodies.anthropic_error(error, status)
