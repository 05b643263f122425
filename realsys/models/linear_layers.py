"""Which layers can have adapters, by the names and shapes of their weights (no torch)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from realsys.api.options import ALL_LINEAR
from realsys.models.shape import Weight

# Parts of names whose weights have two dimensions and belong to no linear layer of transformers.
_OTHERS = ("gate", "router", "experts", "wte", "wpe")
# transformers holds the experts of a mixture as one weight, and peft would take these names for them,
# those of shared experts too.
_OF_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def linear_names(weights: Iterable[Weight]) -> frozenset[str]:
    """Returns the last parts of the names of all linear layers that can have adapters; a head is none.

    Args:
        weights: all weights of a model, by their names in the module or in the files.
    """
    listed = tuple(weights)
    found = {weight.name.split(".")[-2] for weight in listed if _is_linear(weight)}
    return frozenset(found - (_OF_EXPERTS if has_experts(w.name for w in listed) else set()))


def adapted(weights: Iterable[Weight], targets: Collection[str]) -> tuple[Weight, ...]:
    """Returns the weights that get an adapter, as ``targets`` (``LoRAOptions.target_modules``) say."""
    listed = tuple(weights)
    names = linear_names(listed)
    chosen = names if ALL_LINEAR in targets else names.intersection(targets)
    return tuple(w for w in listed if _is_linear(w) and w.name.split(".")[-2] in chosen)


def has_experts(names: Iterable[str]) -> bool:
    """True if weights of these names are those of a mixture of experts."""
    return any(".experts." in name for name in names)


def _is_linear(weight: Weight) -> bool:
    *parts, kind = weight.name.split(".")
    return (
        kind == "weight"
        and len(weight.shape) == 2
        and len(parts) > 1  # a head's name has no dot
        and "embed" not in parts[-1]
        and not any(part in _OTHERS for part in parts)
    )
