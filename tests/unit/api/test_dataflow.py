"""The dataflow graph: levels, edges, and the mistakes that could only hang at run time."""

import golden
import pytest

from realsys.api.dataflow import MFCDef, OffloadHook, ParamReallocHook, build_graph
from realsys.api.errors import ConfigError, ConfigErrors
from realsys.api.model import ModelInterfaceAbstraction, ModelInterfaceType, ModelName


def call(name, reads=(), makes=(), *, role=None, kind="inference", n_seqs=8, **more):
    return MFCDef(
        name=name,
        n_seqs=n_seqs,
        interface_type=ModelInterfaceType(kind),
        interface_impl=ModelInterfaceAbstraction("test"),
        model_name=ModelName(role or name),
        input_keys=tuple(reads),
        output_keys=tuple(makes),
        **more,
    )


def ppo():
    return [
        call("actor_gen", ["prompts"], ["answers", "logp"], role="actor", kind="generate"),
        call("rew_inf", ["answers"], ["rewards"], role="reward"),
        call("ref_inf", ["answers"], ["ref_logp"], role="ref"),
        call("critic_inf", ["answers"], ["values"], role="critic"),
        call(
            "actor_train",
            ["answers", "logp", "rewards", "ref_logp", "values"],
            role="actor",
            kind="train_step",
        ),
        call("critic_train", ["answers", "rewards", "values"], role="critic", kind="train_step"),
    ]


def problems_of(nodes, keys=("prompts",)):
    with pytest.raises(ConfigError) as refused:
        build_graph(nodes, dataset_keys=keys)
    return getattr(refused.value, "problems", (refused.value,))


# ---- a right graph ------------------------------------------------------------------------------


def test_levels_are_the_calls_that_may_run_at_the_same_time():
    assert build_graph(ppo(), dataset_keys=["prompts"]).levels == (
        ("actor_gen",),
        ("rew_inf", "ref_inf", "critic_inf"),
        ("actor_train", "critic_train"),
    )


def test_the_order_within_a_level_is_the_files():
    nodes = ppo()
    swapped = [nodes[0], nodes[3], nodes[1], nodes[2], *nodes[4:]]
    assert build_graph(swapped, dataset_keys=["prompts"]).levels[1] == (
        "critic_inf",
        "rew_inf",
        "ref_inf",
    )


def test_an_edge_carries_the_keys_that_the_pair_shares():
    edges = build_graph(ppo(), dataset_keys=["prompts"]).edges()
    assert ("actor_gen", "rew_inf", ("answers",)) in edges
    assert ("actor_gen", "actor_train", ("answers", "logp")) in edges
    assert ("ref_inf", "actor_train", ("ref_logp",)) in edges
    assert len(edges) == 3 + 4 + 3  # inf calls from gen; actor_train from 4; critic_train from 3


def test_parents_children_and_sources():
    graph = build_graph(ppo(), dataset_keys=["prompts"])
    assert graph.parents["critic_train"] == {"actor_gen", "rew_inf", "critic_inf"}
    assert graph.children("rew_inf") == ("actor_train", "critic_train")
    assert [n.name for n in graph.sources] == ["actor_gen"]
    assert graph["ref_inf"].role == "ref"
    with pytest.raises(KeyError):
        graph["nobody"]


def test_two_calls_that_read_the_data_set_are_both_sources():
    graph = build_graph(
        [call("a", ["prompts"], ["x"]), call("b", ["prompts"], ["y"])], dataset_keys=["prompts"]
    )
    assert [n.name for n in graph.sources] == ["a", "b"]
    assert graph.levels == (("a", "b"),)


def test_only_a_train_step_updates_weights():
    assert [n.name for n in ppo() if n.is_train] == ["actor_train", "critic_train"]


# ---- wrong graphs -------------------------------------------------------------------------------


def test_a_graph_without_calls_is_refused():
    (problem,) = problems_of([])
    assert problem.what == "no calls"


