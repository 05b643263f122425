"""Tokens that an answer may continue with, where a grammar says what it is: JSON of a schema, a tool call.

For continuous.py. Grammars are texts in the Lark dialect of the package llguidance, which is imported when
the first one is read. The same tokens always leave the same ones: an answer does not depend on how many
requests it took.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realsys.api.errors import ConfigError, DataError
from realsys.config.extras import missing_packages

PACKAGES = ("llguidance",)
MAX_GRAMMAR = 1 << 20  # characters
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_KEPT_TOKENIZERS = 4  # one for each set of stop tokens, which clients may choose


class TokenGrammar:
    """One answer's grammar, and how far the answer has come.

    Attributes:
        fault: why the answer can't go on; empty: it can. A grammar may take more work than is allowed, or
            have no end.
    """

    fault: str = ""

    def __init__(self, matcher: Any, *, vocabulary: int, stop_ids: frozenset[int]) -> None:
        from llguidance.numpy import allocate_token_bitmask

        self._matcher, self._vocabulary, self._stop_ids = matcher, vocabulary, stop_ids
        self._words: NDArray[np.int32] = allocate_token_bitmask(1, vocabulary)

    def take(self, tokens: Sequence[int]) -> None:
        """Advances by tokens of the answer; a stop token ends it.

        Raises:
            DataError: the grammar does not allow one of them.
        """
        for token in tokens:
            if token not in self._stop_ids and not self._matcher.consume_token(token):
                raise DataError(
                    f"the grammar does not allow token {token} of the answer so far",
                    where="generation request",
                    fix="continue an answer with the grammar that it began with",
                )

    def advance(self, token: int) -> None:
        """Advances by the token that was sampled; sets ``fault`` if that can't be."""
        if (
            not self.fault
            and token not in self._stop_ids
            and not self._matcher.consume_token(token)
        ):
            self.fault = _first_line(self._matcher.get_error()) or f"it refuses token {token}"

    def allowed(self) -> NDArray[np.int32]:
        """Returns which tokens may follow, at least one: a bit of 32 in each word, from the lowest on."""
        from llguidance.numpy import fill_next_token_bitmask

        if not self._matcher.is_error():
            fill_next_token_bitmask(self._matcher, self._words)
        if self._matcher.is_error():
            self.fault = _first_line(self._matcher.get_error()) or "llguidance gives up"
        elif not self._words.any() and not self._matcher.is_accepting():
            self.fault = "nothing may follow"
        if self.fault or not self._words.any():
            self._words[:] = 0
            for token in self._stop_ids:
                self._words[0, token // 32] |= np.uint32(1 << token % 32).view(np.int32)
        words: NDArray[np.int32] = self._words[0]
        return words


class GrammarReader:
    """Reads the grammars of answers in one tokenizer's tokens.

    Args:
        tokenizer: a fast one of transformers.
        vocabulary: number of the model's tokens, which may be more than the tokenizer's.
    """

    def __init__(self, tokenizer: Any, *, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._known: dict[frozenset[int], Any] = {}

    def read(self, grammar: str, *, stop_ids: frozenset[int]) -> TokenGrammar:
        """Reads a grammar.

        Args:
            stop_ids: tokens that end an answer, allowed where it is complete.
        Raises:
            DataError: it can't be read, or nothing would end the answer. ConfigError: the package is not
                installed, or can't read this tokenizer.
        """
        stop_ids = frozenset(token for token in stop_ids if 0 <= token < self._vocabulary)
        if not stop_ids:
            raise DataError(
                "a grammar, and no token that ends the answer",
                where="generation request",
                fix="leave out ignore_eos, or name stop_token_ids",
            )
        _need_package()
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer_ending_with(stop_ids), grammar[:MAX_GRAMMAR])
        if matcher.is_error():
            raise DataError(
                f"a grammar can't be read: {matcher.get_error()}"[:600],
                where="generation request",
                fix="send another one",
            )
        return TokenGrammar(matcher, vocabulary=self._vocabulary, stop_ids=stop_ids)

    def _tokenizer_ending_with(self, stop_ids: frozenset[int]) -> Any:
        if stop_ids not in self._known:
            from llguidance.hf import from_tokenizer

            while len(self._known) >= _KEPT_TOKENIZERS:
                del self._known[next(iter(self._known))]
            try:
                made = from_tokenizer(
                    self._tokenizer, n_vocab=self._vocabulary, eos_token=sorted(stop_ids)
                )
            except Exception as error:  # a slow tokenizer, one without a backend, …
                raise ConfigError(
                    f"grammars can't be used with this tokenizer: {error}"[:600],
                    where="generation request",
                    fix="use a fast tokenizer (tokenizer.json), or no JSON schemas",
                ) from error
            self._known[stop_ids] = made
        return self._known[stop_ids]


def grammar_fault(grammar: str) -> str:
    """Returns why a grammar can't be read, in words; empty: it can.

    Raises:
        ConfigError: the package is not installed.
    """
    _need_package()
    if len(grammar) > MAX_GRAMMAR:
        return f"a grammar of {len(grammar):,} characters, {MAX_GRAMMAR:,} at most"
    from llguidance import LLMatcher

    # Without the place in a grammar that its writer never saw
    fault = _PLACE.sub("", str(LLMatcher.validate_grammar(grammar)).partition("\n   1 | ")[0])
    return fault.strip()[:600]


def _need_package() -> None:
    for problem in missing_packages(PACKAGES, where="answers by a JSON schema"):
        raise problem


def _first_line(error: object) -> str:
    """Returns what an error of the package says before it shows its state."""
    return str(error or "").partition("\n")[0][:600]
