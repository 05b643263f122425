"""Checks what plug-ins are given against the fields that they declare, before anything starts.

For resolve.py, of interfaces, backends, models, data sets, agents, environments and reward rules: the class
that their arguments are read into (``registry.arguments_class``) has a field for each. Makes no plug-in but
rules: what it checks itself is checked when a worker makes it, except by a class of arguments alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING
from typing import Any

from realsys.api import registry
from realsys.api.basics.choice import KIND, is_choice, kinds_of
from realsys.api.basics.reward import BY_SOURCE, KNOWN_FIELDS, reward_terms
from realsys.api.errors import ConfigError, UnknownName, collected, did_you_mean
from realsys.api.experiment import ExperimentConfig
from realsys.api.options import value_range_problems
from realsys.api.plain import from_plain, to_plain
from realsys.api.worker_configs import HELD_OUT
from realsys.config.option_tree import nested, type_text

_Use = tuple[str, str, Mapping[str, Any], str]  # kind, name, arguments, place


def plugin_argument_problems(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Yields wrong arguments of all plug-ins of a run; equal ones of several places once."""
    distinct: list[tuple[str, str, Mapping[str, Any], list[str]]] = []
    seen: set[tuple[str, str, int, str]] = set()  # thousands of workers share descriptions
    for kind, name, args, place in _uses(config):
        if (use := (kind, name, id(args), place)) in seen:
            continue
        seen.add(use)
        same = [places for *one, places in distinct if one == [kind, name, args]]
        if not same:
            distinct.append((kind, name, args, [place]))
        elif place not in same[0]:
            same[0].append(place)
    for kind, name, args, places in distinct:
        yield from argument_problems(kind, name, args, where=", ".join(places))


def _uses(config: ExperimentConfig) -> Iterator[_Use]:
    for call in config.model_rpcs:
        interface = call.interface_impl
        yield "interface", interface.type_, interface.args, f"call {call.name!r}"
        yield from _rules(interface.args, "task")
    for worker in config.model_worker:
        for shard in worker.shards:
            role = f"role {shard.id.model_name.role!r}"
            yield "model", shard.model.type_, shard.model.args, role
            yield "backend", shard.backend.type_, shard.backend.args, role
            if (held_out := shard.eval_dataset) is not None:
                yield "dataset", held_out.type_, held_out.args, role
        for data in worker.datasets:
            yield "dataset", data.type_, data.args, "training data"
    for evaluator in config.evaluator:
        for name, benchmark in evaluator.benchmarks.items():
            own = name == HELD_OUT
            data, where = benchmark.dataset, "evaluator" if own else f"benchmarks.{name}"
            yield "dataset", data.type_, data.args, where
            if not own:  # the task's rules are those of the training
                yield from _rules(vars(benchmark), where)
    for rollout in config.rollout_worker:
        for data in rollout.datasets:
            yield "dataset", data.type_, data.args, "training data"
        yield "agent", rollout.agent, rollout.agent_args, "task.agent_args"
        yield "environment", rollout.env, rollout.env_args, "task.env_args"
        yield from _rules(rollout.env_args, "task")


def _rules(given: Mapping[str, Any], place: str) -> Iterator[_Use]:
    """The reward rules that arguments name, with theirs; what is wrong with names, the task tells."""
    expression, args = given.get("reward"), given.get("reward_args") or {}
    if expression == BY_SOURCE:
        for source, own in args.items():
            yield from _rules(own, f"{place}.sources.{source}")
    elif isinstance(expression, str):
        with suppress(ConfigError):
            for name, _ in reward_terms(expression):
                known = name in registry.names("reward")
                if known and (name not in KNOWN_FIELDS or name in args):  # no import for nothing
                    yield "reward", name, args.get(name, {}), f"{place}.reward_args.{name}"


