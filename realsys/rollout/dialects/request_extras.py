"""Fields that other open servers read beside those of the APIs, in all dialects (pure).

Each is honoured or refused: a client that sends one relies on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realsys.api.basics.template_args import reserved_among
from realsys.rollout.conversation.chat_messages import ChatMessage
from realsys.rollout.dialects.body_fields import SamplingFields, refused

_SCHEMA = "send a JSON schema as response_format, or leave it out"
_LEAVE = "leave it out"
# Field → what to do instead. Values that are empty or false change nothing.
_NOT_SERVED: Mapping[str, str] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _SCHEMA),
    **dict.fromkeys(("structured_outputs", "regex", "ebnf"), _SCHEMA),
    "chat_template": "leave it out: the server's own counts",
    "documents": "send their text in a message",
    "skip_special_tokens": "leave it out: texts have all tokens but the one that ends them",
    "include_stop_str_in_output": _LEAVE,
    "return_token_ids": _LEAVE,
    "return_tokens_as_token_ids": _LEAVE,
    "prompt_logprobs": _LEAVE,
    "truncate_prompt_tokens": "send a shorter conversation",
}
_OURS = {"tools": "send them as tools"}


class ExtraFields(SamplingFields, kw_only=True):
    """What other servers take besides. ``chat_template_kwargs``: arguments of the chat template;
    ``enable_thinking``: the one that most of them have."""

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    regex: Any = None
    ebnf: Any = None
    chat_template: Any = None
    documents: Any = None
    skip_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None


def refuse_extras(fields: ExtraFields) -> None:
    """Refuses what would be ignored.

    Raises:
        DataError: names the field.
    """
    for name, fix in _NOT_SERVED.items():
        if getattr(fields, name):
            raise refused("not served here", where=name, fix=fix)


def template_args_of(fields: ExtraFields) -> dict[str, Any]:
    """Returns the arguments that the request gives to the chat template.

    Raises:
        DataError: one of them is the server's to give.
    """
    given = dict(fields.chat_template_kwargs or {})
    reserved = reserved_among(given) or next((name for name in given if name in _OURS), None)
    if reserved is not None:
        raise refused(
            "the server gives it to the chat template",
            where=f"chat_template_kwargs.{reserved}",
            fix=_OURS.get(reserved, _LEAVE),
        )
    if fields.enable_thinking is not None:
        given.setdefault("enable_thinking", fields.enable_thinking)
    return given


def effort_hints(effort: object) -> dict[str, Any]:
    """Returns what templates may read of a wish for more or less thinking, ``none`` to ``high``."""
    if not isinstance(effort, str):
        return {}
    if effort == "none":
        return {"enable_thinking": False}
    return {"reasoning_effort": effort}


def prefilled(
    messages: Sequence[ChatMessage], *, continues: bool, where: str
) -> tuple[tuple[ChatMessage, ...], bool]:
    """Returns the messages, and whether the last one is to go on; an empty one is only an opening.

    Raises:
        DataError: it can't go on.
    """
    last = messages[-1]
    if not continues:
        return tuple(messages), False
    if last.role != "assistant" or last.tool_calls:
        raise refused(
            "only a message of the assistant without calls can go on",
            where=where,
            fix="end with one, or leave it out",
        )
    if not last.content and not last.reasoning:
        if len(messages) == 1:
            raise refused("there is no message before it", where=where, fix="send a question")
        return tuple(messages[:-1]), False
    return tuple(messages), True
