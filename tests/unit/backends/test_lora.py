"""Adapters: they alone train, the base stays pristine, and what is exported is base plus adapters."""

import io
import json
import warnings
from dataclasses import replace

import golden
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from near import assert_near

from realsys.api.errors import ConfigError
from realsys.api.model import (
    FinetuneSpec,
    GenerationHyperparameters,
    ModelName,
    ParallelGroups,
    ProcessTopology,
)
from realsys.api.options import LoRAOptions, OptimizerOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.hf.lora import adapter_weights, with_adapters
from realsys.backends.inference import InferenceBackend
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import num_answer_tokens
from realsys.interfaces.supervised import next_token_loss
from realsys.models.factories import hf_causal_lm, hf_critic
from realsys.models.shape import Weight
from realsys.models.source import source_of
from realsys.planner.memory.copy_memory import HeldModel, held_numbers
from realsys.weights.layouts.holdings import fsdp_layout

torch.set_num_threads(1)
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=10)
LORA = LoRAOptions(rank=3, alpha=6.0, target_modules=("q_proj", "o_proj", "up_proj"))
COMPANY = {
    "name": ModelName("m"),
    "device": "cpu",
    "topology": ProcessTopology(),
    "rank": 0,
    "groups": ParallelGroups(),
    "base_seed": 1,
}


def trainer(path, make=hf_causal_lm, **more):
    lora = replace(LORA, **more.pop("lora", {}))
    model = make(path=str(path), **COMPANY, **more)
    backend = FSDPBackend(optimizer=OptimizerOptions(lr=1e-2), lora=lora)
    return backend.initialize(model, SPEC)


def generator(path):
    return InferenceBackend(lora=LORA).initialize(hf_causal_lm(path=str(path), **COMPANY), SPEC)


def batch(lengths=((9, 5), (20,))):
    flat = [n for pieces in lengths for n in pieces]
    tokens = torch.randint(3, 500, (sum(flat),), generator=torch.Generator().manual_seed(0))
    mask = torch.cat([torch.arange(n) < 2 for n in flat])
    keys = ("packed_input_ids", "prompt_mask")
    return SequenceSample.from_tensors(
        "ab", dict.fromkeys(keys, lengths), dict(zip(keys, (tokens, mask), strict=True))
    )


def train(engine, loss_fn=next_token_loss):
    return engine.train_batch(batch(), loss_fn=loss_fn, loss_weight_fn=num_answer_tokens)


def weights(engine):
    return {n: view.clone() for n, ((_, view),) in engine.held_weights().items()}


def send(source, target, names=None):
    """What an exchange does between whole copies."""
    sent, received = source.held_weights(), target.held_weights()
    assert sent.keys() == received.keys()
    for name in sent if names is None else names:
        received[name][0][1].copy_(sent[name][0][1])
    target.weights_changed()


LAST = slice(14, -1)  # the last sequence but for its last token, whose logits mean nothing


def plain_logits(engine):
    """Of the module that generates."""
    with torch.no_grad():
        ids = batch().data["packed_input_ids"][None, LAST]
        return engine.whole_module()(input_ids=ids, use_cache=False).logits[0]


