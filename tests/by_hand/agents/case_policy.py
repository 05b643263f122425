"""A policy that gives the answers of an outsider's case, in its tokens and pieces, and logs them.

For outsider_endpoint.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from chat_families import ChatFamily
from scripted_policy import ScriptedPolicy

import realsys.api.agent as agent_api
from realsys.api.agent import Answer
from realsys.generation.engine.token_grammar import GrammarReader

HELD_S = 1.0  # an answer that its case holds goes on after this time
TOKEN_S = 0.002  # between the pieces of a short answer
SHORT = 300  # tokens
MOST_HELD = 3000  # tokens of an answer that a grammar holds
_CLOSERS = ("<|im_end|>", '"', "</tool_call>")
_BRACKETS = ("}", "]")  # which may stand in a text


@dataclass(eq=False)
class SampledAnswer:
    """An answer of the policy: its tokens, as many as it would sample at most, behind which context."""

    context: tuple[int, ...]
    tokens: tuple[int, ...]
    num_sampled: int = 0


@dataclass(eq=False, kw_only=True)
class CaseAsk:
    """An ``Ask`` that answers by script.

    Args:
        answers: texts, in the order of sampling.
        chunk: tokens of a piece; None: the whole answer is one.
        hold: text, number of tokens → whether no more is sampled while a client is there, for ``held_s``
            at most.
        as_bytes: one token a byte; else those of the tokenizer.
    Attributes:
        num_clients: that are connected now. ``ran_out``: a hold ended by its time.
    """

    family: ChatFamily
    answers: Sequence[str]
    chunk: int | None = None
    hold: Callable[[str, int], bool] | None = None
    held_s: float = HELD_S
    as_bytes: bool = True
    ends: bool = True
    context_length: int = 1_000_000
    max_new_tokens: int = 1_000_000
    log: list[SampledAnswer] = field(default_factory=list)
    contexts: list[tuple[int, ...]] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    num_clients: int = 0
    ran_out: bool = False

    def __post_init__(self) -> None:
        self._made = [self._tokens(text) for text in self.answers]  # not while others wait

    async def __call__(
        self,
        tokens: Sequence[int],
        limit: int | None = None,
        /,
        *,
        stop: Sequence[str] = (),
        on_tokens: Callable[[Any], None] | None = None,
        grammar: str = "",
        answer_prefix: int = 0,
        **_: Any,
    ) -> Answer:
        """Answers; ``answer_prefix`` of the last tokens are the answer's own."""
        split = len(tokens) - answer_prefix
        context, own = tuple(tokens[:split]), tuple(tokens[split:])
        self.contexts.append(context)
        self.asked.set()
        room = self.context_length - len(context)
        if room - answer_prefix <= 0:
            return self._answer((), stopped=False)
        entry = self._entry(context, own, grammar)
        most = room if grammar else min(room, limit or room, self.max_new_tokens)
        end = self._stopped_at(entry.tokens[:most], stop)
        position, holds_at = answer_prefix, self._holds_at(entry.tokens[:end])
        grown = list[int]()
        so_far = _so_far(grown)
        if position >= end and end < len(entry.tokens):
            return self._answer((), stopped=False)
        while position < end:
            if holds_at is not None and position >= holds_at:
                await self._held()
            step = min(end, position + (self.chunk or end))
            position = step if holds_at is None or position >= holds_at else min(step, holds_at)
            entry.num_sampled = max(entry.num_sampled, position)
            if on_tokens is not None:
                grown.extend(entry.tokens[answer_prefix + len(grown) : position])
                on_tokens(so_far())
                await asyncio.sleep(TOKEN_S if len(entry.tokens) <= SHORT else 0)
        made = entry.tokens[answer_prefix:end]
        return self._answer(made, stopped=bool(made) and made[-1] in self.family.end_ids)

    def _entry(self, context: tuple[int, ...], own: tuple[int, ...], grammar: str) -> SampledAnswer:
        for entry in reversed(self.log if own else []):
            if entry.context == context and entry.tokens[: len(own)] == own:
                return entry
        number = len(self.log)
        if grammar:
            made = held_tokens(self.family, grammar)
        elif number < len(self._made):
            made = self._made[number]
        else:
            made = self._tokens(f"Unforeseen {number}.")
        entry = SampledAnswer(context, own + made[len(own) :])
        self.log.append(entry)
        return entry

    def _tokens(self, text: str) -> tuple[int, ...]:
        ending = text + (self.family.ends[0] if self.ends else "")
        return answer_tokens(self.family, ending, self.as_bytes)

    def text(self, tokens: Sequence[int]) -> str:
        """Decodes tokens of an answer, without the one that ends it."""
        ended = bool(tokens) and tokens[-1] in self.family.end_ids
        return str(self.family.tokenizer.decode(list(tokens[:-1] if ended else tokens)))

    def _holds_at(self, tokens: Sequence[int]) -> int | None:
        if self.hold is None:
            return None
        for count in range(len(tokens) + 1):
            if self.hold(self.text(tokens[:count]), count):
                return count
        return None

    async def _held(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self.held_s
        while self.num_clients and not self.ran_out:
            await asyncio.sleep(0.005)
            self.ran_out = self.ran_out or loop.time() > until

    def _stopped_at(self, tokens: Sequence[int], stop: Sequence[str]) -> int:
        """Returns how many tokens there are up to the one that completes a stop text."""
        if not stop:
            return len(tokens)
        texts = (self.text(tokens[:count]) for count in range(1, len(tokens) + 1))
        found = (i for i, text in enumerate(texts, 1) if any(s in text for s in stop))
        return next(found, len(tokens))

    def _answer(self, tokens: Sequence[int], *, stopped: bool) -> Answer:
        more: dict[str, Any] = {}
        if "context_length" in {f.name for f in dataclasses.fields(Answer)}:
            more["context_length"] = self.context_length
        return Answer(
            tokens=tuple(tokens),
            logprobs=tuple(_logprobs(tokens)),
            versions=(7,) * len(tokens),
            stopped=stopped,
            **more,
        )


@cache
def answer_tokens(family: ChatFamily, text: str, as_bytes: bool) -> tuple[int, ...]:
    """Returns the tokens of a text, one a byte or those of the tokenizer."""
    if as_bytes:
        return ScriptedPolicy(family, []).tokens(text)
    return tuple(family.tokenizer.encode(text))


def _so_far(grown: list[int]) -> Callable[[], Any]:
    """Returns what tells of an answer's tokens so far, with log-probs where the session wants them."""
    kind = getattr(agent_api, "AnswerSoFar", None)
    if kind is None:
        return lambda: grown
    logprobs, versions = list[float](), list[int]()
    made = kind(tokens=grown, logprobs=logprobs, versions=versions)

    def told() -> Any:
        logprobs.extend(-float(i + 1) for i in range(len(logprobs), len(grown)))
        versions.extend([7] * (len(grown) - len(versions)))
        return made

    return told


def _logprobs(tokens: Sequence[int]) -> list[float]:
    return [-float(i + 1) for i in range(len(tokens))]


_READERS: dict[str, GrammarReader] = {}


def held_tokens(family: ChatFamily, grammar: str) -> tuple[int, ...]:
    """Samples an answer that a grammar holds: what closes it first, else anything."""
    tokenizer = family.tokenizer
    if family.name not in _READERS:
        _READERS[family.name] = GrammarReader(tokenizer, vocabulary=len(tokenizer))
    state = _READERS[family.name].read(grammar, stop_ids=family.end_ids)
    closers, brackets = _ids(tokenizer, _CLOSERS), _ids(tokenizer, _BRACKETS)
    rng, made = random.Random(0), list[int]()
    while len(made) < MOST_HELD:
        words = state.allowed().view(np.uint32)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(tokenizer)]
        allowed = np.flatnonzero(bits)
        is_in_text = str(tokenizer.decode(made)).count('"') % 2
        first = [i for i in closers + ([] if is_in_text else brackets) if bits[i]]
        token = first[0] if first else int(rng.choice(list(allowed)))
        made.append(token)
        if token in family.end_ids:
            break
        state.advance(token)
    return tuple(made)


def _ids(tokenizer: Any, marks: Sequence[str]) -> list[int]:
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    return [vocabulary[mark] for mark in marks if mark in vocabulary]
