"""Activations that are computed again in the backward pass, layer by layer (arXiv:1604.06174).

Kept is the input of each layer; all else of a layer is there only while its own backward pass runs. The
layers stay the modules that they are: names of weights, and what FSDP makes of a layer, do not change.
transformers' own checkpointing asks for training mode, in which our modules never are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from realsys.api.errors import ConfigError
from realsys.backends.kernels.packed_attention import attending


def layer_kinds(module: nn.Module) -> frozenset[str]:
    """Names of the classes of a model's layers; none where transformers does not say."""
    return frozenset(getattr(module, "_no_split_modules", None) or ())


def recompute_layers(module: Any, *, where: str) -> None:
    """Has the layers of ``module`` keep nothing but their inputs; before they are sharded.

    Raises:
        ConfigError: the module does not say which of its parts are its layers.
    """
    kinds = layer_kinds(module)
    layers = [part for part in module.modules() if type(part).__name__ in kinds]
    if not layers:
        raise ConfigError(
            f"{type(module).__name__} does not say which of its parts are its layers",
            where=where,
            fix="leave recompute out for this model",
        )
    for layer in layers:
        layer.forward = _again(layer.forward, module.config)


def _again(forward: Callable[..., Any], config: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        how = config._attn_implementation  # another one again by the time of the backward pass

        def as_now(*args: Any, **kwargs: Any) -> Any:
            with attending(config, how):
                return forward(*args, **kwargs)

        # There is no dropout: nothing is drawn, so no state of a generator has to come back.
        return checkpoint(as_now, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
