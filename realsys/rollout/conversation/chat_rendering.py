"""Tokens of a conversation by the tokenizer's chat template (pure, given the tokenizer).

A conversation is rendered whole only where it begins. Behind an answer of the policy only what follows it
is rendered, and put behind the tokens that were sampled: these are never written or tokenised anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from realsys.api.basics.template_args import all_texts, template_for
from realsys.api.basics.thoughts import THINK
from realsys.api.errors import ConfigError, DataError
from realsys.data.sources.assistant_turns import ANSWER_MARK
from realsys.data.sources.marks_as_text import MarksAsText, tokenizers_marks, tokens_of
from realsys.models.render_template import names_read
from realsys.rollout.conversation.chat_messages import ChatMessage, ChatRequest, ToolCall

Tools = Sequence[Mapping[str, Any]]
NO_ARGS: Mapping[str, Any] = {}

# For tokenizers without a template of their own. Roles by name, turns that end in the end token, tools
# and calls as Hermes models write them.
PLAIN_TEMPLATE = """\
{%- macro turn(role, text) -%}{{ role + ': ' + text + '\\n' }}{%- endmacro -%}
{%- if tools -%}
{{ turn('tools', tools | tojson) }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ 'assistant: ' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) +
'</tool_call>' }} {%- endfor -%}
{{ eos_token + '\\n' }}
{%- else -%}
{{ turn(message.role, message.content or '') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}
"""

_UNSET = object()
_AS_IT_IS = {"add_special_tokens": False}


@dataclass(frozen=True, kw_only=True)
class RenderedChat:
    """Tokens up to where the policy's answer begins. ``thinking``: they open its thoughts."""

    tokens: tuple[int, ...]
    thinking: bool = False


class ChatRenderer(Protocol):
    """Turns messages into tokens. Implementations keep no state.

    Attributes:
        template: by whose marks the policy's answers are read; empty: there is none.
        own_args: of the template, as the run has them.
        can_continue: whether an answer that was begun can go on.
    """

    template: str
    own_args: Mapping[str, Any]
    can_continue: bool

    def reads(self, name: str) -> bool:
        """Returns whether an argument of this name can be given with a request."""

    def whole(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools,
        *,
        args: Mapping[str, Any] = NO_ARGS,
        continues: bool = False,
    ) -> RenderedChat:
        """Renders a conversation from its beginning.

        Args:
            args: of the template, besides and before those that it always gets.
            continues: the last message is the assistant's and has no end: the policy goes on with it.
        Raises:
            DataError: the template refuses these messages.
        """

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
        """Renders what stands behind ``messages[:answered]``, the last of which the policy wrote.

        Args:
            prompt: all tokens before that answer. sampled: its own; where the last one ends a turn, that
                is not written twice.
            args, continues: as of ``whole``.
        Returns:
            Tokens to put behind these, which stay as they are; None if the renderer does not know where
            the turn ends, or would change what stands before.
        Raises:
            DataError: the template refuses these messages.
        """


class TemplateRenderer:
    """A ``ChatRenderer`` over a transformers tokenizer.

    Args:
        end_ids: tokens that end an answer.
        template_args: keyword arguments of the template, e.g. ``{"enable_thinking": False}``.
        keep_thoughts: thoughts of earlier answers stay where the template would drop them; else such a
            conversation is rendered anew, without them.
        marks_as_text: in whose texts the template's marks are text: ``tools``, ``all`` or ``none``.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_ids: Iterable[int],
        template: str | None = None,
        template_args: Mapping[str, Any] | None = None,
        keep_thoughts: bool = True,
        marks_as_text: str = "tools",
    ) -> None:
        self.tokenizer, self.keep_thoughts = tokenizer, keep_thoughts
        own = getattr(tokenizer, "chat_template", None)
        self._plain = template or template_for(own, tools=False) or PLAIN_TEMPLATE
        self.template = template or template_for(own, tools=True) or self._plain
        self.own_args: Mapping[str, Any] = dict(template_args or {})
        self.can_continue = True
        self._end_ids = frozenset(end_ids)
        self._names = names_read(self._plain) | names_read(self.template)
        marks = tokenizers_marks(tokenizer, template or all_texts(own or PLAIN_TEMPLATE))
        self._literal = MarksAsText(marks, of=marks_as_text)
        self._takes_developer = "developer" in self.template
        ends = [tokenizer.decode([i], skip_special_tokens=False) for i in sorted(self._end_ids)]
        self._ends = [end for end in ends if end]
        self._shows_turn_ends = self._find_turn_end() is not None
        self._ends_itself = self._shows_turn_ends and self._writes_turn_end()

    def reads(self, name: str) -> bool:
        """Returns whether the template has this name."""
        return name in self._names

    def whole(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools,
        *,
        args: Mapping[str, Any] = NO_ARGS,
        continues: bool = False,
    ) -> RenderedChat:
        """Renders a conversation from its beginning."""
        messages = self._broken(messages)
        return self._rendered(self._context(messages, tools, args, continues), messages, continues)

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
        """Renders what stands behind ``messages[:answered]``; of the tokens the last one counts."""
        if not self._shows_turn_ends:
            return None
        messages = self._broken(messages)
        if not self.keep_thoughts and self._drops_thoughts(messages, answered, tools, args):
            return None
        mark = _unused_mark(messages, tools)
        answer = _marked(messages[answered - 1], mark)
        marked = [*messages[: answered - 1], answer, *messages[answered:]]
        text = self._context(marked, tools, args, continues)
        # The last one: a template may list the calls before the content, or echo them
        _, found, after_mark = text.rpartition(mark)
        turn_end = _first_of(self._ends, after_mark)
        if not found or turn_end is None:
            return None
        closing, _, rest = after_mark.partition(turn_end)
        if _is_swallowed(messages[answered:], closing, rest):
            return None
        last = sampled[-1] if sampled else None
        has_ended = last in self._end_ids and (
            self._ends_itself
            or self.tokenizer.decode([last], skip_special_tokens=False) == turn_end
        )
        text = rest if has_ended else turn_end + rest
        return self._rendered(text, messages, continues)

    def _broken(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        return [
            replace(m, content=self._literal.text(m.content)) if self._literal.is_of(m.role) else m
            for m in messages
        ]

    def _rendered(
        self, text: str, messages: Sequence[ChatMessage], continues: bool
    ) -> RenderedChat:
        thinking = opens_thoughts(text)
        if continues:
            prefill = messages[-1]
            opened = prefill.content.lstrip().startswith(THINK[0])
            is_open = opened and THINK[1] not in prefill.content
            thinking = is_open or bool(prefill.reasoning and not prefill.content)
        return RenderedChat(tokens=self._ids(text), thinking=thinking)

    def _drops_thoughts(
        self,
        messages: Sequence[ChatMessage],
        answered: int,
        tools: Tools,
        args: Mapping[str, Any],
    ) -> bool:
        thoughts = [m.reasoning for m in messages[:answered] if m.reasoning]
        if not thoughts:
            return False
        text, place = self._text(messages, tools, args), 0
        for thought in map(str.strip, thoughts):
            # They stand in order: looked for from the beginning each, that were quadratic.
            if (found := text.find(thought, place)) >= 0:
                place = found + len(thought)
            elif thought not in text:
                return True
        return False

    def _context(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools,
        args: Mapping[str, Any],
        continues: bool,
    ) -> str:
        """Renders a conversation up to where the policy goes on: behind the opening of an answer, or within
        the last message, in which the template's own text before a content is kept."""
        if not continues:
            return self._text(messages, tools, args)
        *before, prefill = messages
        if prefill.reasoning:
            prefill = replace(prefill, content=self._with_thoughts(prefill), reasoning="")
        if prefill.content.lstrip().startswith(THINK[0]):
            opening = self._text(before, tools, args)
            if opens_thoughts(opening):
                opening = opening.rstrip().removesuffix(THINK[0])
            return opening + prefill.content.lstrip()
        mark = _unused_mark(messages, tools, "prefill")
        text = self._text([*before, replace(prefill, content=mark)], tools, args, opens=False)
        opening, found, _ = text.rpartition(mark)
        if not found:
            raise DataError(
                "the model's chat template does not write the message that is to go on",
                where=f"messages[{len(before)}]",
                fix="end with a question, or a tool's result",
            )
        return opening + prefill.content

    def _with_thoughts(self, prefill: ChatMessage) -> str:
        """Returns the text of an answer that was begun with thoughts, or within them."""
        if THINK[0] not in self.template:
            raise DataError(
                "the model's chat template writes no thoughts",
                where="messages, thoughts of the last one",
                fix="leave them out",
            )
        thoughts = f"{THINK[0]}\n{prefill.reasoning}"
        return f"{thoughts}\n{THINK[1]}\n\n{prefill.content}" if prefill.content else thoughts

    def _text(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools,
        args: Mapping[str, Any] = NO_ARGS,
        *,
        opens: bool = True,
    ) -> str:
        first: Exception | None = None
        for as_text in (False, True) if any(m.tool_calls for m in messages) else (False,):
            try:
                text: str = self.tokenizer.apply_chat_template(
                    [self._for_template(m, as_text) for m in messages],
                    tools=[dict(t) for t in tools] or None,
                    chat_template=self.template if tools else self._plain,
                    add_generation_prompt=opens,
                    tokenize=False,
                    **{**self.own_args, **args},
                )
            except Exception as error:  # a template may raise anything
                first = first or error
            else:
                return text
        raise DataError(
            f"the model's chat template can't be filled: {first}"[:400],
            where="messages of " + ", ".join(m.role for m in messages[-20:]),
            fix="send messages in an order that this model's template takes",
        ) from first

    def _for_template(self, message: ChatMessage, as_text: bool) -> dict[str, Any]:
        return template_message(
            message, takes_developer=self._takes_developer, arguments_as_text=as_text
        )

    def _ids(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(tokens_of(text, lambda part: self.tokenizer(part, **_AS_IT_IS).input_ids))
        except (TypeError, ValueError) as error:  # half of a surrogate pair, which JSON can hold
            raise DataError(
                f"the text can't be tokenised: {error}"[:400],
                where="messages",
                fix="send text that UTF-8 can hold",
            ) from error

    def _find_turn_end(self) -> str | None:
        """Returns the end token that the template writes behind an answer; None if it writes none."""
        talk = [
            ChatMessage(role="user", content="?"),
            ChatMessage(role="assistant", content=ANSWER_MARK),
            ChatMessage(role="user", content="?"),
        ]
        try:
            _, found, behind = self._text(talk, ()).partition(ANSWER_MARK)
        except DataError as error:
            raise ConfigError(
                f"the chat template does not take a question, an answer and a question: {error.what}",
                where="the tokenizer's chat template",
                fix="use another tokenizer or give another template",
            ) from error
        return _first_of(self._ends, behind) if found else None

    def _writes_turn_end(self) -> bool:
        """Returns whether a last answer has the token that ends a turn: else it is the next message's."""
        talk = [
            ChatMessage(role="user", content="?"),
            ChatMessage(role="assistant", content=ANSWER_MARK),
        ]
        try:
            _, _, behind = self._text(talk, (), opens=False).partition(ANSWER_MARK)
        except DataError:  # it takes no conversation that ends so
            return True
        return _first_of(self._ends, behind) is not None


def request_args(request: ChatRequest, renderer: ChatRenderer) -> dict[str, Any]:
    """Returns the arguments that a request's chat template gets otherwise than the run's requests do.

    Raises:
        DataError: one of them would change nothing.
    """
    own = renderer.own_args
    for name, value in request.template_args.items():
        if not renderer.reads(name) and own.get(name, _UNSET) != value:
            raise DataError(
                f"{name!r} can't be given with a request: the chat template reads none, or the renderer "
                "takes its arguments once",
                where=name if name == "enable_thinking" else f"chat_template_kwargs.{name}",
                fix="leave it out",
            )
    hints = {n: v for n, v in request.template_hints.items() if renderer.reads(n) and n not in own}
    given = {**hints, **request.template_args}
    return {name: value for name, value in given.items() if own.get(name, _UNSET) != value}


def template_message(
    message: ChatMessage, *, takes_developer: bool, arguments_as_text: bool = False
) -> dict[str, Any]:
    """Returns a message as chat templates take it; a developer's as the system's, unless they know both.

    Most templates write arguments of calls by themselves and want values. DeepSeek-V3's wants texts.
    """
    role = message.role
    if role == "developer" and not takes_developer:
        role = "system"
    made: dict[str, Any] = {"role": role, "content": message.content}
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            _call(call, call.arguments) if arguments_as_text else _template_call(call)
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    if message.name:
        made["name"] = message.name
    return made


def _template_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments: Any = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    return _call(call, arguments)


def _call(call: ToolCall, arguments: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _marked(answer: ChatMessage, mark: str) -> ChatMessage:
    """Returns an answer of the same shape whose text holds ``mark`` only.

    Calls keep ids and names, which templates look up for results; some templates leave out the content
    of an answer that calls tools, so the arguments hold the mark, too.
    """
    calls = tuple(replace(c, arguments=json.dumps({"mark": mark})) for c in answer.tool_calls)
    return replace(answer, content=mark, reasoning="", tool_calls=calls)


def _unused_mark(messages: Sequence[ChatMessage], tools: Tools, what: str = "answer") -> str:
    """Returns a text that none of these holds in any spelling, since it depends on all of them."""
    text = repr((messages, tools)).encode("utf-8", "surrogatepass")
    return f"{what}-{hashlib.blake2b(text, digest_size=8).hexdigest()}-stands-here"


def _first_of(ends: Sequence[str], text: str) -> str | None:
    places = {end: text.find(end) for end in ends if end in text}
    return min(places, key=places.__getitem__) if places else None


def _is_swallowed(behind: Sequence[ChatMessage], closing: str, rest: str) -> bool:
    """Returns whether what follows an answer stands before the end of a turn: it is not the answer's then.

    Some templates don't end turns that call tools.
    """
    content = behind[0].content.strip() if behind else ""
    return bool(content) and content in closing and content not in rest


def opens_thoughts(text: str) -> bool:
    """Returns whether an answer behind ``text`` begins within its thoughts."""
    return text.rstrip().endswith(THINK[0])
