"""The reward rule: equal values score, however they are written; nothing makes it raise or hang."""

import threading

import pytest

from realsys.rewards.math_verify import final_value, math_verify_reward


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
    assert math_verify_reward(response=response, answer=answer, prompt="ignored") == 1.0


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


@pytest.mark.timeout(20)
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
    assert final_value(r"so \boxed{1} or \boxed{\frac{1}{2}}, yes") == r"\frac{1}{2}"
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
