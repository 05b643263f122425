"""Modules without weights, and weights put into them one by one, straight from the files.

For models of any size: a skeleton's weights have shapes and no memory (torch's ``meta`` device), so it can
be cut over processes first; then each process makes memory for its part and reads nothing else. Nothing is
drawn at random. What is no weight (rotary frequencies) is there, float32, as ``from_pretrained`` makes it.

Only for models whose files name the weights as the module does (``stored_names``): others are renamed or
put together while transformers loads them, and stay its business (hf.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_LATER_BUFFERS = r"rotary_emb\.inv_freq|(^|\.)position_ids$"  # stored once, no weights any more


def skeleton(make: Callable[[], Any]) -> Any:
    """The module that ``make`` gives, in evaluation mode, with all its weights on ``meta``.

    No random state is moved: there is nothing to draw.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        module = make()
    _make_buffers(module)
    return module.eval()


def _make_buffers(module: Any) -> None:
    """Gives what is no weight its memory and values, the way ``from_pretrained`` does it itself."""
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
    """Whether transformers renames weights of this module, or puts them together, to load or save it."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    found = getattr(module, "_weight_conversions", None)
    if found is None:  # made from a config: then a prefix that a file may lack is nobody's business
        found = get_model_conversion_mapping(module, add_legacy=False)
        found = [c for c in found if type(c).__name__ != "PrefixChange"]
    return bool(found)


def names_of(module: nn.Module) -> dict[str, list[str]]:
    """Name of each weight → all its names, of which tied weights have several; its first one first."""
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
    """Name of each weight of a skeleton → its name in the files; None: transformers has to load them.

    Args:
        stored: names and shapes in the files.
        made: weights that may be missing there (a critic's head, which then is 0): these are left out.
        dtype: in which it will compute.
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


def unused(module: Any, stored: Mapping[str, Any]) -> list[str]:
    """Names in the files that belong to nothing in the module, but for those that are known not to."""
    own = {name for names in names_of(module).values() for name in names}
    known = "|".join([_LATER_BUFFERS, *(module._keys_to_ignore_on_load_unexpected or ())])
    return sorted(name for name in stored if name not in own and not re.search(known, name))


def tied_again(module: nn.Module, stored: Mapping[str, Any]) -> Iterator[list[str]]:
    """Names of one weight of the module that the files hold several times: they ought to be equal."""
    for names in names_of(module).values():
        if len(there := [name for name in names if name in stored]) > 1:
            yield there


@torch.no_grad()
def make_memory(module: nn.Module, device: torch.device | str) -> None:
    """Gives all weights that are on ``meta`` memory on ``device``; it holds nothing yet.

    Cut weights get memory for this process's part. Tied ones stay one.
    """
    made: dict[int, tuple[Tensor, nn.Parameter]] = {}  # with the old one kept: ids are used again
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is None or isinstance(old, DTensor) or not old.is_meta:
                continue
            if id(old) not in made:
                empty = torch.empty_like(old, device=device)
                made[id(old)] = (old, nn.Parameter(empty, requires_grad=old.requires_grad))
            part._parameters[name] = made[id(old)][1]
    # Cut ones stay the objects they are; fully_shard takes notice here, pads and pins them.
    fill: Any = module._apply
    fill(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
