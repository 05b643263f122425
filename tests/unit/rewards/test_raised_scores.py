"""What a rule raises because of an answer's text scores 0 and is counted; a record whose own right answer
can't be scored gets no score."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.basics.reward import RAISED, Completion, Score, is_count
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import DataError, RewardError, SandboxFailure
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.math_reward import MathRewardInterface
from realsys.master.rollouts.rollout_dispatcher import RolloutDispatcher
from realsys.master.statistics import reward_parts
from realsys.rewards.guard.guarded import CPU_TIME, DIED, MEMORY, CallFailed
from realsys.rewards.raised_scores import SHOWN, AnswerFailure, RaisedAnswers, right_answers
from realsys.rewards.rule import RewardRule, made_rule
from realsys.rollout.environments.math_question import MathVerify

ZERO = Score(value=0.0, correct=False, parts={RAISED: 1.0})


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    monkeypatch.setattr(plugin_table, "registered", {kind: {} for kind in registry.BUILTIN})
    monkeypatch.setattr(registry, "_reward_options", {})
    made_rule.cache_clear()
    yield partial(registry.register_reward, trusted=True)  # no other process could find them
    made_rule.cache_clear()


def product(response: str, answer: str) -> float:
    """As the scorer of prime_factorization: raises for all that is no product of whole numbers."""
    found = known = 1
    for factor in response.split("×"):
        found *= int(factor)
    for factor in answer.split("×"):
        known *= int(factor)
    return float(found == known)


def scored(*texts: str, rule: str = "mine", answer: str = "2×3", **more: Any) -> list[Any]:
    return RewardRule(rule).score_all(
        [Completion(response=t, answer=answer, **more) for t in texts]
    )


def test_a_text_that_a_rule_fails_on_scores_0_and_the_others_what_the_rule_says(rules: Any) -> None:
    rules("mine", product)
    right, odd, wrong, empty = scored("3×2", "I think 6", "2×2", "")
    assert (right.value, wrong.value) == (1.0, 0.0)
    assert odd == empty == ZERO
    assert right.parts == wrong.parts == {}


def test_a_right_answer_is_asked_about_without_the_texts_of_the_one_that_failed(rules: Any) -> None:
    rules("mine", lambda final, answer: product(final, answer))  # a rule that reads `final`
    odd, right = scored("<think>hm</think>I think 6", "<think>hm</think>3×2")
    assert (odd, right.value) == (ZERO, 1.0)


def test_so_it_is_in_an_asynchronous_run_too(rules: Any) -> None:
    rules("mine", product)

    async def played() -> Any:
        environment = MathVerify(reward="mine")
        await environment.reset({"answer": "2×3"})
        return await environment.step("no idea")

    observation = asyncio.run(played())
    assert (observation.reward, observation.info["reward/raised"]) == (0.0, 1.0)


def test_a_record_whose_right_answer_can_not_be_scored_gets_no_score(rules: Any) -> None:
    rules("mine", product)
    for result in scored("3×2", "six", answer="none"):
        assert type(result) is RewardError
        assert "right answer" in result.what
        assert result.where.startswith("test_raised_scores.py:")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "0.5", {}], ids=repr)
def test_no_number_for_a_text_is_0_where_the_right_answer_has_one(rules: Any, value: Any) -> None:
    rules("mine", lambda response, answer: 1.0 if response == answer else value)
    assert scored("2×3", "x") == [Score(value=1.0, correct=True), ZERO]


@pytest.mark.parametrize("why", [CPU_TIME, MEMORY, DIED])
def test_a_text_that_exceeds_a_limit_scores_0_and_is_not_tried_again(rules: Any, why: str) -> None:
    asked: list[str] = []

    def limited(response: str, answer: str) -> float:
        asked.append(response)
        if response == "9**9**9":
            raise CallFailed(why, "it computed for more than 3 s")
        return float(response == answer)

    rules("mine", limited)
    assert scored("9**9**9", "2×3") == [ZERO, Score(value=1.0, correct=True)]
    assert asked.count("9**9**9") == 1


def test_a_rule_that_reads_one_form_only_is_tried_with_the_right_answer_in_that_form(
    rules: Any,
) -> None:
    def tagged(response: str, answer: str) -> float:
        return float(response.split("<answer>")[1].split("</answer>")[0] == answer)

    rules("mine", tagged)
    assert scored("2×3", "six") == [ZERO, ZERO]
    answer = Completion(response="", answer="7", record={"answer": "4 + 3 = 7\n#### 7"})
    assert right_answers(answer) == [
        "7", "4 + 3 = 7\n#### 7", "<answer>7</answer>", "\\boxed{7}", "#### 7",
    ]  # fmt: skip
    assert right_answers(Completion(response="", record={})) == []


@pytest.mark.parametrize(
    "error",
    [
        RewardError("no grade", where="judge", fix="ask again"),
        DataError("the record has no tests", where="record", fix="give some"),
        SandboxFailure("the box failed", where="n1", fix="again"),
        ConnectionRefusedError("away"),
        TimeoutError("away"),
        OSError(5, "Input/output error"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_never_the_texts_fault_gets_no_score(rules: Any, error: Exception) -> None:
    def failing(response: str, answer: str) -> float:
        if response != answer:
            raise error
        return 1.0

    rules("mine", failing)
    (result,) = scored("x")
    assert isinstance(result, RewardError)


def test_of_asynchronous_rules_only_pythons_own_errors_about_values_are_the_texts(
    rules: Any,
) -> None:
    class ServiceError(Exception):
        pass

    async def asking(response: str, answer: str) -> float:
        if response == "busy":
            raise ServiceError("503")
        return float(Fraction(response) == Fraction(answer))

    rules("mine", asking)
    away, odd, right = scored("busy", "1/0", "2/4", answer="1/2")
    assert isinstance(away, RewardError)
    assert (odd, right.value) == (ZERO, 1.0)


def test_without_a_known_answer_a_rule_that_scores_most_answers_is_believed(rules: Any) -> None:
    rules("mine", lambda response: 1.0 / len(response))
    texts = ["a", "bb", "", "cccc"]
    assert [r.value for r in scored(*texts, answer="")] == [1.0, 0.5, 0.0, 0.25]
    rules("broken", lambda response: 1.0 / len(response) if response == "a" else {}["none"])
    found = scored("a", "b", "c", "d", rule="broken", answer="")
    assert [isinstance(result, RewardError) for result in found].count(True) >= 2


@pytest.mark.parametrize("is_later", [False, True])
def test_answers_are_asked_again_counted_and_settled_one_by_one(is_later: bool) -> None:
    """Each is of a record of its own; ``slow`` exceeded a limit, of ``bad`` the right answer fails."""
    failure, limited = (AnswerFailure("it fails", where="x", fix="y") for _ in range(2))
    limited.exceeded_limit = True
    one = Score(value=1.0, correct=True)
    said: dict[str, list[Any]] = {
        "good": [one],
        "twice": [failure, one],
        "odd": [failure] * 2,
        "slow": [limited],
        **{f"right of {text}": [one] for text in ("odd", "slow")},
    }
    asked: list[list[str]] = []

    def score(answers: Any) -> list[Any]:
        asked.append([answer.response for answer in answers])
        return [said[text].pop(0) if text in said else failure for text in asked[-1]]

    async def score_later(answers: Any) -> list[Any]:
        return score(answers)

    settling, texts = RaisedAnswers("mine"), ["good", "twice", "odd", "slow", "bad"]
    answers = [Completion(response=text, answer=f"right of {text}") for text in texts]
    if is_later:
        found = asyncio.run(settling.settled_later(answers, score_later))
    else:
        found = settling.settled(answers, score)
    assert found[:4] == [one, one, ZERO, ZERO]
    assert type(found[4]) is RewardError
    again = [["twice"], ["odd"], ["bad"], ["right of odd"], ["right of slow"]]
    assert asked == [texts, *again, *([form] for form in right_answers(answers[4]))]
    assert (settling.num_scored, settling.num_raised, settling.num_unscored) == (2, 2, 1)


def test_of_a_batch_only_the_text_at_fault_scores_0(rules: Any) -> None:
    def ranks(response: list[str], answer: list[str]) -> list[float]:
        numbers = [float(text) for text in response]
        return [float(sorted(numbers).index(number)) for number in numbers]

    rules("mine", ranks, batched=True)
    found = scored("30", "ten", "10", "20", answer="5")
    assert found[1] == ZERO
    # As the three others are ranked together, without the one.
    assert [found[i].value for i in (0, 2, 3)] == [2.0, 0.0, 1.0]


def test_an_answer_on_which_one_of_several_rules_fails_gets_nothing_from_the_others(
    rules: Any,
) -> None:
    rules("mine", product)
    rules("long", lambda response: -1.0 if len(response) > 3 else 1.0)
    fine, odd, long = scored("3×2", "x", "long text", rule="mine + 0.5*long")
    assert (fine.value, odd.value, long.value) == (1.5, 0.0, -0.5)  # failing pays for nothing
    assert not odd.correct
    assert odd.parts == {"long": 1.0, RAISED: 1.0}


def test_a_broken_rule_is_told_by_its_own_line_and_ends_the_run(rules: Any) -> None:
    def bad(response: str, answer: str) -> float:
        return len(response) / 0

    rules("mine", bad)
    line = bad.__code__.co_firstlineno + 1
    does, model = MathRewardInterface(reward="mine"), SimpleNamespace(tokenizer=Letters())
    with pytest.raises(RewardError) as caught:
        does.inference(model, batch(2, answers=2), MicroBatchSpec())  # type: ignore[arg-type]
    assert f"test_raised_scores.py:{line} in bad: ZeroDivisionError" in caught.value.what
    assert caught.value.where.startswith(f"test_raised_scores.py:{line} in bad")


class Letters:
    """One letter a token."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + i) for i in ids)


