"""Bytes on every model worker: the copies that it holds, and its most demanding call (pure).

Copies on a worker coexist; calls run one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from realsys.api.dataflow import MFCDef, OffloadHook, averaged_models
from realsys.api.errors import CheckpointError, ConfigError
from realsys.api.experiment import ExperimentConfig
from realsys.api.model import (
    ModelAbstraction,
    ModelInterfaceType,
    ModelName,
    ProcessTopology,
)
from realsys.api.worker_configs import ModelShard
from realsys.models.shape import ModelShape, read_shape
from realsys.planner.allocation import CallAllocation
from realsys.planner.memory.copy_memory import (
    KNOWN_BACKENDS,
    HeldModel,
    StepSizes,
    Terms,
    call_terms,
    permanent_terms,
)
from realsys.planner.memory.episode_length import EpisodeLength, longest_episode
from realsys.planner.placed import (
    allocation_of,
    interface_arguments,
    own_shards,
    tiny_llama_shape,
)

if TYPE_CHECKING:
    from realsys.planner.time.costs import Allocation

DEFAULT_TOKENS = 256  # assumed for a prompt or answer without a configured limit


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """Bytes of one worker.

    Attributes:
        copies: copy → its permanent terms.
        calls: call → terms added while it runs, including a copy restored from CPU memory.
    """

    copies: Mapping[str, Terms] = field(default_factory=dict)
    calls: Mapping[str, Terms] = field(default_factory=dict)

    @property
    def staying_bytes(self) -> float:
        """Permanent bytes."""
        return sum(sum(terms.values()) for terms in self.copies.values())

    @property
    def peak_call(self) -> str:
        """The call that adds most; empty without calls."""
        return max(self.calls, key=lambda name: sum(self.calls[name].values()), default="")

    @property
    def bytes(self) -> float:
        """Bytes at the peak."""
        return self.staying_bytes + sum(self.calls.get(self.peak_call, {}).values())


def memory_of_workers(
    calls: Sequence[MFCDef],
    allocation: Mapping[str, CallAllocation],
    models: Mapping[str, HeldModel],
    sizes: StepSizes,
) -> dict[int, WorkerMemory]:
    """Computes bytes by model worker, for workers that hold weights.

    Args:
        allocation: name of a call → where it runs. Calls of a role in one place share a copy; the
            copy that is trained (or the first) is the role's own, others are of backend inference.
        models: role → its own copy; a role that is missing holds no weights, or none that are known.
    """
    copies = copies_of(calls, allocation, models)
    stay: dict[int, dict[str, Terms]] = {}
    add: dict[int, dict[str, Terms]] = {}
    for name, (place, model, mine) in copies.items():
        generates = any(c.interface_type is ModelInterfaceType.GENERATE for c in mine)
        stages = [
            _of_stage(str(name), model, place.topology, stage, mine, sizes, generates)
            for stage in range(place.topology.pipeline)
        ]
        for rank, worker in enumerate(place.workers):
            terms, by_call = stages[place.topology.coordinate(rank)[0]]
            if terms:
                stay.setdefault(worker, {})[str(name)] = terms
            add.setdefault(worker, {}).update(by_call)
    return {
        worker: WorkerMemory(copies=stay.get(worker, {}), calls=add.get(worker, {}))
        for worker in sorted({*stay, *add})
    }


def _of_stage(
    name: str,
    model: HeldModel,
    topo: ProcessTopology,
    stage: int,
    calls: Sequence[MFCDef],
    sizes: StepSizes,
    generates: bool,
) -> tuple[Terms, dict[str, Terms]]:
    """Computes one process's permanent terms of the copy, and the terms that each call adds."""
    terms = permanent_terms(model, topo, stage, generates=generates)
    back = {f"{what} of {name}": n for what, n in terms.items()} if model.offload else {}
    added: dict[str, Terms] = {
        c.name: {**back, **call_terms(model, topo, stage, c.interface_type, sizes)} for c in calls
    }
    return ({} if model.offload else terms), added


_Copy = tuple[CallAllocation, HeldModel, list[MFCDef]]


def copies_of(
    calls: Sequence[MFCDef],
    allocation: Mapping[str, CallAllocation],
    models: Mapping[str, HeldModel],
) -> dict[ModelName, _Copy]:
    """Lists every copy: its place, its model, and the calls that run on it."""
    found: dict[ModelName, _Copy] = {}
    for call in sorted(calls, key=lambda c: not c.is_train):  # the trained copy is number 0
        model, place = models.get(call.role), allocation.get(call.name)
        if model is None or place is None or model.backend not in KNOWN_BACKENDS:
            continue
        same = [n for n, (p, _, _) in found.items() if n.role == call.role and p == place]
        if not same:
            number = sum(n.role == call.role for n in found)
            if number:
                model = replace(
                    model,
                    backend="inference",
                    trained=False,
                    averaged=False,
                    recompute=False,
                    cpu_offload=False,
                )
            same = [ModelName(call.role, number)]
            found[same[0]] = (place, model, [])
        found[same[0]][2].append(call)
    return found


