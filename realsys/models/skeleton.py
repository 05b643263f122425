"""Modules without weights, filled one weight at a time directly from the files.

For models of any size: a skeleton's weights have shapes and no memory (torch's ``meta`` device), so it can
be sharded over processes first; then each process allocates its part and reads nothing else. Nothing is
initialised at random. Buffers (rotary frequencies) exist, in float32, as ``from_pretrained`` makes them.

Only for models whose files name the weights as the module does (``stored_names``); if weights are renamed
or merged on loading, transformers loads the model (hf.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_LATER_BUFFERS = (
    r"rotary_emb\.inv_freq|(^|\.)position_ids$"  # stored in older files, no longer weights
)


def skeleton(make: Callable[[], Any]) -> Any:
    """Makes the module that ``make`` returns, in evaluation mode, with all weights on ``meta``.

    Random states are not advanced.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        module = make()
    _make_buffers(module)
    return module.eval()


def _make_buffers(module: Any) -> None:
    """Allocates and initialises non-persistent buffers the way ``from_pretrained`` does."""
    for name, buffer in list(module.named_non_persistent_buffers()):
        parent, _, last = name.rpartition(".")
        module.get_submodule(parent)._buffers[last] = torch.empty_like(buffer, device="cpu")
    for parameter in module.parameters():
        parameter._is_hf_initialized = True
    for part in module.modules():
        part._is_hf_initialized = False
    module.initialize_weights()
    for parameter in module.parameters():
        del parameter._is_hf_initialized


def converts(module: Any) -> bool:
    """True if transformers renames or merges weights of this module when loading or saving it."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    found = getattr(module, "_weight_conversions", None)
    if found is None:  # made from a config: an optional name prefix of files does not matter
        found = get_model_conversion_mapping(module, add_legacy=False)
        found = [c for c in found if type(c).__name__ != "PrefixChange"]
    return bool(found)


def names_of(module: nn.Module) -> dict[str, list[str]]:
    """Maps each weight's first name to all its names; tied weights have several."""
    found: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in found.values()}


def stored_names(
    module: Any,
    stored: Mapping[str, Sequence[int]],
    *,
    made: Sequence[str] = (),
    dtype: torch.dtype,
) -> dict[str, str] | None:
    """Maps each weight of a skeleton to its name in the files; None if transformers must load them.

    Args:
        stored: names and shapes in the files.
        made: weights that may be missing in the files (a critic's head, then 0) and are left out.
        dtype: compute dtype.
    """
    buffers = {name for name, _ in module.named_buffers()}
    if converts(module) or buffers & module.state_dict().keys() or module._get_dtype_plan(dtype):
        return None
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    found = {}
    for name, names in names_of(module).items():
        there = [n for n in names if n in stored]
        if not there and name in made:
            continue
        if not there or any(tuple(stored[n]) != shapes[name] for n in there):
            return None
        found[name] = there[0]
    return found


def unused_names(module: Any, stored: Mapping[str, Any]) -> list[str]:
    """Lists names in the files that match no weight of the module, except those known to be ignored."""
    own = {name for names in names_of(module).values() for name in names}
    known = "|".join([_LATER_BUFFERS, *(module._keys_to_ignore_on_load_unexpected or ())])
    return sorted(name for name in stored if name not in own and not re.search(known, name))


def duplicated_ties(module: nn.Module, stored: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields the names of each weight that the files hold several times; the copies should be equal."""
    for names in names_of(module).values():
        if len(there := [name for name in names if name in stored]) > 1:
            yield there


@torch.no_grad()
def make_memory(module: nn.Module, device: torch.device | str) -> None:
    """Allocates uninitialised memory on ``device`` for all weights that are on ``meta``.

    Sharded weights get memory for this process's part. Tied weights stay tied.
    """
    made: dict[int, tuple[Tensor, nn.Parameter]] = {}  # keeps the old one alive: ids are reused
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is None or isinstance(old, DTensor) or not old.is_meta:
                continue
            if id(old) not in made:
                empty = torch.empty_like(old, device=device)
                made[id(old)] = (old, nn.Parameter(empty, requires_grad=old.requires_grad))
            part._parameters[name] = made[id(old)][1]
    # Sharded parameters stay the same objects; fully_shard intercepts this, pads and pins them.
    fill: Any = module._apply
    fill(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
