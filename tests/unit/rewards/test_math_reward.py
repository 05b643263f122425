"""The reward rule: equal values score, however they are written; nothing makes it raise or hang."""

import logging
import threading

import pytest
from stand_in_slurm import wait_until

from realsys.rewards import math_verify
from realsys.rewards.final_answers.plain_numbers import has_prices
from realsys.rewards.guard.guarded import Guarded
from realsys.rewards.math_verify import final_value, math_verify_reward


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("2 + 2 = 4\n#### 4", "4"),
        ("#### 5\n#### 4", "4"),  # the last one counts
        ("#### 4\nand so on: 5", "4"),  # and only its line
        ("1,234", "1234"),
        ("#### $18.", "18.0"),
        ("#### -3", "-3"),
        ("It makes 12 apples.", "12"),
        ("The answer is 5!", "5"),
        (r"thus \boxed{\frac{1}{2}} of it", "0.5"),
        ("#### 1/2", r"\frac12"),
        ("#### x^2 + 1", "1 + x^2"),
        ("$y^{2}+x^{2}$", "$x^2+y^2$"),
        ("#### (1, 2)", "(1,2)"),
        ("#### 12 apples", "12"),
    ],
)
def test_equal_values_score(response, answer):
    assert math_verify_reward(response=response, answer=answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("#### 5", "4"),
        ("4\n#### 5", "4"),  # what stands before the sign does not count
        ("#### 1,23", "123"),
        ("#### (2, 1)", "(1,2)"),
        ("####", "4"),
        ("", "4"),
        ("four", "4"),
        (r"\frac{1}{", "4"),
        ("#### " + "(" * 900, "4"),
        ("\ufffd\x00####\x1f", "4"),
    ],
)
def test_other_values_and_rubbish_do_not(response, answer):
    assert math_verify_reward(response=response, answer=answer) == 0.0


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "tower",
    [
        "9**9**9**9",
        "$9^{9^9}$",
        "9^{99999999}",
        "99999999!",
        "$(x+y+z)^{99}$",
        r"\binom{99999999}{4999999}",
        r"$\prod_{i=1}^{99999999} i$",
    ],
)
def test_numbers_that_would_take_for_ever_score_nothing(tower):
    for response in (tower, f"#### {tower}", rf"\boxed{{{tower}}}"):
        assert math_verify_reward(response=response, answer="4") == 0.0


def test_it_works_outside_the_main_thread():
    found = []
    thread = threading.Thread(
        target=lambda: found.append(math_verify_reward(response="#### 1/2", answer="0.5"))
    )
    thread.start()
    thread.join()
    assert found == [1.0]


def test_the_final_value_is_found():
    assert final_value("a #### 1\n#### 2 b\nc") == "2 b"
    assert final_value(r"so \boxed{1}. No: \boxed{\frac{1}{2}}, yes") == r"\frac{1}{2}"
    assert final_value(r"so \boxed{1} or \boxed{\frac{1}{2}}, yes") == r"1, \frac{1}{2}"
    assert final_value(" just text ") == "just text"


@pytest.mark.parametrize(
    "response",
    [
        "86 - 3",
        "86 - 3 =",
        "86 - 3 = \n",
        "#### 86 - 3",
        "#### 86 - 3 =",
        "#### 86 -3",
        "#### 82 83",
        r"\boxed{80+3}",
        "#### 166/2",
        r"\boxed{\frac{166}{2}}",
        "9 \\times 9 + 2",
    ],
)
def test_a_sum_to_be_worked_out_is_no_answer(response):
    assert math_verify_reward(response=response, answer="86 - 3 = 83\n#### 83") == 0.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("40 + 7 = 47", "#### 47"),
        ("#### -5", "#### -5"),
        ("#### 1/2", "0.5"),
        ("#### 2^{10}", "2^{10}"),
        ("so there are 47 apples", "47"),
        ("#### 47 apples", "47"),
        ("She had 40 and bought 7, so it is 47.", "47"),
        (r"it is $\frac{1}{2}$", "0.5"),
        (r"\boxed{40 + 7 = 47}", "47"),
    ],
)
def test_worked_answers_still_score(response, answer):
    assert math_verify_reward(response=response, answer=answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("**5**", "5"),
        ("#### **5**", "5"),
        ("#### **5.**", "5"),
        ("`5`", "5"),
        ("#### `5`", "5"),
        ("–5", "-5"),
        ("#### \u22125", "-5"),
        ("1e3", "1000"),
        ("#### 1.5E-2", "0.015"),
        (r"\boxed{1.2 \times 10^{3}}", "1200"),
        (r"\boxed{1 1/2}", "1.5"),
        (r"\boxed{1 1/2}", r"\frac{3}{2}"),
        (r"\boxed{1\frac{1}{2}}", "1.5"),
        ("#### 3/2", "1 1/2"),
        ("It took 1 1/2 hours.", "1.5"),
        ("1/2", "0.5"),
        ("#### -1 1/2", "-3/2"),
        ("#### -3/2", "-1 1/2"),
        (r"90^\circ", "90"),
        (r"\boxed{90^{\circ}}", "90"),
        ("#### 90°", "90"),
        (r"\$5.00", "5"),
        ("It costs $5 for 3, so $15.", "15"),
        ("1{,}234", "1234"),
        (r"1\,234", "1234"),
        (r"1,\!234", "1234"),
        (r"\boxed{1\,234\,567}", "1234567"),
        # A percentage is its number and its share: both are written where a percentage is asked for.
        ("#### 72%", "72"),
        (r"#### 72\%", "72"),
        ("#### 72", "72%"),
        ("#### 72%", "0.72"),
        ("#### 0.72", "72%"),
    ],
)
def test_numbers_score_however_people_write_them(response, answer):
    assert math_verify_reward(response=response, answer=answer) == 1.0