# ---- from an experiment's configuration ------------------------------------------------------------------


def memory_of_experiment(
    config: ExperimentConfig,
    made_before: ModelShape | None = None,
    *,
    whole_context: bool = False,
) -> dict[int, WorkerMemory]:
    """Computes bytes by model worker, as far as the sizes of the models are known.

    Args:
        made_before: sizes of the model that an earlier phase makes; its directory may not exist yet.
        whole_context: an agent's episodes, whose length no setting bounds, fill the model's context.
    """
    shapes = model_shapes(config, made_before)
    models = held_models(config, shapes)
    sizes = step_sizes(config, shapes, whole_context=whole_context)
    found = memory_of_workers(config.model_rpcs, allocation_of(config), models, sizes)
    return {
        worker: replace(
            memory, calls={**memory.calls, **_evaluations(config, worker, models, sizes)}
        )
        for worker, memory in found.items()
    }


def _evaluations(
    config: ExperimentConfig, worker: int, models: Mapping[str, HeldModel], sizes: StepSizes
) -> dict[str, Terms]:
    """Terms that held-out evaluation adds on a worker: whole weights, and the cache of its rows."""
    found: dict[str, Terms] = {}
    for shard in config.model_worker[worker].shards:
        name, data = shard.id.model_name, shard.eval_dataset
        answers = any(
            c.role == name.role and "gen" in c.interface_impl.args for c in config.model_rpcs
        )
        if data is None or not answers or name.role not in models:
            continue
        model, topo = models[name.role], shard.id.topo
        generates = any(
            c.model_name == name and c.interface_type is ModelInterfaceType.GENERATE
            for c in config.model_rpcs
        )
        stage = topo.coordinate(shard.id.parallelism_rank)[0]
        questions = int(data.args.get("eval_size") or shard.eval_bs)
        asked = replace(sizes, sequences=min(questions, shard.eval_bs * topo.data))
        terms = call_terms(model, topo, stage, ModelInterfaceType.GENERATE, asked)
        copied = permanent_terms(model, topo, stage, generates=True).get("whole copy", 0.0)
        if copied and not generates:  # else it is there anyway
            terms = {**terms, "whole copy": copied}
        found[f"evaluation of {name}"] = terms
    return found


def model_shapes(
    config: ExperimentConfig, made_before: ModelShape | None = None
) -> dict[str, ModelShape]:
    """Returns the shape of each role's model; roles without weights or of unknown sizes are omitted."""
    found = {
        role: _shape_or_reason(shard.model, made_before)
        for role, shard in own_shards(config).items()
    }
    return {role: shape for role, shape in found.items() if isinstance(shape, ModelShape)}


def memory_unknown(
    config: ExperimentConfig, made_before: ModelShape | None = None
) -> dict[str, str]:
    """Returns why no memory is estimated, for each role with weights of which none is."""
    found: dict[str, str] = {}
    for role, shard in own_shards(config).items():
        shape = _shape_or_reason(shard.model, made_before)
        if isinstance(shape, str):
            found[role] = shape
        elif shape is not None and shard.backend.type_ not in KNOWN_BACKENDS:
            known = ", ".join(KNOWN_BACKENDS)
            found[role] = (
                f"what backend {shard.backend.type_!r} holds is not known (of {known} it is)"
            )
    return found


def _shape_or_reason(
    model: ModelAbstraction, made_before: ModelShape | None
) -> ModelShape | str | None:
    """Returns a model's shape, or why it is not known; None for a rule without weights."""
    kind, args = model.type_, model.args
    if kind == "tokenizer_only":
        return None
    if kind == "tiny_llama":
        return tiny_llama_shape(args)
    if kind not in ("hf_causal_lm", "hf_critic"):
        return f"the sizes of a model {kind!r} are not known"
    critic = kind == "hf_critic"
    try:
        return read_shape(str(args.get("path")), critic=critic)
    except CheckpointError as error:
        if made_before is not None:
            return made_before.as_critic() if critic else made_before
        return f"{error.what} ({error.where})"
    except ConfigError as error:
        return f"the planner does not know this model: {error.what} ({error.where})"


def held_models(config: ExperimentConfig, shapes: Mapping[str, ModelShape]) -> dict[str, HeldModel]:
    """Returns each role's own copy, as configured, for roles of known sizes."""
    trained = {call.role for call in config.model_rpcs if call.is_train}
    return {
        role: _held(role, shard, shapes[role], config, trained=role in trained)
        for role, shard in own_shards(config).items()
        if role in shapes
    }


