"""OpenAI's Chat Completions: POST /v1/chat/completions (pure). A dialect, see dialect.py.

Beyond OpenAI's own fields it reads and writes ``reasoning_content`` of assistant messages, as other open
servers do, so that thoughts survive the way to the client and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from realsys.api.errors import RealsysError
from realsys.rollout.conversation.chat_messages import (
    ChatMessage,
    ChatReply,
    ChatRequest,
    ChatResult,
    ToolCall,
    ToolChoice,
    Unserved,
)
from realsys.rollout.dialects import body_fields, error_bodies, request_extras
from realsys.rollout.dialects.allowed_tools import allowed_tools
from realsys.rollout.dialects.body_fields import refused
from realsys.rollout.dialects.chat_stream import (
    ChatStream,
    chat_usage,
    content_logprobs,
    tool_call_body,
)
from realsys.rollout.dialects.held_replies import held_fields
from realsys.rollout.dialects.turn_merger import TurnMerger
from realsys.rollout.dialects.unserved_parts import LeftOut


class ChatFunction(msgspec.Struct):
    """The function of a tool call."""

    name: str
    arguments: str = ""


class ChatToolCall(msgspec.Struct):
    """A tool call of an assistant message."""

    id: str
    function: ChatFunction | None = None
    type: str = "function"


class ChatMessageBody(msgspec.Struct):
    """A message, of any role."""

    role: str
    content: body_fields.Content | None = None
    name: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None
    prefix: bool | None = None
    partial: bool | None = None


class ChatBody(request_extras.ExtraFields, kw_only=True):
    """A request's body."""

    messages: list[ChatMessageBody]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    echo: bool | None = None


def read(
    body: bytes, headers: Mapping[str, str], *, unserved: Unserved = Unserved.REFUSE
) -> ChatRequest:
    """Returns what the client asks for.

    Raises:
        DataError: the body is malformed, or asks for what isn't served.
    """
    fields = body_fields.decoded(body, ChatBody)
    left = LeftOut(unserved)
    _refuse_what_is_not_served(fields, left)
    for message in fields.messages:
        message.content = left.content(message.content)
    tools = tuple(
        _tool(tool, f"tools[{i}]")
        for i, tool in enumerate(fields.tools or ())
        if not left.tool(tool, ("function",))
    )
    allowed = allowed_tools(fields.tool_choice, tools, left)
    choice, tool_name = (
        _tool_choice(fields.tool_choice, tools) if allowed is None else (allowed.choice, "")
    )
    if fields.max_completion_tokens is not None:
        limit = body_fields.positive(fields.max_completion_tokens, "max_completion_tokens")
    else:
        limit = body_fields.positive(fields.max_tokens, "max_tokens")
    retries, key = body_fields.retries_and_key(headers)
    field = _continuing(fields)
    messages, continues = request_extras.prefilled(
        _messages(fields.messages), continues=bool(field), where=field
    )
    return ChatRequest(
        messages=messages,
        continues=continues,
        template_args=request_extras.template_args_of(fields),
        template_hints=request_extras.template_hints_of(fields),
        model=fields.model or "",
        tools=tools,
        tool_choice=choice,
        tool_name=tool_name,
        allowed_tools=() if allowed is None else allowed.names,
        one_call=fields.parallel_tool_calls is False,
        n=body_fields.positive(fields.n, "n", body_fields.MAX_REPLIES) or 1,
        max_tokens=limit,
        stop=body_fields.stop_texts(fields.stop, "stop"),
        logprobs=bool(fields.logprobs),
        token_ids=bool(fields.return_token_ids),
        stream=bool(fields.stream),
        stream_usage=(fields.stream_options or {}).get("include_usage") is True,
        sampling=body_fields.sampling_of(fields),
        **held_fields(
            fields, body_fields.response_schema(fields.response_format), "response_format"
        ),
        left_out=tuple(left.kinds),
        retries=retries,
        idempotency_key=key,
    )


def _refuse_what_is_not_served(fields: ChatBody, left: LeftOut) -> None:
    options = fields.web_search_options
    if options is not None and not left.field("web_search_options", options):
        raise body_fields.unserved_tool("web_search", "web_search_options", "leave it out")
    for name in ("functions", "function_call"):
        if getattr(fields, name) is not None:
            raise refused(
                "deprecated and not served", where=name, fix="send tools and tool_choice instead"
            )
    if any(kind != "text" for kind in fields.modalities or ()):
        raise refused(
            "only text is served", where="modalities", fix='send ["text"], or leave it out'
        )
    request_extras.refuse_extras(fields, has_token_ids=True)
    if fields.echo:
        raise refused(
            "what was begun is not told again", where="echo", fix="send false, or leave it out"
        )
    body_fields.no_top_logprobs(fields.top_logprobs, "top_logprobs")
    body_fields.bounded(fields.tools, body_fields.MAX_TOOLS, "tools")
    body_fields.bounded(fields.messages, body_fields.MAX_MESSAGES, "messages")
    if not fields.messages:
        raise refused("there is no message", where="messages", fix="send one at least")


