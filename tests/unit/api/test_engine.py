"""The engines: micro-batches change nothing, denominators are global, state comes back whole."""

import io
import math

import golden
import pytest
import torch
from near import assert_near, near

from realsys.api.data import MicroBatchSpec
from realsys.api.errors import CheckpointError, ConfigError, DataError, GradientNotFinite
from realsys.api.model import (
    SKIPPED_STEPS,
    FinetuneSpec,
    GenerationHyperparameters,
    ModelName,
    ParallelGroups,
    ProcessTopology,
)
from realsys.api.options import LoRAOptions, OptimizerOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.hf.lr_schedule import learning_rate
from realsys.backends.inference import InferenceBackend
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import answer_tokens, num_answer_tokens
from realsys.interfaces.supervised import next_token_loss
from realsys.models.factories import hf_critic, tiny_llama

torch.set_num_threads(1)
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=10)
COMPANY = {
    "name": ModelName("m"),
    "device": "cpu",
    "topology": ProcessTopology(),
    "rank": 0,
    "groups": ParallelGroups(),
    "base_seed": 1,
}
SHAPE = {"hidden_size": 32, "num_layers": 2}


def make_engine(adapters=None, **optimizer):
    model = tiny_llama(**SHAPE, **COMPANY)
    lora = {} if adapters is None else {"lora": adapters}
    backend = FSDPBackend(optimizer=OptimizerOptions(**optimizer), **lora)
    return backend.initialize(model, SPEC).module


def make_batch(lengths=((9, 5), (20,), (3, 12, 7), (16,)), prompt=2):
    """Random tokens; each sequence begins with ``prompt`` masked ones."""
    generator = torch.Generator().manual_seed(0)
    flat = [n for pieces in lengths for n in pieces]
    tokens = torch.randint(3, 512, (sum(flat),), generator=generator)
    mask = torch.cat([torch.arange(n) < prompt for n in flat])
    keys = ("packed_input_ids", "prompt_mask")
    return SequenceSample.from_tensors(
        [f"id{i}" for i in range(len(lengths))],
        dict.fromkeys(keys, lengths),
        dict(zip(keys, (tokens, mask), strict=True)),
    )


def train(engine, batch, mb_spec=None, **kwargs):
    arguments = {"loss_fn": next_token_loss, "loss_weight_fn": num_answer_tokens, **kwargs}
    return engine.train_batch(batch, mb_spec=mb_spec, **arguments)


def gradients_of(engine, batch, mb_spec):
    """Gradients by way of a step of plain size: momentum is (1 - beta1) of the first gradient."""
    train(engine, batch, mb_spec)
    return {name: m["exp_avg"] / 0.1 for name, m in engine.state_dict()["optimizer"].items()}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mb_spec",
    [MicroBatchSpec(n_mbs=2), MicroBatchSpec(n_mbs=4), MicroBatchSpec(max_tokens_per_mb=25)],
)
def test_gradients_do_not_depend_on_micro_batches(mb_spec):
    batch = make_batch()
    assert len(batch.microbatches(mb_spec)) > 1
    whole = gradients_of(make_engine(gradient_clipping=0.0), batch, None)
    cut = gradients_of(make_engine(gradient_clipping=0.0), batch, mb_spec)
    assert_near(cut, whole)


def test_packed_output_is_that_of_each_sequence_alone():
    engine, batch = make_engine(), make_batch()
    output = engine.forward(batch, mb_spec=MicroBatchSpec(n_mbs=2))
    lengths = batch.piece_lengths("packed_input_ids")
    rows = torch.split(batch.data["packed_input_ids"], lengths)
    for row, found in zip(rows, torch.split(output, lengths), strict=True):
        with torch.no_grad():
            alone = engine.module(input_ids=row[None]).logits[0]
        # What follows the last token nobody asks.
        assert_near(found[:-1], alone[:-1])


def test_loss_is_the_mean_over_all_tokens_not_of_means():
    # 7 and 1 answer tokens: their mean counts 8 tokens alike; a mean of two means would not.
    engine, batch = make_engine(), make_batch(((9,), (3,)))
    one_each = MicroBatchSpec(n_mbs=2)
    logits = engine.forward(batch)
    tokens_R, rows_N = answer_tokens(batch)
    losses = torch.nn.functional.cross_entropy(logits[rows_N], tokens_R, reduction="none")
    assert len(losses) == 8
    assert abs(losses.mean() - (losses[:7].mean() + losses[7]) / 2) > 1e-3
    found = train(engine, batch, one_each)["loss"]
    assert found == near(losses.mean().item())


