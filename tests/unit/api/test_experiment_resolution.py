"""An experiment's resolution: what follows from its parts, and the culprit of each mistake."""

from dataclasses import replace

import golden
import pytest

from experiments.algorithm import PPO
from experiments.asynchronous import Async, RolloutOnly
from experiments.ppo_math import ppo_math
from experiments.schedule import Sync
from realsys.api.dataflow import MFCDef, ParamReallocHook
from realsys.api.errors import ConfigError, ConfigErrors
from realsys.api.experiment import ExperimentConfig
from realsys.api.model import (
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    ModelShardID,
    ProcessTopology,
)
from realsys.api.options import ModelOptions
from realsys.api.scheduling import WorkerType
from realsys.api.worker_configs import (
    ExperimentSaveEvalControl,
    MasterWorker,
    ModelShard,
    ModelWorker,
)

ACTOR, SAMPLER, CRITIC = ModelName("actor"), ModelName("actor", 1), ModelName("critic")


def shard(name, rank=0, **degrees):
    return ModelShard(
        id=ModelShardID(model_name=name, topo=ProcessTopology(**degrees), parallelism_rank=rank),
        model=ModelAbstraction("test"),
        backend=ModelBackendAbstraction("test"),
    )


def call(name, model, reads, makes=(), kind="inference", **more):
    return MFCDef(
        name=name,
        n_seqs=more.pop("n_seqs", 8),
        interface_type=ModelInterfaceType(kind),
        interface_impl=ModelInterfaceAbstraction("test"),
        model_name=model,
        input_keys=tuple(reads),
        output_keys=tuple(makes),
        **more,
    )


def experiment(calls, *workers, **more):
    return ExperimentConfig(
        exp_ctrl=ExperimentSaveEvalControl(benchmark_steps=5),
        model_rpcs=tuple(calls),
        model_worker=tuple(ModelWorker(shards=tuple(shards)) for shards in workers),
        dataset_keys=("prompts",),
        **more,
    )


def gen(model=ACTOR, **more):
    return call("gen", model, ["prompts"], ["answers"], "generate", **more)


def train(model=ACTOR, name="train", **more):
    return call(name, model, ["answers"], [], "train_step", **more)


def problems_of(config):
    with pytest.raises(ConfigError) as refused:
        config.lazy_init()
    return getattr(refused.value, "problems", (refused.value,))


# ---- what follows -------------------------------------------------------------------------------


def test_topologies_and_places_of_all_shards_follow_from_the_workers():
    config = experiment(
        [gen(), train()],
        [shard(ACTOR, 0, data=2), shard(CRITIC)],
        [shard(ACTOR, 1, data=2)],
    ).lazy_init()
    assert config.resolved.model_topos == (
        (ACTOR, ProcessTopology(data=2)),
        (CRITIC, ProcessTopology()),
    )
    assert [(str(s), w) for s, w in config.msid2mwid] == [
        ("actor@0/d2t1p1#0", 0),
        ("critic@0/d1t1p1#0", 0),
        ("actor@0/d2t1p1#1", 1),
    ]


def test_data_moves_along_edges_and_from_the_first_source_to_the_others():
    calls = [gen(), call("judge", CRITIC, ["prompts"], ["score"]), train(CRITIC)]
    config = experiment(calls, [shard(ACTOR), shard(CRITIC)]).lazy_init()
    # gen → train (answers); the data set is where gen runs, so judge's prompts come from there.
    assert config.resolved.data_transfer_pairs == ((ACTOR, CRITIC),)


def test_weights_move_from_a_hooks_source_to_its_target_once():
    pull, push = ParamReallocHook(source=ACTOR), ParamReallocHook(target=SAMPLER)
    calls = [gen(SAMPLER, pre_hooks=(pull,)), train(post_hooks=(push,))]
    config = experiment(calls, [shard(ACTOR), shard(SAMPLER)]).lazy_init()
    assert config.resolved.sync_param_pairs == ((ACTOR, SAMPLER),)


def test_only_the_trained_replica_of_a_role_is_instantiated():
    calls = [gen(SAMPLER, pre_hooks=(ParamReallocHook(source=ACTOR),)), train()]
    config = experiment(calls, [shard(ACTOR), shard(SAMPLER), shard(CRITIC)]).lazy_init()
    assert config.resolved.instantiate == (ACTOR, CRITIC)


