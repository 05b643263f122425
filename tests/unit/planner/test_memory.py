"""The memory estimate: terms by hand, against layouts and against autograd, sums, what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import golden
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from wanted_resources import model_workers

from experiments.algorithm import PPO
from experiments.compose import RLExperiment
from experiments.placement import Shared, Split
from experiments.ppo_math import ppo_math, ppo_math_async
from launcher.plan.memory_check import gpu_bytes, memory_of_plan, memory_problems, usable_bytes
from launcher.plan.plan_view import allocation_rows, memory_rows
from launcher.plan.resolve import resolve
from realsys.api import data
from realsys.api.cluster import ClusterSpec, PartitionSpec, SlurmSpec
from realsys.api.errors import ConfigError
from realsys.api.model import ModelInterfaceType, ProcessTopology
from realsys.api.options import LORA_TARGETS
from realsys.api.plan import LaunchPlan
from realsys.api.scheduling import Scheduling
from realsys.models.shape import ModelShape, shape_of
from realsys.planner.allocation import CallAllocation
from realsys.planner.memory import copy_memory
from realsys.planner.memory.copy_memory import (
    GiB,
    HeldModel,
    StepSizes,
    call_terms,
    held_numbers,
    layer_activation_bytes,
    permanent_terms,
)
from realsys.planner.memory.memory_messages import size
from realsys.planner.memory.memory_of_workers import memory_of_experiment, memory_of_workers
from realsys.weights.layouts.holdings import fsdp_layout, layout_problems, megatron_layout

SHAPE = ModelShape(
    family="llama",
    hidden_size=64,
    intermediate_size=192,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=96,
)
SIZES = StepSizes(sequences=64, prompt_tokens=24, answer_tokens=8, updates_per_pass=4)
TRAIN, GENERATE = ModelInterfaceType.TRAIN_STEP, ModelInterfaceType.GENERATE
ONE = ProcessTopology()


def topo(text: str) -> ProcessTopology:
    return ProcessTopology.parse(text)


# ---- what stays --------------------------------------------------------------------------------------


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["fsdp", "megatron"]),
    st.booleans(),
    st.booleans(),
)
def test_held_numbers_are_those_of_the_layouts(data, tensor, pipeline, backend, tied, qk_norm):
    shape = replace(SHAPE, tied_embeddings=tied, qk_norm=qk_norm)
    layout_topo = ProcessTopology(data=data, tensor=tensor, pipeline=pipeline)
    if backend == "fsdp" and pipeline > 1:
        return
    assert not layout_problems(shape, layout_topo, backend)
    layout = (
        fsdp_layout(shape.weights(), layout_topo)
        if backend == "fsdp"
        else megatron_layout(shape, layout_topo)
    )
    model = HeldModel(shape=shape, backend=backend, trained=True)
    for rank, holding in enumerate(layout):
        stage = layout_topo.coordinate(rank)[0]
        held = sum(box.numel for boxes in holding.values() for box in boxes)
        counted, trained = held_numbers(model, layout_topo, stage)
        assert trained == counted
        assert counted == pytest.approx(held, rel=0.02)  # norms don't divide evenly into shards


def test_training_state_by_backend_and_type():
    """A number has weight + gradient + optimizer: fsdp keeps all in float32 and computes with a cast,
    Megatron the gradient and what AdamW needs, of which a float32 weight is its own master."""
    numbers = SHAPE.num_params

    def per_number(backend: str, dtype: str, layout: str = "d1") -> dict[str, float]:
        model = HeldModel(shape=SHAPE, dtype=dtype, backend=backend, trained=True)
        terms = permanent_terms(model, topo(layout), 0, generates=False)
        return {what: n / numbers for what, n in terms.items()}

    assert per_number("fsdp", "float32") == {"weights": 4, "gradients": 4, "optimizer": 8}
    assert per_number("fsdp", "bfloat16") == {"weights": 4, "gradients": 4, "optimizer": 8}
    assert per_number("fsdp", "bfloat16", "d4") == {"weights": 1, "gradients": 1, "optimizer": 2}
    assert per_number("megatron", "bfloat16", "d4") == {
        "weights": 2,
        "gradients": 4,
        "optimizer": 3,
    }
    assert per_number("megatron", "float32")["optimizer"] == 8
    frozen = HeldModel(shape=SHAPE, dtype="bfloat16", backend="inference")
    assert permanent_terms(frozen, topo("d4"), 0, generates=False) == {"weights": 2 * numbers}


def test_an_average_of_half_precision_is_float32_beside_what_computes():
    ref = HeldModel(shape=SHAPE, dtype="bfloat16", backend="inference", averaged=True)
    numbers = SHAPE.num_params
    assert permanent_terms(ref, ONE, 0, generates=False) == {
        "weights": 2 * numbers,
        "average": 4 * numbers,
    }
    whole = permanent_terms(replace(ref, dtype="float32"), ONE, 0, generates=False)
    assert whole == {"weights": 4 * numbers}


@pytest.mark.parametrize("rank", [1, 2])
def test_adapters_are_all_that_trains(rank):
    model = HeldModel(shape=SHAPE, trained=True, lora_rank=rank, lora_targets=LORA_TARGETS)
    # of a layer: q 64→64, k and v 64→32, o 64→64, gate and up 64→192, down 192→64
    adapters = 4 * rank * (128 + 96 + 96 + 128 + 256 + 256 + 256)
    assert held_numbers(model, ONE, 0) == (SHAPE.num_params + adapters, adapters)
    terms = permanent_terms(model, ONE, 0, generates=True)
    assert terms["optimizer"] == 8 * adapters
    assert terms["whole copy"] == 4 * SHAPE.num_params  # merged weights to generate with
    half = permanent_terms(replace(model, dtype="bfloat16"), ONE, 0, generates=True)
    assert half["weights"] == 2 * SHAPE.num_params + 4 * adapters
    assert (half["gradients"], half["optimizer"]) == (4 * adapters, 8 * adapters)
    other = replace(model, dtype="bfloat16", backend="inference", trained=False)
    assert other.learning_bytes == 4  # adapters are float32 whoever holds them
    assert replace(other, lora_rank=0).learning_bytes == 2


def test_generation_needs_whole_weights_where_they_are_cut():
    model = HeldModel(shape=SHAPE, trained=True)
    whole = 4.0 * SHAPE.num_params
    assert "whole copy" not in permanent_terms(model, ONE, 0, generates=True)
    assert permanent_terms(model, topo("d2"), 0, generates=True)["whole copy"] == whole
    assert "whole copy" not in permanent_terms(model, topo("d2"), 0, generates=False)
    cast = replace(model, dtype="bfloat16")
    assert permanent_terms(cast, ONE, 0, generates=True)["whole copy"] == whole / 2
    copy = replace(model, backend="inference", trained=False)
    assert permanent_terms(copy, topo("d2"), 0, generates=True) == {"weights": whole}


def test_cpu_offload_leaves_no_state_on_the_gpu():
    model = HeldModel(shape=SHAPE, trained=True, cpu_offload=True)
    assert permanent_terms(model, topo("d2"), 0, generates=False) == {}


# ---- what a call adds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "config"), [(LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config)]
)
def test_activations_of_a_layer_are_what_autograd_saves(
    kind: type, config: type[PretrainedConfig], dtype: torch.dtype
) -> None:
    rows, length = 2, 64

    def saved_bytes(num_layers: int) -> tuple[int, ModelShape]:
        sizes = config(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=num_layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=8,
            max_position_embeddings=128,
        )
        model = kind(sizes).to(dtype)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def keep(x: torch.Tensor) -> torch.Tensor:
            if x.untyped_storage().data_ptr() not in own:
                kept[x.untyped_storage().data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            output = model(input_ids=torch.zeros(rows, length, dtype=torch.int64), use_cache=False)
        assert output.logits.requires_grad
        return sum(x.untyped_storage().nbytes() for x in kept.values()), shape_of(sizes.to_dict())

    (few, shape), (more, _) = saved_bytes(1), saved_bytes(3)
    per_token = (more - few) / 2 / (rows * length)
    expected = layer_activation_bytes(shape, 1, dtype.itemsize)
    assert per_token == pytest.approx(expected, rel=0.03)


def test_recomputation_keeps_the_inputs_of_layers_and_one_layer():
    model = HeldModel(shape=SHAPE, backend="megatron", trained=True)
    layer = layer_activation_bytes(SHAPE, 1, 4)
    tokens = 64 // 4 * 32  # a minibatch of 16 sequences
    kept = call_terms(model, ONE, 0, TRAIN, SIZES)["activations"]
    again = call_terms(replace(model, recompute=True), ONE, 0, TRAIN, SIZES)["activations"]
    assert kept == tokens * 4 * layer
    assert again == tokens * (4 * 64 * 4 + layer)


def test_early_stages_keep_more_micro_batches_and_the_last_has_the_logits():
    model = HeldModel(shape=SHAPE, backend="megatron", trained=True, max_tokens_per_mb=128)
    first, last = (call_terms(model, topo("p2"), stage, TRAIN, SIZES) for stage in (0, 1))
    assert first["activations"] == 2 * last["activations"]
    assert "logits" not in first
    # 128 tokens: a chunk, logits as they are and their gradients, the last norm
    assert last["logits"] == 96 * 128 * (7 * 4 + 2 * 4) + 128 * 64 * 8


def test_logits_take_a_chunk_however_many_tokens_there_are(monkeypatch):
    monkeypatch.setattr(data, "LOGITS_AT_ONCE", 32 * 96)

    def logits(limit: int, **changes: object) -> float:
        model = HeldModel(shape=SHAPE, trained=True, max_tokens_per_mb=limit)
        return call_terms(replace(model, **changes), ONE, 0, TRAIN, SIZES)["logits"]  # type: ignore[arg-type]

    # 128 tokens' and 32 answers' states and their gradients, the last norm, the head's gradient twice
    chunk, head = 32 * 96 * 7 * 4, 2 * 96 * 64 * 4
    assert logits(128) == chunk + head + 2 * (128 + 32) * 64 * 4 + 128 * 64 * 8
    assert logits(256) - logits(128) == 2 * (128 + 32) * 64 * 4 + 128 * 64 * 8
    assert logits(128) - logits(128, lora_rank=2) == head


def test_a_forward_pass_has_three_floats_a_logit():
    model = HeldModel(shape=SHAPE, backend="inference", max_tokens_per_mb=128)
    found = call_terms(model, ONE, 0, ModelInterfaceType.INFERENCE, SIZES)
    assert found["logits"] == 96 * 128 * (3 * 4 + 4)  # and as the model made them


def test_norms_are_whole_on_each_process_of_the_tensor_axis(monkeypatch):
    monkeypatch.setattr(copy_memory, "FSDP_WHOLE_BYTES", 0)
    model = HeldModel(shape=SHAPE, trained=True, max_tokens_per_mb=32)
    # A layer: two norms, and halves of q and o, k and v, three of the MLP. Embedding, half a head, norm.
    layer = 2 * 64 + (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192) / 2
    rest = 96 * 64 + 96 * 64 / 2 + 64
    found = call_terms(model, topo("d2t2"), 0, TRAIN, SIZES)
    assert found["gathered layers"] == 4 * (2 * layer + rest)


def test_a_micro_batch_is_at_least_one_sequence_and_at_most_the_minibatch():
    def activations(limit: int | None) -> float:
        model = HeldModel(shape=SHAPE, trained=True, max_tokens_per_mb=limit)
        return call_terms(model, ONE, 0, TRAIN, SIZES)["activations"]

    assert activations(1) == activations(32)
    assert activations(64) == 2 * activations(32)
    assert activations(None) == activations(10**9) == 16 * activations(32)


def test_fsdp_reduces_the_gradients_of_each_micro_batch_layer_by_layer(monkeypatch):
    monkeypatch.setattr(copy_memory, "FSDP_WHOLE_BYTES", 0)
    model = HeldModel(shape=SHAPE, trained=True, max_tokens_per_mb=32)
    # norms, q and o, k and v, three of the MLP; embedding, norm and head of 96 tokens are smaller
    layer = 2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192
    found = call_terms(model, topo("d2"), 0, TRAIN, SIZES)
    assert found["gradients of a layer"] == layer * (4 + 4)  # as computed, and as they are sent
    assert "whole gradients" not in found
    half = call_terms(replace(model, dtype="bfloat16"), ONE, 0, TRAIN, SIZES)
    assert half["gradients of a layer"] == layer * (2 + 4)
    assert half["gathered layers"] == 2 * (2 * layer + 2 * 96 * 64 + 64)
    assert "gradients of a layer" not in call_terms(model, ONE, 0, TRAIN, SIZES)


def test_fsdp_gathers_a_small_model_in_one_piece(monkeypatch):
    model, size = HeldModel(shape=SHAPE, trained=True), 4 * SHAPE.num_params
    monkeypatch.setattr(copy_memory, "FSDP_WHOLE_BYTES", size)
    found = call_terms(model, topo("d2"), 0, TRAIN, SIZES)
    assert (found["gathered layers"], found["whole gradients"]) == (size, size)
    half = call_terms(replace(model, dtype="bfloat16"), topo("d2"), 0, TRAIN, SIZES)
    assert half["gathered layers"] == size / 2
    assert half["whole gradients"] == size * 3 / 2  # their float32 sums, and a micro-batch's own
    monkeypatch.setattr(copy_memory, "FSDP_WHOLE_BYTES", size - 1)
    found = call_terms(model, topo("d2"), 0, TRAIN, SIZES)
    assert found["gathered layers"] < size
    assert "whole gradients" not in found


def test_the_cache_holds_as_many_tokens_as_it_may():
    model = HeldModel(shape=SHAPE, max_tokens_per_mb=None)
    # Keys and values, layers, kv heads × width, bytes; one of four layers twice while it grows.
    of_a_token = 2 * 4 * 32 * 4 * 1.25
    assert call_terms(model, ONE, 0, GENERATE, SIZES)["cache"] == 64 * 32 * of_a_token
    few = replace(model, max_tokens_per_mb=100)
    assert call_terms(few, ONE, 0, GENERATE, SIZES)["cache"] == 100 * of_a_token
    own = replace(few, max_cache_tokens=160)
    assert call_terms(own, ONE, 0, GENERATE, SIZES)["cache"] == 160 * of_a_token
    one = replace(few, max_cache_tokens=8)  # a whole answer's at the least
    assert call_terms(one, ONE, 0, GENERATE, SIZES)["cache"] == 32 * of_a_token
    assert (
        call_terms(own, ONE, 0, GENERATE, SIZES)["logits"]
        > call_terms(few, ONE, 0, GENERATE, SIZES)["logits"]
    )
    assert call_terms(model, topo("d2t2"), 0, GENERATE, SIZES)["cache"] == 32 * 32 * of_a_token
    dealt = replace(model, backend="megatron")
    assert call_terms(dealt, topo("d2t2"), 0, GENERATE, SIZES)["cache"] == 16 * 32 * of_a_token


@given(st.sampled_from(["d1", "d2", "t2", "d2t2", "p2", "d2t2p2"]), st.integers(33, 4096))
def test_more_processes_and_smaller_micro_batches_never_need_more(layout, limit):
    model = HeldModel(
        shape=SHAPE, backend="megatron", trained=True, recompute=True, max_tokens_per_mb=limit
    )

    def needs(model: HeldModel, where: ProcessTopology, stage: int) -> float:
        return sum(permanent_terms(model, where, stage, generates=False).values()) + sum(
            call_terms(model, where, stage, TRAIN, SIZES).values()
        )

    cut = topo(layout)
    for stage in range(cut.pipeline):
        assert needs(model, cut, stage) <= needs(model, ONE, 0)
        smaller = replace(model, max_tokens_per_mb=math.ceil(limit / 2))
        assert needs(smaller, cut, stage) <= needs(model, cut, stage)


# ---- workers -------------------------------------------------------------------------------------------


def config_of(experiment: RLExperiment):
    return experiment.with_prepared("sft", "/not/there").initial_setup().lazy_init()


TINY = ppo_math().sft.init.shape()


def test_a_worker_has_all_its_copies_and_its_largest_call():
    found = memory_of_experiment(config_of(ppo_math()), TINY)
    (worker,) = found.values()
    assert sorted(worker.copies) == ["actor@0", "critic@0", "ref@0"]
    assert sorted(worker.calls) == [
        "actor_gen",
        "actor_train",
        "critic_inf",
        "critic_train",
        "evaluation of actor@0",
        "ref_inf",
    ]
    most = max(sum(terms.values()) for terms in worker.calls.values())
    assert worker.bytes == worker.staying_bytes + most
    weights = 4 * (2 * TINY.num_params + TINY.as_critic().num_params)
    assert sum(terms["weights"] for terms in worker.copies.values()) == weights


def test_split_puts_each_copy_where_it_is():
    found = memory_of_experiment(config_of(replace(ppo_math(), placement=Split())), TINY)
    assert [sorted(m.copies) for m in found.values()] == [["actor@0", "ref@0"], ["critic@0"]]


def test_a_copy_beside_the_trained_one_has_no_optimizer():
    found = memory_of_experiment(
        config_of(replace(ppo_math(), placement=Shared(allocation="actor_gen:d2"))), TINY
    )
    assert sorted(found[0].copies["actor@1"]) == ["weights"]
    assert sorted(found[0].copies["actor@0"]) == ["gradients", "optimizer", "weights"]
    assert sorted(found[1].copies) == ["actor@1"]


def test_a_copy_that_offloads_counts_only_while_it_computes():
    actor = replace(ppo_math().actor, offload=True)
    worker = memory_of_experiment(config_of(replace(ppo_math(), actor=actor)), TINY)[0]
    assert sorted(worker.copies) == ["critic@0", "ref@0"]
    assert worker.calls["actor_train"]["optimizer of actor@0"] == 8 * TINY.num_params
    assert "optimizer of actor@0" not in worker.calls["critic_train"]


def test_roles_of_unknown_size_and_backend_are_left_out():
    assert memory_of_experiment(config_of(ppo_math())) == {}
    calls = config_of(ppo_math()).model_rpcs
    place = {call.name: CallAllocation(workers=(0,), topology=ONE) for call in calls}
    own = {"actor": HeldModel(shape=TINY, backend="my_own")}
    assert memory_of_workers(calls, place, own, SIZES) == {}


# ---- a plan --------------------------------------------------------------------------------------------


def cluster(**partition: object) -> ClusterSpec:
    spec = PartitionSpec(gpus=8, cpus=64, memory_mib=512000, **partition)  # type: ignore[arg-type]
    return ClusterSpec(
        name="site",
        scheduler="slurm",
        file_root="/shared",
        partitions={"gpu": spec},
        slurm=SlurmSpec(partition="gpu"),
    )


def plan_of(where: ClusterSpec, **settings: object) -> LaunchPlan:
    experiment = replace(ppo_math(), scheduling=model_workers(gpu=1), **settings)  # type: ignore[arg-type]
    return resolve("ppo-math", experiment, cluster=where, trial_name="run1", user="ada")


def test_the_size_of_a_gpu_is_the_site_files_or_its_types():
    task = Scheduling(gpu=1)
    assert gpu_bytes(cluster(gpu_memory_gib=24), task) == 24 * GiB
    assert gpu_bytes(cluster(gpu_type="h200"), task) == 141e9
    assert gpu_bytes(cluster(gpu_type="b9000"), task) is None
    assert gpu_bytes(cluster(), task) is None
    assert gpu_bytes(cluster(gpu_memory_gib=24), Scheduling(gpu=0.5)) == 12 * GiB
    assert gpu_bytes(cluster(gpu_memory_gib=24), Scheduling(gpu=0)) is None


def test_a_plan_that_does_not_fit_is_refused_with_its_terms_and_a_way_out():
    assert plan_of(cluster(gpu_memory_gib=24))
    with pytest.raises(ConfigError) as refused:
        plan_of(cluster(gpu_memory_gib=0.05))
    problems = getattr(refused.value, "problems", (refused.value,))
    main = next(p for p in problems if p.where.startswith("phase main"))
    for words in ("model workers 0 need", "activations in", "logits in", "weights of actor@0"):
        assert words in main.what
    golden.check(main)


def test_what_is_not_known_is_not_compared():
    plan = plan_of(cluster())
    copy_memory = memory_of_plan(plan)
    assert list(memory_problems(copy_memory)) == []
    assert {group.limit for groups in copy_memory.values() for group in groups} == {None}


def test_a_cpu_worker_that_needs_more_than_its_task_has_is_a_warning():
    small = replace(ppo_math(), scheduling=model_workers(mem=700))
    spec = ClusterSpec(file_root="/tmp/root")
    plan = resolve("ppo-math", small, cluster=spec, trial_name="a", user="ada")
    golden.check(plan.warnings)
    usual = resolve("ppo-math", ppo_math(), cluster=spec, trial_name="a", user="ada")
    assert not any("their tasks have" in warning for warning in usual.warnings)


def test_idle_workers_are_told():
    experiment = replace(ppo_math(), placement=Shared(pools={"all": "4"}, allocation="*:d2@all"))
    spec = ClusterSpec(file_root="/tmp/root")
    plan = resolve("ppo-math", experiment, cluster=spec, trial_name="a", user="ada")
    golden.check(plan.warnings)


def test_the_rows_of_a_plan_name_copies_pools_hooks_and_sums():
    plan = plan_of(
        cluster(gpu_memory_gib=80),
        placement=Split(n_model_workers=4, allocation="actor_gen:d2,actor_train:t2"),
        algorithm=PPO(ref_ema_eta=0.5),
    )
    rows = {row[0]: row[1:] for row in allocation_rows(plan.phase("main").config)}
    golden.check(rows["actor_gen"])
    assert rows["actor_train"][2:5] == ("bfloat16", "d1t2p1", "0-1")
    assert "ref@0 (eta 0.5)" in rows["actor_train"][-1]
    copy_memory = memory_rows(memory_of_plan(plan)["main"])
    assert [row[0] for row in copy_memory if row[0]] == ["0-1", "2-3"]
    of = "of {} GiB usable of 80.0 GiB"  # a communicator a copy
    shown = [row[3] for row in copy_memory if row[1] == "together"]
    assert shown == [of.format("75.1"), of.format("75.7")]


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(3.14 * GiB, "3.1 GiB"), (64 << 20, "64 MiB"), (1 << 20, "1.0 MiB")]
)
def test_sizes_are_read_at_a_glance(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


def test_an_evaluation_counts_its_answers_and_in_an_asynchronous_run_its_whole_weights():
    """There it is all that the trainers' processes generate."""
    few = replace(ppo_math_async().actor, max_tokens_per_mb=256)
    run = replace(ppo_math_async(), actor=few, placement=Shared(n_model_workers=2))
    for worker in memory_of_experiment(config_of(run), TINY).values():
        assert not any("gen" in call for call in worker.calls)
        terms = worker.calls["evaluation of actor@0"]
        assert terms["whole copy"] == 4 * TINY.num_params
        more = replace(few, max_tokens_per_mb=1024)
        config = config_of(replace(run, actor=more))
        larger = memory_of_experiment(config, TINY)[0].calls["evaluation of actor@0"]
        assert larger["cache"] > terms["cache"] > 0


def test_a_process_has_memory_of_its_own_on_a_gpu():
    """Context and communicators were in no plan: a worker of several copies has gigabytes of them."""
    alone = usable_bytes(80 * 2**30, workers=1, copies=3)
    assert alone == 0.96 * 80 * 2**30 - 2**30 / 2
    several = [usable_bytes(80 * 2**30, workers=8, copies=n) for n in (1, 3)]
    assert alone - several[0] == 2 * 300 * 2**20
    assert several[0] - several[1] == 2 * 300 * 2**20
