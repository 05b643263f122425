"""What a configuration says of models and a step, read field by field, and what refuses a place."""

from __future__ import annotations

from dataclasses import astuple, replace
from types import SimpleNamespace as Parts

import pytest

from experiments.placement import Shared
from experiments.ppo_math import ppo_math
from realsys.api.dataflow import MFCDef, OffloadHook
from realsys.api.errors import CheckpointError, ConfigError
from realsys.api.model import (
    ModelAbstraction,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    ProcessTopology,
)
from realsys.models.shape import ModelShape
from realsys.planner import placed
from realsys.planner.allocation import CallAllocation
from realsys.planner.memory import memory_of_workers as memory
from realsys.planner.memory.copy_memory import HeldModel, StepSizes, call_terms
from realsys.planner.memory.episode_length import TURNS
from realsys.planner.meshes import Degrees
from realsys.planner.placed import RoleModel, Workload
from realsys.planner.time.simulate_steps import simulate
from realsys.planner.time.simulated_timeline import CallWork, Overheads
from realsys.rollout.agents.math_multi_turn import MathMultiTurn
from realsys.rollout.agents.tool_use import ToolUse
from realsys.rollout.runners.agent_arguments import ChatArguments, HarborArguments

TINY = ppo_math().sft.init.shape()


def call(name: str, kind: str = "inference", **more: object) -> MFCDef:
    usual = {"n_seqs": 12, "input_keys": (), "output_keys": (), "role": "actor", "args": {}, **more}
    role, args = usual.pop("role"), usual.pop("args")
    return MFCDef(
        name=name,
        interface_type=ModelInterfaceType(kind),
        interface_impl=ModelInterfaceAbstraction("any", args),  # type: ignore[arg-type]
        model_name=ModelName(role),  # type: ignore[arg-type]
        **usual,  # type: ignore[arg-type]
    )


def shard(*, backend: dict | None = None, **model: object) -> Parts:
    return Parts(
        id=Parts(model_name=ModelName("actor")),
        model=ModelAbstraction("hf_causal_lm", model),
        backend=Parts(type_="fsdp", args=backend or {}),
    )


def limited(config: Parts, *limits: tuple[int | None, int | None]) -> Parts:
    specs = [Parts(max_tokens_per_mb=n, max_cache_tokens=m) for n, m in limits]
    calls = [Parts(role="actor", is_train=False, mb_spec=spec, post_hooks=()) for spec in specs]
    return Parts(**{**vars(config), "model_rpcs": [*calls, Parts(role="other")]})


LORA = {"lora": {"rank": 4, "target_modules": ["q", "v"]}, "recompute": 1, "cpu_offload": True}


@pytest.mark.parametrize(
    ("agent", "server", "args", "answer", "is_bounded"),
    [
        ("math_single_step", {}, {}, 7, None),
        ("python", {}, {}, 7, False),  # its length is not known: a warning, no refusal
        ("python", {"max_tokens": 500}, {}, 470, True),
        ("chat", {"max_tokens": 500}, {}, 470, True),
        ("chat", {"max_tokens": 9999}, {}, 2048 - 30, True),
        ("chat", {"max_tokens": 20}, {}, 7, True),
        ("math_multi_turn", {}, {}, 2048 - 30, True),
        ("math_multi_turn", {}, {"max_turns": 2}, 2 * (7 + 256), True),
        ("tool_use", {"max_tokens": 500}, {"max_turns": 2}, 470, True),
        ("chat", {}, {"max_turns": 1}, 7 + 1024, True),
    ],
)
def test_an_agents_answer_is_as_long_as_its_turns_and_its_context_allow(
    agent, server, args, answer, is_bounded
) -> None:
    shapes = {"actor": replace(TINY, max_positions=2048)}
    data = [Parts(args={"max_prompt_len": 30})]
    config = Parts(
        model_rpcs=[call("a", "train_step", args={"gen": {"max_new_tokens": 7}})],
        model_worker=[],
        rollout_worker=[Parts(datasets=data, agent=agent, agent_args=args)],
        generation_server=[Parts(backend_type="embedded", backend_args=server)],
    )
    assert memory.step_sizes(config, shapes).answer_tokens == answer
    assert memory.step_sizes(config).answer_tokens == 7  # a server has one answer at a time
    episode = memory.episode_length(config, shapes)
    assert (episode and episode.is_bounded) == is_bounded
    if is_bounded is not None:
        assert episode is not None
        assert episode.setting == "schedule.server_args.max_tokens"
        longest = episode.tokens - 30 if is_bounded else 2048 - 30
        found = memory.step_sizes(config, shapes, whole_context=True)
        assert found.answer_tokens == max(7, longest)
    unknown = {"actor": replace(TINY, max_positions=0)}
    if not is_bounded:
        assert memory.step_sizes(config, unknown, whole_context=True).answer_tokens == 7