def _continuing(fields: ChatBody) -> str:
    """Returns the field by which the last message is to go on; empty: there is none."""
    *before, last = fields.messages
    for i, body in enumerate(before):
        for name in ("prefix", "partial"):
            if getattr(body, name):
                raise refused(
                    "only the last message can go on",
                    where=f"messages[{i}].{name}",
                    fix="leave it out",
                )
    opens = fields.add_generation_prompt
    if fields.continue_final_message:
        if opens:
            raise refused(
                "an answer can't both go on and be opened",
                where="add_generation_prompt",
                fix="send false with continue_final_message",
            )
        return "continue_final_message"
    if name := next((name for name in ("prefix", "partial") if getattr(last, name)), ""):
        if opens or fields.continue_final_message is False:
            raise refused(
                "the message says that it goes on, and this that it does not",
                where="add_generation_prompt" if opens else "continue_final_message",
                fix="leave one of them out",
            )
        return f"messages[{len(before)}].{name}"
    if opens is False:
        raise refused(
            "an answer that is not opened is not served",
            where="add_generation_prompt",
            fix="leave it out, or send continue_final_message to go on with the last message",
        )
    return ""


def _messages(bodies: list[ChatMessageBody]) -> tuple[ChatMessage, ...]:
    merger = TurnMerger(merge=False)
    for i, body in enumerate(bodies):
        merger.add(_message(body, f"messages[{i}]"))
    return merger.messages()


def _message(body: ChatMessageBody, where: str) -> ChatMessage:
    content = body_fields.joined_text(body.content, f"{where}.content")
    match body.role:
        case "system" | "developer" | "user":
            return ChatMessage(role=body.role, content=content)
        case "tool":
            if body.tool_call_id is None:
                raise refused(
                    "a tool message without it",
                    where=f"{where}.tool_call_id",
                    fix="send the call's id",
                )
            return ChatMessage(
                role="tool", content=content, tool_call_id=body.tool_call_id, name=body.name or ""
            )
        case "assistant":
            return _assistant(body, content, where)
        case "function":
            raise refused(
                "role 'function' is deprecated", where=f"{where}.role", fix="send role 'tool'"
            )
    raise refused(
        f"role {body.role!r} is unknown",
        where=f"{where}.role",
        fix="use system, developer, user, assistant or tool",
    )


def _assistant(body: ChatMessageBody, content: str, where: str) -> ChatMessage:
    if body.function_call is not None:
        raise refused("deprecated", where=f"{where}.function_call", fix="send tool_calls instead")
    if body.audio is not None:
        raise refused("sound can't be read", where=f"{where}.audio", fix="send the text as content")
    thoughts = (
        body.reasoning_content,
        body.reasoning,
    )  # other servers' forms of the second are no texts
    calls = []
    for i, call in enumerate(body.tool_calls or ()):
        if call.type != "function" or call.function is None:
            raise refused(
                f"a call of type {call.type!r} is not served"
                if call.function
                else "a call without function",
                where=f"{where}.tool_calls[{i}]",
                fix="send calls of function tools only",
            )
        calls.append(
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
        )
    return ChatMessage(
        role="assistant",
        content=content or body.refusal or "",
        reasoning=next((text for text in thoughts if isinstance(text, str) and text), ""),
        tool_calls=tuple(calls),
    )


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind, function = tool.get("type", "function"), tool.get("function")
    form = 'send {"type": "function", "function": {"name": …, "parameters": …}}'
    if kind != "function":
        raise body_fields.unserved_tool(kind, where, form)
    if "function" not in tool and "name" in tool:  # as Responses has it
        raise refused("a function's fields stand in the tool itself", where=where, fix=form)
    if not isinstance(function, dict):
        what = "a function tool without its function" if function is None else "expected an object"
        raise refused(what, where=f"{where}.function", fix=form)
    return body_fields.function_tool(function, f"{where}.function")


def _tool_choice(
    choice: str | Mapping[str, Any] | None, tools: tuple[Mapping[str, Any], ...]
) -> tuple[ToolChoice, str]:
    if choice is None:
        return ToolChoice.AUTO, ""
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        return body_fields.checked_choice(ToolChoice(choice), "", tools, "tool_choice")
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
        return body_fields.checked_choice(ToolChoice.ONE, name, tools, "tool_choice.function.name")
    raise body_fields.unserved_choice(
        choice, 'use "auto", "none", "required" or {"type": "function", "function": {"name": …}}'
    )


def body(result: ChatResult, request: ChatRequest) -> dict[str, Any]:
    """Returns the whole answer."""
    ids = {"prompt_token_ids": list(result.replies[0].prompt_ids)} if request.token_ids else {}
    return {
        **ids,
        "id": result.id,
        "object": "chat.completion",
        "created": result.created,
        "model": result.model,
        "choices": [_choice(i, reply, request) for i, reply in enumerate(result.replies)],
        "usage": chat_usage(result),
        "system_fingerprint": None,
    }


def _choice(index: int, reply: ChatReply, request: ChatRequest) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.message.content or (None if reply.message.tool_calls else ""),
        "refusal": None,
        "annotations": [],
    }
    if reply.message.reasoning:
        message["reasoning_content"] = reply.message.reasoning
    if reply.message.tool_calls:
        message["tool_calls"] = [tool_call_body(call) for call in reply.message.tool_calls]
    ids = {"token_ids": list(reply.token_ids)} if request.token_ids else {}
    return {
        **ids,
        "index": index,
        "message": message,
        "logprobs": content_logprobs(reply) if request.logprobs else None,
        "finish_reason": reply.finish.value,
    }


def stream(request: ChatRequest) -> ChatStream:
    """Returns the encoder of one streamed answer."""
    return ChatStream(request)


def error(error: RealsysError, status: int) -> dict[str, Any]:
    """Returns the answer of a failed request."""
    return error_bodies.openai_error(error, status)