def argument_problems(
    kind: str, name: str, args: Mapping[str, Any], *, where: str
) -> Iterator[ConfigError]:
    """Yields an unknown plug-in; of a known one names that it has no field for, fields without a value,
    and values of another type or out of their range.
    """
    if problem := registry.check(kind, name, where=where):
        yield problem
        return
    fields_of = registry.arguments_class(kind, name)
    if fields_of is None:
        return
    where, args = f"{where}, {kind} {name!r}", registry.present_arguments(kind, name, args)
    given_later = registry.CONTEXT.get(kind, ())
    types = {k: v for k, v in registry.argument_types(fields_of).items() if k not in given_later}
    wrong = list(_table_problems(types, args, where=where, taker=f"{kind} {name!r}"))
    for f in dataclasses.fields(fields_of):
        no_default = f.default is MISSING and f.default_factory is MISSING
        if f.name in types and f.name not in args and no_default:
            fix = f"give it: {type_text(types[f.name])}"
            wrong.append(ConfigError(f"{kind} {name!r} needs {f.name}", where=where, fix=fix))
    # Read arguments check themselves, but a plug-in is not made here.
    made_freely = kind == "reward" or name in registry.ARGUMENTS.get(kind, ())
    if made_freely or fields_of is not registry.find(kind, name):
        wrong += _at(where, _value_problems(fields_of, types, args))
    yield from wrong


def _value_problems(
    fields_of: type, types: Mapping[str, Any], args: Mapping[str, Any]
) -> Iterator[ConfigError]:
    """Yields values of their type that are out of their range, and what the class itself refuses, as far as
    that is not for want of an argument that is wrong.
    """
    read: dict[str, Any] = {}
    for key in types.keys() & args.keys():
        with suppress(ConfigError):
            value = args[key]
            read[key] = value if types[key] is Any else from_plain(types[key], to_plain(value))
    out_of_range = list(value_range_problems(fields_of, read))
    yield from out_of_range
    for problem in out_of_range:
        read.pop(problem.where.partition(".")[0], None)
    found: list[ConfigError] = []
    with collected(found), suppress(TypeError):  # a field without a default is missing
        fields_of(**read)
    is_misspelt = not args.keys() <= types.keys()  # then any that is not given may be meant
    doubtful = (types if is_misspelt else args).keys() - read.keys()
    for problem in found:
        about = types.keys() & re.findall(r"\w+", problem.where)
        if not doubtful or (about and doubtful.isdisjoint(about)):
            yield problem


def _at(where: str, problems: Iterable[ConfigError]) -> list[ConfigError]:
    return [type(p)(p.what, where=f"{where}: {p.where}", fix=p.fix) for p in problems]


def _table_problems(
    types: Mapping[str, Any], args: Mapping[str, Any], *, where: str, taker: str, path: str = ""
) -> Iterator[ConfigError]:
    for key in args:
        if key not in types:
            within = [f"{k}.{n}" for k, v in args.items() if isinstance(v, Mapping) for n in v]
            known = (*types, *within)
            fix = did_you_mean(key, known) if types else "leave it out: it takes none"
            yield UnknownName(f"{taker} takes no {path + key!r}", where=where, fix=fix)
            continue
        found: list[ConfigError] = []
        with collected(found):
            from_plain(types[key], to_plain(args[key]), where=path + key)
        if not found:
            continue
        inner, given, below = nested(types[key]), args[key], f"{path}{key}."
        if inner is not None and is_choice(inner) and isinstance(given, Mapping) and KIND in given:
            inner = kinds_of(inner).get(given[KIND])
            given = {name: value for name, value in given.items() if name != KIND}
            if inner is None:  # no such kind
                yield from _at(where, found)
                continue
        if inner is None or not isinstance(given, Mapping):
            table = "a table with kind: " if is_choice(inner) else ""
            fix = f"use: {table}{type_text(types[key])}"
            yield ConfigError(f"{path}{key} is {args[key]!r:.200}", where=where, fix=fix)
            continue
        of_inner = registry.argument_types(inner)
        each = list(_table_problems(of_inner, given, where=where, taker=taker, path=below))
        yield from each or _at(where, found)
