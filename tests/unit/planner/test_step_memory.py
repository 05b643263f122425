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
from realsys.interfaces.ppo.policy_objective import PolicyObjective
from realsys.models.shape import shape_of
from realsys.planner.memory.copy_memory import (
    HeldModel,
    StepSizes,
    attention_activation_bytes,
    call_terms,
    head_states_bytes,
    last_norm_bytes,
    layer_activation_bytes,
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


def batch(length: int, group: int = 1) -> SequenceSample:
    """Sequences, half of each an answer; those of a group have one prompt, others nothing in common."""
    num, draw = SEQUENCES * length, torch.Generator().manual_seed(0)
    per_token = ("packed_logprobs", "advantages")
    data = {key: torch.rand(num, generator=draw) - 8 for key in per_token}
    data["packed_input_ids"] = torch.randint(0, VOCABULARY, (num,), generator=draw)
    rows = data["packed_input_ids"].view(-1, group, length)
    rows[..., : length // 2] = rows[:, :1, : length // 2].clone()
    data["prompt_mask"] = (torch.arange(length) < length // 2).repeat(SEQUENCES)
    lengths = ((length,) * group,) * (SEQUENCES // group)
    return SequenceSample.from_tensors("abcd"[: len(lengths)], dict.fromkeys(data, lengths), data)


def saved_bytes(
    length: int, dtype: torch.dtype, *, layers: int, recompute: bool, group: int = 1
) -> float:
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
    settings = PPOSettings(entropy_coef=0.01, group_size=group)
    objective, sample = PolicyObjective(settings), batch(length, group)
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


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [32, 96, 256])
def test_a_step_keeps_what_the_planner_says(monkeypatch, length, dtype):
    monkeypatch.setattr(data, "LOGITS_AT_ONCE", 16 * VOCABULARY)
    terms, head = planned(length, dtype, recompute=False)
    found = saved_bytes(length, dtype, layers=LAYERS, recompute=False)
    assert found == pytest.approx(terms["activations"] + head, rel=0.1)


@pytest.mark.parametrize("group", [2, 4])
def test_a_prompt_that_answers_share_is_kept_once(monkeypatch, group):
    monkeypatch.setattr(data, "LOGITS_AT_ONCE", 16 * VOCABULARY)
    model = HeldModel(shape=shape_of(config().to_dict()), trained=True)
    sizes = StepSizes(sequences=SEQUENCES, prompt_tokens=48, answer_tokens=48, group_size=group)
    terms = call_terms(model, ONE, 0, ModelInterfaceType.TRAIN_STEP, sizes)
    tokens = SEQUENCES // group * 48 + SEQUENCES * 48
    head = last_norm_bytes(model.shape, tokens, 4) + SEQUENCES * 48 * HIDDEN * 4
    found = saved_bytes(96, torch.float32, layers=LAYERS, recompute=False, group=group)
    assert found == pytest.approx(terms["activations"] + head, rel=0.1)


@pytest.mark.parametrize(
    ("limit", "prompt", "answer", "group", "tokens"),
    [
        (None, 64, 10, 8, 8 * 64 + 64 * 10),  # all of 8 groups
        (2048, 64, 10, 8, 640 + (2048 - 640) // 8),  # all answers with shorter prompts
        (2048, 64, 512, 8, 2048),  # answers alone fill it
        (2048, 1000, 10, 8, 1000 + 2 * 10),  # two answers to one question
        (512, 1000, 10, 8, 1010),  # a sequence is never cut
        (2048, 64, 10, 1, 2048),  # nothing is shared
    ],
)
def test_the_largest_micro_batch_counts_shared_prompts_once(limit, prompt, answer, group, tokens):
    shape = shape_of(config().to_dict())
    sizes = StepSizes(sequences=64, prompt_tokens=prompt, answer_tokens=answer, group_size=group)

    def activations(**fields: Any) -> float:
        model = HeldModel(shape=shape, max_tokens_per_mb=limit, trained=True, **fields)
        return call_terms(model, ONE, 0, ModelInterfaceType.TRAIN_STEP, sizes)["activations"]

    each = LAYERS * layer_activation_bytes(shape, 1, 4)
    attended = LAYERS * attention_activation_bytes(shape, 1, 4)
    plain = min(64 * (prompt + answer), max(limit or 1 << 30, prompt + answer))
    assert activations() == tokens * each + (plain - tokens) * attended
    assert activations(backend="megatron") == plain * each


@pytest.mark.thorough
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


@pytest.mark.thorough
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
