"""Checks that models and batches can be divided as their parallel layouts require.

Sizes are read from ``config.json``; torch is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from realsys.api.dataflow import MFCDef
from realsys.api.errors import CheckpointError, ConfigError
from realsys.api.model import ModelName
from realsys.api.options import ModelOptions
from realsys.models.shape import ModelShape, read_shape
from realsys.planner.allocation import CallAllocation
from realsys.weights.layouts.holdings import layout_problems


def layout_problems_of(
    places: Mapping[ModelName, CallAllocation],
    models: Mapping[str, ModelOptions],
    *,
    default_path: str | None,
    built_in: ModelShape,
) -> Iterator[ConfigError]:
    """Yields copies whose parallel layout does not divide their model or is unsupported by their backend.

    Args:
        places: copy → its workers and topology.
        models: role → its settings; roles that are missing have no weights.
        default_path: directory of roles without a ``path``; None: they are ``built_in``.
    """
    for name, place in places.items():
        options, topo = models.get(name.role), place.topology
        replica = name.replica_id > 0
        backend = "inference" if replica or options is None else options.backend
        if topo.tensor * topo.pipeline == 1 and backend != "megatron":
            continue
        if options is None:
            yield ConfigError(
                f"role {name.role!r} has no weights to split, but its layout is {topo}",
                where=f"allocation of {name.role}",
                fix=f"use d{topo.world_size}t1p1, or fewer workers",
            )
            continue
        where = f"layout {topo} of {name}" + ("" if replica else f" ({name.role}.parallel)")
        if options.lora.rank and backend not in ("fsdp", "megatron"):  # that one has none at all
            yield ConfigError(
                f"backend {backend!r} can't split adapters (lora.rank={options.lora.rank}) over tensor and "
                "pipeline axes",
                where=where,
                fix=f"use d{topo.world_size}t1p1 there",
            )
        try:
            shape = shape_of_role(options, name.role, default_path, built_in)
        except CheckpointError:
            continue  # reported by the check of the directory
        except ConfigError as error:
            yield ConfigError(error.what, where=f"{where}, {error.where}", fix=error.fix)
            continue
        yield from layout_problems(shape, topo, backend, where=where)


def batch_problems(
    calls: Iterable[MFCDef],
    allocated: Mapping[str, CallAllocation],
    *,
    n_seqs: int,
    where: str,
) -> Iterator[ConfigError]:
    """Yields train steps whose ranks would get unequal minibatches, once per number of ranks."""
    reported = set()
    for call in calls:
        ranks, n_minibatches = allocated[call.name].topology.data, call.n_minibatches
        pieces = ranks * n_minibatches
        if call.is_train and ranks not in reported and n_seqs % pieces:
            reported.add(ranks)
            yield ConfigError(
                f"a batch of {n_seqs} questions does not divide into {n_minibatches} minibatches "
                f"on {ranks} data-parallel ranks",
                where=f"train_bs_n_seqs, algorithm.ppo_n_minibatches and {call.role}.{where}",
                fix=f"use a multiple of {pieces}",
            )


def held_out_problems(eval_size: int, ranks: int, *, where: str) -> Iterator[ConfigError]:
    """Yields an evaluation set with fewer records than data-parallel ranks: each rank answers a share."""
    if 0 < eval_size < ranks:
        yield ConfigError(
            f"{eval_size} held-out records do not give one to each of {ranks} data-parallel ranks",
            where=f"task.eval_size and {where}",
            fix=f"use {ranks} or more, or 0 for no evaluation",
        )


def reference_following_problems(
    actor: ModelOptions, ref: ModelOptions, default_path: str | None, built_in: ModelShape
) -> Iterator[ConfigError]:
    """Yields the reasons why a reference can't follow the actor's weights."""
    if actor.lora.rank != ref.lora.rank:
        yield ConfigError(
            f"the actor's adapters have rank {actor.lora.rank}, the reference's {ref.lora.rank}: "
            "it can't follow the actor",
            where="algorithm.ref_ema_eta, actor.lora.rank and ref.lora.rank",
            fix="make the ranks equal, or algorithm.ref_ema_eta=none",
        )
    try:
        shapes = [
            shape_of_role(o, r, default_path, built_in) for o, r in ((actor, "actor"), (ref, "ref"))
        ]
    except (CheckpointError, ConfigError):
        return
    if shapes[0].weights() != shapes[1].weights():
        yield ConfigError(
            f"the reference's weights ({shapes[1].num_params:,} parameters) differ in shape from the "
            f"actor's ({shapes[0].num_params:,})",
            where="algorithm.ref_ema_eta, ref.path and actor.path",
            fix="start both from one model, or algorithm.ref_ema_eta=none",
        )


def shape_of_role(
    options: ModelOptions, role: str, default_path: str | None, built_in: ModelShape
) -> ModelShape:
    """Returns the sizes of a role's model.

    Raises:
        CheckpointError: they can't be read. ConfigError: unsupported model family.
    """
    path, critic = options.path or default_path, role == "critic"
    if path is None:
        return built_in.as_critic() if critic else built_in
    return read_shape(Path(path).expanduser(), critic=critic)
