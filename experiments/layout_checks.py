"""Whether every copy's model can be cut as its layout says, from the sizes in ``config.json``. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from realsys.api.allocation import CallAllocation
from realsys.api.errors import CheckpointError, ConfigError
from realsys.api.model import ModelName
from realsys.api.options import ModelOptions
from realsys.models.shape import ModelShape, read_shape
from realsys.param_realloc.layouts import layout_problems


def layout_problems_of(
    places: Mapping[ModelName, CallAllocation],
    models: Mapping[str, ModelOptions],
    *,
    default_path: str | None,
    built_in: ModelShape,
) -> Iterator[ConfigError]:
    """Copies whose layout does not divide their model, or that their backend can't have.

    Args:
        places: copy → where it sits.
        models: role → its settings; roles that are missing have no weights.
        default_path: directory of roles without a ``path``; None: they are ``built_in``.
    """
    for name, place in places.items():
        options, topo = models.get(name.role), place.topology
        if options is None or topo.tensor * topo.pipeline == 1:
            continue
        replica = name.replica_id > 0
        where = f"layout {topo} of {name}" + ("" if replica else f" ({name.role}.parallel)")
        backend = "inference" if replica else options.backend
        if options.lora.rank and backend != "fsdp":
            yield ConfigError(
                f"adapters (lora.rank={options.lora.rank}) can't be cut over tensor and pipeline axes "
                f"by backend {backend!r}",
                where=where,
                fix=f"use d{topo.world_size}t1p1 there",
            )
        try:
            shape = shape_of_role(options, name.role, default_path, built_in)
        except CheckpointError:
            continue  # told by the check of the directory
        except ConfigError as error:
            yield ConfigError(error.what, where=f"{where}, {error.where}", fix=error.fix)
            continue
        yield from layout_problems(shape, topo, backend, where=where)


def shape_of_role(
    options: ModelOptions, role: str, default_path: str | None, built_in: ModelShape
) -> ModelShape:
    """The sizes of a role's model.

    Raises:
        CheckpointError: they can't be read. ConfigError: of another family.
    """
    path, critic = options.path or default_path, role == "critic"
    if path is None:
        return built_in.as_critic() if critic else built_in
    return read_shape(Path(path).expanduser(), critic=critic)
