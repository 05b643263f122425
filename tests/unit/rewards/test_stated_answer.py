"""One answer of a text is read, by the last mark that there is, and never the best of several."""

from __future__ import annotations

import time

import pytest

from realsys.rewards.attack.attack_answers import FORMS, MORE_FORMS
from realsys.rewards.final_answers.stated_answer import stated_answer


@pytest.mark.parametrize("form", [*FORMS, *MORE_FORMS])
@pytest.mark.parametrize(
    "answer", ["42", "-3.5", "north east", "{a: {b: 1}}", "1 2\n3 4", "[[1, 2]]"]
)
def test_common_forms_state_their_answer(form: str, answer: str) -> None:
    assert stated_answer(form.format(answer)) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<think><answer>1</answer></think>\\boxed{2}", "2"),
        ("\\boxed{1} or \\boxed{2}", "2"),
        ("The answer is 1.\nThe answer is 2 or 1.", "2 or 1"),
        ("<answer>1", "<answer>1"),
        ("#### Step 1\nwe add\n#### 7", "7"),
        ("<think>it may be <answer>5</answer>", ""),
        ("I think that the answer is 5 or so", "I think that the answer is 5 or so"),
        ("", ""),
        ("**2*x**2**", "2*x**2"),
    ],
)
def test_one_reading_of_many(text: str, answer: str) -> None:
    assert stated_answer(text) == answer


@pytest.mark.parametrize(
    "piece",
    [
        "<answer>",
        "\\boxed{",
        "answer is ",
        "answer: \n",
        "**",
        "```",
        "#### ",
        "{",
        " ",
        "</think>",
    ],
)
def test_its_time_is_linear_in_the_text(piece: str) -> None:
    def seconds(size: int) -> float:
        text = piece * (size // len(piece))
        began = time.process_time()
        stated_answer(text)
        return time.process_time() - began

    assert seconds(1_000_000) < 5.0  # milliseconds; a quadratic one takes minutes
