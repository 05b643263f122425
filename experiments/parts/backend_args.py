"""Maps a role's settings to its backend, and checks settings that the backend does not have (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from realsys.api import registry
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError
from realsys.api.model import ModelBackendAbstraction
from realsys.api.options import ModelOptions
from realsys.api.plain import to_plain

OPTIONAL = ("recompute", "cpu_offload", "lora")  # settings that not every backend has


def compute_dtype(*roles: ModelOptions, gpus: float) -> str:
    """Returns a role's compute dtype: the first one set among ``roles``, the role itself first.

    A GPU is ten times faster in bfloat16; CPUs are not, so there the default is float32.
    """
    given = [role.dtype for role in roles if role.dtype is not None]
    return given[0] if given else ("bfloat16" if gpus else "float32")


def mb_spec_of(options: ModelOptions) -> MicroBatchSpec:
    """Returns the micro-batch limits of a role's calls, and its token limit while generating."""
    return MicroBatchSpec(
        max_tokens_per_mb=options.max_tokens_per_mb, max_cache_tokens=options.max_cache_tokens
    )


def backend_of(options: ModelOptions, *, trained: bool) -> ModelBackendAbstraction:
    """Builds the backend of a role's copy 0. A frozen role has no optimizer."""
    args = {"optimizer": to_plain(options.optimizer)} if trained else {}
    return ModelBackendAbstraction(options.backend, {**args, **_optional(options)})


def replica_backend_of(options: ModelOptions) -> ModelBackendAbstraction:
    """Builds the backend of a copy filled from the trained one: no optimizer, the same adapters."""
    wanted = _optional(options)
    return ModelBackendAbstraction("inference", {k: wanted[k] for k in wanted if k == "lora"})


def _optional(options: ModelOptions) -> dict[str, Any]:
    """Returns settings that are on, as arguments; those that are off are left out, so a plain backend
    needs none.
    """
    found: dict[str, Any] = {}
    if options.recompute:
        found["recompute"] = True
    if options.cpu_offload:
        found["cpu_offload"] = True
    if options.lora.rank:
        found["lora"] = to_plain(options.lora)
    return found


def backend_problems(options: ModelOptions, where: str) -> Iterator[ConfigError]:
    """Yields settings that are on but that the backend, if there is such a one, does not have."""
    if registry.check("backend", options.backend, where=where):
        return
    for name in _optional(options):
        if not _takes(options.backend, name):
            setting = "lora.rank" if name == "lora" else name
            others = [backend for backend in registry.BUILTIN["backend"] if _takes(backend, name)]
            yield ConfigError(
                f"backend {options.backend!r} has no {name}",
                where=f"{where}.{setting} and {where}.backend",
                fix=f"leave it out, or use backend {' or '.join(others)}",
            )


def _takes(backend: str, name: str) -> bool:
    """True if a registered backend has the setting ``name``, or may have it, as only itself knows."""
    fields_of = registry.arguments_class("backend", backend)
    return fields_of is None or name in registry.argument_types(fields_of)