@pytest.mark.parametrize(
    ("text", "are_prices"),
    [
        ("$5", True),
        ("$5 and $15", True),
        ("nothing", True),
        ("$5 and $x$", False),
        ("$x and $5", False),
        ("$5$", False),
    ],
)
def test_dollar_signs_are_prices_only_if_all_of_them_are(text, are_prices):
    assert has_prices(text) == are_prices


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("#### 0.72%", "72%"),
        ("#### 72%", "7200"),
        ("5–7", "-7"),  # a range
        ("#### 1 2/2", "2"),
        ("#### 1 1/2", "5.5"),  # not 11/2
        ("#### -1 1/2", "1 1/2"),
        ("#### 1 1/2", "-3/2"),
        (r"1\,23", "123"),
        ("#### 1e3", "3"),
        ("#### 1e99999999999", "4"),
    ],
)
def test_other_numbers_do_not(response, answer):
    assert math_verify_reward(response=response, answer=answer) == 0.0


SLOW_LIBRARY = """
def is_one_of(known, readings):
    while "7" in readings[0]:
        pass
    return True
"""


@pytest.mark.thorough
def test_text_on_which_the_library_never_ends_scores_nothing_and_the_next_one_is_read(
    tmp_path, monkeypatch, caplog
):
    (tmp_path / "slow_library.py").write_text(SLOW_LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    quick = Guarded("slow_library:is_one_of", cpu_s=0.5)
    monkeypatch.setattr(math_verify, "_library", quick)
    try:
        with caplog.at_level(logging.WARNING):
            assert math_verify_reward(response=r"\boxed{\sqrt{7}}", answer=r"\sqrt{8}") == 0.0
            # Of half a second of computing it takes a quarter, of a machine of its own
            wait_until(lambda: math_verify_reward(response="#### y + x", answer="x+y") == 1.0)
    finally:
        quick.close()


@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{" + "{" * 40 + "x" + "}" * 40 + "}",
        r"\boxed{x^{999}=1}",
        r"\boxed{9^{9^{9^9}}}",
        r"\boxed{((((9^9)^9)^9)^9)^9}",
        r"\boxed{10^{99999999} + x}",
        r"\boxed{(10^{99999})!}",
        r"\boxed{\sin(9^{99999})}",
        r"\boxed{\binom{99999999}{4999999}}",
        r"\boxed{\sqrt[99999999]{2}}",
        r"\boxed{e^{e^{e^{e^{e}}}}}",
        r"\boxed{" + "(x+y+z)" * 60 + "}",
        r"\boxed{\{" + "x," * 200 + r"x\}}",
    ],
)
@pytest.mark.parametrize("answer", ["y", r"\sqrt{2}", "x=1", r"\int_0^1 x\,dx", r"\{x, y\}"])
def test_values_that_would_take_for_ever_score_nothing_at_once(response, answer):
    assert math_verify_reward(response=response, answer=answer) == 0.0


@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "piece",
    [
        "__a ",
        "**a ",
        "`a ",
        "$1,1,1,1",
        "$5 ",
        "1,111",
        "1/1 ",
        "1e3",
        "{,}",
        "\\,1",
        "–",
        "=",
        "####",
        "\\boxed{",
        "\\boxed{1} or ",
        "<answer>1</answer>",
        "the answer is 5, ",
        "#### Step 2\n",
        "$x$ or ",
        "\\text{",
        "\\left(",
        "½",
        "not 5 ",
        "5 million ",
    ],
)
def test_our_own_reading_takes_no_longer_on_text_that_is_made_to_slow_it(piece, monkeypatch):
    """Long texts, and those of the length of a final value; the library is not asked here."""
    monkeypatch.setattr(math_verify, "_asked", lambda *_: False)
    for count in (100_000 // len(piece), 500 // len(piece)):
        for response in (piece * count, piece * count + "$x", "#### " + piece * count + "$x"):
            math_verify_reward(response=response, answer="4")
            math_verify_reward(response=response, answer="x+1")
