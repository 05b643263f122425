"""Packages outside the control plane, and the extra of realsys that installs each.

For messages: `pip install realsys` brings what plans, launches and looks after trials; what computes comes
with an extra (pyproject.toml). Standard library only; nothing is imported to look whether it is there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from realsys.api.errors import ConfigError

# Extra → import names. `train` brings `report`'s packages too.
_PACKAGES = {
    "train": "torch transformers safetensors peft numpy xxhash aiohttp math_verify mpmath",
    "megatron": "megatron",
    "report": "matplotlib tensorboard",
    "wandb": "wandb",
    "gym": "reasoning_gym",
    "data": "pyarrow huggingface_hub",
    "renderers": "renderers httpx",
    "schemas": "llguidance",
    "mcp": "mcp httpx2 anyio",
}
EXTRA_OF = {name: extra for extra, names in _PACKAGES.items() for name in names.split()}


def missing_packages(
    packages: Iterable[str], *, where: str, instead: str = ""
) -> list[ConfigError]:
    """Returns one error for each extra that would bring ``packages`` which are not installed here.

    Args:
        packages: import names, keys of EXTRA_OF.
        where: who needs them.
        instead: another way out, appended to the fix.
    """
    missing: dict[str, list[str]] = {}
    for package in packages:
        if find_spec(package) is None:
            missing.setdefault(EXTRA_OF[package], []).append(package)
    return [_error(extra, names, where, instead) for extra, names in missing.items()]


def missing_module(name: str, where: str) -> ConfigError | None:
    """Returns the error for a module that could not be imported, None if no extra brings it."""
    package = name.partition(".")[0]
    return _error(EXTRA_OF[package], [package], where, "") if package in EXTRA_OF else None


def _error(extra: str, packages: Sequence[str], where: str, instead: str) -> ConfigError:
    names = " and ".join(packages)
    return ConfigError(
        f"{names} {'is' if len(packages) == 1 else 'are'} not installed in {sys.prefix}",
        where=where,
        fix=f"pip install 'realsys[{extra}]'" + f"; {instead}" * bool(instead),
    )
