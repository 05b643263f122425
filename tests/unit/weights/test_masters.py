"""What computes in bfloat16 learns as float32 does: float32 shards, float32 averages, casts on the way."""

import json
from dataclasses import replace
from functools import partial

import golden
import pytest
import torch
from safetensors.torch import load_file
from wanted_resources import model_workers

from experiments.grpo_math import grpo_math
from experiments.ppo_math import ppo_math, ppo_math_async
from experiments.sft import sft_math
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError, InternalError
from realsys.api.model import FinetuneSpec, ModelName, ParallelGroups, ProcessTopology
from realsys.api.options import LoRAOptions, ModelOptions, OptimizerOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.hf import sharding
from realsys.backends.hf.recompute import recompute_layers
from realsys.backends.inference import InferenceBackend
from realsys.backends.megatron_backend import inference_engine
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import num_answer_tokens
from realsys.interfaces.supervised import next_token_loss
from realsys.models.factories import hf_causal_lm, hf_critic
from realsys.models.hf import load_causal_lm
from realsys.weights.layouts.boxes import Box
from realsys.weights.layouts.holdings import held_dtype
from realsys.weights.realloc.disk import write_part
from realsys.weights.realloc.realloc import Reallocator
from realsys.weights.realloc.realloc_plan import plan_realloc, sent_dtypes
from realsys.weights.realloc.views import check_lossless, write

torch.set_num_threads(1)
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=10)
LENGTHS = ((9, 5), (20,))
COMPANY = {
    "name": ModelName("m"),
    "device": "cpu",
    "topology": ProcessTopology(),
    "rank": 0,
    "groups": ParallelGroups(),
    "base_seed": 1,
}


def batch():
    flat = [n for pieces in LENGTHS for n in pieces]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 500, (sum(flat),), generator=generator)
    mask = torch.cat([torch.arange(n) < 2 for n in flat])
    keys = ("packed_input_ids", "prompt_mask")
    return SequenceSample.from_tensors(
        "ab", dict.fromkeys(keys, LENGTHS), dict(zip(keys, (tokens, mask), strict=True))
    )


def trainer(path, dtype="bfloat16", *, make=hf_causal_lm, lr=1e-3, **settings):
    model = make(path=str(path), dtype=dtype, **COMPANY)
    return FSDPBackend(optimizer=OptimizerOptions(lr=lr), **settings).initialize(model, SPEC).module


def train(engine, steps=1, limit=None):
    for _ in range(steps):
        stats = engine.train_batch(
            batch(),
            loss_fn=next_token_loss,
            loss_weight_fn=num_answer_tokens,
            mb_spec=MicroBatchSpec(max_tokens_per_mb=limit),
        )
    return stats


def weights(engine):
    return {name: view.clone() for name, ((_, view),) in engine.held_weights().items()}


def share_changed(before, after):
    """Of the numbers that both have."""
    numel = sum(x.numel() for x in before.values())
    return sum(int((x != after[name]).sum()) for name, x in before.items()) / numel


@pytest.mark.thorough
def test_as_many_weights_move_at_a_small_learning_rate_as_in_float32(tiny_policy):
    shares, losses = [], []
    for dtype in ("float32", "bfloat16"):
        engine = trainer(tiny_policy, dtype, lr=1e-6)
        before = weights(engine)
        losses.append([train(engine)["loss"], train(engine, 39)["loss"]])
        shares.append(share_changed(before, weights(engine)))
    assert shares[0] > 0.5  # the rest are rows of tokens that the batch does not have
    assert shares[1] == pytest.approx(shares[0], rel=0.05)
    gains = [first - last for first, last in losses]
    assert gains[1] == pytest.approx(gains[0], rel=0.2)


def test_masters_moments_and_gradients_are_float32_and_the_rest_is_not(tiny_policy):
    engine = trainer(tiny_policy)
    seen = {}
    hook = engine.optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.dtype for n, p in engine._shards.items()})
    )
    train(engine)
    hook.remove()
    assert set(seen.values()) == {torch.float32}
    moments = engine.state_dict()["optimizer"].values()
    assert {x.dtype for m in moments for x in m.values()} == {torch.float32}
    assert {x.dtype for x in weights(engine).values()} == {torch.float32}
    assert engine.forward(batch()).dtype == torch.bfloat16
    assert {p.dtype for p in engine.whole_module().parameters()} == {torch.bfloat16}


def test_masters_are_the_files_numbers_and_compute_what_their_rounding_computes(tiny_policy):
    engine = trainer(tiny_policy)
    exact = dict(load_causal_lm(tiny_policy, dtype="float32").named_parameters())
    for name, x in weights(engine).items():
        assert torch.equal(x, exact[name]), name
    plain = InferenceBackend().initialize(
        hf_causal_lm(path=str(tiny_policy), dtype="bfloat16", **COMPANY), SPEC
    )
    assert torch.equal(engine.forward(batch()), plain.module.forward(batch()))


