"""How sessions understand requests, and what samples their answers: values and an interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from realsys.api.agent import Answer
from realsys.rollout.conversation.answer_forms import ANSWER_FORMS, AnswerForm
from realsys.rollout.conversation.chat_messages import ChatRequest, Unserved
from realsys.rollout.conversation.chat_rendering import ChatRenderer
from realsys.rollout.conversation.given_prompts import no_texts
from realsys.rollout.conversation.message_matching import MessageMatch

OnTokens = Callable[[Sequence[int]], None]


class SessionPolicy(Protocol):
    """What samples answers. Implementations find a server, wait for weights, and retry."""

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        limit: int | None,
        stop: Sequence[str],
        sampling: Mapping[str, Any],
        on_tokens: OnTokens | None,
        grammar: str = "",
        answer_prefix: int = 0,
    ) -> Answer:
        """Samples an answer to ``tokens``.

        Args:
            limit: most tokens; None: as many as the run allows.
            stop: texts at which sampling may end early; the session cuts there in any case.
            sampling: the client's wishes; a training run samples by its own settings.
            on_tokens: called with all tokens of the answer so far, whenever there are more. They are an
                ``AnswerSoFar`` where an answer that its client leaves is to be trained on.
            grammar: what the answer must be, see reply_grammar.py; empty: anything.
            answer_prefix: so many of the last ``tokens`` are the answer's own beginning. Returned is the
                rest; ``limit`` and ``grammar`` are of the whole.
        Raises:
            WaitTimeout, RemoteError: there is no answer.
        """


class SchemaUse(StrEnum):
    """What becomes of a request for a JSON schema, or for a call of certain tools (``tool_choice``)."""

    REFUSE = "refuse"  # a schema; tool_choice is ignored
    IGNORE = "ignore"  # both: answered as other requests are
    ENFORCE = "enforce"  # the engine holds the answer to it


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """How a session understands requests; the same for all of a run.

    Attributes:
        model: name that replies carry.
        match: how equal messages must be for a request to continue an answer.
        decode: tokens → text with special tokens. ``encode``: text → tokens, with those that the tokenizer
            puts before every text. ``num_ids``: tokens that a client may send; None: the engine knows it.
        end_ids: tokens that end an answer, not part of its text.
        max_calls: requests of one episode, above which it fails: an agent in a loop.
        special: special tokens of the tokenizer, their ids by text; for schemas that are enforced.
        unserved: what becomes of tools and parts of messages that the policy can't take.
    """

    renderer: ChatRenderer
    form: AnswerForm
    decode: Callable[[Sequence[int]], str]
    end_ids: frozenset[int]
    encode: Callable[[str], Sequence[int]] = no_texts
    num_ids: int | None = None
    model: str = "policy"
    match: MessageMatch = MessageMatch.TOOLS
    max_calls: int = 1000
    schemas: SchemaUse = SchemaUse.REFUSE
    special: Mapping[str, int] = field(default_factory=dict)
    unserved: Unserved = Unserved.REFUSE

    def form_of(self, request: ChatRequest) -> AnswerForm:
        """Returns how replies are read: those to prompts are texts and nothing else."""
        return ANSWER_FORMS["plain"] if request.prompts else self.form

    def text(self, tokens: Sequence[int]) -> str:
        """Decodes an answer with special tokens, without the token that ended it."""
        return self.decode(self.without_end(tokens))

    def without_end(self, tokens: Sequence[int]) -> Sequence[int]:
        """Returns an answer's tokens but for the one that ended it."""
        ended = bool(tokens) and tokens[-1] in self.end_ids
        return tokens[:-1] if ended else tokens
