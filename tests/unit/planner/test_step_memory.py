"""What a training step keeps for its backward pass, and what its head takes, as the planner says it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen2Config

from realsys.algorithms import logprobs
from realsys.algorithms.predictions import Predictions
from realsys.api import data
from realsys.api.model import (
    FinetuneSpec,
    Model,
    ModelInterfaceType,
    ModelName,
    ProcessTopology,
)
from realsys.backends.hf.recompute import recompute_layers
from realsys.backends.inference import InferenceBackend
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.policy_objective import PolicyObjective
from realsys.models.shape import shape_of
from realsys.planner.memory.copy_memory import (
    HeldModel,
    StepSizes,
    call_terms,
    head_states_bytes,
    last_norm_bytes,
)

torch.set_num_threads(1)
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=64, train_batch_size=4)
SEQUENCES, VOCABULARY, HIDDEN, LAYERS = 4, 4096, 64, 5
ONE = ProcessTopology()


def config(layers: int = LAYERS) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=176,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )


def batch(length: int) -> SequenceSample:
    """Sequences that have nothing in common, half of each an answer."""
    num, draw = SEQUENCES * length, torch.Generator().manual_seed(0)
    per_token = ("packed_logprobs", "advantages")
    data = {key: torch.rand(num, generator=draw) - 8 for key in per_token}
    data["packed_input_ids"] = torch.randint(0, VOCABULARY, (num,), generator=draw)
    data["prompt_mask"] = (torch.arange(length) < length // 2).repeat(SEQUENCES)
    lengths = ((length,),) * SEQUENCES
    return SequenceSample.from_tensors("abcd", dict.fromkeys(data, lengths), data)


def saved_bytes(length: int, dtype: torch.dtype, *, layers: int, recompute: bool) -> float:
    """Of a step's forward pass: all that autograd keeps but weights."""
    torch.manual_seed(0)
    module: Any = AutoModelForCausalLM.from_config(config(layers), dtype=dtype)
    if recompute:
        recompute_layers(module, where="test")
    model = Model(
        name=ModelName("m"), module=module, tokenizer=None, device="cpu", dtype=str(dtype)[6:]
    )
    engine = InferenceBackend().initialize(model, SPEC).module
    module.requires_grad_(True)
    settings = PPOSettings(entropy_coef=0.01, group_size=1)
    objective, sample = PolicyObjective(settings), batch(length)
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    own |= {x.untyped_storage().data_ptr() for x in sample.data.values()}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss, _, _ = objective.loss(engine.run_module(sample), sample)
    loss.backward()
    assert all(p.grad is not None for p in module.parameters())
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def planned(length: int, dtype: torch.dtype, *, recompute: bool) -> tuple[dict[str, float], float]:
    """Terms of such a step, and what of them is the head's and kept."""
    model = HeldModel(
        shape=shape_of(config().to_dict()),
        dtype=str(dtype)[6:],
        trained=True,
        recompute=recompute,
    )
    sizes = StepSizes(
        sequences=SEQUENCES, prompt_tokens=length // 2, answer_tokens=length - length // 2
    )
    terms = call_terms(model, ONE, 0, ModelInterfaceType.TRAIN_STEP, sizes)
    tokens = SEQUENCES * length
    norm = last_norm_bytes(model.shape, tokens, dtype.itemsize)
    states = tokens * HIDDEN * dtype.itemsize  # of all tokens: autograd needs those of answers only
    return dict(terms), norm + head_states_bytes(model, tokens, tokens // 2) - states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [32, 96, 256])
def test_a_step_keeps_what_the_planner_says(monkeypatch, length, dtype):
    monkeypatch.setattr(data, "LOGITS_AT_ONCE", 16 * VOCABULARY)
    terms, head = planned(length, dtype, recompute=False)
    found = saved_bytes(length, dtype, layers=LAYERS, recompute=False)
    assert found == pytest.approx(terms["activations"] + head, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [32, 96, 256])
def test_a_step_that_recomputes_keeps_inputs_of_layers_and_has_one_layer(
    monkeypatch, length, dtype
):
    monkeypatch.setattr(data, "LOGITS_AT_ONCE", 16 * VOCABULARY)
    terms, head = planned(length, dtype, recompute=True)
    found = saved_bytes(length, dtype, layers=LAYERS, recompute=True)
    few, more = (saved_bytes(length, dtype, layers=n, recompute=False) for n in (1, 2))
    assert found + (more - few) == pytest.approx(terms["activations"] + head, rel=0.1)


# ---- the head ----------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Most bytes that tensors made meanwhile have at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            storage = x.untyped_storage() if isinstance(x, Tensor) else None
            if storage is not None and storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata)
        self.most = max(self.most, self.now)
        return made

    def _gone(self, storage: int) -> None:
        self.now -= self._sizes.pop(storage)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [64, 256, 1024])
@pytest.mark.parametrize("train_entropy", [False, True])
def test_the_head_takes_no_more_than_the_planner_says(monkeypatch, length, dtype, train_entropy):
    """And not much less, at tokens of one chunk, of four and of sixteen."""
    monkeypatch.setattr(data, "LOGITS_AT_ONCE", 256 * VOCABULARY)
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", 128 * VOCABULARY)  # half, as they are
    draw = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=dtype)
    made = torch.randn(SEQUENCES * length, HIDDEN, generator=draw).to(dtype).requires_grad_()
    answers = torch.arange(SEQUENCES * length) % 2 == 0
    with Live() as live:
        states = made * 1
        predictions = Predictions(states, head, vocab_size=VOCABULARY)
        found = predictions.logprobs_and_entropy(
            torch.zeros(SEQUENCES * length // 2, dtype=torch.int64),
            answers,
            temperature=0.8,
            train_entropy=train_entropy,
        )
        sum(x.sum() for x in found).backward()  # type: ignore[union-attr]
    terms, _ = planned(length, dtype, recompute=False)
    weights = HIDDEN * VOCABULARY * dtype.itemsize  # its gradient, which is another term
    assert 0.45 * terms["logits"] < live.most - weights <= terms["logits"]
