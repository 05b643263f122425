"""Tokenizes prompts and conversations, by the tokenizer's chat template where it has one.

A prompt's tokens are the same for sampling, for fine-tuning and for the plan (models/prompt_lengths.py):

- with a chat template: the messages, and the template's opening of the answer; a text is a user's message;
- without: the text, ending in white space (a newline is added where it doesn't), behind a BOS token if the
  tokenizer puts one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realsys.api.errors import DataError
from realsys.data.sources.record_shape import Message, with_system


class PromptTokenizer:
    """A tokenizer with what a task puts around its prompts.

    Args:
        system: system prompt for messages that have none.
        template_args: keyword arguments of the chat template.
    Raises:
        DataError: one of these is given, and the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self._system, self._args = system, dict(template_args or {})
        if not self.has_template and (system is not None or self._args):
            raise no_template("task.system" if system is not None else "task.template_args")

    def messages(self, prompt: str | Sequence[Message]) -> tuple[Message, ...]:
        """Returns the messages that the template gets, the system prompt among them."""
        given = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
        return with_system(given, self._system)

    def text(self, prompt: str | Sequence[Message]) -> str:
        """Formats a prompt as the model's input text, without a BOS token that a template doesn't put.

        Raises:
            DataError: messages without a template, or a template that refuses them.
        """
        if self.has_template:
            return self._rendered(self.messages(prompt), opens_answer=True)
        if not isinstance(prompt, str):
            raise no_template("a prompt of messages")
        return prompt if prompt[-1:].isspace() else prompt + "\n"

    def tokens(self, prompt: str | Sequence[Message]) -> list[int]:
        """Tokenizes a prompt, up to where the answer begins."""
        tokens = self.ids(self.text(prompt))
        return tokens if self.has_template else [*_bos(self.tokenizer), *tokens]

    def ids(self, text: str) -> list[int]:
        """Tokenizes a text as it is."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool], int]:
        """Tokenizes a conversation for fine-tuning on every assistant turn.

        A turn is what the template adds to its opening of the answer. Templates may write earlier turns
        otherwise than the last one (without their thoughts, say): such a turn has another text than the
        model would have written, and no loss.

        Returns:
            tokens, for each whether it has no loss, and the number of assistant turns without any.
        Raises:
            DataError: no template, or no assistant turn that it keeps as it was written.
        """
        if not self.has_template:
            raise no_template("a conversation")
        turns = with_system(tuple(messages), self._system)
        whole, end_id = self._rendered(turns), self.tokenizer.eos_token_id
        tokens: list[int] = []
        no_loss: list[bool] = []
        at = num_rewritten = 0
        for place, message in enumerate(turns):
            if message["role"] != "assistant":
                continue
            opening = self._rendered(turns[:place], opens_answer=True)
            turn = self._rendered(turns[: place + 1])
            if not turn.startswith(opening) or not whole.startswith(turn) or len(opening) < at:
                num_rewritten += 1
                continue
            before, answer = self.ids(whole[at : len(opening)]), self.ids(turn[len(opening) :])
            if end_id not in answer and place + 1 == len(turns):
                answer.append(end_id)
            # White space behind the end token is the template's
            trained = len(answer) - answer[::-1].index(end_id) if end_id in answer else len(answer)
            tokens += before + answer
            no_loss += [True] * len(before) + [i >= trained for i in range(len(answer))]
            at = len(turn)
        if all(no_loss):
            raise _no_turn(num_rewritten)
        return tokens, no_loss, num_rewritten

    def _rendered(self, messages: Sequence[Message], *, opens_answer: bool = False) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                add_generation_prompt=opens_answer,
                tokenize=False,
                **self._args,
            )
        except Exception as error:  # a template may raise anything
            roles = ", ".join(str(m["role"]) for m in messages)
            raise DataError(
                f"the chat template can't be filled: {error}"[:300],
                where=f"messages of {roles}",
                fix="give messages that this model's template takes",
            ) from error
        return text


def no_template(what: str) -> DataError:
    """Makes the error for what only a chat template can render."""
    return DataError(
        "the tokenizer has no chat template",
        where=what,
        fix="use an instruction-tuned model, or prompts as plain text without system and template_args",
    )


def _no_turn(num_rewritten: int) -> DataError:
    """Makes the error for a conversation without anything to train on."""
    if num_rewritten:
        return DataError(
            "the chat template writes every assistant turn otherwise than it opens an answer",
            where="chat template",
            fix="give prompt and answer instead, or try other task.template_args",
        )
    return DataError(
        "the conversation has no assistant turn",
        where="messages",
        fix="give conversations with answers, or leave these out by a filter",
    )


def _bos(tokenizer: Any) -> list[int]:
    """Returns the BOS token if the tokenizer adds one itself. (Some would add an EOS as well.)"""
    with_special = tokenizer("a").input_ids
    return [with_special[0]] if with_special[:1] == [tokenizer.bos_token_id] else []
