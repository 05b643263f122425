"""Low-rank adapters (arXiv:2106.09685) by peft, inside the Hugging Face module.

A linear layer gets two small matrices: it computes ``W x + scale · B (A x)``, and only A and B train
(and a critic's head, which starts from nothing). W is never written to: what generation and export
need, ``W + scale · B · A``, is made anew from it each time, so nothing adds up.

Names: in the module, peft's (``….q_proj.base_layer.weight``, ``….q_proj.lora_A.default.weight``);
outside, the plain Hugging Face name of the base weight and, of an adapter, the one in peft's files.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from realsys.api.errors import ConfigError, did_you_mean
from realsys.api.model import ProcessTopology
from realsys.api.options import LoRAOptions
from realsys.api.plain import from_plain
from realsys.backends.hf.sharding import full_weights
from realsys.models.shape import Weight
from realsys.models.weight_writer import WeightSpec
from realsys.weights.layouts.boxes import Layout
from realsys.weights.layouts.holdings import COLUMN_SPLIT, ROW_SPLIT, TRAINED_HEADS

FOLDER = "adapter"
_PREFIX = "base_model.model."
_SIDES = ("lora_A", "lora_B")


def lora_options(settings: Mapping[str, Any], *, where: str = "lora") -> LoRAOptions | None:
    """The options in a backend's argument; None where the whole model trains (rank 0)."""
    options = from_plain(LoRAOptions, dict(settings), where=where)
    return options if options.rank else None


def add_adapters(
    module: nn.Module, options: LoRAOptions, *, seed: int, where: str = "lora"
) -> None:
    """Puts adapters into ``module``, in place, and freezes all that isn't trained.

    They start equal on all ranks (B at 0, so the model computes what it did). Where the weights are of
    half precision they and a critic's head are float32, as the steps of training are too small for that.

    Raises:
        ConfigError: a target is no linear layer of the module.
    """
    layers = {n for n, m in module.named_modules() if isinstance(m, nn.Linear) and "." in n}
    linear = {n.split(".")[-1] for n in layers}  # heads stand alone, without a dot
    for target in options.target_modules:
        if target not in linear:
            raise ConfigError(
                f"the model has no linear layer {target!r}",
                where=f"{where}.target_modules",
                fix=did_you_mean(target, linear),
            )
    import peft  # takes seconds, and only these runs need it

    devices = {p.get_device() for p in module.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings(), _on_cpu(module):
        warnings.simplefilter("ignore")  # it warns of tied weights that we don't touch
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(_config(peft, options), module)
    for name, parameter in module.named_parameters():
        trains = is_adapter(name) or name.startswith(TRAINED_HEADS)
        parameter.requires_grad_(trains)
        if trains and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    for name, part in module.named_children():
        if f"{name}.".startswith(TRAINED_HEADS):
            part.register_forward_pre_hook(_in_the_weights_type)


def _in_the_weights_type(head: Any, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0].to(head.weight.dtype),)


@contextmanager
def _on_cpu(module: nn.Module) -> Iterator[None]:
    """Lets weights of a skeleton look as if they were on the CPU, without memory.

    peft puts an adapter where its layer's weight is; what it drew would be lost on ``meta``.
    """
    found = [
        (part, part.weight)
        for part in module.modules()
        if isinstance(part, nn.Linear) and part.weight.is_meta
    ]
    for part, weight in found:
        seen = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        part.weight = nn.Parameter(seen, requires_grad=weight.requires_grad)
    try:
        yield
    finally:
        for part, weight in found:
            part.weight = weight


def _config(peft: Any, options: LoRAOptions) -> Any:
    return peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=list(options.target_modules),
        lora_dropout=0.0,
        bias="none",
    )


def scale_of(options: LoRAOptions) -> float:
    """What B · A is multiplied by."""
    return options.alpha / options.rank


# ---- names -----------------------------------------------------------------------------------


def is_adapter(name: str) -> bool:
    """Whether a module's weight of this name is an adapter's."""
    return any(f".{side}.default." in name for side in _SIDES)


def exchange_name(name: str) -> str:
    """What a module's weight is called outside of the module."""
    if is_adapter(name):
        return _PREFIX + name.replace(".default.", ".")
    return name.replace(".base_layer.", ".")


def trained_names(names: Iterable[str]) -> frozenset[str]:
    """Of a module with adapters: exchange names of all that training changes."""
    return frozenset(
        exchange_name(n) for n in names if is_adapter(n) or n.startswith(TRAINED_HEADS)
    )


# ---- whole weights ---------------------------------------------------------------------------


