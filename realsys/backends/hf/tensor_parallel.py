"""The tensor axis over Hugging Face modules: which linear layers are cut, and how.

Megatron's scheme (arXiv:1909.08053) with torch's ``parallelize_module``: what feeds the heads and the
MLP's inner units is cut by rows, what comes out of them by columns, so that a layer needs two sums
over the ranks forward and two backward. Embeddings and norms are whole on every rank. Attention of
transformers counts its heads from the sizes it gets, so it computes the local heads as it stands.
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
    """Cuts the linear layers of ``module`` over the ranks of ``mesh``, in place.

    The weights must be equal on all ranks beforehand: each takes its part, nothing is sent. Which of
    them train stays as it is. A head tied to the embedding stays whole with it.
    """
    head, tied = getattr(module, "lm_head", None), module.get_input_embeddings().weight  # type: ignore[operator]
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    plan = {name: style for name in linear if (style := _style(name))}
    if head is not None and head.weight is not tied:
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    parallelize_module(module, mesh, plan, src_data_rank=None)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)  # a cut parameter is a new one


def _style(name: str) -> ParallelStyle | None:
    """How the linear layer called ``name`` is cut; of an adapter, the side that the layer's cut is on."""
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
    """Whether a rank's gradient of this whole weight comes from its own heads only: to be summed."""
    return name.endswith(_PER_HEAD)
