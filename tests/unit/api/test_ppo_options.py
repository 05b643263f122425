"""Settings of PPO that don't go together are told before anything starts."""

import pytest
from changed_settings import changed

from experiments.grpo_math import grpo_math
from experiments.ppo_math import ppo_math
from realsys.api.basics.estimators import GDPOAdvantage
from realsys.api.errors import ConfigError
from realsys.api.options import PPOHyperparameters, ppo_problems, range_problems
from realsys.interfaces.ppo.ppo_actor import PPOActorInterface

CLASHES = [
    ({"correction": "tis"}, "algorithm.correction"),
    ({"mismatch_kl_max": 0.1}, "algorithm.mismatch_kl_max"),
    (
        {
            "correction": "icepop",
            "recompute_logprob": True,
            "icepop_low": 5.0,
        },
        "algorithm.icepop_low and algorithm.icepop_high",
    ),
    (
        {"correction": "sequence_mask", "use_decoupled_loss": True, "sequence_mask_high": 0.5},
        "algorithm.sequence_mask_low and algorithm.sequence_mask_high",
    ),
    ({"overlong_buffer_len": 33}, "algorithm.overlong_buffer_len"),
]


@pytest.mark.parametrize(("changes", "where"), CLASHES)
def test_settings_that_do_not_go_together_are_named(changes, where):
    (problem,) = ppo_problems(PPOHyperparameters(**changes), longest=32)
    assert problem.where == where
    with pytest.raises(ConfigError):
        PPOActorInterface(**changes)


def test_an_experiment_tells_them():
    experiment = ppo_math()
    wrong = changed(experiment, {"algorithm.correction": "cap"})
    assert "algorithm.correction" in [p.where for p in wrong.problems()]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("score_on_truncated", False),
        ("max_reward_clip", 1.0),
        ("reward_output_scaling", 2.0),
        ("reward_output_bias", 0.5),
        ("overlong_buffer_len", 8),
    ],
)
def test_what_changes_the_score_alone_is_refused_where_the_parts_are_compared(setting, value):
    """GDPO would ignore it."""
    chosen = {f"algorithm.{setting}": value}
    apart = changed(grpo_math(), chosen)
    assert f"algorithm.{setting}" not in [p.where for p in apart.problems()]
    together = changed(grpo_math(), {**chosen, "algorithm.advantage": GDPOAdvantage()})
    assert [p.where for p in together.problems()].count(f"algorithm.{setting}") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_decoupled_loss": True, "correction": "cap"},
        {"recompute_logprob": True, "correction": "icepop", "mismatch_kl_max": 0.1},
        {"icepop_low": 9.0},  # of a correction that is not used
        {"overlong_buffer_len": 32},
    ],
)
def test_settings_that_go_together_are_no_problem(changes):
    ppo = PPOHyperparameters(**changes)
    assert [*ppo_problems(ppo, longest=32), *range_problems(ppo)] == []


@pytest.mark.parametrize(
    ("flags", "needed"),
    [({}, False), ({"recompute_logprob": True}, True), ({"use_decoupled_loss": True}, True)],
)
def test_who_needs_proximal_logprobs(flags, needed):
    assert PPOHyperparameters(**flags).needs_prox_logprobs is needed
