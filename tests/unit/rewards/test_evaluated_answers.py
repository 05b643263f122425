"""reasoning-gym's scorers that evaluate an answer: it states a value and does nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from realsys.api import registry
from realsys.api.basics.reward import Completion, Score
from realsys.api.errors import RewardError
from realsys.data.sources.reasoning_gym_questions import question_of
from realsys.rewards.guard.evaluated_answers import BY_EVAL, BY_SYMPY, does_more_than_state
from realsys.rewards.guarded_rules import close_guards
from realsys.rewards.reasoning_gym_rule import reasoning_gym_reward
from realsys.rewards.rule import RewardRule

pytest.importorskip("reasoning_gym")
EVALUATE = sorted(BY_EVAL | BY_SYMPY)


@pytest.fixture(scope="module", autouse=True)
def guards() -> Iterator[None]:
    yield
    close_guards()


def record(generator: str) -> dict[str, Any]:
    return {"generator": generator, "number": 0, "config": {}}


def scored(generator: str, *texts: str) -> list[Score | RewardError]:
    answers = [Completion(response=text, record=record(generator)) for text in texts]
    return RewardRule("reasoning_gym").score_all(answers)


KNOWN_ANSWERS = """
import json, sys
from realsys.data.sources.reasoning_gym_questions import question_of
print(json.dumps([question_of(record)[1] for record in json.load(sys.stdin)]))
"""


def known_answers() -> list[str]:
    """Of the first record of each generator, made with the hash seed that guards have."""
    made = subprocess.run(
        [sys.executable, "-c", KNOWN_ANSWERS],
        input=json.dumps([record(generator) for generator in EVALUATE]),
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    return list(json.loads(made.stdout))


PAYLOAD = "__import__('os').system('touch {mark}')"


@pytest.mark.thorough
def test_code_in_an_answer_is_never_run_and_the_known_answer_scores_1(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = PAYLOAD.format(mark=mark)
    forms = [code, f"[{code}]", f"[[{code}]]", f"[str({code})]", f"<answer>{code}</answer>"]
    for generator, known in zip(EVALUATE, known_answers(), strict=True):
        found = scored(generator, *forms, known)
        assert [getattr(result, "value", 0.0) for result in found] == [0.0] * len(forms) + [1.0]
    assert not mark.exists()


UNSCREENED = """
from realsys.api.registry import register_reward
from realsys.data.sources.reasoning_gym_questions import entry_of
from realsys.rewards import reasoning_gym_rule

reasoning_gym_rule.does_more_than_state = lambda generator, text: False

def unscreened(response, record):
    return reasoning_gym_rule.reasoning_gym_reward(response=response, record=record)

def prepare():  # once, not in the fork of each answer
    for generator in GENERATORS:
        entry_of({"generator": generator, "number": 0, "config": {}})

unscreened.prepare = prepare
register_reward("unscreened", unscreened, cpu_s=0.5)
"""


@pytest.mark.thorough
def test_the_guard_alone_keeps_code_from_files_and_ends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As if such an answer were not recognised: the scorers evaluate it, in the guard."""
    mark = tmp_path / "mark"
    (tmp_path / "unscreened_rule.py").write_text(UNSCREENED.replace("GENERATORS", repr(EVALUATE)))
    registry.load_plugins([str(tmp_path / "unscreened_rule.py")])
    code = f"{PAYLOAD.format(mark=mark)} or open({str(mark)!r}, 'w')"
    texts = [(name, text) for name in EVALUATE for text in (code, f"[{code}]")]
    texts += [("countdown", "9**9**9**9"), ("n_queens", "9**9**9**9")]
    answers = [Completion(response=text, record=record(name)) for name, text in texts]
    found = RewardRule("unscreened").score_all(answers)
    assert not mark.exists()
    assert [getattr(result, "value", 0.0) for result in found[-2:]] == [0.0, 0.0]
    assert caplog.text.count("computed for more than 0.5 s") == 2  # they were evaluated


@pytest.mark.parametrize(
    ("generator", "text", "does_more"),
    [
        ("n_queens", "[['Q', '_'], ['_', 'Q']]", False),
        ("n_queens", "_ Q _ _\n_ _ _ Q", False),
        ("n_queens", "[[q for q in 'Q_']]", True),
        ("n_queens", "[''.join('Q_')]", True),
        ("spiral_matrix", "[1, 2, -3]", False),
        ("spiral_matrix", "[print]", False),
        ("spiral_matrix", "[print(1)]", True),
        ("spiral_matrix", "(lambda: 1)", True),
        ("simple_integration", "3*x**2/2 + sin(x) + C", False),
        ("simple_integration", "x! + f(x) + 2(x + 1)", False),
        ("simple_integration", r"\frac{x^2}{2} + \left(x\right)", False),
        ("simple_integration", "The answer is (x + 1).", False),
        ("simple_integration", "exit()!", True),
        ("simple_integration", "S('exit()')", True),
        ("simple_integration", "x.func", True),
        ("simple_integration", "eval (x)", True),
        ("simple_integration", "ｅval(x)", True),
        ("chain_sum", "exit()", False),
    ],
)
def test_what_does_more_than_state_a_value(generator: str, text: str, does_more: bool) -> None:
    assert does_more_than_state(generator, text) == does_more


def test_a_right_answer_scores_1_without_a_guard_as_within() -> None:
    _, known = question_of(record("chain_sum"))
    assert reasoning_gym_reward(response=known, record=record("chain_sum")) == 1.0
    assert scored("chain_sum", known)[0] == Score(value=1.0, correct=True)


@pytest.mark.parametrize("generator", EVALUATE)
@pytest.mark.parametrize(
    "text",
    [
        "[__import__('os').system('true'), 5!, 1!=2]",  # neither reading of it is Python's
        "5! + eval(chr(49))!",
        "(lambda: 1)( 5! != 2 ! = 3",
        "x.__class__ !== 1!",
    ],
)
def test_what_python_can_not_parse_is_not_taken_for_harmless(generator: str, text: str) -> None:
    assert does_more_than_state(generator, text)


@pytest.mark.parametrize("text", ["5! + 3!", "x**2 + sin(x)!", "3 x + 2 (x + 1)", "2*x != 3"])
def test_values_that_python_can_not_parse_are_the_scorers_to_judge(text: str) -> None:
    assert not does_more_than_state("simple_integration", text)
