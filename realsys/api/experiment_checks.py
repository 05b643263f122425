"""Checks that the parts of an experiment are consistent, and derives what follows from them (pure).

For ``ExperimentConfig.lazy_init``: each check adds its findings to ``problems``, with the worker,
model or call at fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from realsys.api.dataflow import DataflowGraph, MFCDef, ParamReallocHook
from realsys.api.errors import ConfigError, Problems, did_you_mean
from realsys.api.model import ModelName, ProcessTopology
from realsys.api.worker_configs import ModelWorker

if TYPE_CHECKING:
    from realsys.api.experiment import ExperimentConfig


def collect_topologies(
    workers: Iterable[ModelWorker], problems: Problems
) -> dict[ModelName, ProcessTopology]:
    """Returns the topology of each model. The ranks of its shards must be exactly 0 … world size − 1."""
    topos: dict[ModelName, ProcessTopology] = {}
    ranks: dict[ModelName, list[int]] = {}
    for i, worker in enumerate(workers):
        here = [s.id.model_name for s in worker.shards]
        for name in sorted({n for n in here if here.count(n) > 1}):
            problems.add(
                f"two shards of {name} on one worker",
                where=f"model_worker/{i}",
                fix="place each shard of a model on a worker of its own",
            )
        for shard in worker.shards:
            name = shard.id.model_name
            known = topos.setdefault(name, shard.id.topo)
            if known != shard.id.topo:
                problems.add(
                    f"shards of {name} disagree on the topology: {known} and {shard.id.topo}",
                    where=f"model_worker/{i}",
                    fix="use one topology for a model name, or another replica id",
                )
            ranks.setdefault(name, []).append(shard.id.parallelism_rank)
    for name, found in ranks.items():
        expected = list(range(topos[name].world_size))
        if sorted(found) != expected:
            problems.add(
                f"parallelism ranks of {name} are {sorted(found)}, "
                f"its topology {topos[name]} needs exactly {expected}",
                where=f"shards of {name}",
                fix="give each rank to one worker",
            )
    return topos


def check_replicas(topos: Iterable[ModelName], problems: Problems) -> None:
    by_role: dict[str, list[int]] = {}
    for name in topos:
        by_role.setdefault(name.role, []).append(name.replica_id)
    for role, ids in by_role.items():
        if sorted(ids) != list(range(len(ids))):
            problems.add(
                f"replica ids of role {role!r} are {sorted(ids)}",
                where=f"model names of role {role!r}",
                fix=f"number its replicas 0 … {len(ids) - 1}",
            )


def trained_replicas(rpcs: Iterable[MFCDef], problems: Problems) -> dict[str, ModelName]:
    trained: dict[str, MFCDef] = {}
    for rpc in rpcs:
        if not rpc.is_train:
            continue
        other = trained.setdefault(rpc.role, rpc)
        if other is not rpc:
            problems.add(
                f"role {rpc.role!r} has two train steps: {other.name} and {rpc.name}",
                where="model_rpcs",
                fix="train a role in one call, or use two roles",
            )
    return {role: rpc.model_name for role, rpc in trained.items()}


def check_calls(
    rpcs: Iterable[MFCDef],
    topos: Mapping[ModelName, ProcessTopology],
    problems: Problems,
) -> None:
    for rpc in rpcs:
        if rpc.model_name not in topos:
            problems.add(
                f"call {rpc.name} runs on {rpc.model_name}, which no worker holds",
                where=f"MFC {rpc.name!r}, model_name",
                fix=did_you_mean(str(rpc.model_name), [str(n) for n in topos]),
            )
            continue
        data = topos[rpc.model_name].data
        if rpc.n_seqs < data * rpc.min_n_seqs_per_pass:
            problems.add(
                f"{rpc.n_seqs} datapoints a call are too few for {data} data-parallel ranks "
                f"of at least {rpc.min_n_seqs_per_pass}",
                where=f"MFC {rpc.name!r}, n_seqs",
                fix=f"use {data * rpc.min_n_seqs_per_pass} or more, or fewer ranks",
            )


def check_weights(
    rpcs: Iterable[MFCDef],
    topos: Mapping[ModelName, ProcessTopology],
    trained: Mapping[str, ModelName],
    problems: Problems,
) -> None:
    """Reports replicas that no hook fills: only the trained replica has weights of its own."""
    rpcs = tuple(rpcs)
    filled = {hook.target or rpc.model_name for rpc, hook in _realloc_hooks(rpcs)}
    for rpc in rpcs:
        name = rpc.model_name
        if name in topos and trained.get(name.role, name) != name and name not in filled:
            problems.add(
                f"{name} is never filled: only {trained[name.role]} is trained, no hook copies it",
                where=f"MFC {rpc.name!r}, model_name",
                fix=f"run it on {trained[name.role]}, or add ParamReallocHook(source=…)",
            )


def check_rollout(
    config: ExperimentConfig, trained: Mapping[str, ModelName], problems: Problems
) -> None:
    """Reports an incomplete or inconsistent rollout setup.

    Servers, manager and rollout workers come together or not at all. The model that they serve must
    be trained, unless no model is.
    """
    parts = {
        "generation_server": len(config.generation_server),
        "gserver_manager": len(config.gserver_manager),
        "rollout_worker": len(config.rollout_worker),
    }
    if config.rollout is None:
        for kind, count in parts.items():
            if count:
                problems.add(
                    f"{count} {kind} workers, but rollouts are not enabled",
                    where=f"initial_setup().{kind}",
                    fix="set rollout=RolloutControl(…)",
                )
        return
    for kind, count in parts.items():
        if not count or (kind == "gserver_manager" and count != 1):
            problems.add(
                f"rollouts need {'one' if kind == 'gserver_manager' else 'at least one'} {kind}, "
                f"there are {count}",
                where=f"initial_setup().{kind}",
                fix="add them, or leave out rollout",
            )
    name = config.rollout.model_name
    if config.rollout.trains and trained.get(name.role) != name:
        problems.add(
            f"the servers have the weights of {name}, which is not trained",
            where="initial_setup().rollout.model_name",
            fix=did_you_mean(str(name), [str(n) for n in trained.values()]),
        )


def check_evaluator(
    config: ExperimentConfig, trained: Mapping[str, ModelName], problems: Problems
) -> None:
    """Reports a bad evaluator: at most one, for a role that is saved, with at least one benchmark."""
    if len(config.evaluator) > 1:
        problems.add(
            f"{len(config.evaluator)} evaluators would write the same files",
            where="initial_setup().evaluator",
            fix="use one; it takes the checkpoints one by one",
        )
    for i, evaluator in enumerate(config.evaluator):
        where = f"initial_setup().evaluator[{i}]"
        if evaluator.role not in trained:
            problems.add(
                f"{evaluator.role!r} is not trained, so it has no checkpoints to evaluate",
                where=f"{where}.role",
                fix=did_you_mean(evaluator.role, list(trained)),
            )
        if not evaluator.benchmarks:
            problems.add(
                "the evaluator has no questions",
                where=f"{where}.benchmarks",
                fix="name a benchmark, or leave out the evaluator",
            )


def sync_param_pairs(
    rpcs: Iterable[MFCDef],
    topos: Mapping[ModelName, ProcessTopology],
    problems: Problems,
) -> tuple[tuple[ModelName, ModelName], ...]:
    pairs: list[tuple[ModelName, ModelName]] = []
    for rpc, hook in _realloc_hooks(rpcs):
        source = hook.source or rpc.model_name
        target = hook.target or rpc.model_name
        if problem := _realloc_problem(rpc, source, target, topos):
            problems.append(problem)
        elif (source, target) not in pairs:
            pairs.append((source, target))
    return tuple(pairs)


def _realloc_hooks(rpcs: Iterable[MFCDef]) -> Iterator[tuple[MFCDef, ParamReallocHook]]:
    for rpc in rpcs:
        for hook in (*rpc.pre_hooks, *rpc.post_hooks):
            if isinstance(hook, ParamReallocHook):
                yield rpc, hook


def _realloc_problem(
    rpc: MFCDef, source: ModelName, target: ModelName, topos: Mapping[ModelName, ProcessTopology]
) -> ConfigError | None:
    where = f"MFC {rpc.name!r}, ParamReallocHook {source} → {target}"
    if source == target:
        return ConfigError(
            f"{source} would be copied onto itself", where=where, fix="name another replica"
        )
    for name in (source, target):
        if name not in topos:
            return ConfigError(
                f"no worker holds {name}",
                where=where,
                fix=did_you_mean(str(name), [str(n) for n in topos]),
            )
    return None


def data_transfer_pairs(graph: DataflowGraph) -> tuple[tuple[ModelName, ModelName], ...]:
    """Lists model → model for every edge, and from the first source call's model to the other sources'."""
    pairs = [(graph[a].model_name, graph[b].model_name) for a, b, _ in graph.edges()]
    first, *others = graph.sources
    pairs += [(first.model_name, other.model_name) for other in others]
    return tuple(dict.fromkeys(pairs))
