"""Packages outside the control plane, and the extra of realsys that installs each.

For messages: `pip install realsys` brings what plans, launches and looks after trials; what computes comes
with an extra (pyproject.toml). Standard library only; nothing is imported to look whether it is there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from realsys.api.errors import ConfigError

# Import name → extra. `train` brings `report`'s packages too.
EXTRA_OF = {
    **dict.fromkeys(
        (
            "torch",
            "transformers",
            "safetensors",
            "accelerate",
            "peft",
            "numpy",
            "aiohttp",
            "xxhash",
        ),
        "train",
    ),
    "math_verify": "train",
    "megatron": "megatron",
    "matplotlib": "report",
    "tensorboard": "report",
    "wandb": "wandb",
}


def missing_packages(
    packages: Iterable[str], *, where: str, instead: str = ""
) -> list[ConfigError]:
    """One error for each extra that would bring ``packages`` which are not installed here.

    Args:
        packages: import names, keys of EXTRA_OF.
        where: who needs them.
        instead: another way out, told after the installation.
    """
    missing: dict[str, list[str]] = {}
    for package in packages:
        if find_spec(package) is None:
            missing.setdefault(EXTRA_OF[package], []).append(package)
    return [_error(extra, names, where, instead) for extra, names in missing.items()]


def missing_module(name: str, where: str) -> ConfigError | None:
    """The error for a module that could not be imported; None if no extra brings it."""
    package = name.partition(".")[0]
    return _error(EXTRA_OF[package], [package], where, "") if package in EXTRA_OF else None


def _error(extra: str, packages: Sequence[str], where: str, instead: str) -> ConfigError:
    names = " and ".join(packages)
    return ConfigError(
        f"{names} {'is' if len(packages) == 1 else 'are'} not installed in {sys.prefix}",
        where=where,
        fix=f"pip install 'realsys[{extra}]'" + f"; {instead}" * bool(instead),
    )
