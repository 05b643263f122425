"""What a loss gets of a language model: the same numbers however cut, and never all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from near import assert_near, near
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config

from realsys.algorithms.predictions import Predictions, next_token_logprobs, nothing_of
from realsys.api import data
from realsys.api.basics.estimators import GRPOAdvantage
from realsys.api.data import MicroBatchSpec
from realsys.api.model import (
    FinetuneSpec,
    GenerationHyperparameters,
    Model,
    ModelName,
)
from realsys.api.options import OptimizerOptions, PPOHyperparameters
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.hf.singleton_group import singleton_group
from realsys.backends.kernels.packed_attention import predict_packed, run_packed
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.ppo.ppo_actor import PPOActorInterface
from realsys.interfaces.supervised import SFTInterface

torch.set_num_threads(1)
VOCABULARY, WIDTH = 700, 16
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=64, train_batch_size=4)


def at_once(monkeypatch: pytest.MonkeyPatch, rows: int, vocabulary: int = VOCABULARY) -> None:
    """So many rows of logits may exist at a time."""
    monkeypatch.setattr(data, "LOGITS_AT_ONCE", rows * vocabulary)


# ---- numbers -----------------------------------------------------------------------------------


def states_and_head() -> tuple[Tensor, torch.nn.Linear]:
    draw = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight.data.normal_(generator=draw)
    return torch.randn(9, WIDTH, generator=draw).requires_grad_(), head


PLACE = torch.tensor(
    [0, 1, 2, 3, 0, 1, 4, 5, 0, 6, 7, 8]
)  # 12 tokens, three of them like the first
ASKED = torch.tensor([0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0]).bool()
TOKENS = torch.arange(8) * 71 % VOCABULARY


def by_hand(temperature: float) -> list[Tensor]:
    """Log-probabilities, entropy, and gradients of Σ (i + 1) (2 log p_i - H_i), in float64."""
    states, head = states_and_head()
    x = states.detach().double().requires_grad_()
    w = head.weight.detach().double().requires_grad_()
    logp = ((x @ w.T)[PLACE][ASKED] / temperature).log_softmax(-1)
    picked, h = logp[torch.arange(8), TOKENS], -(logp.exp() * logp).sum(-1)
    (torch.arange(1, 9) * (2 * picked - h)).sum().backward()
    return [picked, h, x.grad, w.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("as_logits", [False, True])
@pytest.mark.parametrize("rows", [100, 3, 1])
def test_chunks_change_neither_numbers_nor_gradients(monkeypatch, rows, as_logits, temperature):
    at_once(monkeypatch, rows)
    states, head = states_and_head()
    if as_logits:
        predictions = Predictions.of_logits(head(states)[PLACE])
    else:
        predictions = Predictions(states, head, vocab_size=VOCABULARY, place_N=PLACE)
    for asked in (ASKED, ASKED.nonzero().flatten()):
        states.grad = head.weight.grad = None
        picked, h = predictions.logprobs_and_entropy(
            TOKENS, asked, temperature=temperature, train_entropy=True
        )
        loss = (torch.arange(1, 9) * (2 * picked - h)).sum()
        loss.backward(retain_graph=True)
        found = [picked, h, states.grad, head.weight.grad]
        for number, (mine, expected) in enumerate(zip(found, by_hand(temperature), strict=True)):
            assert_close(mine.double(), expected, rtol=1e-5, atol=2e-4 if number > 1 else 1e-5)
    alone = predictions.logprobs(TOKENS, ASKED, temperature=temperature)
    assert torch.equal(alone, picked)
    assert_near(predictions.logits(ASKED), head(states)[PLACE][ASKED])
    assert_near(predictions.logits(), head(states)[PLACE])


def test_an_entropy_that_is_only_a_figure_has_no_gradient(monkeypatch):
    at_once(monkeypatch, 3)
    states, head = states_and_head()
    predictions = Predictions(states, head, vocab_size=VOCABULARY, place_N=PLACE)
    picked, h = predictions.logprobs_and_entropy(TOKENS, ASKED)
    assert picked.requires_grad
    assert not h.requires_grad
    assert_near(h.double(), by_hand(1.0)[1].detach())


@pytest.mark.parametrize("rows", [100, 3])
def test_no_rows_and_nothing_give_every_weight_a_gradient_of_0(monkeypatch, rows):
    at_once(monkeypatch, rows)
    states, head = states_and_head()
    predictions = Predictions(states, head, vocab_size=VOCABULARY)
    none = torch.zeros(9, dtype=torch.bool)
    for zero in (
        predictions.nothing(),
        nothing_of(predictions),
        predictions.logprobs(TOKENS[:0], none).sum(),
    ):
        states.grad = head.weight.grad = None
        zero.backward(retain_graph=True)
        assert zero.item() == 0.0
        assert not states.grad.any()
        assert not head.weight.grad.any()


def test_log_probabilities_of_bfloat16_states_are_summed_in_float32(monkeypatch):
    at_once(monkeypatch, 3)
    states, head = states_and_head()
    head, states = head.bfloat16(), states.detach().bfloat16().requires_grad_()
    predictions = Predictions(states, head, vocab_size=VOCABULARY)
    found, h = predictions.logprobs_and_entropy(TOKENS, torch.arange(8), train_entropy=True)
    logp = head(states).double().log_softmax(-1)[:8]
    assert found.dtype == h.dtype == torch.float32
    assert_near(found.double(), logp[torch.arange(8), TOKENS])
    assert_near(h.double(), -(logp.exp() * logp).sum(-1))
    (found.sum() + h.sum()).backward()
    assert states.grad.dtype == torch.bfloat16


def test_packed_predictions_are_the_modules_logits_and_it_keeps_its_forward(monkeypatch):
    module = policy(1, tie_word_embeddings=True)
    tokens = torch.cat([torch.tensor([5, 6, 7, 8, 9, i, i]) for i in range(4)])
    expected = run_packed(module, tokens, [[7] * 4], to_the_end=False)
    for rows in (100, 3):
        at_once(monkeypatch, rows)
        predictions = predict_packed(module, tokens, [[7] * 4])
        assert_near(predictions.logits(), expected)
        found = next_token_logprobs(predictions, tokens, [7] * 4, temperature=0.8)
        wide = (expected.view(4, 7, -1)[:, :-1].double() / 0.8).log_softmax(-1)
        by_token = wide.gather(2, tokens.view(4, 7)[:, 1:, None])[..., 0]
        assert_near(found.view(4, 7)[:, 1:].double(), by_token)
        assert not found.view(4, 7)[:, 0].any()
    assert "forward" not in vars(module)
    assert module(input_ids=tokens[None]).logits.shape == (1, 28, VOCABULARY)
    with pytest.raises(IndexError):
        predict_packed(module, tokens + VOCABULARY, [[7] * 4])
    assert "forward" not in vars(module)


# ---- memory ------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that an operator makes meanwhile, and its shape."""

    numbers, shape = 0, ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and x.numel() > self.numbers:
                self.numbers, self.shape = x.numel(), tuple(x.shape)
        return made


