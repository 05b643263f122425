"""Rules get what they name, return numbers or parts, block or not, one by one or all at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import golden
import pytest

from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.basics.reward import (
    KNOWN_FIELDS,
    Completion,
    Score,
    fields_of,
    fields_of_expression,
    reward_terms,
    rule_problems,
)
from realsys.api.errors import (
    ClusterError,
    ConfigError,
    RewardError,
    RewardServiceAway,
    SandboxFailure,
)
from realsys.rewards import rule_terms
from realsys.rewards.rule import MOST_AT_ONCE, RewardRule, made_rule


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Registers rules for one test."""
    monkeypatch.setattr(plugin_table, "registered", {kind: {} for kind in registry.BUILTIN})
    monkeypatch.setattr(registry, "_reward_options", {})
    made_rule.cache_clear()
    yield partial(registry.register_reward, trusted=True)  # no other process could find them
    made_rule.cache_clear()


def answers(*texts: str, **more: Any) -> list[Completion]:
    return [Completion(response=text, **more) for text in texts]


def values(results: list[Score | RewardError]) -> list[float]:
    return [result.value for result in results if isinstance(result, Score)]


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("a", [("a", 1.0)]),
        (" a+ 0.5 * b ", [("a", 1.0), ("b", 0.5)]),
        ("code+2*brie+1.e+1*c", [("code", 1.0), ("brie", 2.0), ("c", 10.0)]),
        ("2*a + -1e-3*b.c + 1e+2*d-e", [("a", 2.0), ("b.c", -0.001), ("d-e", 100.0)]),
    ],
)
def test_an_expression_names_rules_and_weights(text: str, terms: list[tuple[str, float]]) -> None:
    assert list(reward_terms(text)) == terms


@pytest.mark.parametrize(
    "text", ["", "a +", "a*2", "1..2*a", "a + a", "nan*a", "1e999*a", "a b", "0.5"]
)
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        reward_terms(text)


def test_a_rule_gets_the_fields_that_it_names(rules: Any) -> None:
    seen: dict[str, Any] = {}

    def looks(response: str, record: Any, prompt: str, token_ids: Any, finish_reason: str) -> float:
        seen.update(locals())
        return 1.0

    rules("looks", looks)
    record = {"prompt": "p", "unit": "km"}
    more = {"record": record, "token_ids": (1, 2), "finish_reason": "length"}
    assert values(RewardRule("looks").score_all(answers("r", **more))) == [1.0]
    assert {k: v for k, v in seen.items() if k != "seen"} == {
        "response": "r",
        "record": record,
        "prompt": "p",
        "token_ids": (1, 2),
        "finish_reason": "length",
    }
    assert fields_of(lambda response, answer, strict=False: 0.0) == {"response", "answer"}
    assert "record" not in fields_of(lambda *some, **rest: 0.0), "it would travel with every batch"
    with golden.raises(ConfigError) as caught:
        fields_of(lambda respons: 0.0)
    assert "response" in caught.value.fix


def test_parts_are_summed_or_say_themselves_what_counts(rules: Any) -> None:
    rules("sum", lambda response: {"format": 0.25, "right": 1})
    rules("own", lambda response: {"reward": 0.5, "format": 2.0, "correct": True})
    (summed,) = RewardRule("sum").score_all(answers("x"))
    (own,) = RewardRule("own").score_all(answers("x"))
    assert summed == Score(value=1.25, correct=True, parts={"format": 0.25, "right": 1.0})
    assert own == Score(value=0.5, correct=True, parts={"format": 2.0, "correct": 1.0})


def test_weighted_rules_are_logged_apart_and_the_first_decides(rules: Any) -> None:
    rules("exact", lambda response, answer: float(response == answer))
    rules("brief", lambda response: {"reward": 1.0 / len(response), "letters": len(response)})
    (score,) = RewardRule("exact + 0.5*brief").score_all(answers("ab", answer="ab"))
    assert score == Score(
        value=1.25, correct=True, parts={"exact": 1.0, "brief": 0.5, "brief/letters": 2.0}
    )
    assert fields_of_expression("exact + 0.5*brief") == {"response", "answer"}


@pytest.mark.parametrize("value", [{}, {"a": "x"}, {"a": float("nan")}, "1", None, [1.0]], ids=repr)
def test_what_is_no_number_is_an_error_of_the_rule(rules: Any, value: Any) -> None:
    rules("odd", lambda response: value)
    (error,) = RewardRule("odd").score_all(answers("x"))
    assert isinstance(error, RewardError)
    assert "'odd'" in error.what


def test_named_numbers_without_one_to_train_on_are_an_error_of_the_rule(rules: Any) -> None:
    rules("flag", lambda response: {"correct": True})
    (result,) = RewardRule("flag").score_all(answers("a"))
    assert isinstance(result, RewardError)
    golden.check(result)