def test_one_master_is_made_with_the_run_of_the_experiment():
    config = experiment([gen(), train()], [shard(ACTOR)]).lazy_init()
    (master,) = config.master_worker
    assert master == MasterWorker(exp_ctrl=config.exp_ctrl, n_model_workers=1)
    resolved = config.resolve_worker_config("master_worker", 0)
    assert resolved.model_rpcs == config.model_rpcs
    assert resolved.msid2mwid == config.msid2mwid


def test_every_worker_is_told_who_it_is_and_workers_watch_the_master():
    config = experiment([gen(), train()], [shard(ACTOR, 0, data=2)], [shard(ACTOR, 1, data=2)])
    told = config.lazy_init().set_worker_information("ppo", "run1")
    info = told.resolve_worker_config(WorkerType.MODEL_WORKER, 1).worker_info
    assert info.name == "model_worker/1"
    assert (info.experiment_name, info.trial_name) == ("ppo", "run1")
    assert info.worker_count == 2
    assert info.host_key == "worker/model_worker/1"
    assert info.watch_keys == ("worker/master_worker/0",)
    assert told.resolve_worker_config("master_worker", 0).worker_info.watch_keys == ()


def test_the_default_ppo_experiment_resolves():
    config = ppo_math().initial_setup().lazy_init()
    assert [str(name) for name in config.resolved.instantiate] == [
        "actor@0",
        "critic@0",
        "ref@0",
        "reward@0",
    ]
    assert config.graph().levels[0] == ("actor_gen",)
    assert set(config.graph().levels[-1]) == {"actor_train", "critic_train"}


@pytest.mark.parametrize("schedule", [Sync(), Async()])
def test_without_a_penalty_there_is_no_reference(schedule):
    ppo = PPO(kl_ctl=0.0, use_decoupled_loss=schedule.is_async)
    experiment = replace(
        ppo_math(), schedule=schedule, algorithm=ppo, actor=ModelOptions(path="start")
    )
    config = experiment.initial_setup().lazy_init()
    calls = {call.name: call for call in config.model_rpcs}
    assert "ref_inf" not in calls
    assert "ref" not in {name.role for name in config.resolved.instantiate}
    for name in ("actor_train", "critic_train"):
        assert "packed_ref_logprobs" not in calls[name].input_keys
    with_it = replace(experiment, algorithm=replace(ppo, kl_ctl=0.1)).initial_setup()
    assert "packed_ref_logprobs" in {
        key for call in with_it.model_rpcs if call.name == "critic_train" for key in call.input_keys
    }


def test_no_reference_follows_the_actor_without_a_penalty():
    experiment = replace(ppo_math(), algorithm=PPO(kl_ctl=0.0, ref_ema_eta=0.1))
    assert [p.where for p in experiment.problems()] == [
        "algorithm.ref_ema_eta and algorithm.kl_ctl"
    ]


def test_rollouts_alone_have_one_call_and_no_model():
    config = replace(
        ppo_math(), schedule=RolloutOnly(), actor=ModelOptions(path="start")
    ).initial_setup()
    config = config.lazy_init()
    assert [call.name for call in config.model_rpcs] == ["rollout_end"]
    assert [str(name) for name in config.resolved.instantiate] == ["reward@0"]
    assert not config.rollout.trains


def test_rollouts_alone_refuse_what_is_about_training():
    experiment = replace(ppo_math(), schedule=RolloutOnly(), auto_eval=True)
    assert [p.where for p in experiment.problems()] == ["auto_eval and schedule"]
    assert not hasattr(RolloutOnly(), "max_staleness")


# ---- each mistake names its culprit --------------------------------------------------------------


def test_two_topologies_of_one_model_are_refused():
    found = problems_of(experiment([gen(), train()], [shard(ACTOR, data=2)], [shard(ACTOR, 1)]))
    assert found[0].where == "model_worker/1"
    assert "d2t1p1 and d1t1p1" in found[0].what


@pytest.mark.parametrize("ranks", [(0, 0), (0, 2), (1, 2)])
def test_ranks_must_be_all_of_the_topologys(ranks):
    workers = [[shard(ACTOR, rank, data=2)] for rank in ranks]
    (problem,) = problems_of(experiment([gen(), train()], *workers))
    assert str(list(ranks)) in problem.what
    assert "[0, 1]" in problem.what
    assert problem.where == "shards of actor@0"


def test_a_missing_rank_is_refused():
    (problem,) = problems_of(experiment([gen(), train()], [shard(ACTOR, 0, tensor=2)]))
    golden.check(problem)


