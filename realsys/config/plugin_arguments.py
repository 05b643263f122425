"""Checks what a plug-in is given against the fields that it declares, before anything starts.

For resolve.py, of agents and environments: `task.agent_args` may have any names, the class that gets
them knows which and of what type. Makes no plug-in: its own checks come when a worker makes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from realsys.api import registry
from realsys.api.errors import ConfigError, UnknownName, did_you_mean
from realsys.api.experiment import ExperimentConfig
from realsys.api.plain import hints
from realsys.config.option_tree import type_text
from realsys.config.typed_values import fits


def rollout_argument_problems(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Of the first rollout worker, which stands for all of them."""
    for worker in config.rollout_worker[:1]:
        yield from argument_problems("agent", worker.agent, worker.agent_args)
        yield from argument_problems("environment", worker.env, worker.env_args)


def argument_problems(kind: str, name: str, args: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Names that the plug-in has no field for, and values of another type."""
    if registry.check(kind, name, where=kind) is not None:
        return  # told elsewhere
    made_by = registry.find(kind, name)
    if dataclasses.is_dataclass(made_by):
        try:
            types = hints(made_by)
        except NameError:  # a name that only a type checker sees: the worker will tell
            return
        known = {f.name: types[f.name] for f in dataclasses.fields(made_by) if f.init}
    elif getattr(made_by, "__init__", None) is object.__init__:
        known = {}
    else:
        return
    where = f"rollout.{'agent' if kind == 'agent' else 'env'}_args, {kind} {name!r}"
    for key, value in args.items():
        if key not in known:
            fix = did_you_mean(key, known) if known else "leave it out: it takes none"
            yield UnknownName(f"{kind} {name!r} takes no {key!r}", where=where, fix=fix)
        elif not fits(known[key], value):
            fix = f"use: {type_text(known[key])}"
            yield ConfigError(f"{key} is {value!r}", where=where, fix=fix)
