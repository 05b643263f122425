"""Low-rank adapters (arXiv:2106.09685) inside the Hugging Face module, by peft.

A linear layer gets two small matrices: it computes ``W x + scale · B (A x)``, and only A and B train
(and a critic's head, which starts untrained). W is never written to: ``W + scale · B · A``, needed for
generation and export, is computed from it each time, so rounding errors don't accumulate.

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
from realsys.api.options import ALL_LINEAR, LoRAOptions
from realsys.backends.hf.sharding import full_weights
from realsys.models.shape import Weight, adapted, linear_names
from realsys.models.weight_writer import WeightSpec
from realsys.weights.layouts.boxes import Layout
from realsys.weights.layouts.holdings import COLUMN_SPLIT, ROW_SPLIT, TRAINED_HEADS

FOLDER = "adapter"
_PREFIX = "base_model.model."
_SIDES = ("lora_A", "lora_B")


def add_adapters(
    module: nn.Module, options: LoRAOptions, *, seed: int, where: str = "lora"
) -> None:
    """Adds adapters to ``module`` in place and freezes all weights that aren't trained.

    They start equal on all ranks (B at 0, so the model's output is unchanged). With half-precision
    weights, adapters and a critic's head are float32, because updates are too small for half precision.

    Raises:
        ConfigError: a target is not a linear layer of the module.
    """
    linear = {n.split(".")[-1] for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    linear &= linear_names(Weight(n, tuple(p.shape)) for n, p in module.named_parameters())
    every = ALL_LINEAR in options.target_modules
    if every and not linear:
        raise ConfigError(
            f"{type(module).__name__} has no linear layers besides its head",
            where=f"{where}.target_modules",
            fix="leave lora.rank out for this model",
        )
    targets = sorted(linear) if every else options.target_modules
    for target in targets:
        if target not in linear:
            raise ConfigError(
                f"the model has no linear layer {target!r}",
                where=f"{where}.target_modules",
                fix=did_you_mean(target, linear),
            )
    import peft  # slow import, needed only by these runs

    devices = {p.get_device() for p in module.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings(), _on_cpu(module):
        warnings.simplefilter("ignore")  # it warns of tied weights, which stay unchanged
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(_config(peft, options, targets), module)
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
    """Makes a skeleton's weights appear to be on the CPU, without memory.

    peft creates an adapter on its layer's device; its random values would be lost on ``meta``.
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


def _config(peft: Any, options: LoRAOptions, targets: Iterable[str]) -> Any:
    return peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=list(targets),
        lora_dropout=0.0,
        bias="none",
    )


def scale_of(options: LoRAOptions) -> float:
    """Factor of B · A."""
    return options.alpha / options.rank


# ---- names -----------------------------------------------------------------------------------


def is_adapter(name: str) -> bool:
    """True if a module's weight of this name belongs to an adapter."""
    return any(f".{side}.default." in name for side in _SIDES)


def exchange_name(name: str) -> str:
    """Returns the name of a module's weight outside the module."""
    if is_adapter(name):
        return _PREFIX + name.replace(".default.", ".")
    return name.replace(".base_layer.", ".")


def trained_names(names: Iterable[str]) -> frozenset[str]:
    """Returns the exchange names of all weights that training a module with adapters changes."""
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
    """Yields plain names and whole weights with adapters merged, one at a time. Collective if sharded.

    Args:
        weights: of a module, by its own names. Without adapters (``options`` None) they are yielded as
            they are; unsharded ones in their own memory.
        changed_only: only weights that training the adapters changes.
        dtype: without adapters, the dtype of the result; cast before gathering.
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
    """Specs of the weights that ``merged_weights`` yields, in its order."""
    plain = {exchange_name(n): WeightSpec.of(x) for n, x in weights.items() if not is_adapter(n)}
    if dtype is None:
        return plain
    return {
        n: replace(k, dtype=dtype) if k.dtype.is_floating_point else k for n, k in plain.items()
    }


def _adapted(weights: Iterable[str]) -> dict[str, list[str]]:
    """Maps weights that have adapters to the names of these: A, B."""
    ending = ".base_layer.weight"
    return {
        name: [name.replace("base_layer", f"{side}.default") for side in _SIDES]
        for name in weights
        if name.endswith(ending)
    }


def adapter_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of peft's file, on the CPU: adapters and a critic's head. Collective if sharded."""
    own = [(n, x) for n, x in weights.items() if is_adapter(n) or n.startswith(TRAINED_HEADS)]
    return {
        exchange_name(n) if is_adapter(n) else _PREFIX + n: x.cpu().contiguous()
        for n, x in full_weights(own)
    }


def save_adapter(folder: Path, tensors: Mapping[str, Tensor], options: LoRAOptions) -> None:
    """Writes ``folder`` in peft's format; the reader loads the base model itself."""
    import peft

    adapted = {n.split(".")[-3] for n in tensors if ".lora_A." in n}
    every = ALL_LINEAR in options.target_modules
    config = _config(peft, options, sorted(adapted) if every else options.target_modules)
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
    """Maps each adapted base weight to its A ``[rank, in]`` and B ``[out, rank]``, by exchange names."""
    if options is None:
        return {}
    found = {}
    for weight in adapted(weights, options.target_modules):
        layer, (rows, columns), rank = weight.name[: -len(".weight")], weight.shape, options.rank
        found[weight.name] = (
            Weight(f"{_PREFIX}{layer}.lora_A.weight", (rank, columns)),
            Weight(f"{_PREFIX}{layer}.lora_B.weight", (rows, rank)),
        )
    return found


def with_adapters(
    weights: Sequence[Weight], options: LoRAOptions | None, topo: ProcessTopology, layout: Any
) -> Layout:
    """Returns ``layout(weights, topo)`` extended by the adapters' layout.

    An adapter is split on the side on which its base weight is split and is otherwise whole, so it is laid
    out under that weight's name and then renamed.
    """
    weights = tuple(  # a module in memory may have its adapters already
        Weight(exchange_name(w.name), w.shape) for w in weights if not is_adapter(w.name)
    )
    by_base = adapter_weights(weights, options)
    renamed: dict[str, Weight] = {}  # name under which it is laid out → the adapter
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
