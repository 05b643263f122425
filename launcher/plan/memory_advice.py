"""Finds settings with which a plan's models fit their GPUs, by trying them (pure).

Candidates are ordered by what they cost a run, cheapest first. They are added until everything fits; then
those that turn out to be unnecessary are removed again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.plan.memory_check import WorkerGroup, excess_bytes
from realsys.api.errors import ConfigError
from realsys.api.experiment import ExperimentConfig
from realsys.api.model import ModelInterfaceType, ModelName
from realsys.api.options import ModelOptions
from realsys.api.plan import LaunchPlan
from realsys.config.option_tree import with_value
from realsys.planner.memory.memory_messages import ADVICE, advice, largest, size
from realsys.planner.memory.memory_of_workers import episode_length, model_shapes, step_sizes

Overcommitted = Callable[[Any], float]
_TENSOR = (2, 4, 8)  # tensor-parallel degrees of a frozen role, within a node
_MORE = (2, 4, 8)  # factors for the number of workers
_ROUND = 1024


@dataclass(frozen=True)
class SettingChange:
    """A setting and its proposed value."""

    path: str
    value: Any

    def __str__(self) -> str:
        is_word = self.value is None or isinstance(self.value, bool)
        value = str(self.value).lower() if is_word else self.value
        return f"{self.path}={value}"

    def on(self, experiment: Any) -> Any:
        """Returns the experiment with this change."""
        return with_value(experiment, self.path, self.value)


Candidate = tuple[SettingChange, ...]  # changes that help only together


@dataclass(frozen=True, kw_only=True)
class FittingSettings:
    """Settings, and by how many bytes the fullest worker exceeds its GPU with them; <= 0: all fits."""

    changes: tuple[SettingChange, ...] = ()
    excess: float = math.inf

    def words(self) -> str:
        """Renders the settings for pasting into a command line."""
        return " ".join(map(str, self.changes))


def changes_that_fit(
    experiment: Any, config: ExperimentConfig, over: Overcommitted
) -> FittingSettings:
    """Finds settings with which everything fits, else those with the smallest excess.

    Args:
        config: of the experiment's main phase.
        over: excess bytes of an experiment's fullest worker; infinite for an invalid experiment.
    """
    taken: list[Candidate] = []
    best = FittingSettings()
    for candidate in candidates(experiment, config):
        paths = {change.path for change in candidate}
        together = [c for c in taken if not paths & {change.path for change in c}]
        together.append(candidate)
        if math.isinf(left := over(_with(experiment, together))):
            continue
        taken = together
        if left < best.excess:
            best = FittingSettings(changes=_flat(taken), excess=left)
        if left <= 0:
            break
    else:
        return best
    for candidate in reversed(taken[:-1]):
        rest = [c for c in taken if c is not candidate]
        if (left := over(_with(experiment, rest))) <= 0:
            taken, best = rest, FittingSettings(changes=_flat(rest), excess=left)
    return best


def candidates(experiment: Any, config: ExperimentConfig) -> Iterator[Candidate]:
    """Yields changes that may help, in the order in which they are tried; not all of them are valid."""
    made = {preparation.name for preparation in experiment.preparations()}
    roles = [
        (path, role)
        for path, role in _model_options(experiment)
        if "." not in path or path.partition(".")[0] in made
    ]
    learning = {call.role for call in config.model_rpcs if call.is_train}
    frozen = {call.role for call in config.model_rpcs} - learning
    train = [(path, role) for path, role in roles if path not in frozen]
    inference = [(path, role) for path, role in roles if path in frozen]
    for path, role in train:
        if not role.recompute:
            yield (SettingChange(f"{path}.recompute", True),)
    one_answer = -(-step_sizes(config, model_shapes(config)).length // _ROUND) * _ROUND
    for path, role in roles:
        if role.max_tokens_per_mb is None or role.max_tokens_per_mb > one_answer:
            yield (SettingChange(f"{path}.max_tokens_per_mb", one_answer),)
    for path, role in roles:
        if (role.max_cache_tokens or 0) > one_answer:
            yield (SettingChange(f"{path}.max_cache_tokens", one_answer),)
    everyone = len(config.model_worker)
    for path, role in train:
        is_small = path in learning and _workers(config, path) < everyone
        if is_small and role.pool is None and role.parallel is not None:
            yield (SettingChange(f"{path}.parallel", f"d{everyone}t1p1"),)
    for path, role in inference:
        yield from _cut_over(path, _workers(config, path))
        if _workers(config, path) < everyone:
            freed = () if role.pool is None else (SettingChange(f"{path}.pool", None),)
            for cut in _cut_over(path, everyone):
                yield (*freed, *cut)
    for path, role in inference:
        if not role.offload:
            yield (SettingChange(f"{path}.offload", True),)
    if len(train) > 1:  # they train in turn
        for path, role in train:
            if path in learning and not role.offload:
                yield (SettingChange(f"{path}.offload", True),)
    yield from _own_copy(experiment, config)
    for path, role in train:
        if role.backend == "fsdp" and not role.cpu_offload:
            yield (SettingChange(f"{path}.cpu_offload", True),)
    placement = getattr(experiment, "placement", None)
    if (now := getattr(placement, "n_model_workers", None)) is not None:
        for times in _MORE:
            yield (SettingChange("placement.n_model_workers", now * times),)


def _cut_over(path: str, workers: int) -> Iterator[Candidate]:
    """Proposes tensor-parallel layouts of a role over so many workers."""
    for tensor in _TENSOR:
        if workers % tensor == 0:
            yield (SettingChange(f"{path}.parallel", f"d{workers // tensor}t{tensor}p1"),)


def _own_copy(experiment: Any, config: ExperimentConfig) -> Iterator[Candidate]:
    """Proposes separate copies for generation and training in two parallel layouts, one of them
    offloaded.
    """
    placement = getattr(experiment, "placement", None)
    if getattr(placement, "allocation", "given") is not None:
        return
    for call in config.model_rpcs:
        role = getattr(experiment, call.role, None)
        workers = _workers(config, call.role)
        if call.interface_type is ModelInterfaceType.GENERATE and role and workers > 1:
            own = [
                SettingChange("placement.allocation", f"{call.name}:d{workers}t1p1"),
                SettingChange(f"{call.role}.offload", True),
            ]
            if role.parallel is None and workers % 2 == 0:
                own.insert(0, SettingChange(f"{call.role}.parallel", f"d{workers // 2}t2p1"))
            yield tuple(own)


def _workers(config: ExperimentConfig, role: str) -> int:
    """Counts the workers that hold a role's copy 0."""
    shards = (shard for worker in config.model_worker for shard in worker.shards)
    return sum(shard.id.model_name == ModelName(role) for shard in shards)


