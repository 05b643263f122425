"""Environments: scores are the reward interface's, tries are counted, arithmetic is worked out safely."""

from __future__ import annotations

import asyncio
import re
import threading
from fractions import Fraction

import golden
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realsys.api import registry
from realsys.api.agent import Environment, Observation
from realsys.api.basics import plugin_table
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError, DataError, RolloutError
from realsys.api.model import Model, ModelName, ParallelGroups, ProcessTopology
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.math_reward import MathRewardInterface
from realsys.rollout.environments.calculator import Calculator, NotArithmetic, evaluate
from realsys.rollout.environments.math_question import FEEDBACK, MathVerify
from realsys.rollout.worker.episode_tries import fault_of
from realsys.transport.rollout_messages import TryFault

RECORD = {"prompt": "What is 40 + 2?", "answer": "42"}


def play(environment: Environment, *actions: str) -> list[Observation]:
    """What the environment says to each action of one episode."""

    async def episode() -> list[Observation]:
        await environment.reset(RECORD)
        said = [await environment.step(action) for action in actions]
        await environment.close()
        return said

    return asyncio.run(episode())


@pytest.mark.parametrize("made", [MathVerify(reward=""), Calculator(reward="")])
def test_without_a_rule_an_episode_that_the_agent_did_not_reward_has_failed(made):
    """And is played again, as after other mistakes of an agent's code: its record is not at fault."""
    with pytest.raises(RolloutError) as failed:
        play(made, "42")
    assert "task.reward" in failed.value.where
    assert fault_of(failed.value) is TryFault.FAILED


class Words:
    """A tokenizer whose tokens stand for whole texts; 0 is special."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        if not skip_special_tokens:
            return "question: "  # only a prompt's end is looked at with them
        return "".join(self.texts[i - 1] for i in ids if i)


@pytest.mark.parametrize("text", ["so #### 42", "42", "#### 41", "", "$42", "9^9^9^9", "84/2"])
def test_one_turn_gives_what_the_reward_interface_gives(text):
    sequence = torch.tensor([7, 1, 0])  # prompt, the text, an end token
    sample = SequenceSample.from_tensors(
        ["a"],
        {"packed_input_ids": [[3]], "prompt_mask": [[3]]},
        {"packed_input_ids": sequence, "prompt_mask": torch.tensor([True, False, False])},
        metadata={"answer": [RECORD["answer"]]},
    )
    model = Model(
        name=ModelName("reward"),
        module=None,
        tokenizer=Words(text),
        device="cpu",
        dtype="float32",
        topology=ProcessTopology(),
        rank=0,
        groups=ParallelGroups(),
        base_seed=1,
    )
    scored = MathRewardInterface().inference(model, sample, MicroBatchSpec())
    (said,) = play(MathVerify(), text)
    assert said.done
    assert said.reward == scored.data["rewards"].item()


def test_a_wrong_answer_may_be_tried_again_for_less():
    wrong, right = "#### 41", "#### 42"
    said = play(MathVerify(turns=3, discount=0.5), wrong, wrong, right)
    assert [(o.text, o.reward, o.done) for o in said] == [
        (FEEDBACK, 0.0, False),
        (FEEDBACK, 0.0, False),
        ("", 0.25, True),  # 1 · 0.5²
    ]
    assert play(MathVerify(turns=3, discount=0.5), right)[0].reward == 1.0
    assert play(MathVerify(turns=2), wrong, wrong)[-1] == Observation(info={"turns": 2.0})


def test_a_rule_runs_beside_the_event_loop_and_never_twice_at_a_time(monkeypatch):
    monkeypatch.setattr(plugin_table, "registered", {kind: {} for kind in registry.BUILTIN})
    running, most, threads = [0], [0], set()

    def slow(*, response: str, answer: str) -> float:
        running[0] += 1
        most[0] = max(most[0], running[0])
        threads.add(threading.current_thread())
        threading.Event().wait(0.02)
        running[0] -= 1
        return 1.0

    registry.register_reward("slow", slow, trusted=True)

    async def several() -> None:
        made = [MathVerify(reward="slow") for _ in range(4)]
        await asyncio.gather(*(e.reset(RECORD) for e in made))
        await asyncio.gather(*(e.step("") for e in made))

    asyncio.run(several())
    assert most == [1]
    assert threading.main_thread() not in threads


def test_mistakes_are_named():
    with golden.raises(ConfigError):
        MathVerify(turns=0)
    with golden.raises(ConfigError):
        MathVerify(discount=2)
    with golden.raises(DataError):
        asyncio.run(Calculator().reset({"prompt": "?"}))


def test_the_calculator_answers_calls_and_scores_what_is_none():
    said = play(Calculator(), "first <<40 + 2>>", "then <<1/0=>>", "<<2+2=4>> so #### 42")
    assert [(o.text, o.done, o.reward) for o in said] == [
        ("42", False, 0.0),
        ("(division by zero)", False, 0.0),
        ("", True, 1.0),
    ]
    assert said[-1].info == {"calls": 2.0, "failed_calls": 1.0}


def test_past_the_most_calls_everything_is_an_answer():
    said = play(Calculator(max_calls=1), "<<1+1>>", "<<1+1>>")
    assert [o.done for o in said] == [False, True]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12+30", "42"),
        (" (1,200 - 200) / 8 ", "125"),
        ("0.1+0.2", "0.3"),
        ("1/3", "1/3"),
        ("-(2×3)÷4", "-1.5"),
        ("7/2*2", "7"),
    ],
)
def test_arithmetic_is_exact(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "2**9", "2^9", "__import__('os')", "1//0", "1;2", "().__class__", "1e9", "0x10"),
        *("1/0", "(" * 60, "1+", "9" * 31, "9" * 101, "1,2", "\n", "*".join(["9" * 9] * 9)),
    ],
)
def test_nothing_else_is_worked_out(text):
    with pytest.raises(NotArithmetic):
        evaluate(text)


@given(st.text(alphabet="0123456789+-*/(). ,", max_size=14))
def test_whatever_is_written_has_its_exact_value_or_none(text):
    try:
        value = evaluate(text)
    except NotArithmetic:
        return
    exact = re.sub(r"[\d.]+", lambda n: f"Fraction('{n[0]}')", text.replace(",", "").strip())
    assert Fraction(value) == eval(exact, {"Fraction": Fraction})


@given(st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=6))
def test_sums_are_those_of_python(numbers):
    assert evaluate("+".join(f"({n})" for n in numbers)) == str(sum(numbers))
