"""Builds the requests of weight movements around calls: participating workers, and whether needed at all.

Pure: returns requests, sends nothing. A copy whose source has not been trained since is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from realsys.api.dataflow import Hook, MFCDef, OffloadHook
from realsys.api.model import ModelName, ModelShardID
from realsys.transport.worker_requests import Offload, Reallocate


@dataclass(frozen=True)
class WeightMovement:
    """One hook's requests: worker → the request without its number."""

    what: str  # for waits, logs and the timeline
    requests: Mapping[int, Callable[..., Any]]


class WeightHooks:
    """The hooks of all calls of a run; informed of every issued call."""

    def __init__(self, shards: Iterable[tuple[ModelShardID, int]]) -> None:
        self._holders: dict[ModelName, list[int]] = {}
        for shard, worker in shards:
            self._holders.setdefault(shard.model_name, []).append(worker)
        self._version: dict[ModelName, int] = {}  # times written to, by training or by a hook
        self._copied: dict[tuple[ModelName, ModelName], tuple[int, int]] = {}

    def before(self, call: MFCDef, *, step: int) -> list[WeightMovement]:
        """Returns the movements before ``call`` runs."""
        return self._movements(call, call.pre_hooks, step)

    def after(self, call: MFCDef, *, step: int) -> list[WeightMovement]:
        """Returns the movements after ``call``, and accounts for the call's own effect on its weights."""
        if call.is_train:
            self._written(call.model_name)
        return self._movements(call, call.post_hooks, step)

    def refresh(
        self, target: ModelName, calls: Iterable[MFCDef], *, step: int
    ) -> list[WeightMovement]:
        """Returns the movements that update ``target`` as the hooks of ``calls`` would, for an
        evaluation."""
        found: list[WeightMovement] = []
        for call in calls:
            if call.model_name == target:
                found += self._movements(call, call.pre_hooks, step)
        return found

    def _movements(self, call: MFCDef, hooks: Iterable[Hook], step: int) -> list[WeightMovement]:
        found = []
        for hook in hooks:
            if isinstance(hook, OffloadHook):
                name = call.model_name
                request = partial(Offload, call=call.name, step=step, model=str(name))
                requests = dict.fromkeys(self._holders[name], request)
                found.append(WeightMovement(f"offload {name}", requests))
                continue
            source, target = hook.source or call.model_name, hook.target or call.model_name
            if hook.eta == 1 and self._copied.get((source, target)) == self._state(source, target):
                continue
            self._written(target)
            self._copied[source, target] = self._state(source, target)
            move = partial(
                Reallocate,
                call=call.name,
                step=step,
                source=str(source),
                target=str(target),
                eta=hook.eta,
            )
            workers = sorted({*self._holders[source], *self._holders[target]})
            found.append(
                WeightMovement(f"weights {source} → {target}", dict.fromkeys(workers, move))
            )
        return found

    def _state(self, source: ModelName, target: ModelName) -> tuple[int, int]:
        return self._version.get(source, 0), self._version.get(target, 0)

    def _written(self, name: ModelName) -> None:
        self._version[name] = self._version.get(name, 0) + 1