def test_two_calls_of_one_name_are_refused():
    found = problems_of([call("a", ["prompts"], ["x"]), call("a", ["prompts"], ["y"])])
    golden.check([p.what for p in found])


def test_two_producers_of_a_key_are_named():
    (problem,) = problems_of([call("a", ["prompts"], ["x"]), call("b", ["prompts"], ["x"])])
    golden.check(problem)
    assert "'b'" in problem.where


def test_the_data_set_is_a_producer_too():
    (problem,) = problems_of([call("a", ["prompts"], ["prompts"])])[:1]
    golden.check(problem)


def test_a_key_that_nobody_makes_comes_with_the_nearest_name():
    (problem,) = problems_of([call("a", ["prompts"], ["rewards"]), call("b", ["reward"])])
    golden.check(problem)
    assert problem.where == "MFC 'b', input_keys"


def test_a_cycle_is_named_call_by_call():
    (problem,) = problems_of(
        [
            call("a", ["prompts", "z"], ["x"]),
            call("b", ["x"], ["y"]),
            call("c", ["y"], ["z"]),
        ]
    )
    path = problem.what.removeprefix("the calls form a cycle: ").split(" → ")
    assert path[0] == path[-1]
    waits_for = {"a": "c", "b": "a", "c": "b"}
    assert [waits_for[name] for name in path[:-1]] == path[1:]


def test_a_call_that_waits_for_itself_is_a_cycle():
    (problem,) = problems_of([call("a", ["x"], ["x"])])
    assert problem.what.endswith("a → a")


def test_all_problems_are_told_at_once():
    nodes = [
        call("a", ["prompt"], ["x"]),
        call("a", ["prompts"], ["x"]),
        call("c", ["y"], ["z"]),
        call("d", ["z"], ["y"]),
    ]
    with pytest.raises(ConfigErrors) as refused:
        build_graph(nodes, dataset_keys=["prompts"])
    text = str(refused.value)
    for part in ("two calls named 'a'", "two producers", "'prompt'", "form a cycle"):
        assert part in text


def test_a_call_that_reads_nothing_is_refused_since_it_would_never_run():
    (problem,) = problems_of([call("a", ["prompts"], ["x"]), call("b", [], ["y"])])
    assert "'b'" in problem.where


def test_calls_of_unequal_batches_are_refused_since_a_step_runs_each_once():
    """A smaller n_seqs would leave datapoints behind in every step, a larger one waits for ever."""
    found = problems_of([call("a", ["prompts"], ["x"], n_seqs=64), call("b", ["x"], n_seqs=32)])
    assert "64" in found[0].what
    assert "32" in found[0].what


# ---- one call -----------------------------------------------------------------------------------


def test_a_call_of_no_datapoints_is_refused():
    with golden.raises(ConfigError):
        call("a", n_seqs=0)


def test_a_remap_must_name_keys_of_the_call():
    call("a", ["x"], ["y"], input_key_remap={"x": "inner"}, output_key_remap={"inner": "y"})
    with golden.raises(ConfigError):
        call("a", ["answers"], input_key_remap={"answer": "inner"})
    with golden.raises(ConfigError):
        call("a", ["x"], ["z"], output_key_remap={"inner": "y"})


def test_a_reallocation_hook_names_exactly_one_other_end():
    a, b = ModelName("actor"), ModelName("actor", 1)
    assert ParamReallocHook(source=a).target is None
    for ends in ({}, {"source": a, "target": b}):
        with golden.raises(ConfigError):
            ParamReallocHook(**ends)


@pytest.mark.parametrize("eta", [0.0, -0.5, 1.01, float("nan")])
def test_the_blend_of_a_hook_is_above_0_and_at_most_1(eta):
    with golden.raises(ConfigError):
        ParamReallocHook(source=ModelName("actor"), eta=eta)


def test_hooks_are_kept_in_order():
    hooks = (OffloadHook(), ParamReallocHook(source=ModelName("actor", 1)))
    assert call("a", ["x"], pre_hooks=hooks).pre_hooks == hooks
