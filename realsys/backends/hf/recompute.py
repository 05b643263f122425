"""Recomputes activations in the backward pass, layer by layer (arXiv:1604.06174).

Only the input of each layer is kept; other activations exist only during the layer's own backward pass.
The layers stay the same modules, so weight names and FSDP's wrapping do not change. The checkpointing of
transformers requires training mode, which modules are never in here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from realsys.api.errors import ConfigError
from realsys.backends.kernels.packed_attention import packed_attention


def layer_kinds(module: nn.Module) -> frozenset[str]:
    """Returns the class names of a model's layers; empty if transformers does not declare them."""
    return frozenset(getattr(module, "_no_split_modules", None) or ())


def recompute_layers(module: Any, *, where: str) -> None:
    """Makes the layers of ``module`` keep only their inputs; call before sharding.

    Raises:
        ConfigError: the module does not declare which of its submodules are its layers.
    """
    kinds = layer_kinds(module)
    layers = [part for part in module.modules() if type(part).__name__ in kinds]
    if not layers:
        raise ConfigError(
            f"{type(module).__name__} does not declare which of its submodules are its layers",
            where=where,
            fix="leave recompute out for this model",
        )
    for layer in layers:
        layer.forward = _recomputed(layer.forward, module.config)


def _recomputed(forward: Callable[..., Any], config: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        how = config._attn_implementation  # may have changed by the time of the backward pass

        def as_now(*args: Any, **kwargs: Any) -> Any:
            with packed_attention(config, how):
                return forward(*args, **kwargs)

        # Without dropout no random state has to be restored.
        return checkpoint(as_now, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
