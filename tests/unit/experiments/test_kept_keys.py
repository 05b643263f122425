"""Which runs carry kept sets, and which engines can't."""

from dataclasses import replace

import golden
import pytest

from experiments.asynchronous import Async, RolloutOnly
from experiments.grpo_math import grpo_math
from experiments.ppo_math import ppo_math
from realsys.api.model import GenerationHyperparameters
from realsys.api.options import ModelOptions

KEPT = {"packed_kept_counts", "packed_kept_ids"}
NARROW = GenerationHyperparameters(top_p=0.9)
FLOOR = GenerationHyperparameters(min_new_tokens=2)


def calls_of(experiment):
    policy = replace(experiment, actor=replace(experiment.actor, path="/nowhere"))
    return {call.name: call for call in policy._calls}


def with_sets(calls):
    return {name for name, call in calls.items() if {*call.input_keys, *call.output_keys} >= KEPT}


@pytest.mark.parametrize("gen", [NARROW, FLOOR, GenerationHyperparameters(top_k=5)])
def test_every_call_of_the_policys_log_probs_reads_the_sets_and_no_other(gen):
    made = calls_of(replace(ppo_math(), gen=gen))
    assert with_sets(made) == {"actor_gen", "ref_inf", "actor_train"} | ({"actor_inf"} & set(made))
    assert set(made["actor_gen"].output_keys) >= KEPT


@pytest.mark.parametrize(
    "gen", [GenerationHyperparameters(), GenerationHyperparameters(greedy=True, top_p=0.5)]
)
def test_runs_that_sample_from_all_tokens_have_no_such_key(gen):
    for experiment in (ppo_math(), grpo_math(), replace(grpo_math(), schedule=Async())):
        assert not with_sets(calls_of(replace(experiment, gen=gen)))


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("setting", ["top_p=0.9", "top_k=5", "min_new_tokens=8"])
def test_what_narrows_sampling_needs_an_engine_that_tells_what_it_keeps(engine, setting):
    """Log-probs of an engine without the end tokens were trained on as of the whole vocabulary."""
    name, value = setting.split("=")
    gen = GenerationHyperparameters(**{name: float(value) if name == "top_p" else int(value)})
    (problem,) = Async(server_backend=engine).sampling_problems(gen)
    golden.check(problem)
    assert problem.where == f"gen.{name} and schedule.server_backend"
    assert "server_backend=embedded" in problem.fix
    assert f"gen.{name}=" in problem.fix


@pytest.mark.parametrize(
    ("schedule", "gen", "records"),
    [
        (Async(), NARROW, True),
        (Async(), GenerationHyperparameters(), False),
        (Async(), FLOOR, True),
        (RolloutOnly(server_backend="vllm"), FLOOR, False),
        (Async(server_backend="vllm"), GenerationHyperparameters(), False),
        (RolloutOnly(server_backend="vllm"), NARROW, False),  # nothing trains
        (RolloutOnly(), NARROW, True),
    ],
)
def test_rollout_workers_record_what_their_engine_can_tell(schedule, gen, records):
    assert not list(schedule.sampling_problems(gen))
    experiment = replace(
        grpo_math(), schedule=schedule, gen=gen, actor=ModelOptions(path="/nowhere")
    )
    assert schedule.records_kept(gen) is records
    assert (set(experiment._rollout_keys) >= KEPT) is records


HOLDING = replace(
    grpo_math().task,
    agent="python",
    agent_args={"function": "my_agent.py:solve", "schema": "enforce"},
)


def test_a_run_that_holds_answers_to_schemas_computes_over_what_they_left():
    experiment = replace(
        grpo_math(), task=HOLDING, schedule=Async(), actor=ModelOptions(path="/nowhere")
    )
    assert with_sets(calls_of(experiment)) >= {"ref_inf", "actor_train"}
    assert set(experiment._rollout_keys) >= KEPT
    (worker,) = experiment.initial_setup().rollout_worker
    assert worker.kept_sets
    ignoring = replace(HOLDING, agent_args={**HOLDING.agent_args, "schema": "ignore"})
    free = replace(experiment, task=ignoring)
    assert not with_sets(calls_of(free))
    assert not free.initial_setup().rollout_worker[0].kept_sets


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_servers_that_hold_no_schema_are_refused(engine):
    schedule = Async(server_backend=engine)
    (problem,) = schedule.sampling_problems(GenerationHyperparameters(), by_schema=True)
    golden.check(problem)
    assert problem.where == "task.agent_args.schema and schedule.server_backend"