def _held(
    role: str, shard: ModelShard, shape: ModelShape, config: ExperimentConfig, *, trained: bool
) -> HeldModel:
    args, calls = shard.backend.args, [c for c in config.model_rpcs if c.role == role]
    lora = args.get("lora") or {}
    limits = [c.mb_spec.max_tokens_per_mb for c in calls]
    return HeldModel(
        shape=shape,
        dtype=shard.model.args.get("dtype", "float32"),
        backend=shard.backend.type_,
        trained=trained,
        averaged=shard.id.model_name in averaged_models(config.model_rpcs),
        lora_rank=lora.get("rank", 0),
        lora_targets=tuple(lora.get("target_modules", ())),
        recompute=bool(args.get("recompute")),
        cpu_offload=bool(args.get("cpu_offload")),
        offload=any(isinstance(hook, OffloadHook) for c in calls for hook in c.post_hooks),
        max_tokens_per_mb=None if None in limits else max(n for n in limits if n is not None),
        max_cache_tokens=max((c.mb_spec.max_cache_tokens or 0 for c in calls), default=0) or None,
    )


def episode_length(
    config: ExperimentConfig, shapes: Mapping[str, ModelShape]
) -> EpisodeLength | None:
    """Returns how long an agent's episode of several turns may be, see ``longest_episode``."""
    one = step_sizes(config)
    return longest_episode(
        config, shapes, prompt_tokens=one.prompt_tokens, answer_tokens=one.answer_tokens
    )


def step_sizes(
    config: ExperimentConfig,
    shapes: Mapping[str, ModelShape] | None = None,
    *,
    whole_context: bool = False,
) -> StepSizes:
    """Computes the largest step that the configuration allows.

    Args:
        shapes: by role; with them an answer may be as long as the episode of an agent of several turns, if
            settings bound it.
        whole_context: also if the model's positions alone bound it.
    """
    args = interface_arguments(config)
    data: dict[str, Any] = {}
    # If servers sample, rollout workers have the questions.
    given = [w.datasets for w in config.model_worker[:1]]
    given += [w.datasets for w in config.rollout_worker[:1]]
    for dataset in (dataset for datasets in given for dataset in datasets):
        data = {**dataset.args, **data}
    gen = args.get("gen") or {}
    answer = int(gen.get("max_new_tokens") or data.get("max_answer_len") or DEFAULT_TOKENS)
    prompt = longest_prompt(data)
    episode = episode_length(config, shapes) if shapes else None
    if episode is not None and (episode.is_bounded or whole_context):
        answer = max(answer, episode.tokens - prompt)
    return StepSizes(
        sequences=config.model_rpcs[0].n_seqs * int(args.get("group_size", 1)),
        prompt_tokens=prompt,
        answer_tokens=answer,
        updates_per_pass=int(args.get("ppo_n_minibatches", 1)),
        group_size=int(args.get("group_size", 1)),
    )


def longest_prompt(data_args: Mapping[str, Any]) -> int:
    """Returns the tokens of the longest prompt that a data set allows, of a mixture in any source."""
    sources = data_args.get("sources", {}).values()
    lengths = [args.get("max_prompt_len") for args in (data_args, *sources)]
    return max((int(n) for n in lengths if n is not None), default=DEFAULT_TOKENS)


# ---- for many plans, fast: the same, cached by role ------------------------------------------------------
#
# Roles on one worker are independent: permanent bytes add up, and of the calls' bytes the largest
# counts, since calls run one at a time.


def fullest_worker(
    config: ExperimentConfig, allocation: Allocation, made_before: ModelShape | None = None
) -> WorkerMemory:
    """Returns what the worker with the most bytes holds in an allocation of the experiment's calls."""
    shapes = model_shapes(config, made_before)
    models, sizes = held_models(config, shapes), step_sizes(config, shapes)
    found = memory_of_workers(config.model_rpcs, allocation, models, sizes)
    return max(found.values(), key=lambda memory: memory.bytes, default=WorkerMemory())


def memory_of_plans(
    config: ExperimentConfig, made_before: ModelShape | None = None
) -> Callable[[Allocation], Mapping[int, float]]:
    """Makes a function from an allocation of the experiment's calls to bytes of each worker with
    weights.
    """
    shapes = model_shapes(config, made_before)
    models, sizes = held_models(config, shapes), step_sizes(config, shapes)
    calls = {
        role: tuple(c for c in config.model_rpcs if c.role == role)
        for role in dict.fromkeys(c.role for c in config.model_rpcs)
        if role in models
    }

    @cache
    def of_role(role: str, places: tuple[CallAllocation, ...]) -> dict[int, tuple[float, float]]:
        """Returns worker → (permanent bytes, the largest call's bytes)."""
        own = {c.name: p for c, p in zip(calls[role], places, strict=True)}
        found = memory_of_workers(calls[role], own, models, sizes)
        return {w: (m.staying_bytes, m.bytes - m.staying_bytes) for w, m in found.items()}

    def of_plan(allocation: Allocation) -> dict[int, float]:
        stays: dict[int, float] = {}
        most: dict[int, float] = {}
        for role, mine in calls.items():
            places = tuple(allocation[c.name] for c in mine)
            for worker, (stay, add) in of_role(role, places).items():
                stays[worker] = stays.get(worker, 0.0) + stay
                most[worker] = max(most.get(worker, 0.0), add)
        return {worker: stay + most[worker] for worker, stay in stays.items()}

    return of_plan