def _model_options(options: Any, path: str = "") -> Iterator[tuple[str, ModelOptions]]:
    for field in dataclasses.fields(options):
        value, here = getattr(options, field.name), f"{path}{field.name}"
        if isinstance(value, ModelOptions):
            yield here, value
        elif dataclasses.is_dataclass(value):
            yield from _model_options(value, f"{here}.")


def _flat(candidates: Sequence[Candidate]) -> tuple[SettingChange, ...]:
    return tuple(change for candidate in candidates for change in candidate)


def _with(experiment: Any, candidates: Sequence[Candidate]) -> Any:
    for change in _flat(candidates):
        experiment = change.on(experiment)
    return experiment


def memory_fix(
    experiment: Any,
    plan: LaunchPlan,
    memory_with: Callable[[Any], Mapping[str, list[WorkerGroup]]],
) -> str:
    """Advises what to do about a plan whose models are too large.

    Args:
        memory_with: memory of an experiment with other settings. Raises ConfigError if it has no plan.
    """

    def over(changed: Any) -> float:
        try:
            return excess_bytes(memory_with(changed))
        except ConfigError:
            return math.inf

    config = plan.phases[-1].config
    fewer = _shorter_episodes(config)
    found = changes_that_fit(experiment, config, over)
    if found.excess <= 0:
        return f"{found.words()}  (verified: everything fits){fewer}"
    if not found.changes:
        return ""
    left = memory_with(_with(experiment, [found.changes]))
    fullest = max((g for groups in left.values() for g in groups), key=lambda g: g.memory.bytes)
    peak = fullest.memory.peak_call
    whole = not any(
        call.name == peak and call.interface_type is not ModelInterfaceType.GENERATE
        for call in config.model_rpcs
    )
    helps = ADVICE["whole copy"] if whole else advice(largest(fullest.memory, peak)[:2])
    return (
        f"{helps}. No settings were found with which it fits: with {found.words()} it still exceeds the "
        f"GPU by {size(found.excess)}{fewer}"
    )


def _shorter_episodes(config: ExperimentConfig) -> str:
    """Returns how to declare that an agent's episodes are shorter than they are counted; empty: they have
    one answer."""
    episode = episode_length(config, model_shapes(config))
    if episode is None or not episode.setting or not episode.is_bounded:
        return ""
    return (
        f"; episodes are counted with {episode.tokens:,} tokens, {episode.setting}=N allows fewer"
    )