def peft_reads(base, folder):
    """The base with the adapter in ``folder``, by peft alone."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")  # peft's own call
        return PeftModel.from_pretrained(base, str(folder)).eval()


def test_only_adapters_train_and_only_they_have_moments(tiny_policy):
    engine = trainer(tiny_policy).module
    before = weights(engine)
    train(engine)
    train(engine)  # the first step moves B alone, as A sees B's zeros
    changed = {n for n, x in weights(engine).items() if not torch.equal(x, before[n])}
    assert changed == engine.adapter_names
    assert len(changed) == 2 * 3 * 2  # A and B, targets, layers
    moments = engine.state_dict()["optimizer"]
    assert len(moments) == len(changed)
    assert all(".lora_" in name for name in moments)
    base = {n for n in before if n not in changed}
    loaded = source_of(hf_causal_lm(path=str(tiny_policy), **COMPANY))
    assert base == {w.name for w in loaded.weights()}, "base weights have their plain names"


def test_adapters_start_as_nothing_and_leave_the_random_state(tiny_policy):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    adapted = trainer(tiny_policy).module
    assert torch.equal(torch.rand(1), expected)
    plain = trainer(tiny_policy, lora={"rank": 0}).module
    assert torch.equal(adapted.forward(batch()), plain.forward(batch()))
    assert not plain.adapter_names


def test_the_merged_export_and_pefts_own_reading_of_the_adapter_compute_the_same(
    tiny_policy, tmp_path
):
    model = trainer(tiny_policy)
    for _ in range(3):
        train(model.module)
    output = model.module.forward(batch())
    model.module.save_to_hf(tokenizer=model.tokenizer, save_dir=str(tmp_path / "out"))
    merged = hf_causal_lm(path=str(tmp_path / "out"), **COMPANY)
    found = InferenceBackend().initialize(merged, SPEC).module.forward(batch())
    assert_near(found, output)
    assert (output - trainer(tiny_policy).module.forward(batch())).abs().max() > 1e-2

    base = hf_causal_lm(path=str(tiny_policy), **COMPANY).module.load()
    read = peft_reads(base, tmp_path / "out" / "adapter")
    with torch.no_grad():
        ids = batch().data["packed_input_ids"][None, LAST]
        logits = read(input_ids=ids).logits[0]
    assert_near(logits, output[LAST])


def test_generation_after_an_exchange_of_adapters_alone(tiny_policy):
    actor, copy = trainer(tiny_policy).module, generator(tiny_policy).module
    train(actor)
    send(actor, copy)
    plain_logits(copy)  # made now, it must follow the adapters that come later
    at_first = {n: x for n, x in weights(actor).items() if n in actor.adapter_names}
    for _ in range(3):
        train(actor)
        assert copy.adapter_names == actor.adapter_names
        send(actor, copy, actor.adapter_names)
        assert torch.equal(plain_logits(copy), plain_logits(actor))
        assert_near(plain_logits(copy), actor.forward(batch())[LAST])
        assert torch.equal(copy.forward(batch()), actor.forward(batch()))
    held = copy.held_weights()
    for name, x in at_first.items():
        held[name][0][1].copy_(x)
    copy.weights_changed()
    fresh = generator(tiny_policy).module
    held = fresh.held_weights()
    for name, x in at_first.items():
        held[name][0][1].copy_(x)
    fresh.weights_changed()
    assert torch.equal(plain_logits(copy), plain_logits(fresh)), "nothing has added up"


def test_generation_follows_each_training_step(tiny_policy):
    model = trainer(tiny_policy)
    prompts = SequenceSample.from_tensors(
        ["p"], {"packed_prompts": [[3]]}, {"packed_prompts": torch.arange(40, 43)}
    )
    gconfig = GenerationHyperparameters(max_new_tokens=4, greedy=True)
    for _ in range(2):
        train(model.module)
        sample = model.module.generate(prompts, tokenizer=model.tokenizer, gconfig=gconfig)
        ids = sample.data["packed_input_ids"]
        logprobs = model.module.forward(sample).log_softmax(-1)
        expected = logprobs[:-1].gather(-1, ids[1:, None])[:, 0]
        answer = ~sample.data["prompt_mask"][1:]
        assert_near(sample.data["packed_logprobs"][1:][answer], expected[answer])


def test_a_critics_head_trains_beside_its_adapters(tiny_policy, tmp_path):
    critic = trainer(tiny_policy, make=hf_critic)
    for _ in range(3):
        train(critic.module, lambda values, mb: (values - 1).square().mean())
    values = critic.module.forward(batch())
    assert values.abs().max() > 0
    assert {"score.weight", "score.bias"} < critic.module.adapter_names
    critic.module.save_to_hf(tokenizer=critic.tokenizer, save_dir=str(tmp_path / "c"))
    merged = hf_critic(path=str(tmp_path / "c"), **COMPANY)
    found = InferenceBackend().initialize(merged, SPEC).module.forward(batch())
    assert_near(found, values)

    base = hf_critic(path=str(tiny_policy), **COMPANY).module.load()
    read = peft_reads(base, tmp_path / "c" / "adapter")
    with torch.no_grad():
        logits = read(input_ids=batch().data["packed_input_ids"][None, 14:]).logits[0, :, 0]
    assert_near(logits, values[14:])


def test_state_comes_back_bit_for_bit(tiny_policy):
    first = trainer(tiny_policy).module
    train(first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    after = [train(first) for _ in range(2)]
    file.seek(0)
    second = trainer(tiny_policy).module
    plain_logits(second)  # a copy for generation that is out of date afterwards
    second.load_state_dict(torch.load(file, weights_only=True))
    assert [train(second) for _ in range(2)] == after
    assert torch.equal(plain_logits(second), plain_logits(first))


def test_adapters_of_a_half_precision_model_are_float32(tiny_policy):
    engine = trainer(tiny_policy, dtype="bfloat16").module
    kinds = {n: x.dtype for n, x in weights(engine).items()}
    assert {kinds[n] for n in engine.adapter_names} == {torch.float32}
    assert {kinds[n] for n in kinds.keys() - engine.adapter_names} == {torch.bfloat16}
    losses = [train(engine)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    assert next(engine.whole_module().parameters()).dtype == torch.bfloat16
    torch.testing.assert_close(  # one rounding of the sum instead of two sums rounded
        plain_logits(engine), engine.forward(batch())[LAST], atol=0.06, rtol=0
    )


def test_a_target_that_is_no_layer_is_named(tiny_policy):
    with golden.raises(ConfigError):
        trainer(tiny_policy, lora={"target_modules": ("q_proj", "k_prj")})
    with golden.raises(ConfigError):
        trainer(tiny_policy, lora={"target_modules": ("lm_head",)})


@settings(deadline=None, max_examples=50)
@given(
    data=st.integers(1, 4),
    tensor=st.integers(1, 4),
    rank=st.integers(1, 5),
    layer=st.sampled_from(["q_proj", "o_proj", "up_proj", "down_proj"]),
)
def test_the_ranks_of_a_layout_hold_each_adapter_as_often_as_it_is_needed(
    data, tensor, rank, layer
):
    base = Weight(f"model.layers.0.x.{layer}.weight", (12, 24))
    options = LoRAOptions(rank=rank, target_modules=(layer,))
    topo = ProcessTopology(data=data, tensor=tensor)
    layout = with_adapters([base], options, topo, fsdp_layout)
    a, b = adapter_weights([base], options)[base.name]
    assert (a.shape, b.shape) == ((rank, 24), (12, rank))
    by_rows = layer in ("q_proj", "up_proj")
    for adapter, is_cut in ((a, not by_rows), (b, by_rows)):
        held = [box for holding in layout for box in holding.get(adapter.name, ())]
        copies = 1 if is_cut else tensor
        assert sum(box.numel for box in held) == copies * adapter.numel
    for holding in layout:  # the side of the cut goes with the base weight's
        if by_rows and b.name in holding:
            assert holding[b.name][0].start[0] == holding[base.name][0].start[0]
        if not by_rows and a.name in holding and data == 1:
            assert holding[a.name][0].start[1] == holding[base.name][0].start[1]


def test_all_linear_is_every_layer_of_a_llama_for_layouts_memory_and_the_module(
    tiny_policy, tmp_path
):
    every = LoRAOptions(rank=2, target_modules=("all-linear",))
    names = LoRAOptions(rank=2)  # Llama's
    loaded = source_of(hf_causal_lm(path=str(tiny_policy), **COMPANY))
    assert adapter_weights(loaded.weights(), every) == adapter_weights(loaded.weights(), names)
    topo = ProcessTopology(data=2)
    assert with_adapters(loaded.weights(), every, topo, fsdp_layout) == with_adapters(
        loaded.weights(), names, topo, fsdp_layout
    )
    held = [
        held_numbers(
            HeldModel(shape=loaded.shape(), lora_rank=2, lora_targets=lora.target_modules), topo, 0
        )
        for lora in (every, names)
    ]
    assert held[0] == held[1]
    model = trainer(tiny_policy, lora={"target_modules": every.target_modules})
    assert (
        model.module.adapter_names
        == trainer(tiny_policy, lora={"target_modules": names.target_modules}).module.adapter_names
    )
    model.module.save_to_hf(tokenizer=model.tokenizer, save_dir=str(tmp_path / "out"))
    written = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert sorted(written["target_modules"]) == sorted(names.target_modules), "for every reader"
