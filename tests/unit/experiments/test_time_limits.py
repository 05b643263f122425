"""Limits of episodes, answers, environments and deliveries, as a plan relates them to one another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from experiments.asynchronous import Async
from experiments.grpo_math import grpo_math
from experiments.parts.time_limits import argument_of, delivery_silence_s, time_limit_warnings
from realsys.api.model import GenerationHyperparameters
from realsys.api.options import ModelOptions
from realsys.api.worker_configs import DELIVERY_SILENCE_S

MCP = {"servers": ["python server.py"]}


def remarks(
    agent: str = "chat",
    agent_args: dict[str, Any] | None = None,
    env: str = "math_verify",
    env_args: dict[str, Any] | None = None,
    *,
    answer_s: float = 600.0,
    max_new_tokens: int = 256,
) -> list[str]:
    found = time_limit_warnings(
        agent,
        agent_args or {},
        env,
        env_args or {},
        answer_s=answer_s,
        max_new_tokens=max_new_tokens,
    )
    return list(found)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, []),
        ({"agent": "math_single_step", "max_new_tokens": 10**6}, []),  # no limit of an episode
        ({"max_new_tokens": 72_000}, []),  # 1800 s at 40 tokens a second
        ({"max_new_tokens": 80_000}, [("timeout_s=1800", "2000 s")]),
        ({"agent_args": {"timeout_s": 700}, "max_new_tokens": 32_768}, [("=700", "819 s")]),
        ({"agent_args": {"timeout_s": 300}}, [("=300", "rollout_request_timeout=600")]),
        ({"agent_args": {"timeout_s": 300}, "answer_s": 100.0}, []),
        ({"env": "mcp", "env_args": {**MCP, "call_timeout_s": 900.0}}, [("call_timeout_s=900",)]),
        ({"env": "mcp", "env_args": MCP}, []),
        ({"env": "mcp", "env_args": MCP, "answer_s": 30.0}, [("call_timeout_s=60", "=30")]),
        ({"agent": "nobody knows it", "env": "nor this"}, []),
    ],
)
def test_limits_that_cut_what_grows_and_those_never_reached_are_told(
    given: dict[str, Any], named: list[tuple[str, ...]]
) -> None:
    found = remarks(**given)
    assert len(found) == len(named)
    for remark, words in zip(found, named, strict=True):
        assert all(word in remark for word in words)


def test_a_run_waits_for_a_delivery_no_less_than_two_episodes_may_take() -> None:
    usual = delivery_silence_s(1800.0, answer_s=600.0, max_new_tokens=1024)
    assert usual == DELIVERY_SILENCE_S
    assert delivery_silence_s(86400.0, answer_s=600.0, max_new_tokens=1024) == 2 * (86400 + 600)
    slow = delivery_silence_s(None, answer_s=600.0, max_new_tokens=131_072)
    assert slow == pytest.approx(2 * (131_072 / 5 + 600))


def test_a_plan_has_them_related() -> None:
    experiment = replace(
        grpo_math(),
        task=replace(grpo_math().task, agent="chat", agent_args={"timeout_s": 86400}),
        gen=GenerationHyperparameters(max_new_tokens=64),
        schedule=Async(),
        actor=ModelOptions(path="/nowhere"),
    )
    setup = experiment.initial_setup()
    assert setup.rollout is not None
    assert setup.rollout.silence_s == 2 * (86400 + Async().rollout_request_timeout)
    assert argument_of("agent", "chat", {}, "timeout_s") == 1800
    short = replace(experiment, task=replace(experiment.task, agent_args={"timeout_s": 1}))
    assert any("timeout_s=1 " in remark for remark in short.remarks(()))
    assert not any("timeout_s" in remark for remark in experiment.remarks(()))