def test_what_is_saved_is_of_the_type_that_computes(tiny_policy, tmp_path):
    engine = trainer(tiny_policy)
    train(engine)
    engine.save_to_hf(tokenizer=None, save_dir=str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"
    held = weights(engine)
    assert saved.keys() == held.keys()
    for name, x in saved.items():
        assert torch.equal(x, held[name].bfloat16()), name
    again = load_causal_lm(tmp_path / "saved", dtype="bfloat16")
    for name, x in engine.whole_module().named_parameters():
        assert torch.equal(x, dict(again.named_parameters())[name]), name


def test_a_resumed_engine_goes_on_bit_for_bit(tiny_policy):
    engine = trainer(tiny_policy)
    train(engine, 2)
    state = engine.state_dict()
    assert {x.dtype for x in state["weights"].values()} == {torch.float32}
    stats, after = train(engine), weights(engine)
    other = trainer(tiny_policy)
    other.load_state_dict(state)
    assert train(other) == stats
    for name, x in weights(other).items():
        assert torch.equal(x, after[name]), name


def test_float32_takes_no_wrapper_and_no_mesh(tiny_policy):
    engine = trainer(tiny_policy, "float32")
    assert not engine.is_sharded
    assert engine.whole_module() is engine.module


def test_a_frozen_role_has_no_masters(tiny_policy):
    model = hf_causal_lm(path=str(tiny_policy), dtype="bfloat16", **COMPANY)
    model.trains = False
    engine = FSDPBackend().initialize(model, SPEC).module
    assert {x.dtype for x in weights(engine).values()} == {torch.bfloat16}


def test_a_critic_with_adapters_trains_its_head_in_float32(tiny_policy):
    lora = LoRAOptions(rank=2, alpha=4.0, target_modules=("q_proj",))
    engine = trainer(tiny_policy, make=hf_critic, lr=1e-6, lora=lora)
    kinds = {name: x.dtype for name, x in weights(engine).items()}
    assert {kinds[name] for name in engine.adapter_names} == {torch.float32}
    assert {kinds[name] for name in kinds.keys() - engine.adapter_names} == {torch.bfloat16}
    held = FSDPBackend(lora=lora).held_dtype
    said = {n: held("bfloat16", trained=True, weight=n) for n in kinds}
    assert said == {n: str(kind).removeprefix("torch.") for n, kind in kinds.items()}

    def loss(values, mb):
        return (values - 1.0).square().mean()

    start = weights(engine)["score.weight"]
    engine.train_batch(batch(), loss_fn=loss, loss_weight_fn=num_answer_tokens)
    head = weights(engine)["score.weight"]
    assert (head != start).float().mean() > 0.9


# ---- one by one, and again ----------------------------------------------------------------------


def gradients(engine, limit=None):
    found = {}
    hook = engine.optimizer.register_step_pre_hook(
        lambda *_: found.update({n: p.grad.clone() for n, p in engine._shards.items()})
    )
    train(engine, limit=limit)
    hook.remove()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("whole_bytes", [0, 1 << 30], ids=["in layers", "in one piece"])
@pytest.mark.parametrize("lora", [LoRAOptions(), LoRAOptions(rank=2, target_modules=("q_proj",))])
def test_recomputation_changes_no_bit_of_a_gradient(
    tiny_policy, monkeypatch, dtype, whole_bytes, lora
):
    monkeypatch.setattr(sharding, "FSDP_WHOLE_BYTES", whole_bytes)
    kept, again = (
        trainer(tiny_policy, dtype, recompute=recompute, lora=lora) for recompute in (False, True)
    )
    assert weights(kept).keys() == weights(again).keys()
    assert kept.state_dict()["weights"].keys() == again.state_dict()["weights"].keys()
    expected = gradients(kept, limit=20)
    for name, gradient in gradients(again, limit=20).items():
        assert torch.equal(gradient, expected[name]), name
    saved = [saved_bytes(engine) for engine in (kept, again)]
    assert saved[1] < 0.7 * saved[0]


def saved_bytes(engine):
    """Kept for the backward pass of a micro-batch, but for weights and what has the vocabulary's width."""
    kept = {}
    shapes = {p.shape for p in engine.module.parameters()}
    shapes |= {shape[::-1] for shape in shapes}

    def keep(x):
        if x.shape not in shapes and x.shape[-1] != 512:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        engine.run_module(batch()).logits().sum().backward()
    for parameter in engine.module.parameters():
        parameter.grad = None
    return sum(kept.values())


def test_a_model_without_known_layers_can_t_recompute():
    with golden.raises(ConfigError):
        recompute_layers(torch.nn.Linear(2, 2), where="recompute of m@0")


@pytest.mark.parametrize(
    ("whole_bytes", "expected"), [(0, [False, True]), (1 << 30, [False, False])]
)
def test_layers_reduce_the_gradients_of_each_micro_batch(
    tiny_policy, monkeypatch, whole_bytes, expected
):
    """Else whole gradients of the model would be kept from the first micro-batch to the last."""
    monkeypatch.setattr(sharding, "FSDP_WHOLE_BYTES", whole_bytes)
    engine, seen = trainer(tiny_policy), []
    run = engine.run_module

    def spy(mb):
        seen.append(any(p.grad is not None for p in engine.module.parameters()))
        return run(mb)

    monkeypatch.setattr(engine, "run_module", spy)
    train(engine, limit=20)
    assert seen == expected


# ---- averages -----------------------------------------------------------------------------------


def averaged(path, dtype):
    model = hf_causal_lm(path=str(path), dtype=dtype, **COMPANY)
    model.averaged = True
    return InferenceBackend().initialize(model, SPEC).module


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_average_moves_by_steps_that_half_precision_can_t_hold(tiny_policy, dtype):
    """500 steps of 0.01 towards weights 2 % away go 1 − 0.99⁵⁰⁰ of the way."""
    engine = averaged(tiny_policy, dtype)
    start = weights(engine)
    goal = {name: 1.02 * x for name, x in start.items()}
    for _ in range(500):
        for name, ((_, view),) in engine.held_weights().items():
            write(view, goal[name], 0.01)
        engine.weights_changed()
    name = "model.layers.0.mlp.up_proj.weight"
    way = (weights(engine)[name] - start[name]) / (goal[name] - start[name])
    assert float(way.mean()) == pytest.approx(1 - 0.99**500, abs=2e-3)
    computing = dict(engine.whole_module().named_parameters())
    assert {x.dtype for x in computing.values()} == {getattr(torch, dtype)}
    for name, x in weights(engine).items():
        assert torch.equal(computing[name], x.to(getattr(torch, dtype))), name


def test_an_average_over_cut_weights_moves_too(tiny_policy):
    """Megatron's windows into its fused parameters, as a reference with tensor axes has them."""
    engine = inference_engine(hf_causal_lm(path=str(tiny_policy), dtype="bfloat16", **COMPANY))
    engine.keep_averages()
    name = "model.layers.0.self_attn.q_proj.weight"
    start = [view.clone() for _, view in engine.held_weights()[name]]
    for _ in range(100):
        for (_, view), x in zip(engine.held_weights()[name], start, strict=True):
            write(view, 1.02 * x, 0.01)
        engine.weights_changed()
    held = [view for _, view in engine.held_weights()[name]]
    for x, view in zip(start, held, strict=True):
        way = ((view - x) / (0.02 * x)).mean()
        assert float(way) == pytest.approx(1 - 0.99**100, abs=2e-3)
    computing = dict(engine.whole_module().named_parameters())[name]
    assert torch.equal(computing, torch.cat(held).bfloat16())


def test_an_average_is_parked_with_its_model(tiny_policy):
    engine = averaged(tiny_policy, "bfloat16")
    held = [view for parts in engine.held_weights().values() for _, view in parts]
    own = {x.data_ptr() for x in engine.own_memory()}
    assert {x.data_ptr() for x in held} < own


def test_averages_begin_as_the_weights_are(tiny_policy):
    engine = inference_engine(hf_causal_lm(path=str(tiny_policy), dtype="bfloat16", **COMPANY))
    ((_, x),) = engine.held_weights()["model.norm.weight"]
    engine.keep_averages()
    ((_, average),) = engine.held_weights()["model.norm.weight"]
    assert torch.equal(average, x.float())
    average.add_(1.0)
    engine.weights_changed()
    assert torch.equal(x, average.bfloat16())


# ---- what is held, and what is sent -------------------------------------------------------------

LORA = {"trained": True, "adapters": True}


@pytest.mark.parametrize(
    ("dtype", "backend", "more", "held"),
    [
        ("bfloat16", "fsdp", {"trained": True}, "float32"),
        ("float32", "fsdp", {"trained": True}, "float32"),
        ("float64", "fsdp", {"trained": True}, "float64"),
        ("bfloat16", "fsdp", {"trained": False}, "bfloat16"),
        ("bfloat16", "fsdp", {"trained": False, "averaged": True}, "float32"),
        ("bfloat16", "megatron", {"trained": True}, "bfloat16"),
        ("bfloat16", "inference", {"trained": False}, "bfloat16"),
        ("bfloat16", "inference", {"trained": False, "averaged": True}, "float32"),
        ("bfloat16", "of my own", {"trained": True}, "bfloat16"),
        ("bfloat16", "fsdp", {**LORA, "weight": "a.weight"}, "bfloat16"),
        ("bfloat16", "fsdp", {**LORA, "weight": "a.lora_A.weight"}, "float32"),
        ("bfloat16", "inference", {**LORA, "weight": "score.weight"}, "float32"),
    ],
)  # fmt: skip
def test_what_learns_is_held_in_float32(dtype, backend, more, held):
    assert held_dtype(dtype, backend, **more) == held


def test_weights_travel_in_the_narrower_type_of_both_ends():
    kinds = {"masters": "float32", "alike": "bfloat16", "wider": "bfloat16", "average": "float32"}
    there = {"masters": "bfloat16", "alike": "bfloat16", "wider": "float32", "average": "float32"}
    dtype, rounded = sent_dtypes(kinds, there)
    assert dtype == {**kinds, "masters": "bfloat16"}
    assert rounded == {"masters": "float32"}


def test_rounding_is_only_what_the_plan_says():
    box = Box.whole((4,))
    x = torch.tensor([0.1, 0.2, 0.3, 0.4])
    check = partial(check_lossless, {"w": [(box, x)]}, ["w"], {"w": "bfloat16"})
    check({"w": "float32"})
    for rounded in ({}, {"v": "float32"}, {"w": "float64"}):
        with golden.raises(InternalError):
            check(rounded)


def test_rounding_through_files_is_refused_as_well(tmp_path):
    layout, box = ({"w": (Box.whole((4,)),)},), Box.whole((4,))
    views = {"w": [(box, torch.tensor([0.1, 0.2, 0.3, 0.4]))]}
    asked = plan_realloc(
        [], layout, [0], layout, [1], dtype={"w": "bfloat16"}, rounded={"w": "float32"}
    )
    assert write_part(asked, 0, views, tmp_path) is not None
    with golden.raises(InternalError):
        write_part(replace(asked, rounded={}), 0, views, tmp_path)


def test_a_copy_that_computes_in_half_precision_takes_masters_and_says_so(monkeypatch):
    layout, held = ({"w": (Box.whole((4,)),)},), torch.tensor([0.1, 0.2, 0.3, 0.4])
    dtype, rounded = sent_dtypes({"w": "float32"}, {"w": "bfloat16"})
    plan = plan_realloc([], layout, [0], layout, [0], dtype=dtype, rounded=rounded)
    copy = torch.zeros(4, dtype=torch.bfloat16)
    box = Box.whole((4,))
    report = Reallocator(0).run(plan, {"w": [(box, held)]}, {"w": [(box, copy)]})
    assert torch.equal(copy, held.bfloat16())
    assert (report.bytes_copied, plan.rounded) == (8, {"w": "float32"})


# ---- experiments --------------------------------------------------------------------------------


def dtypes(experiment):
    config = experiment.with_prepared("sft", "/not/there").initial_setup()
    return {
        shard.id.model_name.role: shard.model.args.get("dtype")
        for worker in config.model_worker
        for shard in worker.shards
    }


HALF = ModelOptions(dtype="bfloat16")
FULL = ModelOptions(dtype="float32")


@pytest.mark.parametrize(
    ("settings", "actor", "others"),
    [
        ({}, "float32", "float32"),
        ({"scheduling": model_workers(gpu=1)}, "bfloat16", "bfloat16"),
        ({"actor": HALF}, "bfloat16", "bfloat16"),
        ({"scheduling": model_workers(gpu=1), "actor": FULL}, "float32", "float32"),
        ({"actor": HALF, "ref": replace(FULL, backend="inference"), "critic": FULL}, "bfloat16", "float32"),
        ({"ref": replace(HALF, backend="inference"), "critic": HALF}, "float32", "bfloat16"),
    ],
)  # fmt: skip
def test_roles_without_a_dtype_compute_in_the_actors(settings, actor, others):
    found = dtypes(replace(ppo_math(), **settings))
    assert found == {"actor": actor, "ref": others, "critic": others, "reward": None}
    settings.pop("critic", None)
    assert dtypes(replace(grpo_math(), **settings))["ref"] == others


def test_servers_and_the_evaluator_compute_in_the_actors_dtype():
    run = replace(ppo_math_async(), scheduling=model_workers(gpu=1), auto_eval=True)
    config = run.with_prepared("sft", "/not/there").initial_setup()
    assert config.generation_server[0].backend_args["dtype"] == "bfloat16"
    assert config.evaluator[0].dtype == "bfloat16"


def test_fine_tuning_on_gpus_computes_in_bfloat16():
    def dtype(**settings):
        config = replace(sft_math(), **settings).initial_setup()
        return config.model_worker[0].shards[0].model.args["dtype"]

    assert (dtype(), dtype(scheduling=model_workers(gpu=1))) == ("float32", "bfloat16")
