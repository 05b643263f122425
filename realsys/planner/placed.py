"""The planner's view of an experiment: graph, places of calls, models, workload, limits (pure).

Unknown values are chosen so that predictions are too long rather than too short: answers of full length,
prompts of half the longest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from realsys.api.dataflow import DataflowGraph, MFCDef
from realsys.api.errors import CheckpointError, ConfigError
from realsys.api.experiment import ExperimentConfig
from realsys.api.model import ModelAbstraction, ModelInterfaceType, ModelName
from realsys.api.plain import from_plain
from realsys.api.plan import LaunchPlan
from realsys.api.worker_configs import ModelShard
from realsys.models.model_arguments import TinyLlamaArguments
from realsys.models.shape import DTYPE_BYTES, ModelShape, read_shape
from realsys.planner.allocation import CallAllocation
from realsys.planner.meshes import Degrees
from realsys.weights.layouts.holdings import layout_problems

PROMPT_TOKENS = 128
ANSWER_TOKENS = 128
CUT_ALONG_ALL_AXES = ("fsdp", "megatron", "inference")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Workload of a step.

    ``updates`` are optimizer steps of a training call, ``epochs`` its passes over the batch.
    """

    sequences: int
    prompt_tokens: float
    answer_tokens: float
    updates: int = 1
    epochs: int = 1

    @property
    def length(self) -> float:
        """Tokens of a sequence."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def tokens(self) -> float:
        """Tokens of a step."""
        return self.sequences * self.length


@dataclass(frozen=True, kw_only=True)
class RoleModel:
    """A role's model as the formulas need it. ``shape`` None: a rule without weights."""

    shape: ModelShape | None
    dtype: str = "bfloat16"
    backend: str = "fsdp"
    recompute: bool = False
    adapters: bool = False
    max_tokens_per_mb: int | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes of a weight."""
        return DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return float(self.shape.num_params * self.item_bytes) if self.shape else 0.0


@dataclass(frozen=True, kw_only=True)
class ServedGeneration:
    """Generation on servers, beside the calls of the graph.

    Attributes:
        model: what they hold; None if its sizes are not known.
        gpus: of each; 0: they compute on CPUs.
        is_embedded: they are realsys' own engine.
        most_rows: answers that each makes at once, as set; None: by the engine's default.
        overlaps: they work while the trainers train; else the two take turns.
    """

    model: RoleModel | None
    servers: int
    gpus: int
    is_embedded: bool
    most_rows: int | None
    overlaps: bool


@dataclass(frozen=True, kw_only=True)
class PlacedExperiment:
    """One experiment with its placement.

    Attributes:
        roles: role → its model; rules have no shape, other models without a known one neither.
        ahead: calls that run a step ahead.
        unknown: roles with unreadable model sizes, with the reason.
        served: how servers generate what is trained on; None: calls of the graph do, or nothing does.
    """

    graph: DataflowGraph
    allocation: Mapping[str, CallAllocation]
    num_workers: int
    roles: Mapping[str, RoleModel]
    workload: Workload
    ahead: tuple[str, ...]
    unknown: Mapping[str, str]
    served: ServedGeneration | None = None


def place_experiment(plan: LaunchPlan) -> PlacedExperiment:
    """Builds the view of the trial's main phase."""
    config = plan.phases[-1].config
    built_in = model_made_before(plan)
    roles, unknown = {}, {}
    for role, shard in own_shards(config).items():
        try:
            roles[role] = _role_model(role, shard, config, built_in)
        except (CheckpointError, ConfigError) as error:
            unknown[role] = error.what
    return PlacedExperiment(
        graph=config.graph(),
        allocation=allocation_of(config),
        num_workers=len(config.model_worker),
        roles=roles,
        workload=workload_of(config),
        ahead=calls_ahead(config.graph(), max_staleness=config.max_staleness),
        unknown=unknown,
        served=_served(plan, built_in),
    )


def _served(plan: LaunchPlan, built_in: ModelShape | None) -> ServedGeneration | None:
    phase = plan.phases[-1]
    control, group = phase.config.rollout, phase.scheduling.generation_server
    if control is None or not control.trains or group is None or not phase.config.generation_server:
        return None
    server = phase.config.generation_server[0]
    shape, args = shape_at(server.model_path, built_in), server.backend_args
    dtype = str(args.get("dtype") or "bfloat16")
    return ServedGeneration(
        model=RoleModel(shape=shape, dtype=dtype, backend="inference") if shape else None,
        servers=group.count,
        gpus=math.ceil(group.scheduling.gpu),
        is_embedded=server.backend_type == "embedded",
        most_rows=args.get("max_running"),
        overlaps=bool(control.max_staleness),
    )


def allocation_of(config: ExperimentConfig) -> dict[str, CallAllocation]:
    """Derives the places of an experiment's calls from its workers' shards."""
    workers: dict[ModelName, dict[int, int]] = {}
    topologies = {}
    for index, worker in enumerate(config.model_worker):
        for shard in worker.shards:
            name = shard.id.model_name
            workers.setdefault(name, {})[shard.id.parallelism_rank] = index
            topologies[name] = shard.id.topo
    return {
        call.name: CallAllocation(
            workers=tuple(w for _, w in sorted(workers[call.model_name].items())),
            topology=topologies[call.model_name],
        )
        for call in config.model_rpcs
        if call.model_name in topologies
    }


def calls_ahead(graph: DataflowGraph, *, max_staleness: int) -> tuple[str, ...]:
    """Lists calls that run a step ahead: generation that reads only the data set, as in the master."""
    if not max_staleness:
        return ()
    return tuple(n.name for n in graph.sources if n.interface_type is ModelInterfaceType.GENERATE)


