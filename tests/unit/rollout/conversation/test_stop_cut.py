"""Where a stop text ends an answer, in tokens that are not letters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from realsys.rollout.conversation.stop_cut import before_stops, cut_at_stop

PIECES = [
    b"a",
    b"b",
    b"ST",
    b"OP",
    b"S",
    b"T",
    b"O",
    b"P!",
    b"\xe6\x97",
    b"\xa5",
    b"\xff",
    b"STOPEND",
]
A, B, ST, OP, S, T, O_, P, SUN_1, SUN_2, BAD, BOTH = range(len(PIECES))


def decode(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[t] for t in tokens).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("tokens", "stops", "count", "stop"),
    [
        ([A, B], ["STOP"], 2, ""),
        ([A, ST, OP, B], ["STOP"], 3, "STOP"),
        ([A, S, T, O_, P, B], ["STOP"], 5, "STOP"),  # "!" behind it, in the same token
        ([A, ST, ST, OP], ["STOP"], 4, "STOP"),
        ([ST, OP, ST, OP], ["STOP"], 2, "STOP"),
        ([A, B], [], 2, ""),
        ([A, B], [""], 2, ""),
        ([A, B], ["a"], 1, "a"),
        ([], ["a"], 0, ""),
        ([A, BOTH], ["END", "STOP"], 2, "STOP"),  # the one that is whole first
        ([A, S, T, O_, P], ["STOP", "TO"], 4, "TO"),
        ([SUN_1, SUN_2, A], ["日"], 2, "日"),
        ([SUN_1, SUN_2, A, BAD, B], ["\ufffd"], 4, "\ufffd"),  # not the half of the first letter
        ([SUN_1, SUN_2, A], ["\ufffd"], 3, ""),
    ],
)
def test_the_token_that_completes_a_stop_text_is_the_last(
    tokens: list[int], stops: list[str], count: int, stop: str
) -> None:
    assert cut_at_stop(tokens, stops, decode) == (count, stop)


def test_the_beginning_of_a_stop_text_is_held_back() -> None:
    told = {text: before_stops(text, ["END", "STOP"]) for text in ("abE", "abN", "abEN", "aENDb")}
    assert told == {"abE": "ab", "abN": "abN", "abEN": "ab", "aENDb": "a"}


def test_a_long_answer_is_decoded_a_few_times() -> None:
    times = []

    def counted(tokens: Sequence[int]) -> str:
        times.append(len(tokens))
        return decode(tokens)

    assert cut_at_stop([A] * 10_000 + [ST, OP] + [B] * 10_000, ["STOP"], counted) == (
        10_002,
        "STOP",
    )
    assert len(times) < 20
