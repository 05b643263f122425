"""Models of real shapes with random weights, made on the device, and the engines over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from device import Device
from transformers import Qwen2Config, Qwen2ForCausalLM

from realsys.api.model import FinetuneSpec, Model, ModelName, ProcessTopology
from realsys.api.options import OptimizerOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.data.sequence_sample import SequenceSample
from realsys.data.transfer.tensor_store import TensorStore
from realsys.models.source import ModuleInMemory

Shape = Mapping[str, Any]
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=1000, train_batch_size=1)


def shape_of_qwen(size: str) -> Shape:
    """Of Qwen2.5-0.5B or -1.5B, whole: ``size`` is ``0.5b`` or ``1.5b``."""
    hidden, middle, layers, heads = {"0.5b": (896, 4864, 24, 14), "1.5b": (1536, 8960, 28, 12)}[
        size
    ]
    return {
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    }


def shape_of_qwen_7b(*, layers: int = 28) -> Shape:
    """Of Qwen2.5-7B, with fewer layers."""
    return {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": layers,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }


def shape_of_small() -> Shape:
    """The same in small, for the stand-in."""
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }


def causal_lm(
    shape: Shape, device: Device, *, dtype: torch.dtype = torch.bfloat16, key_bias: float = 0.0
) -> Any:
    """A model whose weights are drawn on the device; equal shapes and devices, equal weights.

    Args:
        key_bias: size of the biases of keys, which Qwen2's models have large.
    """
    torch.manual_seed(1)
    with torch.device(device.kind):
        module = Qwen2ForCausalLM(Qwen2Config(**shape, rope_theta=1e6))
        if key_bias:
            for layer in module.model.layers:
                torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=key_bias)
    for parameter in module.parameters():  # not module.to(): rotary frequencies stay float32
        parameter.data = parameter.data.to(dtype)
    return module.eval().requires_grad_(False)


def model_of(module: Any, device: Device, *, dtype: str) -> Model:
    """The module alone on its device, ready for a backend."""
    module.requires_grad_(True)
    return Model(
        name=ModelName("actor"), module=module, tokenizer=None, device=device.kind, dtype=dtype
    )


def fsdp_engine(
    module: Any, device: Device, *, dtype: str, lr: float, recompute: bool = False
) -> Any:
    """The module's weights in float32, computing in ``dtype``."""
    backend = FSDPBackend(optimizer=OptimizerOptions(lr=lr), recompute=recompute)
    module = module if dtype == "bfloat16" else module.float()
    return backend.initialize(model_of(module, device, dtype=dtype), SPEC).module


def megatron_engine(shape: Shape, device: Device, *, lr: float, recompute: bool = False) -> Any:
    """By Megatron-Core on one process."""
    from realsys.backends.megatron_backend import MegatronBackend

    module = causal_lm(shape, device)
    backend = MegatronBackend(optimizer=OptimizerOptions(lr=lr), recompute=recompute)
    return backend.initialize(model_of(module, device, dtype="bfloat16"), SPEC).module


def batch_of(lengths: Sequence[int], vocab_size: int) -> SequenceSample:
    """A question each, the first two tokens the prompt."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, vocab_size, (sum(lengths),), generator=draw)
    mask = torch.cat([torch.arange(n) < 2 for n in lengths])
    ids = [str(i) for i in range(len(lengths))]
    each = [(n,) for n in lengths]
    return SequenceSample.from_tensors(
        ids,
        {"packed_input_ids": each, "prompt_mask": each},
        {"packed_input_ids": tokens, "prompt_mask": mask},
    )


def grouped_answers(device: Device, vocab_size: int) -> SequenceSample:
    """Answers of spread lengths in groups that share a prompt: some 15,000 tokens, as in GRPO's."""
    tokens, num, group, prompt = (320, 8, 4, 8) if device.small else (16384, 16, 8, 200)
    draw = torch.Generator().manual_seed(0)
    shares = (torch.rand(num, generator=draw) * 1.4 + 0.3).tolist()
    lengths = [max(prompt + 8, int(tokens // num * share)) for share in shares]
    rows = []
    for first in range(0, num, group):
        asked = torch.randint(3, vocab_size, (prompt,), generator=draw)
        for n in lengths[first : first + group]:
            answer = torch.randint(3, vocab_size, (n - prompt,), generator=draw)
            rows.append(torch.cat([asked, answer]))
    each = [tuple(lengths[first : first + group]) for first in range(0, num, group)]
    masks = [torch.arange(n) < prompt for n in lengths]
    return SequenceSample.from_tensors(
        [str(i) for i in range(len(each))],
        {"packed_input_ids": each, "prompt_mask": each},
        {"packed_input_ids": torch.cat(rows), "prompt_mask": torch.cat(masks)},
    )


def publisher_of(engine: Any, module: Any) -> Callable[[int], int]:
    """Publishes a version of the engine's weights in bfloat16, as for servers; gives its bytes.

    ``module``: one of the same shape.
    """
    from realsys.weights.sync.plan_publish import plan_publish, wire_dtypes
    from realsys.weights.sync.publisher import WeightPublisher

    layout = FSDPBackend().layout(ModuleInMemory(module), ProcessTopology())
    weights = ModuleInMemory(module).weights()
    dtypes = wire_dtypes(weights, dtype="bfloat16")
    giving = plan_publish(layout, [0], dtypes=dtypes)
    publisher = WeightPublisher(TensorStore(), giving, model="actor@0", worker=0, may_round=True)
    num_bytes = 2 * sum(w.numel for w in weights)

    def publish(version: int) -> int:
        publisher.publish(engine, version)
        if version:
            publisher.forget(version - 1)
        return num_bytes

    return publish