def interface_arguments(config: ExperimentConfig) -> dict[str, Any]:
    """Joins the arguments of all calls' interfaces; the first call that has one decides."""
    args: dict[str, Any] = {}
    for call in config.model_rpcs:
        args = {**call.interface_impl.args, **args}
    return args


def workload_of(config: ExperimentConfig) -> Workload:
    """Derives a step's workload from the arguments of the calls."""
    args = interface_arguments(config)
    gen = args.get("gen") or {}
    prompts = [
        dataset.args.get("max_prompt_len", 2 * PROMPT_TOKENS)
        for worker in config.model_worker[:1]
        for dataset in worker.datasets
    ]
    trains = [c for c in config.model_rpcs if c.is_train]
    epochs = int(args.get("ppo_epochs", 1)) if trains else 1
    return Workload(
        sequences=config.model_rpcs[0].n_seqs * int(args.get("group_size", 1)),
        prompt_tokens=max(prompts, default=2 * PROMPT_TOKENS) / 2,
        answer_tokens=float(gen.get("max_new_tokens", ANSWER_TOKENS)),
        updates=epochs * int(args.get("ppo_n_minibatches", 1)),
        epochs=epochs,
    )


# ---- models ---------------------------------------------------------------------------------------


def own_shards(config: ExperimentConfig) -> dict[str, ModelShard]:
    """Returns a shard of each role's copy 0."""
    found: dict[str, ModelShard] = {}
    for worker in config.model_worker:
        for shard in worker.shards:
            if shard.id.model_name.replica_id == 0:
                found.setdefault(shard.id.model_name.role, shard)
    return found


def shape_at(path: str, made_before: ModelShape | None) -> ModelShape | None:
    """Reads the sizes of a language model that servers load; None for a family that is not known.

    Args:
        made_before: sizes of the model that an earlier phase makes; its directory may not exist yet.
    """
    try:
        return read_shape(path)
    except CheckpointError:
        return made_before
    except ConfigError:
        return None


def _role_model(
    role: str, shard: ModelShard, config: ExperimentConfig, built_in: ModelShape | None
) -> RoleModel:
    limits = [c.mb_spec.max_tokens_per_mb for c in config.model_rpcs if c.role == role]
    return RoleModel(
        shape=_shape(shard.model, built_in),
        dtype=shard.model.args.get("dtype", "float32"),
        backend=shard.backend.type_,
        recompute=bool(shard.backend.args.get("recompute", False)),
        adapters=bool(shard.backend.args.get("lora")),
        max_tokens_per_mb=max((n for n in limits if n), default=None),
    )


def _shape(model: ModelAbstraction, built_in: ModelShape | None) -> ModelShape | None:
    """Returns the sizes of a model; None for a rule. Raises ConfigError, CheckpointError."""
    path, critic = model.args.get("path"), model.type_ == "hf_critic"
    if model.type_ == "tokenizer_only":
        return None
    if model.type_ == "tiny_llama":
        return tiny_llama_shape(model.args)
    if path is not None:
        try:
            return read_shape(path, critic=critic)
        except CheckpointError:  # an earlier phase will make it
            if built_in is None:
                raise
    if built_in is None:
        raise ConfigError(
            f"sizes of a model {model.type_!r} are not known", where="model", fix="give its path"
        )
    return built_in.as_critic() if critic else built_in


def model_made_before(plan: LaunchPlan) -> ModelShape | None:
    """Returns the sizes of the model that the phase before the main one makes."""
    for phase in plan.phases[:-1]:
        for shard in own_shards(phase.config).values():
            try:
                return _shape(shard.model, None)
            except (CheckpointError, ConfigError):
                continue
    return None


def tiny_llama_shape(args: Mapping[str, Any]) -> ModelShape:
    """Returns the sizes of the built-in model that is made from scratch."""
    return from_plain(TinyLlamaArguments, dict(args), where="model 'tiny_llama'").shape()


# ---- limits ---------------------------------------------------------------------------------------


def degrees_of(found: PlacedExperiment, *, gpus_per_node: int) -> dict[str, Degrees]:
    """Returns, per role, the axes that its backend supports; tensor parallelism stays within a node."""
    return {
        role: Degrees(tensor=gpus_per_node)
        if model.shape is not None and model.backend in CUT_ALONG_ALL_AXES
        else Degrees(tensor=1, pipeline=1)
        for role, model in found.roles.items()
    }


def refusal(found: PlacedExperiment, call: MFCDef, place: CallAllocation) -> str | None:
    """Returns why a call can't run at a place; None if it can. For ``search.Limits``."""
    return next(_refusals(found, call, place), None)


def _refusals(found: PlacedExperiment, call: MFCDef, place: CallAllocation) -> Iterator[str]:
    topo, model = place.topology, found.roles.get(call.role)
    if model is None or model.shape is None:
        if topo.world_size > 1:
            yield "a rule runs on one worker"
        return
    pieces = topo.data * (found.workload.updates // found.workload.epochs if call.is_train else 1)
    if call.is_train and call.n_seqs % pieces:
        yield f"{call.n_seqs} datapoints do not divide into d{topo.data} and the minibatches"
    if call.n_seqs < topo.data * call.min_n_seqs_per_pass:
        yield f"{call.n_seqs} datapoints are too few for d{topo.data}"
    # A call that is not on the trained copy runs on a copy of backend inference.
    backend = model.backend if call.is_train else "inference"
    if model.adapters and backend != "fsdp" and topo.tensor * topo.pipeline > 1:
        yield "adapters are not cut over tensor and pipeline axes"
    if topo.tensor * topo.pipeline > 1:
        yield from (problem.what for problem in layout_problems(model.shape, topo, backend))