def merged_weights(
    weights: Mapping[str, Tensor],
    options: LoRAOptions | None,
    *,
    changed_only: bool = False,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Plain name and whole weight, adapters added, one at a time. Collective where they are sharded.

    Args:
        weights: of a module, by its own names. Without adapters (``options`` None) they come as they
            are, and without shards in their own memory.
        changed_only: only those that training the adapters changes.
        dtype: without adapters, what to give them in; cast before they are gathered.
    """
    adapted = _adapted(weights) if options is not None else {}
    wanted: list[str] = []
    for name in weights:
        if name in adapted:
            wanted += [*adapted[name], name]
        elif not is_adapter(name) and (not changed_only or name.startswith(TRAINED_HEADS)):
            wanted.append(name)
    sides: list[Tensor] = []
    for name, whole in full_weights(((name, weights[name]) for name in wanted), dtype):
        if is_adapter(name):
            sides.append(whole.float())
            continue
        if name in adapted:
            a, b = sides
            delta = (b @ a).to(whole.device) * scale_of(options)  # type: ignore[arg-type]
            whole, sides = (whole.float() + delta).to(whole.dtype), []
        yield exchange_name(name), whole


def kinds(weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, WeightSpec]:
    """What ``merged_weights`` will give, in its order."""
    plain = {exchange_name(n): WeightSpec.of(x) for n, x in weights.items() if not is_adapter(n)}
    if dtype is None:
        return plain
    return {
        n: replace(k, dtype=dtype) if k.dtype.is_floating_point else k for n, k in plain.items()
    }


def _adapted(weights: Iterable[str]) -> dict[str, list[str]]:
    """Weights that have adapters, and the names of these: A, B."""
    ending = ".base_layer.weight"
    return {
        name: [name.replace("base_layer", f"{side}.default") for side in _SIDES]
        for name in weights
        if name.endswith(ending)
    }


def adapter_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What peft's file holds, on the CPU: adapters and a critic's head. Collective where sharded."""
    own = [(n, x) for n, x in weights.items() if is_adapter(n) or n.startswith(TRAINED_HEADS)]
    return {
        exchange_name(n) if is_adapter(n) else _PREFIX + n: x.cpu().contiguous()
        for n, x in full_weights(own)
    }


def save_adapter(folder: Path, tensors: Mapping[str, Tensor], options: LoRAOptions) -> None:
    """Writes ``folder`` as peft reads it; the base model is the one that the reader loads."""
    import peft

    config = _config(peft, options)
    critic = any(name.startswith(tuple(_PREFIX + h for h in TRAINED_HEADS)) for name in tensors)
    config.task_type = "TOKEN_CLS" if critic else "CAUSAL_LM"
    if critic:
        config.modules_to_save = sorted({n.split(".")[-2] for n in tensors if "lora_" not in n})
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_file(dict(tensors), str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})


# ---- layouts (pure) --------------------------------------------------------------------------


def adapter_weights(
    weights: Sequence[Weight], options: LoRAOptions | None
) -> dict[str, tuple[Weight, Weight]]:
    """Name of a base weight → its A ``[rank, in]`` and B ``[out, rank]``, by exchange names."""
    found = {}
    for weight in weights if options else ():
        layer = weight.name.removesuffix(".weight")
        if layer != weight.name and layer.split(".")[-1] in options.target_modules:  # type: ignore[union-attr]
            (rows, columns), rank = weight.shape, options.rank  # type: ignore[union-attr]
            found[weight.name] = (
                Weight(f"{_PREFIX}{layer}.lora_A.weight", (rank, columns)),
                Weight(f"{_PREFIX}{layer}.lora_B.weight", (rows, rank)),
            )
    return found


def with_adapters(
    weights: Sequence[Weight], options: LoRAOptions | None, topo: ProcessTopology, layout: Any
) -> Layout:
    """``layout(weights, topo)``, and the same of the adapters.

    An adapter is cut like the weight beside it on the side where that one is cut, else it is whole;
    so it is laid out under that weight's name, and then gets its own.
    """
    weights = tuple(  # a module in memory may have its adapters already
        Weight(exchange_name(w.name), w.shape) for w in weights if not is_adapter(w.name)
    )
    by_base = adapter_weights(weights, options)
    renamed: dict[str, Weight] = {}  # name to lay it out under → the adapter
    for base, (a, b) in by_base.items():
        layer = base.split(".")[-2]
        renamed[base if layer in COLUMN_SPLIT else a.name] = a
        renamed[base if layer in ROW_SPLIT else b.name] = b
    base_layout = layout(weights, topo)
    stand_ins = tuple(Weight(name, adapter.shape) for name, adapter in renamed.items())
    extra = layout(stand_ins, topo) if stand_ins else tuple({} for _ in base_layout)
    return tuple(
        {**of_base, **{renamed[name].name: boxes for name, boxes in of_adapters.items()}}
        for of_base, of_adapters in zip(base_layout, extra, strict=True)
    )
