"""Computes what every process of a model copy holds, by backend (pure).

The backends shard their modules in exactly this way: a plan made from these layouts is executed on
``PipelinableEngine.held_weights``. Boxes there may be finer, but must cover the same parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from realsys.api.errors import ConfigError, ConfigErrors
from realsys.api.model import ProcessTopology
from realsys.models.shape import ModelShape, Weight
from realsys.weights.layouts.boxes import Box, Holding, Layout

# Output features: dim 0, biases too
ROW_SPLIT = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
)
# Input features: dim 1; biases are added after the sum, so they are whole
COLUMN_SPLIT = (
    "o_proj",
    "down_proj",
)
FSDP_VOCABULARY = ("lm_head",)  # split over the tensor axis by vocabulary rows
MEGATRON_VOCABULARY = ("embed_tokens", "lm_head")
# fsdp gathers a model up to this size in one piece and keeps it whole until the update, which is cheaper
# than a collective per layer.
FSDP_WHOLE_BYTES = 256 << 20


# Trained besides adapters: an untrained head.
TRAINED_HEADS = ("score.", "classifier.")


def held_dtype(
    dtype: str,
    backend: str,
    *,
    trained: bool,
    averaged: bool = False,
    adapters: bool = False,
    weight: str = "",
) -> str:
    """Returns the dtype in which an engine holds the weights of a copy that computes in ``dtype``.

    Half precision can't accumulate updates: a step is smaller than the spacing of its numbers. fsdp
    therefore trains float32 shards, and moving averages are float32 too; compute weights are cast from
    them. Megatron keeps float32 in its optimizer, and transfers the compute weights.

    Args:
        averaged: the copy is a moving average of another (``ParamReallocHook.eta`` below 1).
        adapters: only adapters, and a critic's head, are trained.
        weight: exchange name, with adapters.
    """
    if not dtype.endswith("float16"):
        return dtype
    if adapters:
        learns = ".lora_" in weight or weight.startswith(TRAINED_HEADS)
    else:
        learns = (trained and backend == "fsdp") or (averaged and backend in ("fsdp", "inference"))
    return "float32" if learns else dtype


def whole_layout(weights: Iterable[Weight], topo: ProcessTopology) -> Layout:
    """Layout of a copy with only a data axis, whose ranks all hold every weight whole.

    Raises:
        ConfigError: a tensor or pipeline axis.
    """
    if topo.tensor > 1 or topo.pipeline > 1:
        raise ConfigError(
            f"layout {topo} has tensor or pipeline axes, but its processes hold whole weights",
            where="parallel",
            fix=f"use d{topo.world_size}t1p1, or a backend that shards weights",
        )
    holding = {w.name: (Box.whole(w.shape),) for w in weights}
    return (holding,) * topo.data


def fsdp_layout(weights: Iterable[Weight], topo: ProcessTopology) -> Layout:
    """Layout with linear layers split over the tensor axis, then dim 0 of everything over the data axis.

    Both axes are split like ``torch.chunk``: parts of ⌈n / parts⌉, the last ones shorter or empty. Ranks
    with an empty part omit the weight. Embeddings, norms and the critic's ``score`` are whole on each
    tensor rank; so are weights of other names (adapters).

    Raises:
        ConfigError: a pipeline axis.
    """
    if topo.pipeline > 1:
        raise _no_pipeline(topo)
    holdings: list[dict[str, tuple[Box, ...]]] = [{} for _ in range(topo.world_size)]
    for weight in weights:
        dim = split_dim(weight.name, FSDP_VOCABULARY)
        for tensor, part in enumerate(_chunks(Box.whole(weight.shape), dim, topo.tensor)):
            for data, box in enumerate(_chunks(part, 0, topo.data) if part else ()):
                if box is not None:
                    rank = topo.rank(pipeline=0, data=data, tensor=tensor)
                    holdings[rank][weight.name] = (box,)
    return tuple(holdings)


def megatron_layout(shape: ModelShape, topo: ProcessTopology) -> Layout:
    """Layout with layers spread evenly over stages, each split over the tensor axis; data ranks are
    equal.

    The embedding is on the first stage, final norm and head on the last; a tied embedding on both.

    Raises:
        ConfigErrors: the model's sizes can't be split that way.
    """
    if problems := layout_problems(shape, topo, "megatron"):
        raise ConfigErrors(problems)
    stages: list[list[dict[str, tuple[Box, ...]]]] = [
        [{} for _ in range(topo.tensor)] for _ in range(topo.pipeline)
    ]
    for weight in shape.weights():
        dim = split_dim(weight.name, MEGATRON_VOCABULARY)
        parts = [
            (box,) for box in _chunks(Box.whole(weight.shape), dim, topo.tensor) if box is not None
        ]
        for stage in _stages_of(weight.name, shape, topo.pipeline):
            for holding, boxes in zip(stages[stage], parts, strict=True):
                holding[weight.name] = boxes
    coordinates = (topo.coordinate(rank) for rank in range(topo.world_size))
    ranks: list[Holding] = [stages[stage][tensor] for stage, _, tensor in coordinates]
    return tuple(ranks)


def split_dim(name: str, vocabulary: Sequence[str]) -> int | None:
    """Returns the dimension in which the tensor axis splits a weight; None if every tensor rank has
    all of it.

    Args:
        vocabulary: modules with one row per token that are split too.
    """
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    if kind in ("weight", "bias") and (module in ROW_SPLIT or module in vocabulary):
        return 0
    return 1 if kind == "weight" and module in COLUMN_SPLIT else None


def layout_problems(
    shape: ModelShape, topo: ProcessTopology, backend: str, *, where: str = "parallel"
) -> list[ConfigError]:
    """Lists why ``backend`` can't split a model of this shape over these axes; empty if it can.

    Only ``fsdp``, ``megatron`` and ``inference`` (which splits like megatron) are checked; other backends
    have no problems.
    """
    if backend not in ("fsdp", "megatron", "inference"):
        return []
    found = [_no_pipeline(topo, where)] if backend == "fsdp" and topo.pipeline > 1 else []
    cut_by_tensor = {
        "attention heads": shape.num_heads,
        "key/value heads": shape.num_kv_heads,
        "MLP columns (intermediate_size)": shape.intermediate_size,
    }
    head_is_cut = not shape.critic and not shape.tied_embeddings
    if backend != "fsdp" or head_is_cut:
        cut_by_tensor["vocabulary rows"] = shape.vocab_size
    found += [
        _uneven(what, size, "tensor", "t", topo.tensor, list(cut_by_tensor.values()), where)
        for what, size in cut_by_tensor.items()
        if size % topo.tensor
    ]
    if backend != "fsdp" and shape.num_layers % topo.pipeline:
        sizes = [shape.num_layers]
        found.append(_uneven("layers", sizes[0], "pipeline", "p", topo.pipeline, sizes, where))
    return found


def _stages_of(name: str, shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """Pipeline stages that hold a weight."""
    if name.startswith("model.layers."):
        layer = int(name.split(".")[2])
        return (layer // (shape.num_layers // num_stages),)
    last = num_stages - 1
    if name.startswith("model.embed_tokens."):
        return (0, last) if shape.tied_embeddings and last else (0,)
    return (last,)


def _chunks(box: Box, dim: int | None, parts: int) -> list[Box | None]:
    """Splits ``box`` along ``dim`` like torch.chunk; None for an empty part."""
    if dim is None or parts == 1 or not box.start:  # a scalar can't be split
        return [box] * parts
    first, last = box.start[dim], box.stop[dim]
    size = -(-(last - first) // parts)
    found: list[Box | None] = []
    for part in range(parts):
        start, stop = min(first + part * size, last), min(first + (part + 1) * size, last)
        found.append(box.with_range(dim, start, stop) if start < stop else None)
    return found


def _no_pipeline(topo: ProcessTopology, where: str = "parallel") -> ConfigError:
    return ConfigError(
        f"layout {topo} has {topo.pipeline} pipeline stages, backend fsdp has no pipeline",
        where=where,
        fix=f"use d{topo.data * topo.pipeline}t{topo.tensor}p1, or backend=megatron",
    )


def _uneven(
    what: str, size: int, axis: str, letter: str, degree: int, sizes: Sequence[int], where: str
) -> ConfigError:
    allowed = [n for n in range(1, min(sizes) + 1) if all(s % n == 0 for s in sizes)]
    near = [n for n in allowed if n <= degree][-3:] + [n for n in allowed if n > degree][:1]
    return ConfigError(
        f"{size} {what} can't be split evenly over {axis} degree {degree}",
        where=where,
        fix=f"use {letter} of " + " or ".join(map(str, near)),
    )
