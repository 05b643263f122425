"""A policy for tests of conversations: any tokens, weights that change while it answers, a log of it all.

Every sampled token has a log-prob that no other one has, so that wherever one turns up later it is known
which one it is.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from chat_families import ChatFamily

from realsys.api.agent import Answer, AnswerSoFar
from realsys.api.errors import RemoteError

WORDS = (
    *(
        "the answer",
        " is",
        " 42",
        "\n",
        " ",
        "x = 3",
        "search",
        " weather in Paris",
        "4.5",
        "STOP",
        " ",
    ),
    *(
        "über",
        "日本語",
        "😀",
        "e\u0301",
        "\n\n",
        "so",
        "END",
        "}",
        '"',
        "<b>",
        " the other answers",
    ),
)


@dataclass(frozen=True)
class SampledTokens:
    """One answer as the engine made it. ``first``: number of its first token among all of the log's."""

    number: int
    context: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    kept: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class SamplingNoise:
    """How an answer's tokens differ from those that a tokenizer makes of its text.

    Attributes:
        splits: chance that a piece of text is cut at any byte before it becomes tokens.
        any_token: chance that a token is followed by any token of the vocabulary.
    """

    splits: float = 0.0
    any_token: float = 0.0


@dataclass(eq=False, kw_only=True)
class SimulatedPolicy:
    """A ``SessionPolicy``. Answers are texts of words, thoughts and calls, spoiled by ``noise``.

    Args:
        fails: chance that a request fails.
        with_kept: sampling is from a part of the vocabulary.
    """

    family: ChatFamily
    rng: random.Random
    noise: SamplingNoise = field(default_factory=SamplingNoise)
    context_length: int = 3000
    fails: float = 0.0
    calls: float = 0.3
    with_kept: bool = False
    version: int = 0
    log: list[SampledTokens] = field(default_factory=list)
    asked: int = 0
    _drawn: int = 0

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        limit: int | None,
        stop: Sequence[str],
        sampling: Mapping[str, Any],
        on_tokens: Callable[[Sequence[int]], None] | None,
        grammar: str = "",
        answer_prefix: int = 0,
    ) -> Answer:
        """Samples an answer and logs it."""
        self.asked += 1
        rng, context = self.rng, tuple(tokens)
        await asyncio.sleep(0)
        if rng.random() < self.fails:
            raise RemoteError("the server is gone", where="simulated", fix="ask again")
        room = min((limit or 60) - answer_prefix, self.context_length - len(context))
        if room <= 0:
            return Answer(tokens=(), logprobs=(), versions=(), stopped=False)
        drawn = self._tokens(self._text(context))
        ends = bool(rng.random() < 0.85 or not drawn)
        if ends:
            drawn.append(rng.choice(sorted(self.family.end_ids)))
        so_far = AnswerSoFar(tokens=[], logprobs=[], versions=[], kept=[])
        first, self._drawn = self._drawn, self._drawn + min(room, len(drawn))
        try:
            for i, token in enumerate(drawn[:room], first):
                so_far.tokens.append(token)  # type: ignore[attr-defined]
                so_far.logprobs.append(-1.0 - i)  # type: ignore[attr-defined]
                so_far.versions.append(self.version)  # type: ignore[attr-defined]
                if self.with_kept:
                    so_far.kept.append(str(-1.0 - i).encode())  # type: ignore[attr-defined]
                if rng.random() < 0.1:
                    self.version += 1
                if rng.random() < 0.1:
                    if on_tokens is not None:
                        on_tokens(so_far)
                    await asyncio.sleep(0)
                if stop and rng.random() < 0.5 and any(s in self._decode(so_far) for s in stop):
                    break
        finally:  # also of one that is given up: what was sampled until then
            answer = so_far.first(len(so_far))
            self._log(context, answer)
        return replace(answer, stopped=answer.tokens[-1] in self.family.end_ids)

    def _log(self, context: tuple[int, ...], answer: Answer) -> None:
        tokens = (answer.tokens, answer.logprobs, answer.versions, answer.kept)
        self.log.append(SampledTokens(len(self.log), context, *tokens))

    # ---- what it writes --------------------------------------------------------------------------

    def _text(self, context: tuple[int, ...]) -> str:
        rng = self.rng
        text = "".join(rng.choice(WORDS) for _ in range(rng.randrange(8)))
        if rng.random() < self.calls:
            calls = 1 if rng.random() < 0.8 else 2
            text += "".join(self._call() for _ in range(calls))
        thoughts = "".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 5)))
        if self.family.thinks and self._decode(context[-3:]).rstrip().endswith("<think>"):
            return f"{thoughts}\n</think>\n\n{text}"
        if self.family.thinks and rng.random() < 0.6:
            return f"<think>\n{thoughts}\n</think>\n\n{text}"
        return text

    def _call(self) -> str:
        rng = self.rng
        values = (1, 1.0, 3, 2.5, "Paris", "ü", ["a", 1], {"z": 1, "a": None}, 1e21)
        names = ["query", "limit", "b"][: rng.randrange(4)]
        arguments = {name: rng.choice(values) for name in names}
        return self.family.call_text("search", arguments, indent=rng.random() < 0.3)

    def _tokens(self, text: str) -> list[int]:
        """Tokenises ``text``, some of it in pieces, with some tokens more."""
        rng, tokenizer = self.rng, self.family.tokenizer
        made: list[int] = []
        for token in tokenizer.encode(text, add_special_tokens=False):
            made += self._split(token) if rng.random() < self.noise.splits else [token]
            if rng.random() < self.noise.any_token:
                more = rng.randrange(len(tokenizer))
                made += [] if more in self.family.end_ids else [more]
        return made

    def _split(self, token: int) -> list[int]:
        """Returns tokens of the same bytes: one for each of them up to a place, and the rest."""
        tokenizer = self.family.tokenizer
        letters = tokenizer.convert_ids_to_tokens(token)
        if token in self.family.tokenizer.added_tokens_decoder:
            return [token]
        cut = self.rng.randrange(len(letters) + 1)
        rest = tokenizer.convert_tokens_to_ids(letters[cut:]) if cut < len(letters) else None
        pieces = letters[:cut] if rest is not None else letters
        return [tokenizer.convert_tokens_to_ids(x) for x in pieces] + (
            [rest] if rest is not None else []
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.family.tokenizer.decode(list(tokens)))
