"""Shows what was said in a group's episodes, for people: who wrote what, in order (pure)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from realsys.api.agent import Episode, Trajectory


class DecodesTokens(Protocol):
    """A tokenizer, as far as it is used here."""

    def decode(self, token_ids: list[int], /) -> str: ...


def shown_episodes(episodes: Sequence[Episode], tokenizer: DecodesTokens) -> dict[str, Any]:
    """Returns texts with special tokens, as the policy saw them, and what became of each episode.

    ``prompt`` is what the policy saw before its first answer, where that is the same in all sequences,
    which then begin behind it. Each of ``episodes`` has its ``reward``, ``sequences``, and if there are any
    finite ``numbers``, ``answers`` (``AnsweredRequest``) and the ``problem`` of its agent. A sequence has
    its ``reward``, ``role``, ``truncated`` if its last answer was cut off, and ``pieces``: each has a
    ``text``, ``by`` the ``policy`` or from the ``context``.
    """
    sequences = [sequence for episode in episodes for sequence in episode.sequences]
    split = shared_prompt_length(sequences)
    shown = []
    for episode in episodes:
        row: dict[str, Any] = {"reward": episode.reward}
        if episode.problem:
            row["problem"] = episode.problem
        if numbers := {k: v for k, v in episode.stats.items() if math.isfinite(v)}:
            row["numbers"] = numbers
        if episode.answers:
            row["answers"] = [answer.as_row() for answer in episode.answers]
        row["sequences"] = [_sequence_row(one, split, tokenizer) for one in episode.sequences]
        shown.append(row)
    prompt = tokenizer.decode(list(sequences[0].tokens[:split])) if split else ""
    return {"prompt": prompt, "episodes": shown}


def _sequence_row(sequence: Trajectory, split: int, tokenizer: DecodesTokens) -> dict[str, Any]:
    pieces = [
        {"by": "policy" if is_policy else "context", "text": tokenizer.decode(tokens)}
        for is_policy, tokens in _pieces(sequence, split)
    ]
    row: dict[str, Any] = {"reward": sequence.reward, "pieces": pieces}
    if sequence.role:
        row["role"] = sequence.role
    if sequence.truncated:
        row["truncated"] = True
    return row


def _pieces(sequence: Trajectory, split: int) -> Iterator[tuple[bool, list[int]]]:
    pairs = zip(sequence.from_policy[split:], sequence.tokens[split:], strict=True)
    for is_policy, run in itertools.groupby(pairs, key=lambda pair: pair[0]):
        yield is_policy, [token for _, token in run]


def shared_prompt_length(sequences: Sequence[Trajectory]) -> int:
    """Counts the tokens before the policy's first, if they are the same in all sequences; else 0."""
    first = sequences[0]
    length = _first_answer(first)
    same = first.tokens[:length]
    is_shared = all(_first_answer(s) == length and s.tokens[:length] == same for s in sequences)
    return length if is_shared else 0


def _first_answer(sequence: Trajectory) -> int:
    by_policy = sequence.from_policy
    return by_policy.index(True) if True in by_policy else len(by_policy)