def policy(layers: int, **more: Any) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        **more,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def engine_of(module: Any) -> Model:
    dtype = str(module.dtype).removeprefix("torch.")
    model = Model(name=ModelName("m"), module=module, tokenizer=None, device="cpu", dtype=dtype)
    return FSDPBackend(optimizer=OptimizerOptions(lr=1e-3)).initialize(model, SPEC)


def batch() -> SequenceSample:
    """Six questions, two answers of 20 tokens each: 240 tokens, 156 of them answers'."""
    lengths, ones, draw = ((20, 20),) * 6, ((1, 1),) * 6, torch.Generator().manual_seed(0)
    data = {
        "packed_input_ids": torch.randint(3, VOCABULARY, (240,), generator=draw),
        "prompt_mask": (torch.arange(20) < 7).repeat(12),
        "packed_logprobs": torch.full((240,), -6.5),
        "packed_ref_logprobs": torch.full((240,), -6.5),
        "rewards": torch.rand(12, generator=draw),
        "seq_no_eos_mask": torch.zeros(12, dtype=torch.bool),
    }
    seqlens = {k: ones if len(x) == 12 else lengths for k, x in data.items()}
    return SequenceSample.from_tensors("abcdef", seqlens, data)


def ppo(**changes: Any) -> PPOActorInterface:
    settings = PPOHyperparameters(
        gen=GenerationHyperparameters(temperature=0.8),
        ppo_n_minibatches=1,
        advantage=GRPOAdvantage(),
        early_stop_imp_ratio=None,
        **changes,
    )
    return PPOActorInterface(**vars(settings), group_size=2)