def test_stats_of_the_loss_function_are_averaged_by_weight():
    def loss_fn(logits, mb):
        return next_token_loss(logits, mb), {"tokens": torch.tensor(num_answer_tokens(mb))}

    engine, batch = make_engine(), make_batch(((9,), (3,)))
    arguments = {"loss_fn": loss_fn, "loss_weight_fn": num_answer_tokens}
    stats = engine.eval_batch(batch, mb_spec=MicroBatchSpec(n_mbs=2), **arguments)
    assert stats["tokens"] == near((7 * 7 + 1 * 1) / 8)


def test_eval_is_the_loss_that_training_starts_from():
    engine, batch = make_engine(), make_batch()
    arguments = {"loss_fn": next_token_loss, "loss_weight_fn": num_answer_tokens}
    before = engine.eval_batch(batch, **arguments)["loss"]
    assert train(engine, batch)["loss"] == near(before)
    assert engine.eval_batch(batch, **arguments)["loss"] < before


def test_a_micro_batch_without_weight_adds_nothing():
    # Two tokens that are both prompt: its own mean is 0 / 0.
    batch = make_batch(((9,), (2,)))
    alone = gradients_of(make_engine(gradient_clipping=0.0), batch.take([0]), None)
    both = gradients_of(make_engine(gradient_clipping=0.0), batch, MicroBatchSpec(n_mbs=2))
    assert_near(both, alone)
    with golden.raises(DataError):
        train(make_engine(), batch.take([1]))


def test_gradient_norm_is_reported_before_clipping():
    batch = make_batch()
    free = train(make_engine(gradient_clipping=0.0), batch)
    clipped = make_engine(gradient_clipping=free["grad_norm"] / 2)
    assert train(clipped, batch)["grad_norm"] == near(free["grad_norm"])
    moments = clipped.state_dict()["optimizer"].values()
    norm = torch.stack([(m["exp_avg"] / 0.1).square().sum() for m in moments]).sum().sqrt()
    assert norm == near(free["grad_norm"] / 2, rel=1e-4)


def times(factor):
    """A loss whose gradient is ``factor`` times as large."""
    return lambda output, mb: next_token_loss(output, mb) * factor


NAN, INFINITE, FINE = float("nan"), float("inf"), 1.0


def same_state(one, other):
    """Whether two engines' states are the same bits, but for the count of steps left out."""
    mine, theirs = ({k: e.state_dict()[k] for k in ("weights", "optimizer")} for e in (one, other))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    return True


@pytest.mark.thorough
@pytest.mark.parametrize("adapters", [None, LoRAOptions(rank=2)], ids=["whole", "adapters"])
@pytest.mark.parametrize("factor", [NAN, INFINITE])
def test_a_step_without_a_finite_gradient_is_left_out(factor, adapters):
    batch = make_batch()
    plain, poisoned = (
        make_engine(adapters=adapters, lr_schedule="linear", weight_decay=0.1) for _ in range(2)
    )
    expected = [train(plain, batch, version_steps=v) for v in (0, 2, 3)]
    found = [train(poisoned, batch, version_steps=0)]
    skipped = train(poisoned, batch, loss_fn=times(factor), version_steps=1)
    assert skipped[SKIPPED_STEPS] == 1
    assert not math.isfinite(skipped["grad_norm"])
    found += [train(poisoned, batch, version_steps=v) for v in (2, 3)]
    assert found == expected  # the schedule goes by the version
    assert SKIPPED_STEPS not in found[-1]
    assert same_state(plain, poisoned)
    assert poisoned.state_dict().keys() == {"weights", "optimizer"}


def test_several_steps_in_a_row_without_a_finite_gradient_end_the_run():
    engine, batch = make_engine(max_skipped_steps=3), make_batch()
    for factor in (NAN, NAN, FINE, NAN, INFINITE):  # never three in a row
        train(engine, batch, loss_fn=times(factor))
    resumed = make_engine(max_skipped_steps=3)
    resumed.load_state_dict(engine.state_dict())
    for one in (engine, resumed):  # the count is part of the state
        with pytest.raises(GradientNotFinite) as ended:
            train(one, batch, loss_fn=times(NAN))
        assert ended.value.where == "FSDPEngine.train_batch"
    assert same_state(engine, resumed)
    with pytest.raises(GradientNotFinite):
        train(make_engine(max_skipped_steps=1), batch, loss_fn=times(NAN))


# Peak 1, 10 steps, a fifth of them warm-up; the linear rest falls by 0.9 / 8 a step to 0.1.
@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", {0: 0.5, 1: 1.0, 2: 1.0, 9: 1.0}),
        ("linear", {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.55, 9: 0.2125, 10: 0.1, 99: 0.1}),
        ("cosine", {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.55, 4: 0.8681980515, 10: 0.1, 99: 0.1}),
    ],
)
def test_learning_rate_by_hand(schedule, rates):
    options = OptimizerOptions(
        lr=1.0, lr_schedule=schedule, warmup_steps_proportion=0.2, min_lr_ratio=0.1
    )
    for step, rate in rates.items():
        assert learning_rate(options, step=step, total_steps=10) == near(rate)


