"""OpenAI's Responses: POST /v1/responses (pure). A dialect, see dialect.py.

The endpoint keeps no responses: each request brings its whole conversation, and ``store`` is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realsys.api.errors import RealsysError
from realsys.rollout.conversation.chat_messages import (
    ChatMessage,
    ChatRequest,
    ChatResult,
    ToolChoice,
    Unserved,
)
from realsys.rollout.dialects import body_fields, error_bodies, request_extras
from realsys.rollout.dialects.allowed_tools import allowed_tools
from realsys.rollout.dialects.body_fields import refused
from realsys.rollout.dialects.held_replies import held_fields
from realsys.rollout.dialects.response_object import finished_response, output_items
from realsys.rollout.dialects.response_stream import CONVERSATION, ResponseStream
from realsys.rollout.dialects.responses_input import add_items
from realsys.rollout.dialects.turn_merger import TurnMerger
from realsys.rollout.dialects.unserved_parts import LeftOut

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_LOGPROBS = "message.output_text.logprobs"


class ResponsesBody(request_extras.ExtraFields, kw_only=True):
    """A request's body."""

    input: body_fields.Content | None = None
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    background: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None


def read(
    body: bytes, headers: Mapping[str, str], *, unserved: Unserved = Unserved.REFUSE
) -> ChatRequest:
    """Returns what the client asks for.

    Raises:
        DataError: the body is malformed, or asks for what isn't served.
    """
    fields = body_fields.decoded(body, ResponsesBody)
    _refuse_what_is_not_served(fields)
    left = LeftOut(unserved)
    if isinstance(fields.input, list):
        for item in fields.input:
            for name in ("content", "output"):
                if isinstance(item.get(name), list):
                    item[name] = left.content(item[name])
    tools = tuple(
        _tool(tool, f"tools[{i}]")
        for i, tool in enumerate(fields.tools or ())
        if not left.tool(tool, ("function",))
    )
    allowed = allowed_tools(fields.tool_choice, tools, left)
    choice, tool_name = (
        _tool_choice(fields.tool_choice, tools) if allowed is None else (allowed.choice, "")
    )
    retries, key = body_fields.retries_and_key(headers)
    return ChatRequest(
        messages=_messages(fields),
        template_args=request_extras.template_args_of(fields),
        template_hints=request_extras.template_hints_of(fields),
        model=fields.model or "",
        tools=tools,
        tool_choice=choice,
        tool_name=tool_name,
        allowed_tools=() if allowed is None else allowed.names,
        one_call=fields.parallel_tool_calls is False,
        max_tokens=body_fields.positive(fields.max_output_tokens, "max_output_tokens"),
        logprobs=_LOGPROBS in (fields.include or ()),
        stream=bool(fields.stream),
        sampling=body_fields.sampling_of(fields),
        **held_fields(fields, _schema(fields.text), "text.format"),
        left_out=tuple(left.kinds),
        retries=retries,
        idempotency_key=key,
        id_prefix="resp_",
    )


def _refuse_what_is_not_served(fields: ResponsesBody) -> None:
    if fields.background:
        raise refused(
            "background responses are not served", where="background", fix="leave it out; stream"
        )
    for name in ("previous_response_id", "conversation"):
        if getattr(fields, name) is not None:
            raise refused(
                "this endpoint keeps no responses",
                where=name,
                fix="leave it out, and send the whole conversation as input",
            )
    if fields.prompt is not None:
        raise refused("stored prompts are not served", where="prompt", fix="send its text as input")
    request_extras.refuse_extras(fields)
    request_extras.opens_anew(fields)
    body_fields.no_top_logprobs(fields.top_logprobs, "top_logprobs")
    body_fields.bounded(fields.tools, body_fields.MAX_TOOLS, "tools")
    if isinstance(fields.input, list):
        body_fields.bounded(fields.input, body_fields.MAX_MESSAGES, "input")


def _messages(fields: ResponsesBody) -> tuple[ChatMessage, ...]:
    merger = TurnMerger(merge=True)
    if fields.instructions:
        merger.add(ChatMessage(role="system", content=fields.instructions))
    if isinstance(fields.input, str):
        merger.add(ChatMessage(role="user", content=fields.input))
    else:
        add_items(merger, fields.input or [])
    if not (messages := merger.messages()):
        raise refused(
            "there is no message", where="input", fix="send a text, or one message at least"
        )
    return messages


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind == "custom":
        raise body_fields.unserved_tool(kind, where, "offer it as a function with parameters")
    if kind != "function":
        raise body_fields.unserved_tool(kind, where, "offer function tools only")
    if "function" in tool and "name" not in tool:  # as Chat Completions has it
        raise refused(
            "a function's fields stand one level too deep",
            where=f"{where}.function",
            fix='send {"type": "function", "name": …, "parameters": …}',
        )
    given = {name: tool.get(name) for name in _FUNCTION_FIELDS}
    return body_fields.function_tool({k: v for k, v in given.items() if v is not None}, where)


def _tool_choice(
    choice: str | Mapping[str, Any] | None, tools: tuple[Mapping[str, Any], ...]
) -> tuple[ToolChoice, str]:
    if choice is None:
        return ToolChoice.AUTO, ""
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        return body_fields.checked_choice(ToolChoice(choice), "", tools, "tool_choice")
    named = choice if isinstance(choice, Mapping) and choice.get("type") == "function" else {}
    if isinstance(name := named.get("name"), str):
        return body_fields.checked_choice(ToolChoice.ONE, name, tools, "tool_choice.name")
    raise body_fields.unserved_choice(
        choice, 'use "auto", "none", "required" or {"type": "function", "name": …}'
    )


def _schema(text: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    wanted = (text or {}).get("format")
    if wanted is not None and not isinstance(wanted, dict):
        raise refused("expected an object", where="text.format", fix='send {"type": …}')
    return body_fields.schema_of(wanted, "text.format")


def body(result: ChatResult, request: ChatRequest) -> dict[str, Any]:
    """Returns the whole answer."""
    return finished_response(result, request, output_items(result, request))


def stream(request: ChatRequest) -> ResponseStream:
    """Returns the encoder of one streamed answer."""
    return ResponseStream(request)


def error(error: RealsysError, status: int) -> dict[str, Any]:
    """Returns the answer of a failed request."""
    return error_bodies.openai_error(error, status, conversation=CONVERSATION)
