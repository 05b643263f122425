"""Whatever a client does with its history, what is trained on is what was sampled, where it was sampled.

Fifty histories of each family; a hundred thousand by hand: tests/by_hand/agents/fuzz_histories.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from chat_families import FAMILIES, ChatFamily
from fuzzed_history import FuzzedHistory

from realsys.rollout.conversation import answer_tree
from realsys.rollout.conversation.answer_tree import AnswerNode, AnswerTree
from realsys.rollout.conversation.call_book import CallBook

ALL = [pytest.param(f, id=f.name) for f in FAMILIES.values()]


def played(family: ChatFamily, num: int) -> tuple[Counter[str], dict[int, list[str]]]:
    """What histories with seeds from 0 on count, and the problems of those that have some."""
    counts: Counter[str] = Counter()
    problems: dict[int, list[str]] = {}

    async def play() -> None:
        for seed in range(num):
            history = FuzzedHistory(family, seed)
            await asyncio.wait_for(history.run(), 60)
            counts.update(history.counts)
            if history.problems:
                problems[seed] = history.problems

    asyncio.run(play())
    return counts, problems


@pytest.mark.thorough
@pytest.mark.parametrize("family", ALL)
def test_what_is_trained_on_is_what_was_sampled(family: ChatFamily) -> None:
    counts, problems = played(family, 50)
    assert problems == {}
    assert counts["retokenised"] == 0
    assert counts["trained"] > 1000
    assert counts["naive tokens wrong"] > 500  # there was something to get wrong
    assert counts["requests"] > 150
    assert counts["left midway"] > 0
    assert counts["last message"] > 0
    assert (counts["template arguments"] > 0) == (family.name == "qwen3")


def _of_client_text(node: AnswerNode) -> list[int]:
    tokenizer = FAMILIES["chatml"].tokenizer
    return [
        t
        for n in node.line
        for t in (*n.observed, *tokenizer.encode(tokenizer.decode(n.answer.tokens)))
    ]


def _all_leaves(tree: AnswerTree) -> list[AnswerNode]:
    return [n for n in tree.nodes if not n.children]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (
            lambda m: m.setattr(AnswerNode, "tokens", property(_of_client_text)),
            "not trained as it was sampled",
        ),
        (lambda m: m.setattr(AnswerTree, "leaves", _all_leaves), "were not read, and are"),
        (lambda m: m.setattr(AnswerTree, "leaves", lambda t: t.nodes[:1]), "not trained on"),
        (lambda m: m.setattr(CallBook, "_former", lambda *_: None), "a retry"),
        (
            lambda m: m.setattr(
                answer_tree,
                "_sequence",
                lambda leaf, trained, *, reward: _SEQUENCE(leaf, set(), reward=reward),
            ),
            "trained on twice",
        ),
        (
            lambda m: m.setattr(
                answer_tree,
                "_sequence",
                lambda leaf, trained, *, reward: _shifted(_SEQUENCE(leaf, trained, reward=reward)),
            ),
            "not trained as it was sampled",
        ),
    ],
    ids=["retokenised", "unread", "lost", "sampled again", "twice", "other versions"],
)
def test_the_checker_finds_what_is_broken(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None], words: str
) -> None:
    break_it(monkeypatch)
    _, problems = played(FAMILIES["chatml"], 60)
    assert any(words in problem for found in problems.values() for problem in found)


_SEQUENCE = answer_tree._sequence


def _shifted(made: Any) -> Any:
    return replace(made, versions=tuple(v + (v >= 0) for v in made.versions))