def test_asynchronous_rules_run_side_by_side_and_in_order(rules: Any) -> None:
    now = {"running": 0, "most": 0}
    full = asyncio.Event()

    async def judge(response: str) -> float:
        now["running"] += 1
        now["most"] = max(now["most"], now["running"])
        if now["running"] == MOST_AT_ONCE:
            full.set()
        await full.wait()
        await asyncio.sleep(0.001 * (int(response) % 3))  # they end in another order
        now["running"] -= 1
        return float(response)

    rules("service", judge)
    texts = [str(i) for i in range(2 * MOST_AT_ONCE)]
    assert values(RewardRule("service").score_all(answers(*texts))) == list(map(float, texts))
    assert now["most"] == MOST_AT_ONCE


def test_what_no_answer_would_fare_better_with_ends_the_run_in_its_own_words(rules: Any) -> None:
    async def lacking(response: str) -> float:
        raise ClusterError("no user namespaces", where="n1", fix="enable them")

    async def own_limit(response: str) -> float:
        raise TimeoutError("of its own")

    async def box(response: str) -> float:
        raise SandboxFailure("the box failed", where="n1", fix="again")

    rules("lacking", lacking)
    with golden.raises(ClusterError):
        RewardRule("lacking").score_all(answers("a", "b"))
    rules("own_limit", own_limit)
    rules("box", box)

    async def away(response: str) -> float:
        raise ConnectionResetError("the service restarts")

    rules("away", away)
    for name, told in (
        ("own_limit", "TimeoutError: of its own"),
        ("box", "the box failed"),
        ("away", "the service restarts"),
    ):
        (error,) = RewardRule(name).score_all(answers("a"))
        assert isinstance(error, RewardError)
        assert isinstance(error, RewardServiceAway) is (name == "away")
        assert told in error.what


def test_a_rule_may_have_limits_of_its_own(rules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Patient:
        call_s = None

        async def __call__(self, response: str) -> float:
            await asyncio.sleep(0.05)
            return 1.0

    class Hurried(Patient):
        call_s = 0.01  # type: ignore[assignment]

    async def slow(response: str) -> float:
        return await Patient()(response)

    monkeypatch.setattr(rule_terms, "CALL_S", 0.02)
    for name, made in (("patient", Patient), ("hurried", Hurried), ("slow", slow)):
        rules(name, made)
    assert values(RewardRule("patient").score_all(answers("a"))) == [1.0]
    for name, limit in (("hurried", "0.01"), ("slow", "0.02")):
        (error,) = RewardRule(name).score_all(answers("a"))
        assert isinstance(error, RewardError)
        assert error.what == f"reward rule {name!r} took more than {limit} s"


def test_a_blocking_rule_is_called_by_one_thread_at_a_time(rules: Any) -> None:
    inside = threading.Lock()

    def shy(response: str) -> float:
        assert inside.acquire(blocking=False)
        inside.release()
        return 1.0

    async def slow(response: str) -> float:
        return 0.0

    rules("shy", shy)
    rules("slow", slow)
    assert values(RewardRule("slow + shy").score_all(answers(*"abcdefgh"))) == [1.0] * 8


def test_a_batched_rule_gets_all_at_once(rules: Any) -> None:
    calls: list[list[str]] = []

    def ranks(response: list[str]) -> list[float]:
        calls.append(response)
        return [float(sorted(response).index(text)) for text in response]

    rules("ranks", ranks, batched=True)
    assert values(RewardRule("ranks").score_all(answers("c", "a", "b"))) == [2.0, 0.0, 1.0]
    assert calls == [["c", "a", "b"]]
    rules("short", lambda response: [1.0], batched=True)
    found = RewardRule("short").score_all(answers("a", "b"))
    assert [
        "gave 1 scores for 2 answers" in e.what for e in found if isinstance(e, RewardError)
    ] == [
        True,
        True,
    ]


def test_a_rule_may_be_a_dataclass_with_arguments(rules: Any) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Longer:
        than: int = 3

        def __call__(self, response: str) -> float:
            return float(len(response) > self.than)

    rules("longer", Longer)
    assert values(RewardRule("longer", {"longer": {"than": 1}}).score_all(answers("ab", "a"))) == [
        1.0,
        0.0,
    ]
    assert values(RewardRule("longer").score_all(answers("abcd"))) == [1.0]
    golden.check([e.what for e in rule_problems("longer", {"longr": {}}, where="task.reward")])
    with golden.raises(ConfigError):
        RewardRule("longer", {"longer": {"then": 1}})


def test_what_is_known_of_built_in_rules_is_so() -> None:
    for name, fields in KNOWN_FIELDS.items():
        assert fields_of(registry.find_reward(name)) == fields


def test_a_plan_names_unknown_rules(rules: Any) -> None:
    rules("exact", lambda response, answer: 1.0)
    (unknown,) = rule_problems("exact + 0.1*exakt", {}, where="task.reward")
    golden.check((unknown.what, unknown.where))
    (form,) = rule_problems("exact +", {}, where="task.reward")
    assert form.where == "task.reward"
