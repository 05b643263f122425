"""Tokenizes prompts and conversations, by the tokenizer's chat template where it has one.

A prompt's tokens are the same for sampling, for fine-tuning and for the plan (models/prompt_lengths.py):

- with a chat template: the messages, and the template's opening of the answer; a text is a user's message;
- without: the text, ending in white space (a newline is added where it doesn't), behind a BOS token if the
  tokenizer puts one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from realsys.api.basics.template_args import all_texts
from realsys.api.errors import DataError
from realsys.data.sources.assistant_turns import TurnReader, any_of, sequences_of
from realsys.data.sources.marks_as_text import MarksAsText, tokenizers_marks, tokens_of
from realsys.data.sources.record_shape import Message, Tool, template_forms, with_system

PROBE = "1 + 1 = ?"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@dataclass(frozen=True, slots=True)
class TrainedSequence:
    """Tokens, and for each whether it has no loss."""

    tokens: list[int]
    no_loss: list[bool]

    def add(self, tokens: Sequence[int], *, no_loss: bool) -> None:
        """Appends tokens."""
        self.tokens.extend(tokens)
        self.no_loss.extend([no_loss] * len(tokens))


class PromptTokenizer:
    """A tokenizer with what a task puts around its prompts.

    Args:
        system: system prompt for messages that have none.
        template_args: keyword arguments of the chat template.
        marks_as_text: in whose texts the template's marks are text: ``tools``, ``all`` or ``none``.
    Raises:
        DataError: one of these is given, and the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system: str | None = None,
        template_args: Mapping[str, Any] | None = None,
        marks_as_text: str = "tools",
    ) -> None:
        self.tokenizer = tokenizer
        self._marks_as_text = marks_as_text
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self._system, self._args = system, dict(template_args or {})
        if not self.has_template and (system is not None or self._args):
            raise no_template("task.system" if system is not None else "task.template_args")

    def messages(self, prompt: str | Sequence[Message]) -> tuple[Message, ...]:
        """Returns the messages that the template gets, the system prompt among them."""
        given = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
        return with_system(given, self._system)

    def text(self, prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Formats a prompt as the model's input text, without a BOS token that a template doesn't put.

        Raises:
            DataError: messages without a template, or a template that refuses them.
        """
        if self.has_template:
            return self._rendered(self.messages(prompt), tools, opens_answer=True)
        if not isinstance(prompt, str):
            raise no_template("a prompt of messages")
        return prompt if prompt[-1:].isspace() else prompt + "\n"

    def tokens(self, prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Tokenizes a prompt, up to where the answer begins."""
        tokens = self.ids(self.text(prompt, tools))
        return tokens if self.has_template else [*_bos(self.tokenizer), *tokens]

    def ids(self, text: str) -> list[int]:
        """Tokenizes a text as it is, but for broken marks."""
        return tokens_of(
            text, lambda part: self.tokenizer(part, add_special_tokens=False).input_ids
        )

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[list[TrainedSequence], tuple[str, ...]]:
        """Tokenizes a conversation for fine-tuning: every assistant turn once, behind what sampling sees.

        A turn goes on the sequence of the turn before it where its context begins with that; where the
        template writes earlier messages otherwise by then (without their thoughts, say), it begins a
        sequence of its own.

        Returns:
            the sequences, and fields of turns that the template does not write, which are not trained; a
            turn of which it leaves out a call, or all, isn't either.
        Raises:
            DataError: no template, no assistant turn, or a template that refuses the messages.
        """
        if not self.has_template:
            raise no_template("a conversation")
        turns = self._reader(tools).read_all(with_system(tuple(messages), self._system))
        sequences = []
        for parts in sequences_of(turns):
            sequences.append(TrainedSequence([], []))
            for text, has_loss in parts:
                sequences[-1].add(self.ids(text), no_loss=not has_loss)
        if not sequences:
            raise _no_turn()
        return sequences, tuple(dict.fromkeys(name for turn in turns for name in turn.left_out))

    def end_ids(self) -> list[int]:
        """Returns the tokens that end an answer: as the template ends a turn, else the end token."""
        if self.has_template:
            with suppress(DataError):  # one that writes questions alone
                return self.ids(self._reader(()).end_mark(self.messages(PROBE)))
        end = self.tokenizer.eos_token_id
        return [] if end is None else [end]

    def stop_ids(self) -> list[int]:
        """Returns the tokens at which sampling stops: single ones that end an answer, or one with calls."""
        found = [self.end_ids()]
        if self.has_template:
            with suppress(DataError):  # one without tools
                name = PROBE_TOOL["function"]["name"]
                mark = self._reader((PROBE_TOOL,)).end_mark_of_calls(self.messages(PROBE), name)
                found.append(self.ids(mark))
        return sorted({ids[0] for ids in found if len(ids) == 1})

    def _reader(self, tools: Sequence[Tool]) -> TurnReader:
        return TurnReader(
            lambda given, opens: self._rendered(given, tools, opens_answer=opens),
            marks=self._marks,
            last_mark=self.tokenizer.eos_token or "",
        )

    @functools.cached_property
    def _marks(self) -> re.Pattern[str]:
        added: dict[str, int] = getattr(self.tokenizer, "get_added_vocab", dict)()
        return any_of({*added, *map(str, self.tokenizer.all_special_tokens)})

    @functools.cached_property
    def _literal(self) -> MarksAsText:
        marks = tokenizers_marks(self.tokenizer, all_texts(self.tokenizer.chat_template))
        return MarksAsText(marks, of=self._marks_as_text)

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, opens_answer: bool
    ) -> str:
        first: Exception | None = None
        for form in template_forms(self._literal.messages(messages)):
            try:
                text: str = self.tokenizer.apply_chat_template(
                    form,
                    add_generation_prompt=opens_answer,
                    tokenize=False,
                    **{**self._args, "tools": [*map(dict, tools)] or self._args.get("tools")},
                )
            except Exception as error:  # a template may raise anything
                first = first or error
            else:
                return text
        roles = ", ".join(str(m["role"]) for m in messages)
        raise DataError(
            f"the chat template can't be filled: {first}"[:300],
            where=f"messages of {roles}",
            fix="give messages that this model's template takes",
        ) from first


def no_template(what: str) -> DataError:
    """Makes the error for what only a chat template can render."""
    return DataError(
        "the tokenizer has no chat template",
        where=what,
        fix="use an instruction-tuned model, or prompts as plain text without system and template_args",
    )


def _no_turn() -> DataError:
    """Makes the error for a conversation without anything to train on."""
    return DataError(
        "the conversation has no assistant turn that the chat template writes",
        where="messages",
        fix="give conversations with answers, or leave these out by a filter",
    )


def _bos(tokenizer: Any) -> list[int]:
    """Returns the BOS token if the tokenizer adds one itself. (Some would add an EOS as well.)"""
    with_special = tokenizer("a").input_ids
    return [with_special[0]] if with_special[:1] == [tokenizer.bos_token_id] else []