def test_turns_are_counted_as_the_agents_have_them_by_default() -> None:
    made = {
        "math_multi_turn": MathMultiTurn,
        "tool_use": ToolUse,
        "chat": ChatArguments,
        "harbor": HarborArguments,
    }
    assert {name: kind().max_turns for name, kind in made.items()} == {
        name: turns for name, (turns, _) in TURNS.items()
    }


@pytest.mark.parametrize(
    ("backend", "limits", "held", "role"),
    [
        ({}, [(None, None)], [0, (), False, False, None, None], [False, False, None]),
        (LORA, [(8, 0), (16, 5)], [4, ("q", "v"), True, True, 16, 5], [True, True, 16]),
        ({}, [(8, 7), (None, None)], [0, (), False, False, None, 7], [False, False, 8]),
    ],
)
def test_a_roles_model(monkeypatch, backend: dict, limits, held: list, role: list) -> None:
    monkeypatch.setattr(memory, "averaged_models", lambda calls: set())
    monkeypatch.setattr(placed, "read_shape", lambda path, critic: TINY)
    config = limited(Parts(), *limits)
    for dtype in ("float32", "bfloat16"):
        of = shard(backend=backend, path="/m", **({} if dtype == "float32" else {"dtype": dtype}))
        found = memory._held("actor", of, TINY, config, trained=False)
        assert [found.lora_rank, found.lora_targets, found.recompute, found.cpu_offload] == held[:4]
        assert [found.max_tokens_per_mb, found.max_cache_tokens] == held[4:]
        assert (found.dtype, found.trained, found.averaged, found.offload) == (dtype, *[False] * 3)
        mine = placed._role_model("actor", of, config, None)
        assert astuple(mine) == (astuple(TINY), dtype, "fsdp", *role)
    hook = Parts(role="actor", mb_spec=Parts(max_tokens_per_mb=1, max_cache_tokens=0))
    hook.post_hooks = (OffloadHook(),)
    monkeypatch.setattr(memory, "averaged_models", lambda calls: {ModelName("actor")})
    found = memory._held("actor", shard(), TINY, Parts(model_rpcs=[hook]), trained=True)
    assert (found.trained, found.averaged, found.offload) == (True, True, True)


DATA = {"max_prompt_len": 30}
MIXED = {"sources": {"a": {"max_prompt_len": 50}, "b": {}}}


@pytest.mark.parametrize(
    ("args", "data", "trains", "sizes", "work"),
    [
        ({}, {}, True, (12, 2048, 2048, 1, 1), (12, 64, 256, 1, 1)),
        (
            {"group_size": 4, "ppo_epochs": 3},
            DATA,
            False,
            (48, 30, 2048, 1, 4),
            (48, 15, 256, 1, 1),
        ),
        (
            {"gen": {"max_new_tokens": 7}, "ppo_n_minibatches": 4, "ppo_epochs": 2},
            DATA,
            True,
            (12, 30, 7, 4, 1),
            (12, 15, 7, 8, 2),
        ),
        ({}, {**MIXED, "max_answer_len": 9}, True, (12, 50, 9, 1, 1), (12, 64, 256, 1, 1)),
    ],
)
def test_the_size_of_a_step(args: dict, data: dict, trains: bool, sizes, work) -> None:
    first = call("a", "train_step" if trains else "inference", args=args)
    later = call("b", args={"group_size": 99} if "group_size" in args else {})
    shorter = {name: n - 9 for name, n in data.items() if name == "max_prompt_len"}
    worker = Parts(
        datasets=[Parts(args=data), Parts(args=shorter)] if shorter else [Parts(args=data)]
    )
    config = Parts(model_rpcs=[first, later], model_worker=[worker], rollout_worker=[])
    found = memory.step_sizes(config)
    assert (
        found.sequences,
        found.prompt_tokens,
        found.answer_tokens,
        found.updates_per_pass,
        found.group_size,
    ) == tuple(memory.DEFAULT_TOKENS if n == 2048 else n for n in sizes)
    known = {64: float(placed.PROMPT_TOKENS), 256: placed.ANSWER_TOKENS}
    assert astuple(placed.workload_of(config)) == tuple(known.get(n, n) for n in work)


