"""Agents: what they ask, what they keep, and that observations are never the policy's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import golden
import pytest

from realsys.api.agent import Agent, Answer, Environment, Observation, Trajectory
from realsys.api.errors import ConfigError, DataError
from realsys.rollout.agents.answer_text import encode_next_turn
from realsys.rollout.agents.math_multi_turn import MathMultiTurn
from realsys.rollout.agents.math_single_step import MathSingleStep
from realsys.rollout.agents.tool_use import ToolUse

END = "$"  # the end token of the characters' tokenizer, a special one


class Characters:
    """A tokenizer with a token a character."""

    chat_template: str | None = None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text = "".join(map(chr, ids))
        return text.replace(END, "") if skip_special_tokens else text

    def __call__(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=list(map(ord, text)))

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert add_generation_prompt
        assert not tokenize
        return "".join(f"[{m['role'][0]}]{m['content']}{END}\n" for m in messages) + "[a]"


class Scripted(Environment):
    """Says what it was told to, and remembers what was said to it."""

    def __init__(self, *observations: Observation) -> None:
        self.left, self.actions = list(observations), []

    async def reset(self, record: Mapping[str, Any]) -> None:
        raise AssertionError("agents do not reset")

    async def step(self, action: str) -> Observation:
        self.actions.append(action)
        return self.left.pop(0)


class Policy:
    """Says these texts, one after the other; the log-prob of each token is its own number."""

    def __init__(self, *texts: str) -> None:
        self.left, self.asked = list(texts), []

    async def __call__(self, tokens: Sequence[int], limit: int | None) -> Answer:
        self.asked.append("".join(map(chr, tokens)))
        text = self.left.pop(0)
        count, turn = len(text), len(self.asked)
        return Answer(
            tokens=tuple(map(ord, text)),
            logprobs=tuple(-float(i + 1) for i in range(count)),
            versions=(turn,) * count,
            stopped=text.endswith(END),
        )


def play(
    agent: Agent, policy: Policy, environment: Scripted, *, template: str | None = None
) -> Trajectory:
    tokenizer = Characters()
    tokenizer.chat_template = template
    prompt = list(map(ord, "Q:"))
    return asyncio.run(agent.run(prompt, ask=policy, environment=environment, tokenizer=tokenizer))


def text_of(t: Trajectory) -> str:
    """The trajectory as text; what is not the policy's in brackets."""
    pieces, former = [], True
    for token, by_policy in zip(t.tokens, t.from_policy, strict=True):
        if by_policy != former:
            pieces.append("(" if not by_policy else ")")
        pieces.append(chr(token))
        former = by_policy
    return "".join(pieces)


def assert_others_tokens_are_bare(t: Trajectory) -> None:
    for by_policy, logprob, version in zip(t.from_policy, t.logprobs, t.versions, strict=True):
        assert by_policy == (version >= 0)
        assert by_policy == (logprob < 0)


def test_one_answer_is_scored_as_it_is():
    environment = Scripted(Observation(reward=0.5, info={"turns": 1.0}))
    t = play(MathSingleStep(), Policy("no 4" + END), environment)
    assert environment.actions == ["no 4"]
    assert text_of(t) == "(Q:)no 4$"
    assert (t.reward, t.truncated, t.stats) == (0.5, False, {"turns": 1.0})
    assert t.logprobs == (0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0)
    assert t.versions == (-1, -1, 1, 1, 1, 1, 1)


def test_an_answer_that_was_cut_says_so():
    assert play(MathSingleStep(), Policy("4"), Scripted(Observation())).truncated


def test_feedback_is_read_before_the_next_try():
    policy = Policy("4" + END, "5" + END)
    environment = Scripted(
        Observation(text="wrong", reward=0.25, done=False), Observation(reward=0.5)
    )
    t = play(MathMultiTurn(), policy, environment)
    assert policy.asked == ["Q:", "Q:4$\nwrong\n"]
    assert text_of(t) == "(Q:)4$(\nwrong\n)5$"
    assert (t.reward, t.stats["turns"]) == (0.75, 2.0)
    assert t.versions[2:4] == (1, 1)
    assert t.versions[-2:] == (2, 2)
    assert_others_tokens_are_bare(t)


def test_after_the_last_turn_nothing_is_shown():
    environment = Scripted(*[Observation(text="wrong", done=False)] * 2)
    t = play(MathMultiTurn(max_turns=2), Policy("4" + END, "5"), environment)
    assert text_of(t) == "(Q:)4$(\nwrong\n)5"
    assert t.truncated


@pytest.mark.parametrize(("answer", "end"), [("4" + END, ""), ("4", END)])
def test_a_chat_template_closes_the_turn_once(answer, end):
    """The end of the answer's turn is the policy's if it wrote it, else the template's."""
    environment = Scripted(Observation(text="wrong", done=False), Observation())
    t = play(MathMultiTurn(), Policy(answer, "5" + END), environment, template="…")
    assert text_of(t) == f"(Q:){answer}({end}\n[u]wrong{END}\n[a])5$"


def test_a_template_that_hides_earlier_answers_is_refused():
    tokenizer = Characters()
    tokenizer.chat_template = "…"
    tokenizer.apply_chat_template = lambda messages, **_: messages[-1]["content"]
    with golden.raises(DataError):
        encode_next_turn(tokenizer, "wrong", last_token=0)


def test_a_call_is_cut_off_answered_and_gone_on_from():
    policy = Policy("x <<1+2>> is 9" + END, " so 3" + END)
    environment = Scripted(Observation(text="3", done=False), Observation(reward=1.0))
    t = play(ToolUse(), policy, environment)
    assert environment.actions == ["x <<1+2>>", " so 3"]
    assert policy.asked[1] == "Q:x <<1+2>>3"
    assert text_of(t) == "(Q:)x <<1+2>>(3) so 3$"
    assert (t.reward, t.truncated) == (1.0, False)
    assert_others_tokens_are_bare(t)


def test_an_answer_that_ends_at_a_call_is_cut():
    t = play(ToolUse(max_turns=1), Policy("<<1>> 2" + END), Scripted(Observation(done=False)))
    assert text_of(t) == "(Q:)<<1>>"
    assert t.truncated


def test_worked_answers_with_their_result_inside_are_text():
    environment = Scripted(Observation(reward=1.0))
    t = play(ToolUse(), Policy("<<1+2=3>>3" + END), environment)
    assert environment.actions == ["<<1+2=3>>3"]
    assert not t.truncated


def test_mistakes_are_named():
    with golden.raises(ConfigError):
        MathMultiTurn(max_turns=0)
    with golden.raises(ConfigError):
        ToolUse(call="(")


@pytest.mark.parametrize("agent", [MathMultiTurn(), ToolUse()])
def test_an_episode_ends_where_the_model_is_full(agent: Agent) -> None:
    """What was shown to the policy and could not be answered is not in the trajectory: it may not fit."""
    policy = Policy("4" + END, "")
    environment = Scripted(Observation(text="wrong", reward=0.25, done=False))
    t = play(agent, policy, environment)
    assert text_of(t) == "(Q:)4$"
    assert (t.reward, t.truncated, t.stats) == (0.25, True, {"turns": 1.0})
    assert_others_tokens_are_bare(t)