def work(name: str, model: Model) -> Any:
    whole = MicroBatchSpec()
    if name == "sft evaluation":
        return SFTInterface().evaluate(model, [batch()], whole)
    if name == "sft":
        return SFTInterface().train_step(model, batch(), whole)
    if name == "inference":
        return ppo().inference(model, batch(), whole).data["logprobs"].tolist()
    return ppo(entropy_coef=0.01 if name == "ppo with entropy" else 0.0).train_step(
        model, batch(), whole
    )


@pytest.mark.parametrize("name", ["ppo", "ppo with entropy", "sft", "sft evaluation", "inference"])
def test_all_logits_never_exist(monkeypatch, name):
    found = {}
    for rows in (1000, 40):
        at_once(monkeypatch, rows)
        model = engine_of(policy(2))
        with Largest() as largest:
            figures = work(name, model)
        found[rows] = figures, largest
    whole, chunked = found[1000][1], found[40][1]
    assert whole.numbers >= 156 * VOCABULARY, "the spy sees all logits where they exist"
    assert chunked.numbers == 40 * VOCABULARY, chunked.shape
    assert found[40][0] == near(found[1000][0], rel=1e-4)


def test_logits_of_other_families_exist_once_and_nothing_wider_is_kept(monkeypatch):
    """Their head can't be asked in parts: its product is kept, its float32 and softmax are not."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=64, n_inner=16
    )
    module = AutoModelForCausalLM.from_config(config).bfloat16().eval()
    at_once(monkeypatch, 40)
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    engine = engine_of(module).module
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        predictions = engine.run_module(batch())
        predictions.logprobs(torch.zeros(156, dtype=torch.int64), torch.arange(156))
    rows = {x.dtype for x in kept if x.numel() >= 40 * VOCABULARY}
    assert rows <= {torch.bfloat16}


# ---- shards ------------------------------------------------------------------------------------


def test_shards_that_compute_in_bfloat16_give_a_chunked_head_its_whole_gradient(monkeypatch):
    """Two micro-batches, the second of which reduces: what is asked of the head comes after the module's
    call, and again in the backward pass, while its weight is whole and bfloat16."""
    mesh = DeviceMesh.from_group(singleton_group("cpu"), "cpu", mesh_dim_names=("data",))
    halves = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    gradients = []
    for rows in (1000, 40):
        at_once(monkeypatch, rows)
        module: Any = policy(2)
        for layer in module.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=halves)
        fully_shard(module, mesh=mesh, mp_policy=halves)
        tokens, lengths = batch().data["packed_input_ids"], batch().meta.seqlens["packed_input_ids"]
        for last in (False, True):
            module.set_requires_gradient_sync(last)
            predictions = predict_packed(module, tokens, lengths)
            found = predictions.logprobs(tokens.roll(-1))
            assert found.dtype == torch.float32
            (found.mean() if last else nothing_of(predictions)).backward()
        assert {p.grad.dtype for p in module.parameters()} == {torch.float32}
        gradients.append({n: p.grad.full_tensor() for n, p in module.named_parameters()})
    whole, chunked = gradients
    for name, gradient in whole.items():
        apart = (chunked[name] - gradient).norm() / gradient.norm()
        assert apart < 0.02, name
    assert chunked["lm_head.weight"].any()
