"""Fields that other open servers read beside those of the APIs, in all dialects (pure).

Each is honoured or refused: a client that sends one relies on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from realsys.api.basics.template_args import reserved_among
from realsys.rollout.conversation.chat_messages import ChatMessage
from realsys.rollout.dialects import held_replies
from realsys.rollout.dialects.body_fields import SamplingFields, refused

_LEAVE = "leave it out"
_LENGTH = "send max_tokens"
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Field → what to do instead. Values that are empty or false change nothing, and those of _NEUTRAL.
_NOT_SERVED: Mapping[str, str] = {
    **dict.fromkeys(("guided_grammar", "structural_tag", "grammar", "ebnf"), held_replies.WAYS),
    **dict.fromkeys(("guided_whitespace_pattern", "whitespace_pattern"), _LEAVE),
    **dict.fromkeys(("max_new_tokens", "n_predict"), _LENGTH),
    "min_new_tokens": "send min_tokens",
    "chat_template": "leave it out: the server's own counts",
    "documents": "send their text in a message",
    "skip_special_tokens": "leave it out: texts have all tokens but the one that ends them",
    "truncate_prompt_tokens": "send a shorter conversation",
    "stop_regex": "send stop",
    "n_probs": "send logprobs",
    **dict.fromkeys(
        ("thinking_budget", "thinking_token_budget"), "send max_tokens, or reasoning_effort"
    ),
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim"), _LEAVE),
    **dict.fromkeys(
        ("return_tokens_as_token_ids", "return_hidden_states", "prompt_embeds"), _LEAVE
    ),
    **dict.fromkeys(("prompt_logprobs", "input_ids", "lora_path", "eos_token_id"), _LEAVE),
    **dict.fromkeys(("logits_processors", "custom_logit_processor"), _LEAVE),
}
_NEUTRAL: Mapping[str, int] = {"truncate_prompt_tokens": -1}
_MEANT_AT_ZERO = ("prompt_logprobs", "max_new_tokens", "n_predict", "eos_token_id")
# Thoughts are always told
_THOUGHTS_LEFT_OUT = ("include_reasoning", "separate_reasoning")
_OURS = {"tools": "send them as tools"}


if TYPE_CHECKING:
    _NotServed = SamplingFields
else:
    _NotServed = msgspec.defstruct(
        "_NotServed",
        [(name, Any, None) for name in _NOT_SERVED],
        bases=(SamplingFields,),
        kw_only=True,
    )


class ExtraFields(_NotServed, kw_only=True):
    """What other servers take besides.

    ``chat_template_kwargs``: arguments of the chat template; ``enable_thinking``: the one that most have.
    ``add_special_tokens``: whether the tokenizer begins the prompt as it begins every text.
    ``return_token_ids``: whether the reply tells tokens. ``guided_json`` to ``structured_outputs``: what
    the reply is held to, see held_replies.py.
    ``thinking``, ``reasoning`` and ``reasoning_effort``: wishes. ``continue_final_message`` and
    ``add_generation_prompt``: whether the last message goes on.
    """

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    guided_json: Any = None
    guided_choice: Any = None
    guided_regex: Any = None
    json_schema: Any = None
    regex: Any = None
    structured_outputs: Any = None


def refuse_extras(
    fields: ExtraFields, *, has_token_ids: bool = False, begins_texts: bool = False
) -> None:
    """Refuses what would be ignored.

    Args:
        has_token_ids: the API's replies have a place for token ids.
        begins_texts: prompts begin as the tokenizer begins every text, not as a chat template does.
    Raises:
        DataError: names the field.
    """
    for name, fix in _NOT_SERVED.items():
        value = getattr(fields, name)
        is_zero = value == 0 and value is not False and name in _MEANT_AT_ZERO
        if (value and value != _NEUTRAL.get(name)) or is_zero:
            raise refused("not served here", where=name, fix=fix)
    if fields.return_token_ids and not has_token_ids:
        fix = "leave it out, or use /v1/chat/completions"
        raise refused("not served here", where="return_token_ids", fix=fix)
    if fields.add_special_tokens is not None and fields.add_special_tokens is not begins_texts:
        how = (
            "the tokenizer does begin texts"
            if begins_texts
            else "a chat template begins the prompt"
        )
        raise refused(
            how, where="add_special_tokens", fix="leave it out, or send token ids as prompt"
        )
    for name in _THOUGHTS_LEFT_OUT:
        if getattr(fields, name) is False:
            raise refused("thoughts are always told apart", where=name, fix=_LEAVE)


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


def template_hints_of(fields: ExtraFields, *, more: object = None) -> dict[str, Any]:
    """Returns what templates may read of the request's wishes for more or less thinking.

    Args:
        more: an effort that stands elsewhere in the body.
    Raises:
        DataError: a wish that no API has.
    """
    reasoning = fields.reasoning or {}
    hints: dict[str, Any] = {}
    for effort, where in (
        (fields.reasoning_effort, "reasoning_effort"),
        (reasoning.get("effort"), "reasoning.effort"),
        (more, "output_config.effort"),
    ):
        if effort is None:
            continue
        if effort not in _EFFORTS:
            fix = "send one of " + ", ".join(_EFFORTS)
            raise refused(f"{effort!r:.40} is no effort", where=where, fix=fix)
        hints["reasoning_effort"] = effort
        if effort == "none":
            hints["enable_thinking"] = False
    if isinstance(enabled := reasoning.get("enabled"), bool):
        hints["enable_thinking"] = enabled
    if fields.thinking is not None:
        kind = fields.thinking.get("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise refused(
                f"{kind!r:.40} is no kind of it",
                where="thinking.type",
                fix="send enabled, adaptive or disabled",
            )
        hints["enable_thinking"] = kind != "disabled"
    return hints


def opens_anew(fields: ExtraFields) -> None:
    """Refuses to go on with a message, in dialects that have no such choice.

    Raises:
        DataError: the request wants to.
    """
    if fields.continue_final_message:
        raise refused(
            "answers are not continued here",
            where="continue_final_message",
            fix="leave it out, or use /v1/chat/completions",
        )
    if fields.add_generation_prompt is False:
        raise refused(
            "an answer that is not opened is not served",
            where="add_generation_prompt",
            fix="leave it out",
        )


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
