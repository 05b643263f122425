"""What agents and environments are given is checked against their fields when a plan is made."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from launcher.submit.planning import make_plan
from realsys.api import registry
from realsys.api.errors import ConfigError
from realsys.config.plugin_arguments import argument_problems

pytestmark = pytest.mark.usefixtures("file_root")


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (
            ("rollout.agent=math_multi_turn", "rollout.agent_args={max_turn: 3}"),
            "agent 'math_multi_turn' takes no 'max_turn'",
            "did you mean 'max_turns'?",
        ),
        (
            ("rollout.agent=tool_use", "rollout.agent_args.max_turns=many"),
            "max_turns is 'many'",
            "whole number",
        ),
        (
            ("rollout.agent_args.turns=2",),
            "agent 'math_single_step' takes no 'turns'",
            "takes none",
        ),
        (("rollout.env_args={discount: yes}",), "discount is True", "use: number"),
        (("rollout.env_args._turn=2",), "environment 'math_verify' takes no '_turn'", "'turns'"),
    ],
)
def test_an_argument_that_a_plug_in_does_not_take_is_refused(
    words: tuple[str, ...], what: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make_plan("grpo-math-async", words, trial="a")
    assert refused.value.what == what
    assert fix in refused.value.fix
    assert refused.value.where.startswith("rollout.")


def test_arguments_of_their_type_are_planned() -> None:
    words = ("rollout.agent=math_multi_turn", "rollout.agent_args.max_turns=3")
    words += ("rollout.env_args={turns: 2, discount: 1, right: none, feedback: again}",)
    (worker, *_) = make_plan("grpo-math-async", words, trial="a").phases[-1].config.rollout_worker
    assert worker.agent_args == {"max_turns": 3}
    assert worker.env_args["discount"] == 1


def test_a_class_whose_types_can_not_be_resolved_is_left_to_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass
    class Hidden:
        size: NoSuchName  # type: ignore[name-defined]  # noqa: F821

    monkeypatch.setitem(registry._registered["agent"], "hidden", Hidden)
    assert list(argument_problems("agent", "hidden", {"wrong": 1}, where="here")) == []