@pytest.mark.parametrize(
    ("type_", "read", "before", "critic", "found"),
    [
        ("tokenizer_only", None, None, False, None),
        ("hf_causal_lm", TINY, None, False, TINY),
        ("hf_critic", TINY, None, True, TINY),
        ("hf_causal_lm", CheckpointError, TINY, False, TINY),
        ("hf_critic", CheckpointError, TINY, True, TINY.as_critic()),
        ("hf_causal_lm", CheckpointError, None, False, CheckpointError),
        ("other", None, None, False, ConfigError),
    ],
)
def test_the_sizes_of_a_model(monkeypatch, type_, read, before, critic, found) -> None:
    asked = list[bool]()

    def read_shape(path: str, *, critic: bool = False) -> ModelShape:
        asked.append(critic)
        if read is CheckpointError:
            raise CheckpointError("none", where=path, fix="make it")
        return read

    for module in (placed, memory):
        monkeypatch.setattr(module, "read_shape", read_shape)
    model = ModelAbstraction(type_, {"path": "/m"} if read is not None else {})
    if isinstance(found, type):
        with pytest.raises(found):
            placed._shape(model, before)
        assert isinstance(memory._shape_or_reason(model, before), str)
    else:
        assert placed._shape(model, before) == found
        assert memory._shape_or_reason(model, before) == found
        assert set(asked) <= {critic}


ADAPTED = RoleModel(shape=TINY, backend="megatron", adapters=True)


@pytest.mark.parametrize(
    ("model", "kind", "degrees", "words"),
    [
        (None, "inference", "d2t1p1", "one worker"),
        (None, "inference", "d1t1p1", None),
        (RoleModel(shape=None), "inference", "d2t1p1", "one worker"),
        # 12 datapoints in minibatches of two updates, three at least in a pass
        (RoleModel(shape=TINY), "train_step", "d2t1p1", None),
        (RoleModel(shape=TINY), "train_step", "d4t1p1", "minibatches"),
        (RoleModel(shape=TINY), "inference", "d4t1p1", None),
        (RoleModel(shape=TINY), "inference", "d5t1p1", "too few"),
        (ADAPTED, "train_step", "d1t2p1", "adapters"),
        (ADAPTED, "train_step", "d1t2p2", "adapters"),
        (ADAPTED, "train_step", "d2t1p1", None),
        (replace(ADAPTED, backend="fsdp"), "inference", "d1t2p1", "adapters"),
        (replace(ADAPTED, adapters=False), "train_step", "d1t2p1", None),
    ],
)
def test_a_place_that_is_refused(model, kind: str, degrees: str, words: str | None) -> None:
    topo = ProcessTopology.parse(degrees)
    place = CallAllocation(workers=tuple(range(topo.world_size)), topology=topo)
    work = Workload(sequences=12, prompt_tokens=1, answer_tokens=1, updates=4, epochs=2)
    found = Parts(roles={"actor": model} if model else {}, workload=work)
    said = placed.refusal(found, call("a", kind, min_n_seqs_per_pass=3), place)
    assert (words in said) if words and said else said == words


def test_what_runs_ahead() -> None:
    graph = Parts(sources=[call("gen", "generate"), call("inf")])
    assert placed.calls_ahead(graph, max_staleness=0) == ()
    assert placed.calls_ahead(graph, max_staleness=1) == ("gen",)


def test_the_axes_that_a_backend_cuts_along() -> None:
    kinds = {"a": "fsdp", "b": "megatron", "c": "other"}
    roles = {name: RoleModel(shape=TINY, backend=kind) for name, kind in kinds.items()}
    found = placed.degrees_of(
        Parts(roles={**roles, "rule": RoleModel(shape=None)}), gpus_per_node=4
    )
    cut, whole = Degrees(tensor=4), Degrees(tensor=1, pipeline=1)
    assert found == {"a": cut, "b": cut, "c": whole, "rule": whole}


