"""Bytes that a copy of a model needs on one GPU, term by term (pure).

Permanent: weights, gradients, optimizer, and the whole copy that generation needs of sharded
    weights. Added by a
running call: activations, logits, cache, gathered layers. Only tensors that must exist at the same time are
counted; framework memory and fragmentation are not.

Sources: activations counted as in arXiv:2205.05198, section 4, for the tensors of a Llama layer with fused
attention; in flight in a pipeline (1F1B): arXiv:2104.04473, section 2.2; optimizer sharded over the data
axis: arXiv:1910.02054, section 5; adapters: arXiv:2106.09685.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from realsys.api.data import logits_at_once
from realsys.api.model import ModelInterfaceType, ProcessTopology
from realsys.generation.cache_bytes import READ_TOKENS_FUSED, BytesOfGeneration
from realsys.models.shape import DTYPE_BYTES, ModelShape, Weight, adapted
from realsys.weights.layouts.holdings import (
    FSDP_VOCABULARY,
    FSDP_WHOLE_BYTES,
    MEGATRON_VOCABULARY,
    held_dtype,
    split_dim,
)

GiB = 1 << 30
KNOWN_BACKENDS = ("fsdp", "megatron", "inference")
_FLOAT32 = 4

Terms = Mapping[str, float]  # what → bytes


@dataclass(frozen=True, kw_only=True)
class HeldModel:
    """Properties of a model copy that determine its memory.

    Attributes:
        dtype: compute dtype.
        trained: False for a copy that is not trained.
        averaged: the copy is a moving average of another.
        lora_rank, lora_targets: rank 0 trains all weights.
        cpu_offload: shards and optimizer stay in CPU memory even while it computes.
        offload: the whole copy is in CPU memory while it does not compute.
        max_tokens_per_mb: None means no limit.
        max_cache_tokens: cache size during generation; None: at least ``max_tokens_per_mb``, and on a GPU
            whatever memory is left.
    """

    shape: ModelShape
    dtype: str = "float32"
    backend: str = "fsdp"
    trained: bool = False
    averaged: bool = False
    lora_rank: int = 0
    lora_targets: Collection[str] = ()
    recompute: bool = False
    cpu_offload: bool = False
    offload: bool = False
    max_tokens_per_mb: int | None = None
    max_cache_tokens: int | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes per element of compute weights."""
        return DTYPE_BYTES[self.dtype]

    @property
    def learning_bytes(self) -> int:
        """Bytes per element as held for training (``held_dtype``); also of gradient and moments."""
        return DTYPE_BYTES[
            held_dtype(
                self.dtype,
                self.backend,
                trained=self.trained,
                averaged=self.averaged,
                adapters=self.lora_rank > 0,
                weight=".lora_A.weight",
            )
        ]

    @property
    def is_cast(self) -> bool:
        """True if fsdp casts the held weights when gathering them."""
        wider = self.learning_bytes > self.item_bytes
        return wider and self.backend == "fsdp" and not self.lora_rank


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Largest possible step: every prompt and answer at its limit.

    ``updates_per_pass`` are the minibatches of a train step; ``group_size`` answers share a prompt.
    """

    sequences: int
    prompt_tokens: int
    answer_tokens: int
    updates_per_pass: int = 1
    group_size: int = 1

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt_tokens + self.answer_tokens


# ---- permanent --------------------------------------------------------------------------------------


def permanent_terms(
    model: HeldModel, topo: ProcessTopology, stage: int, *, generates: bool
) -> Terms:
    """Bytes that a process of pipeline stage ``stage`` needs permanently, also between calls."""
    held, trained = held_numbers(model, topo, stage)
    item, learning, cut = model.item_bytes, model.learning_bytes, is_cut(model, topo)
    found = {"weights": held * (learning if model.is_cast else item)}
    if model.lora_rank:
        found["weights"] += trained * (learning - item)
    elif learning > item and not model.is_cast:
        found["average"] = held * learning  # beside the compute weights
    if model.trained and model.backend == "megatron":
        found["gradients"] = trained * _FLOAT32
        masters = 0 if model.dtype == "float32" else _FLOAT32  # float32 weights are their own
        found["optimizer"] = trained / topo.data * (masters + 2 * _FLOAT32)
    elif model.trained:
        found["gradients"] = trained * learning
        found["optimizer"] = trained * 2 * learning  # moments
    if model.cpu_offload:
        found = dict.fromkeys(found, 0.0)
    if generates and (cut or model.cpu_offload or model.lora_rank or model.is_cast):
        found["whole copy"] = model.shape.num_params * item
    return {what: size for what, size in found.items() if size}


def is_cut(model: HeldModel, topo: ProcessTopology) -> bool:
    """True if a process holds less than all weights."""
    sharded = topo.data > 1 and model.backend == "fsdp"
    return sharded or topo.tensor * topo.pipeline > 1 or model.backend == "megatron"


def is_one_piece(model: HeldModel) -> bool:
    """True if fsdp gathers the whole model at once (realsys/backends/hf/sharding.py)."""
    small = model.shape.num_params * model.item_bytes <= FSDP_WHOLE_BYTES
    return small and not model.cpu_offload


def held_numbers(model: HeldModel, topo: ProcessTopology, stage: int) -> tuple[float, float]:
    """Number of elements that a process of a stage holds, and how many of them are trained.

    Adapters count as both; fsdp's shards as equal.
    """
    base = _base_numbers(model.shape, topo, stage, model.backend)
    shards = topo.data if model.backend == "fsdp" else 1
    if not model.lora_rank:
        return base / shards, base / shards
    adapters = sum(_adapter_numbers(model, w) for w in _of_stage(model.shape, topo, stage))
    return (base + adapters) / shards, adapters / shards


@functools.lru_cache(maxsize=512)  # a plan's search asks for few of them, again and again
def _base_numbers(shape: ModelShape, topo: ProcessTopology, stage: int, backend: str) -> float:
    vocabulary = FSDP_VOCABULARY if backend == "fsdp" else MEGATRON_VOCABULARY
    base = 0.0
    for weight in _of_stage(shape, topo, stage):
        base += weight.numel / (
            topo.tensor if split_dim(weight.name, vocabulary) is not None else 1
        )
    return base


def _of_stage(shape: ModelShape, topo: ProcessTopology, stage: int) -> list[Weight]:
    layers = shape.num_layers / topo.pipeline
    first, last = stage == 0, stage == topo.pipeline - 1
    found = []
    for weight in shape.weights():
        if weight.name.startswith("model.layers."):
            mine = int(int(weight.name.split(".")[2]) // layers) == stage
        elif weight.name.startswith("model.embed_tokens."):
            mine = first or (last and shape.tied_embeddings)
        else:
            mine = last
        if mine:
            found.append(weight)
    return found


def _adapter_numbers(model: HeldModel, weight: Weight) -> int:
    return model.lora_rank * sum(sum(w.shape) for w in adapted((weight,), model.lora_targets))


# ---- added by a call -------------------------------------------------------------------------------------


def call_terms(
    model: HeldModel,
    topo: ProcessTopology,
    stage: int,
    kind: ModelInterfaceType,
    sizes: StepSizes,
) -> Terms:
    """Bytes that a process of pipeline stage ``stage`` needs only while a call runs."""
    if kind is ModelInterfaceType.GENERATE:
        found = _generation(model, topo, sizes)
    elif kind is ModelInterfaceType.TRAIN_STEP:
        found = _training(model, topo, stage, sizes)
    else:
        found = _forward(model, topo, stage, sizes)
    return {what: size for what, size in found.items() if size}


def _training(
    model: HeldModel, topo: ProcessTopology, stage: int, sizes: StepSizes
) -> dict[str, float]:
    rank_tokens, tokens, again = _computed_tokens(model, topo, sizes, parts=sizes.updates_per_pass)
    # Micro-batches of a stage that still await their backward pass.
    kept = min(tokens * (topo.pipeline - stage), rank_tokens)
    layer = layer_activation_bytes(model.shape, topo.tensor, model.item_bytes)
    attended = again * attention_activation_bytes(model.shape, topo.tensor, model.item_bytes)
    layers = math.ceil(model.shape.num_layers / topo.pipeline)
    if model.recompute:  # the input of each layer, and one layer at a time
        activations = kept * layers * model.shape.hidden_size * model.item_bytes + tokens * layer
        activations += attended
    else:
        activations = layers * (kept * layer + attended)
    found = {
        "activations": activations,
        "logits": _logits(model, topo, stage, tokens, sizes, backward=True),
        "gathered layers": _gathered(model, topo),
    }
    if _gathers(model, topo):
        if is_one_piece(model):  # summed over micro-batches, and reduced with the last
            _, trained = held_numbers(model, topo, stage)
            new = model.item_bytes if model.is_cast else 0
            found["whole gradients"] = trained * topo.data * (model.learning_bytes + new)
        elif not model.lora_rank:  # as computed, and as they are reduced
            largest = max(_gathered_numbers(model, topo))
            found["gradients of a layer"] = largest * (model.item_bytes + model.learning_bytes)
    return found


def _forward(
    model: HeldModel, topo: ProcessTopology, stage: int, sizes: StepSizes
) -> dict[str, float]:
    _, tokens, _ = _computed_tokens(model, topo, sizes)
    return {
        "activations": tokens * layer_activation_bytes(model.shape, topo.tensor, model.item_bytes),
        "logits": _logits(model, topo, stage, tokens, sizes, backward=False),
        "gathered layers": _gathered(model, topo),
    }


def _generation(model: HeldModel, topo: ProcessTopology, sizes: StepSizes) -> dict[str, float]:
    """Terms of generation with whole weights: every process answers its share of the prompts."""
    # Backend fsdp answers a slot's prompts on each of its processes, the others deal them.
    ranks = topo.data if model.backend == "fsdp" else topo.world_size
    rows = math.ceil(sizes.sequences / ranks)
    bound = model.max_cache_tokens or model.max_tokens_per_mb
    tokens = rows * sizes.length
    if bound is not None:
        tokens = min(tokens, max(bound, sizes.length))
        # Rows are admitted by what they hold: more of them while they are short.
        rows = min(rows, max(1, tokens // (sizes.prompt_tokens + 1)))
    needs = bytes_of_generation(model.shape, model.item_bytes)
    # Prompts are prefilled in parts, into a cache of their own (realsys/generation/decoding/slots.py).
    read = min(rows * sizes.prompt_tokens, max(READ_TOKENS_FUSED, sizes.prompt_tokens))
    return {
        "cache": tokens * needs.cached_token,
        "reading prompts": float(needs.reading(read, read)),
        "logits": float(needs.logits(rows)),
    }


def bytes_of_generation(shape: ModelShape, item: int) -> BytesOfGeneration:
    """What the engine computes from the loaded model (realsys/generation/engine/cache_room.py)."""
    return BytesOfGeneration.of_sizes(
        layers=shape.num_layers,
        hidden=shape.hidden_size,
        queries=shape.q_size,
        keys=shape.kv_size,
        middle=shape.intermediate_size,
        vocabulary=shape.vocab_size,
        item=item,
    )


def layer_activation_bytes(shape: ModelShape, tensor: int, item: int) -> float:
    """Bytes per token that one layer keeps for its backward pass.

    Inputs of the two norms in float32, each norm before and after its weight; queries, keys, values,
    attention's output; gate, up, silu(gate) and their product. The tensor axis cuts all but the norms
    of the hidden state. Compared with what autograd saves in tests/unit/planner/test_memory.py.
    """
    cut = item * 4 * shape.intermediate_size
    if shape.qk_norm:
        cut += (_FLOAT32 + item) * (shape.q_size + shape.kv_size)
    attention = attention_activation_bytes(shape, tensor, item)
    return (2 * _FLOAT32 + 4 * item) * shape.hidden_size + cut / tensor + attention


def attention_activation_bytes(shape: ModelShape, tensor: int, item: int) -> float:
    """Those of them that attention keeps: queries, keys, values and its output."""
    return item * (2 * shape.q_size + 2 * shape.kv_size) / tensor


def _logits(
    model: HeldModel,
    topo: ProcessTopology,
    stage: int,
    tokens: int,
    sizes: StepSizes,
    *,
    backward: bool,
) -> float:
    """Bytes on the last stage: inputs of the logits, and the logits of one chunk of rows (Predictions)."""
    if model.shape.critic or stage != topo.pipeline - 1:
        return 0.0
    shape, rows = model.shape, min(tokens, logits_at_once(model.shape.vocab_size))
    if not backward:  # as computed, in float32, by the temperature
        chunk = rows * shape.vocab_size * 3 * _FLOAT32
        return chunk + head_states_bytes(model, tokens, tokens)
    # Also their softmax, what it is multiplied with, and gradients.
    chunk = rows * shape.vocab_size * 7 * _FLOAT32
    # The head's gradient: of a chunk, and of those before it
    if rows < tokens and not model.lora_rank:
        chunk += 2 * shape.vocab_size * shape.hidden_size * model.item_bytes
    answers = math.ceil(tokens * sizes.answer_tokens / sizes.length)
    states = head_states_bytes(model, tokens, answers)
    return chunk + last_norm_bytes(shape, tokens, model.item_bytes) + 2 * states


def last_norm_bytes(shape: ModelShape, tokens: int, item: int) -> int:
    """Bytes kept by the norm after the last layer: its input in float32, and that before its weight."""
    return tokens * shape.hidden_size * (_FLOAT32 + item)


def head_states_bytes(model: HeldModel, tokens: int, answers: int) -> int:
    """Bytes of the head's inputs: of all tokens and of those that count; logits if they fit into a
    chunk.
    """
    shape = model.shape
    if tokens <= logits_at_once(shape.vocab_size):
        return tokens * shape.vocab_size * model.item_bytes
    return (tokens + answers) * shape.hidden_size * model.item_bytes


def _gathered(model: HeldModel, topo: ProcessTopology) -> float:
    """Bytes of two layers, the current and the next, and everything outside layers; whole over the
    data axis.

    For a small model, all weights.
    """
    if not _gathers(model, topo):
        return 0.0
    if is_one_piece(model):
        return model.shape.num_params / topo.tensor * model.item_bytes
    layer, rest = _gathered_numbers(model, topo)
    return (2 * layer + rest) * model.item_bytes


def _gathers(model: HeldModel, topo: ProcessTopology) -> bool:
    """True if fsdp gathers whole weights; a single process does if it casts or offloads them."""
    return model.backend == "fsdp" and (topo.data > 1 or model.is_cast or model.cpu_offload)


def _gathered_numbers(model: HeldModel, topo: ProcessTopology) -> tuple[float, float]:
    """Number of elements of a layer, and of embedding, last norm and head, as split by the tensor axis."""
    layer = rest = 0.0
    for weight in model.shape.weights():
        cut = topo.tensor if split_dim(weight.name, FSDP_VOCABULARY) is not None else 1
        if weight.name.startswith("model.layers.0."):
            layer += weight.numel / cut
        elif not weight.name.startswith("model.layers."):
            rest += weight.numel / cut
    return layer, rest


def _computed_tokens(
    model: HeldModel, topo: ProcessTopology, sizes: StepSizes, *, parts: int = 1
) -> tuple[int, int, int]:
    """Tokens that a process computes in one of ``parts`` of a step, and in its largest micro-batch, and how
    many more attention has there, for which a prompt stands before each answer.

    Groups of answers are split if they don't fit, sequences never. Backend megatron computes a prompt for
    each of its answers, the others once for those of a micro-batch (backends/kernels/packed_attention.py).
    """
    sequences = math.ceil(sizes.sequences / topo.data / parts)
    all_tokens = sequences * sizes.length
    limit = all_tokens if model.max_tokens_per_mb is None else model.max_tokens_per_mb
    counted = min(all_tokens, max(limit, sizes.length))
    if model.backend == "megatron":
        return all_tokens, counted, 0
    once = _distinct(counted, sequences, sizes)
    return _distinct(all_tokens, sequences, sizes), once, counted - once


def _distinct(counted: int, sequences: int, sizes: StepSizes) -> int:
    """Most distinct tokens among ``counted`` of so many sequences: prompts may be shorter than allowed."""
    answers = sequences * sizes.answer_tokens
    if answers >= counted:
        return counted
    together = min(sizes.group_size, max(1, counted // sizes.length))
    prompts = min(
        math.ceil(sequences / sizes.group_size) * sizes.prompt_tokens,
        (counted - answers) // sizes.group_size,
    )
    one_group = sizes.prompt_tokens + together * sizes.answer_tokens
    return min(counted, max(answers + prompts, one_group))