def test_the_learning_rate_follows_the_version_not_the_number_of_calls():
    engine = make_engine(lr=1.0, lr_schedule="linear")  # 10 steps
    assert [train(engine, make_batch(), version_steps=v)["lr"] for v in (0, 0, 5)] == [1, 1, 0.5]


def test_state_comes_back_bit_for_bit_and_training_goes_on_the_same():
    batch, first = make_batch(), make_engine(lr=1e-3)
    for _ in range(2):
        train(first, batch)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    after = [train(first, batch) for _ in range(2)]
    file.seek(0)
    second = make_engine(lr=1e-3)
    train(second, batch)  # a state of its own, to be replaced
    second.load_state_dict(torch.load(file, weights_only=True))
    assert [train(second, batch) for _ in range(2)] == after
    a, b = first.state_dict(), second.state_dict()
    for kind in ("weights", "optimizer"):
        torch.testing.assert_close(a[kind], b[kind], rtol=0, atol=0)


def test_state_of_another_model_is_refused():
    state = make_engine().state_dict()
    del state["weights"]["lm_head.weight"]
    with golden.raises(CheckpointError):
        make_engine().load_state_dict(state)


def test_generate_packs_groups_and_repeats_itself():
    model = FSDPBackend().initialize(tiny_llama(**SHAPE, **COMPANY), SPEC)
    prompts = SequenceSample.from_tensors(
        ["a", "b"],
        {"packed_prompts": [[3], [2]]},
        {"packed_prompts": torch.tensor([40, 41, 42, 50, 51])},
        metadata={"answer": ["1", "2"]},
    )
    gconfig = GenerationHyperparameters(n=2, max_new_tokens=4)
    arguments = {"tokenizer": model.tokenizer, "gconfig": gconfig}
    sample = model.module.generate(prompts, **arguments)
    assert sample.ids == ("a", "b")
    assert sample.meta.metadata["answer"] == ("1", "2")
    lengths = sample.piece_lengths("packed_input_ids")
    pieces = torch.split(sample.data["packed_input_ids"], lengths)
    assert [p[:3].tolist() for p in pieces[:2]] == [[40, 41, 42]] * 2
    assert [p[:2].tolist() for p in pieces[2:]] == [[50, 51]] * 2
    assert pieces[0].tolist() != pieces[1].tolist()
    masks = torch.split(sample.data["prompt_mask"], lengths)
    assert [int(m.sum()) for m in masks] == [3, 3, 2, 2]
    assert bool((sample.data["packed_logprobs"][sample.data["prompt_mask"]] == 0).all())
    assert sample.meta.seqlens["seq_no_eos_mask"] == ((1, 1), (1, 1))

    again = model.module.generate(prompts, **arguments)
    assert torch.equal(again.data["packed_input_ids"], sample.data["packed_input_ids"])
    alone = model.module.generate(prompts.take([1]), **arguments)
    assert torch.equal(alone.data["packed_input_ids"], torch.cat(pieces[2:]))
    seeded = model.module.generate(prompts, seed=7, **arguments)
    assert not torch.equal(seeded.data["packed_input_ids"], sample.data["packed_input_ids"])


def test_a_critic_gives_one_number_a_token_and_is_saved_whole(tmp_path):
    make_engine().save_to_hf(
        tokenizer=tiny_llama(**SHAPE, **COMPANY).tokenizer, save_dir=tmp_path / "a"
    )
    critic = FSDPBackend(optimizer=OptimizerOptions(lr=0.1)).initialize(
        hf_critic(path=str(tmp_path / "a"), **COMPANY), SPEC
    )
    batch = make_batch()
    assert torch.equal(critic.module.forward(batch), torch.zeros(72))
    train(
        critic.module, batch, loss_fn=lambda values, mb: (values - 1).square().mean()
    )  # moves the head first, as everything below it sees only the head's zeros
    values = critic.module.forward(batch)
    critic.module.save_to_hf(tokenizer=critic.tokenizer, save_dir=str(tmp_path / "b"))
    loaded = hf_critic(path=str(tmp_path / "b"), **COMPANY)
    again = InferenceBackend().initialize(loaded, SPEC).module.forward(batch)
    assert values.abs().max() > 0
    assert torch.equal(again, values)


def test_a_pipeline_of_fsdp_is_refused():
    model = tiny_llama(**SHAPE, **{**COMPANY, "topology": ProcessTopology(pipeline=2)})
    with golden.raises(ConfigError):
        FSDPBackend().initialize(model, SPEC)


def test_inference_does_not_train_and_needs_no_module():
    model = InferenceBackend().initialize(tiny_llama(**SHAPE, **COMPANY), SPEC)
    with golden.raises(ConfigError):
        train(model.module, make_batch())
    model.module = None
    assert InferenceBackend().initialize(model, SPEC).module is None
