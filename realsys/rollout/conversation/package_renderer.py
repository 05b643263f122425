"""Tokens of a conversation by the package ``renderers``: families written out in Python, no chat template.

For renderer_choice.py. The package goes on behind tokens that it is given. What it returns counts only if
it begins with all of them; else the conversation begins a branch. Answers are read by our own forms, and
where none fits by package_form.py. The package is imported when a renderer is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from realsys.api.errors import ConfigError, DataError
from realsys.config.extras import missing_packages
from realsys.rollout.conversation.chat_messages import ChatMessage
from realsys.rollout.conversation.chat_rendering import (
    NO_ARGS,
    RenderedChat,
    Tools,
    opens_thoughts,
    template_message,
)

PACKAGES = ("renderers", "httpx")  # it imports httpx, and does not ask for it
FAMILIES = (
    *("qwen3", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "qwen3-vl", "gemma4"),
    *("glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "gpt-oss", "hy3", "inkling"),
    *("kimi-k2", "kimi-k2.5", "laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"),
    *("llama-3", "minimax-m2", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
    *("deepseek-v3", "deepseek-r1", "deepseek-v4"),
)
_IDS_HAVE_NAMES = ("kimi-k2", "kimi-k2.5")
_LAST_TOKENS = 16  # enough for a mark at the end, whatever it is made of


class PackageRenderer:
    """A ``ChatRenderer`` over a renderer of the package.

    Args:
        family: one of FAMILIES.
        template_args: those arguments of the family's template that the package knows.
        keep_thoughts: thoughts of earlier answers stay where the family would drop them; else the package
            decides when a conversation is rendered anew, for most families at each question of the user.
    Raises:
        ConfigError: the package is not installed, or has no such renderer for this tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        family: str,
        *,
        template_args: Mapping[str, Any] | None = None,
        keep_thoughts: bool = True,
    ) -> None:
        self.tokenizer, self.family = tokenizer, family
        self.own_args: Mapping[str, Any] = dict(template_args or {})
        self.can_continue = False
        self.template = str(getattr(tokenizer, "chat_template", None) or "")
        self._package = made_by_package(
            tokenizer,
            family,
            template_args=template_args,
            keep_thoughts=keep_thoughts,
            where="agent_args.renderer, or --renderer",
        )

    def reads(self, name: str) -> bool:
        """Returns False: the package takes its arguments once, when it is loaded."""
        del name
        return False

    def whole(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools,
        *,
        args: Mapping[str, Any] = NO_ARGS,
        continues: bool = False,
    ) -> RenderedChat:
        """Renders a conversation from its beginning."""
        _refuse_continued(continues)
        tokens = self._asked(
            self._package.render_ids,
            self._messages(messages),
            tools=_tools(tools),
            add_generation_prompt=True,
        )
        return self._rendered(tokens)

    def behind(
        self,
        messages: Sequence[ChatMessage],
        answered: int,
        tools: Tools,
        *,
        prompt: Sequence[int],
        sampled: Sequence[int],
        args: Mapping[str, Any] = NO_ARGS,
        continues: bool = False,
    ) -> RenderedChat | None:
        """Renders what stands behind ``messages[:answered]``; None also where a client wrote answers."""
        _refuse_continued(continues)
        extended = self._asked(
            self._package.bridge_to_next_turn,
            list(prompt),
            list(sampled),
            self._messages(messages)[answered:],
            tools=_tools(tools),
        )
        if extended is None:
            return None
        # Some end at the last end of a turn that they find, which need not be where the answer ends
        tokens, before = list(extended.token_ids), [*prompt, *sampled]
        if tokens[: len(before)] != before or len(tokens) == len(before):
            return None
        return self._rendered(tokens[len(before) :])

    def _asked(self, ask: Callable[..., Any], *args: Any, **more: Any) -> Any:
        try:
            return ask(*args, **more)
        except Exception as error:  # a renderer may raise anything
            raise DataError(
                f"the renderer of {self.family} does not take these messages: {error}"[:400],
                where="messages",
                fix="send messages in an order, and text, that this model's family takes",
            ) from error

    def _messages(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        names = {call.id: call.name for m in messages for call in m.tool_calls}
        named: Iterable[ChatMessage] = (
            m if m.name or m.role != "tool" else replace(m, name=names.get(m.tool_call_id, ""))
            for m in messages
        )
        if self.family in _IDS_HAVE_NAMES:
            named = _with_family_ids(named)
        # Many families leave out a developer's message without a word; gpt-oss writes both alike
        return [template_message(m, takes_developer=False) for m in named]

    def _rendered(self, tokens: Sequence[int]) -> RenderedChat:
        end = str(self.tokenizer.decode(list(tokens[-_LAST_TOKENS:]), skip_special_tokens=False))
        return RenderedChat(tokens=tuple(tokens), thinking=opens_thoughts(end))


def _with_family_ids(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    """Gives calls and results the ids that Kimi writes, ``functions.NAME:NUMBER``: else no name is told."""
    given: dict[str, str] = {}
    number = 0
    for message in messages:
        calls = []
        for call in message.tool_calls:
            given[call.id] = f"functions.{call.name}:{number}"
            calls.append(replace(call, id=given[call.id]))
            number += 1
        answers = given.get(message.tool_call_id, message.tool_call_id)
        yield replace(message, tool_calls=tuple(calls), tool_call_id=answers)


def _refuse_continued(continues: bool) -> None:
    if continues:
        raise DataError(
            "a message that was begun can't go on with this model's renderer",
            where="messages",
            fix="end with a question or a tool's result, or use renderer=template",
        )


def _tools(tools: Tools) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in tools] or None  # an empty list makes some of them speak of tools


def made_by_package(
    tokenizer: Any,
    family: str,
    *,
    where: str,
    template_args: Mapping[str, Any] | None = None,
    keep_thoughts: bool = False,
) -> Any:
    """Makes the package's own renderer of a family; ``where``: the setting that asks for it.

    Raises:
        ConfigError: the package is not installed, or has no such renderer for this tokenizer.
    """
    for problem in missing_packages(PACKAGES, where=where):
        raise problem
    from renderers import config_from_name, create_renderer

    try:
        settings = config_from_name(family)
        if keep_thoughts:
            settings = type(settings)(thinking_retention="all")
        return create_renderer(tokenizer, settings, chat_template_kwargs=template_args or None)
    except Exception as error:  # an assertion of a token that is missing, a network that is, …
        raise ConfigError(
            f"the package renderers can't make {family!r} for this tokenizer: {error}"[:600],
            where=where,
            fix="name the model's family and arguments that it takes, or use renderer=template",
        ) from error
