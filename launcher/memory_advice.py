"""Settings with which the models of a plan fit their GPUs, found by trying them (pure).

Each candidate costs a run something, the first ones least. They are put together until all fits; then those
without which it fits too are taken out again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from realsys.api.errors import ConfigError
from realsys.api.experiment import ExperimentConfig
from realsys.api.options import ModelOptions
from realsys.planner.memory_of_workers import step_sizes

Over = Callable[[Any], float]
_TENSOR = (2, 4, 8)  # of a frozen role, within a node
_MORE = (2, 4, 8)  # times as many workers
_ROUND = 1024


@dataclass(frozen=True)
class Change:
    """A setting, and what it is to be."""

    path: str
    value: Any

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.path}={value}"

    def on(self, experiment: Any) -> Any:
        """The experiment with it."""
        return _replaced(experiment, self.path.split("."), self.value)


def changes_that_fit(experiment: Any, config: ExperimentConfig, over: Over) -> list[Change] | None:
    """Settings with which all fits; None: there are none among those that we try.

    Args:
        config: of the experiment's main phase.
        over: bytes that the fullest worker of an experiment has too much; infinite for one that can't be.
    """
    taken: list[Change] = []
    for change in candidates(experiment, config):
        together = [*(c for c in taken if c.path != change.path), change]
        if math.isinf(left := over(_with(experiment, together))):
            continue
        taken = together
        if left <= 0:
            break
    else:
        return None
    for change in reversed(taken[:-1]):
        rest = [c for c in taken if c is not change]
        if over(_with(experiment, rest)) <= 0:
            taken = rest
    return taken


def candidates(experiment: Any, config: ExperimentConfig) -> Iterator[Change]:
    """What may help, in the order in which it is tried; not all of it is possible."""
    roles = list(_model_options(experiment))
    learning = {call.role for call in config.model_rpcs if call.is_train}
    frozen = {call.role for call in config.model_rpcs} - learning
    train = [(path, role) for path, role in roles if path not in frozen]
    wait = [(path, role) for path, role in roles if path in frozen]
    for path, role in train:
        if not role.recompute:
            yield Change(f"{path}.recompute", True)
    sizes = step_sizes(config)
    one_answer = -(-sizes.length // _ROUND) * _ROUND
    for path, role in roles:
        if role.max_tokens_per_mb is None or role.max_tokens_per_mb > one_answer:
            yield Change(f"{path}.max_tokens_per_mb", one_answer)
    for path, role in roles:
        if (role.max_cache_tokens or 0) > one_answer:
            yield Change(f"{path}.max_cache_tokens", one_answer)
    for path, _ in wait:
        workers = sum(shard.id.model_name.role == path for shard in _shards(config))
        for tensor in _TENSOR:
            if workers % tensor == 0:
                yield Change(f"{path}.parallel", f"d{workers // tensor}t{tensor}p1")
    for path, role in wait:
        if not role.offload:
            yield Change(f"{path}.offload", True)
    if len(train) > 1:  # they take turns
        for path, role in train:
            if not role.offload and "." not in path:
                yield Change(f"{path}.offload", True)
    for path, role in train:
        if role.backend == "fsdp" and not role.cpu_offload:
            yield Change(f"{path}.cpu_offload", True)
    if (now := getattr(experiment, "n_model_workers", None)) is not None:
        for times in _MORE:
            yield Change("n_model_workers", now * times)


def _shards(config: ExperimentConfig) -> Iterator[Any]:
    for worker in config.model_worker:
        yield from worker.shards


def _model_options(options: Any, path: str = "") -> Iterator[tuple[str, ModelOptions]]:
    for field in dataclasses.fields(options):
        value, here = getattr(options, field.name), f"{path}{field.name}"
        if isinstance(value, ModelOptions):
            yield here, value
        elif dataclasses.is_dataclass(value):
            yield from _model_options(value, f"{here}.")


def _with(experiment: Any, changes: Sequence[Change]) -> Any:
    for change in changes:
        experiment = change.on(experiment)
    return experiment


def _replaced(options: Any, names: Sequence[str], value: Any) -> Any:
    first, *rest = names
    new = _replaced(getattr(options, first), rest, value) if rest else value
    return dataclasses.replace(options, **{first: new})


def excess_or_never(excess: Callable[[Any], float]) -> Over:
    """``excess``, infinite where the experiment has mistakes."""

    def over(experiment: Any) -> float:
        try:
            return excess(experiment)
        except ConfigError:
            return math.inf

    return over


def words_of(changes: Sequence[Change]) -> str:
    """What to do, to be read and pasted."""
    return f"{' '.join(map(str, changes))}  (tried: all fits then)"
