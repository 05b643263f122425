"""Splits linear layers of Hugging Face modules over the tensor axis.

Megatron's scheme (arXiv:1909.08053) with torch's ``parallelize_module``: the projections into heads and
MLP units are split by rows, those out of them by columns, so that a layer needs two sums over the ranks
forward and two backward. Embeddings and norms are whole on every rank. The attention of
transformers derives the number of heads from its input sizes, so it computes the local heads unchanged.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from realsys.weights.layouts.holdings import COLUMN_SPLIT, ROW_SPLIT

_PER_HEAD = ("q_norm.weight", "k_norm.weight")


def parallelize(module: nn.Module, mesh: DeviceMesh) -> None:
    """Splits the linear layers of ``module`` over the ranks of ``mesh``, in place.

    The weights must be equal on all ranks beforehand: each keeps its part, nothing is sent. Which of
    them are trained does not change. A head tied to the embedding stays whole.
    """
    head, tied = getattr(module, "lm_head", None), module.get_input_embeddings().weight  # type: ignore[operator]
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    plan = {name: style for name in linear if (style := _style(name))}
    if head is not None and head.weight is not tied:
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    parallelize_module(module, mesh, plan, src_data_rank=None)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)  # a split parameter is a new object


def _style(name: str) -> ParallelStyle | None:
    """Returns how the linear layer ``name`` is split; for an adapter, only the side of the layer's
    split.
    """
    parts = name.split(".")
    if parts[-2:-1] in (["lora_A"], ["lora_B"]):
        layer, side = parts[-3], parts[-2]
        if layer in ROW_SPLIT and side == "lora_B":
            return ColwiseParallel()
        return RowwiseParallel() if layer in COLUMN_SPLIT and side == "lora_A" else None
    layer = parts[-2] if parts[-1] == "base_layer" else parts[-1]
    if layer in ROW_SPLIT:
        return ColwiseParallel()
    return RowwiseParallel() if layer in COLUMN_SPLIT else None


def has_local_gradient(name: str) -> bool:
    """True if a rank's gradient of this whole weight covers only its own heads and must be summed."""
    return name.endswith(_PER_HEAD)