def test_two_shards_of_a_model_on_one_worker_are_refused():
    found = problems_of(
        experiment([gen(), train()], [shard(ACTOR, 0, data=2), shard(ACTOR, 1, data=2)])
    )
    golden.check(found[0])


def test_replica_ids_must_count_from_zero():
    calls = [gen(ModelName("actor", 2)), train()]
    found = problems_of(experiment(calls, [shard(ACTOR), shard(ModelName("actor", 2))]))
    assert any("'actor' are [0, 2]" in p.what for p in found)


def test_a_role_is_trained_by_one_call():
    (problem,) = problems_of(experiment([gen(), train(), train(name="again")], [shard(ACTOR)]))
    golden.check(problem)


def test_a_model_that_no_worker_holds_comes_with_the_nearest():
    found = problems_of(experiment([gen(ModelName("acter")), train()], [shard(ACTOR)]))
    golden.check(found[0])


def test_a_batch_smaller_than_the_ranks_is_refused_with_both_numbers():
    workers = [[shard(ACTOR, r, data=4)] for r in range(4)]
    found = problems_of(experiment([gen(n_seqs=3), train(n_seqs=3)], *workers))
    golden.check(found[0])
    assert found[0].where == "MFC 'gen', n_seqs"


def test_least_datapoints_a_rank_count():
    workers = [[shard(ACTOR, r, data=2)] for r in range(2)]
    (problem,) = problems_of(
        experiment([gen(min_n_seqs_per_pass=5), train()], *workers)  # 8 < 2 · 5
    )
    golden.check(problem)


@pytest.mark.parametrize(("a", "b"), [(2, 4), (4, 2), (2, 3)])
def test_weights_move_between_any_two_tensor_parallel_sizes(a, b):
    hook = ParamReallocHook(source=ACTOR)
    workers = [
        [shard(n, r, tensor=t) for n, t in ((ACTOR, a), (SAMPLER, b)) if r < t]
        for r in range(max(a, b))
    ]
    config = experiment([gen(SAMPLER, pre_hooks=(hook,)), train()], *workers)
    assert config.lazy_init().resolved.sync_param_pairs == ((ACTOR, SAMPLER),)


def test_a_model_is_not_copied_onto_itself():
    found = problems_of(
        experiment([gen(pre_hooks=(ParamReallocHook(source=ACTOR),)), train()], [shard(ACTOR)])
    )
    golden.check(found[0])


def test_weights_from_a_model_nobody_holds_are_refused():
    hook = ParamReallocHook(source=ModelName("actor", 7))
    (problem,) = problems_of(experiment([gen(pre_hooks=(hook,)), train()], [shard(ACTOR)]))
    golden.check(problem)


def test_a_call_on_a_replica_that_never_gets_weights_is_refused():
    """actor@1 is not instantiated (actor@0 is trained) and no hook fills it."""
    config = experiment([gen(SAMPLER), train()], [shard(ACTOR), shard(SAMPLER)])
    (problem,) = problems_of(config)
    assert "actor@1" in problem.what
    assert "'gen'" in problem.where


def test_no_workers_is_told_beside_everything_else():
    found = problems_of(experiment([gen(), call("x", ACTOR, ["answer"])]))
    assert {p.what for p in found} >= {"no model workers", "no call produces key 'answer'"}


def test_all_mistakes_come_at_once_and_are_numbered():
    config = experiment([gen(n_seqs=1), train(), train(name="again")], [shard(ACTOR, 1, data=2)])
    with pytest.raises(ConfigErrors) as refused:
        config.lazy_init()
    assert len(refused.value.problems) >= 3
    assert str(refused.value).startswith("1. ")


def test_an_unresolved_experiment_configures_no_worker():
    with golden.raises(ConfigError):
        experiment([gen(), train()], [shard(ACTOR)]).resolve_worker_config("model_worker", 0)


def test_an_index_beyond_the_workers_is_refused_with_their_number():
    config = experiment([gen(), train()], [shard(ACTOR)]).lazy_init()
    with golden.raises(ConfigError):
        config.resolve_worker_config("model_worker", 1)


def test_an_unknown_kind_of_worker_is_refused_by_name():
    config = experiment([gen(), train()], [shard(ACTOR)]).lazy_init()
    with golden.raises(ConfigError):
        config.resolve_worker_config("judge_worker", 0)
