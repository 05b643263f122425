"""``schedule.success_range`` of synchronous runs: what is refused, and what reaches the master."""

from __future__ import annotations

from dataclasses import replace

import golden
import pytest

from experiments.compose import RLExperiment
from experiments.grpo_math import dapo_math, grpo_math
from experiments.ppo_math import ppo_math
from experiments.preferences.scored_calls import RewardModelOptions
from experiments.schedule import Sync
from launcher.submit.planning import default_experiment
from realsys.api.dataflow import DataflowGraph
from realsys.api.errors import ConfigError
from realsys.api.worker_configs import DynamicSamplingControl
from realsys.config.overrides import with_settings
from realsys.master.graph.function_executor import calls_to_rewards


def problems(schedule: Sync) -> list[str]:
    return [p.what for p in schedule.problems(batch_size=8, num_prompts=None)]


def graph_of(run: RLExperiment) -> DataflowGraph:
    return run.with_prepared("sft", "/a/policy").initial_setup().graph()


def test_a_limit_without_a_range_and_a_range_that_ends_before_it_begins_are_refused() -> None:
    (limit,) = problems(Sync(max_gen_batches=3))
    assert "schedule.max_gen_batches is 3" in limit
    (order,) = problems(Sync(success_range=(0.9, 0.1)))
    golden.check(order)
    assert problems(Sync(success_range=(0.1, 0.9), max_gen_batches=3)) == problems(Sync()) == []


def test_one_step_off_has_none_and_says_which_schedules_have() -> None:
    words = ("schedule=one_step_off", "schedule.success_range=0.1,0.9")
    run = default_experiment("grpo-math")
    with pytest.raises(ConfigError) as caught:
        with_settings(run, words=words)
    assert "has no success_range" in str(caught.value)
    assert "schedule=sync" in str(caught.value)


def test_the_masters_settings_are_there_only_with_a_range() -> None:
    plain = grpo_math().initial_setup().lazy_init()
    assert plain.master_worker[0].dynamic_sampling is None
    (scores,) = [call for call in plain.model_rpcs if call.name == "rew_inf"]
    assert "report_means" not in scores.interface_impl.args
    run = replace(grpo_math(), schedule=Sync(success_range=(0.1, 0.9)))
    config = run.with_prepared("sft", "/a/policy").initial_setup().lazy_init()
    expected = DynamicSamplingControl(lowest=0.1, highest=0.9, max_gen_batches=10)
    assert config.master_worker[0].dynamic_sampling == expected
    (scores,) = [call for call in config.model_rpcs if call.name == "rew_inf"]
    assert scores.interface_impl.args["report_means"] is True


def test_only_the_calls_up_to_the_rewards_run_in_rounds() -> None:
    for run in (ppo_math(), grpo_math(), dapo_math()):
        assert calls_to_rewards(graph_of(run)) == ("actor_gen", "rew_inf")
    scored = replace(grpo_math(), reward_model=RewardModelOptions(path="/a/reward"))
    assert calls_to_rewards(graph_of(scored)) == ("actor_gen", "rule_inf")


def test_a_graph_without_rewards_is_refused() -> None:
    calls = default_experiment("sft-math").initial_setup().graph()
    with golden.raises(ConfigError):
        calls_to_rewards(calls)


def test_dapo_math_is_the_papers_four_changes() -> None:
    made = dapo_math()
    assert made.algorithm.loss.eps_clip_higher == 0.28
    assert made.algorithm.loss_aggregation == "token_mean"
    assert made.algorithm.overlong_buffer_len == made.gen.max_new_tokens // 4
    assert made.schedule.success_range == (0.01, 0.99)