def batch(num: int, *, answers: int) -> SequenceSample:
    lengths = [[2] * answers] * num
    size = 2 * num * answers
    return SequenceSample.from_tensors(
        [f"0-{i}" for i in range(num)],
        {"packed_input_ids": lengths, "prompt_mask": lengths},
        {
            "packed_input_ids": torch.arange(2).repeat(num * answers),
            "prompt_mask": torch.tensor([True, False] * (size // 2)),
        },
        metadata={"answer": ["2×3"] * num},
    )


def test_a_run_all_of_whose_answers_fail_goes_on_counts_them_and_shows_the_first(
    rules: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """reasoning-gym's prime_factorization and a policy that writes prose (what it does in step 1)."""
    rules("mine", product)
    does, model = MathRewardInterface(reward="mine"), SimpleNamespace(tokenizer=Letters())
    with caplog.at_level(logging.WARNING):
        found = does.inference(model, batch(16, answers=8), MicroBatchSpec())  # type: ignore[arg-type]
    assert found.data["rewards"].tolist() == [0.0] * 128
    assert not does.set_aside.ids
    lines = [record.getMessage() for record in caplog.records]
    # The first five, then the 8th, 16th, 32nd, 64th, 128th; from 64 on in louder words.
    assert len(lines) == SHOWN + 5
    assert ["most answers" in line for line in lines] == [False] * 8 + [True] * 2
    assert all("answer='b'" in line for line in lines)
    reply = SimpleNamespace(is_head=True, meta=found.meta)
    call: Any = SimpleNamespace(runs=[SimpleNamespace(replies={0: reply})])
    assert reward_parts(call) == {RAISED: 128.0}


def test_rollouts_count_them_over_all_groups() -> None:
    desk = RolloutDispatcher()
    desk._ledger = SimpleNamespace(counts=dict)  # type: ignore[assignment]
    desk._stats = [{"reward/raised": 3.0, "reward": 0.5}, {"reward": 1.0}, {"reward/raised": 1.0}]
    row = desk.metrics()
    assert (row["rollout/reward/raised"], row["rollout/reward"]) == (4.0, 0.75)
    assert is_count("maths/raised")
    assert not is_count("praised")