@pytest.mark.parametrize(("workers", "whole"), [(1, False), (2, True)])
def test_an_evaluation_where_the_copy_generates_anyway_adds_no_weights(workers, whole) -> None:
    run = replace(ppo_math(), placement=Shared(n_model_workers=workers))
    config = run.with_prepared("sft", "/not/there").initial_setup().lazy_init()
    found = memory.memory_of_experiment(config, TINY)
    models = memory.held_models(config, memory.model_shapes(config, TINY))
    asked = next(s.eval_dataset for s in config.model_worker[0].shards if s.eval_dataset)
    questions = int(asked.args["eval_size"])
    batch = next(s.eval_bs for s in config.model_worker[0].shards if s.eval_dataset)
    sizes = replace(memory.step_sizes(config), sequences=min(questions, batch * workers))
    topo = ProcessTopology(data=workers)
    terms = call_terms(models["actor"], topo, 0, ModelInterfaceType.GENERATE, sizes)
    for one in found.values():
        assert one.calls["evaluation of actor@0"] == terms
        assert ("whole copy" in one.copies["actor@0"]) == whole


def test_copies_beside_a_roles_own_only_compute() -> None:
    one, two = (CallAllocation(workers=(w,), topology=ProcessTopology()) for w in (0, 1))
    own = HeldModel(shape=TINY, trained=True, averaged=True, recompute=True, cpu_offload=True)
    calls = [
        call("gen", "generate"),
        call("train", "train_step"),
        call("inf"),
        call("rule", role="r"),
    ]
    at = {"gen": two, "train": one, "inf": one, "rule": one}
    other = replace(own, backend="inference", trained=False, averaged=False)
    found = {
        str(name): (place, model, [c.name for c in mine])
        for name, (place, model, mine) in memory.copies_of(calls, at, {"actor": own}).items()
    }
    assert found == {
        "actor@0": (one, own, ["train", "inf"]),
        "actor@1": (two, replace(other, recompute=False, cpu_offload=False), ["gen"]),
    }
    assert memory.copies_of(calls, at, {"actor": replace(own, backend="other")}) == {}
    sizes = StepSizes(sequences=2, prompt_tokens=3, answer_tokens=4)
    whole = memory.memory_of_workers(calls, at, {"actor": replace(own, cpu_offload=False)}, sizes)
    assert [sorted(w.calls) for w in whole.values()] == [["inf", "train"], ["gen"]]
    away = replace(own, cpu_offload=False, offload=True)
    left = memory.memory_of_workers(calls, at, {"actor": away}, sizes)
    back = {f"{what} of actor@0": n for what, n in whole[0].copies["actor@0"].items()}
    assert left[0].copies == {}
    assert left[0].calls == {name: {**back, **terms} for name, terms in whole[0].calls.items()}


def test_every_span_of_a_step_with_what_it_waited_for() -> None:
    """Loading 1 s on worker 0; a 2 s on both; b 3 s on 1, c 1 s on both: c waits for b on 1."""
    works = [
        CallWork(call="a", workers=(0, 1), seconds=2.0),
        CallWork(call="b", workers=(1,), seconds=3.0, fetch_s=0.5, release_s=0.25),
        CallWork(call="c", workers=(0, 1), seconds=1.0),
    ]
    parents = {"a": frozenset[str](), "b": frozenset({"a"}), "c": frozenset({"a"})}
    overheads = Overheads(call_s=0.5, step_s=2.0, load_s=1.0)
    timeline = simulate(works, parents, num_workers=2, steps=2, overheads=overheads)
    first = [
        # issued, start, busy from, end, cause
        ("load", "load", 0, 0.0, 0.0, 0.0, 1.0, -1),
        ("load", "load", 1, 0.0, 0.0, 0.0, 1.0, -1),
        ("a", "call", 0, 1.25, 1.25, 1.25, 3.25, 0),
        ("a", "call", 1, 1.25, 1.25, 1.25, 3.25, 0),
        ("b", "call", 1, 3.75, 3.75, 3.75, 7.5, 2),
        ("c", "call", 0, 3.75, 3.75, 7.5, 8.5, 4),
        ("c", "call", 1, 3.75, 7.5, 7.5, 8.5, 4),
    ]
    later = [
        (*of, *(t + 10.75 for t in times), 5 if cause < 0 else cause + 7)
        for *of, a, b, c, d, cause in first
        for times in [(a, b, c, d)]
    ]
    assert [astuple(span) for span in timeline.spans] == [
        *((1, *row) for row in first),
        *((2, *row) for row in later),
    ]
    assert (timeline.step_starts, timeline.step_ends) == ((0.0, 10.75), (8.75, 19.5))
    assert (timeline.step_s, timeline.wall_s) == (10.75, 8.75)
