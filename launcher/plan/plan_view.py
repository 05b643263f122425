"""Table rows of `plan` on placement: calls on workers, hooks around them, memory of workers (pure).

Also its lines on servers, rollout workers, staleness and the transmission graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from launcher.plan.memory_check import ServerGroup, WorkerGroup, usable_by_worker
from realsys.api.dataflow import hooks_text
from realsys.api.experiment import ChosenSetting, ExperimentConfig
from realsys.api.worker_configs import RolloutControl
from realsys.config.option_tree import value_text
from realsys.planner.allocation import workers_text
from realsys.planner.memory.copy_memory import Terms
from realsys.planner.memory.memory_messages import size
from realsys.planner.placed import allocation_of

ALLOCATION_HEAD = ("call", "copy", "backend", "dtype", "layout", "workers", "pool", "around it")
CHOSEN_HEAD = ("chosen", "value", "why")
MEMORY_HEAD = ("workers", "what", "bytes", "of which")


def allocation_rows(config: ExperimentConfig) -> list[tuple[str, ...]]:
    """One row per call: copy, backend, dtype, parallel layout, workers, smallest enclosing pool, hooks."""
    backends = {
        shard.id.model_name: (shard.backend.type_, str(shard.model.args.get("dtype", "")))
        for worker in config.model_worker
        for shard in worker.shards
    }
    places = allocation_of(config)
    rows: list[tuple[str, ...]] = []
    for call in config.model_rpcs:
        place = places[call.name]
        inside = [p for p, workers in config.pools.items() if {*place.workers} <= {*workers}]
        rows.append(
            (
                call.name,
                str(call.model_name),
                *backends[call.model_name],
                str(place.topology),
                workers_text(place.workers),
                min(inside, key=lambda pool: len(config.pools[pool]), default=""),
                hooks_text(call),
            )
        )
    return rows


def chosen_rows(chosen: Iterable[ChosenSetting]) -> list[tuple[str, ...]]:
    """One row per setting that was chosen for the model or names data on a hub."""
    return [(one.path, value_text(one.value), one.why) for one in chosen]


def chosen_lines(chosen: Iterable[ChosenSetting]) -> Iterator[str]:
    """Yields the same as words with reasons, for those who read a trial's settings."""
    for path, value, why in chosen_rows(chosen):
        yield f"chosen: {path}={value}  ({why})"


def memory_rows(groups: Sequence[WorkerGroup]) -> list[tuple[str, ...]]:
    """Rows per group of workers: its copies, the call that adds most, and the sum."""
    rows: list[tuple[str, ...]] = []
    for group in groups:
        memory, first = group.memory, workers_text(group.workers)
        parts = dict(memory.copies)
        if memory.peak_call:
            parts[f"while in {memory.peak_call}"] = memory.calls[memory.peak_call]
        for name, terms in parts.items():
            rows.append((first, name, size(sum(terms.values())), _largest_first(terms)))
            first = ""
        usable, of = usable_by_worker(group, groups), ""
        if usable is not None:
            of = f"of {size(usable)} usable of {size(group.limit or 0)}"
            of = of if memory.bytes <= usable else f"DOES NOT FIT: {of}"
        rows.append((first, "together", size(memory.bytes), of))
        if group.host:
            needs = f"of {size(group.host_limit)}: {_largest_first(group.host)}"
            rows.append(("", "host memory", size(sum(group.host.values())), needs))
    return rows


def server_rows(groups: Sequence[ServerGroup]) -> list[tuple[str, ...]]:
    """Rows per group of servers or evaluators: memory needed, and the cache that fits beside it."""
    rows: list[tuple[str, ...]] = []
    for group in groups:
        memory, usable = group.memory, group.usable
        who = f"{group.count} × {group.kind.value}"
        rows.append((who, memory.what, size(memory.bytes), _largest_first(memory.terms)))
        if usable is not None:
            of = f"of {size(usable)} usable of {size(group.limit or 0)}"
            if memory.bytes > usable:
                of = f"DOES NOT FIT: {of}"
            elif memory.cache_token:
                tokens = memory.tokens_beside(usable)
                of += f"; cache of {tokens:,} tokens, {tokens // memory.longest} of the longest answers"
            else:
                of += "; the engine allocates the rest itself"
            rows.append(("", "together", size(memory.bytes), of))
        needs = f"of {size(group.host_limit)}: {_largest_first(memory.host)}"
        rows.append(("", "host memory", size(sum(memory.host.values())), needs))
    return rows


def _largest_first(terms: Terms) -> str:
    parts = sorted(terms.items(), key=lambda part: -part[1])
    return ", ".join(f"{what} {size(n)}" for what, n in parts)


def rollout_lines(config: ExperimentConfig) -> Iterator[str]:
    """Yields the lines of a phase with rollout workers; none for other phases."""
    if config.replay is not None:
        yield f"  replay  {config.replay}"
    control = config.rollout
    if control is None:
        return
    engines = sorted({server.backend_type for server in config.generation_server})
    yield (
        f"  rollout {len(config.generation_server)} × {' and '.join(engines)} server, "
        f"{len(config.rollout_worker)} × rollout worker ({config.rollout_worker[0].agent}, "
        f"{config.rollout_worker[0].env})"
    )
    if not control.trains:
        yield "          nothing trains: the servers keep their initial weights"
        return
    yield (
        f"          max_staleness {control.max_staleness} ({control.policy}), weights by "
        f"{control.weights_through}"
        + (f" every {control.update_steps} steps" if control.update_steps > 1 else "")
        + (f", at most {control.buffer_limit} wait for a trainer" if control.buffer_limit else "")
    )
    yield from _graph_lines(control)


def _graph_lines(control: RolloutControl) -> Iterator[str]:
    """Yields the transmission graph: sources and destinations; trainer i is model_worker/i."""
    for maker in control.makers:
        servers = ", ".join(f"generation_server/{i}" for i in maker.servers)
        workers = ", ".join(f"rollout_worker/{i}" for i in maker.rollout_workers)
        to = ", ".join(f"model_worker/{i}" for i in maker.holders)
        by = ", ".join(f"model_worker/{i}" for i in maker.sources)
        yield f"  {maker.name:<9} {servers}, {workers} → {to}; weights from {by}"
