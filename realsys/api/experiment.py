"""Experiments: what each worker is, and the resolution of a whole from its parts.

A user's ``Experiment`` (a frozen dataclass of options) answers two questions: which tasks
(``scheduling_setup``) and what they do (``initial_setup``). ``ExperimentConfig.lazy_init`` then
checks the whole, names the culprit of every mistake, and fills in what follows from the parts:
graph, topologies, who holds which shard, which data and weights move between which models.
Pure: values in, values out.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from realsys.api.dataflow import DataflowGraph, MFCDef, ParamReallocHook, build_graph
from realsys.api.errors import ConfigError, ConfigErrors, did_you_mean
from realsys.api.model import (
    DatasetAbstraction,
    GenerationHyperparameters,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelName,
    ModelShardID,
    ProcessTopology,
)
from realsys.api.options import WandbOptions, option, range_problems
from realsys.api.scheduling import DISPENSABLE, SCALED, ExperimentScheduling, WorkerType


@dataclass(frozen=True, kw_only=True)
class ExperimentSaveEvalControl:
    """How long to train, and when to save, checkpoint and evaluate.

    ``save`` writes Hugging Face folders to keep, ``ckpt`` what a resume needs. Each happens when any
    of its three periods has passed; None switches a period off.
    """

    total_train_epochs: int = option(1, "passes over the data set", ge=1)
    benchmark_steps: int | None = option(None, "stop after so many steps; none: by epochs", ge=1)
    save_freq_epochs: int | None = option(None, "save every … epochs", ge=1)
    save_freq_steps: int | None = option(None, "save every … steps", ge=1)
    save_freq_secs: float | None = option(None, "save every …", unit="seconds", gt=0)
    ckpt_freq_epochs: int | None = option(None, "checkpoint every … epochs", ge=1)
    ckpt_freq_steps: int | None = option(None, "checkpoint every … steps", ge=1)
    ckpt_freq_secs: float | None = option(60.0, "checkpoint every …", unit="seconds", gt=0)
    ckpt_keep: int = option(2, "recovery checkpoints kept", ge=1)
    eval_freq_epochs: int | None = option(None, "evaluate every … epochs", ge=1)
    eval_freq_steps: int | None = option(None, "evaluate every … steps", ge=1)
    eval_freq_secs: float | None = option(None, "evaluate every …", unit="seconds", gt=0)


@dataclass(frozen=True, kw_only=True)
class WorkerInformation:
    """Who a worker is and whom it depends on.

    Attributes:
        worker_tag: ``training`` or ``evaluation``.
        host_key: name-resolution key that this worker keeps alive.
        watch_keys: the worker exits when all of these keys are gone.
    """

    experiment_name: str = ""
    trial_name: str = ""
    worker_type: str = ""
    worker_index: int = -1
    worker_count: int = 0
    worker_tag: str = "training"
    host_key: str | None = None
    watch_keys: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``model_worker/3``."""
        return f"{self.worker_type}/{self.worker_index}"

    def system_setup(
        self,
        *,
        experiment_name: str,
        trial_name: str,
        worker_type: WorkerType,
        worker_index: int,
        worker_count: int,
        host_key: str | None = None,
        watch_keys: tuple[str, ...] = (),
    ) -> WorkerInformation:
        """The same with the place of this worker filled in."""
        return replace(
            self,
            experiment_name=experiment_name,
            trial_name=trial_name,
            worker_type=worker_type.value,
            worker_index=worker_index,
            worker_count=worker_count,
            host_key=host_key or f"worker/{worker_type.value}/{worker_index}",
            watch_keys=watch_keys,
        )


@dataclass(frozen=True, kw_only=True)
class ModelShard:
    """One shard on a model worker: which piece, how the module is made, which backend wraps it."""

    id: ModelShardID
    model: ModelAbstraction
    backend: ModelBackendAbstraction
    eval_dataset: DatasetAbstraction | None = None
    eval_bs: int = 128


@dataclass(frozen=True, kw_only=True)
class ModelWorker:
    """A process that holds model shards and, where a source call runs, the data set.

    The fields under "resolved" are filled in by ``ExperimentConfig.resolve_worker_config``.
    """

    base_seed: int = 1
    shards: tuple[ModelShard, ...] = ()
    tokenizer_name_or_path: str | None = None
    datasets: tuple[DatasetAbstraction, ...] = ()
    shuffle_dataset: bool = True
    num_threads: int | None = None
    # resolved
    model_rpcs: tuple[MFCDef, ...] = ()
    model_topos: tuple[tuple[ModelName, ProcessTopology], ...] = ()
    msid2mwid: tuple[tuple[ModelShardID, int], ...] = ()
    data_transfer_pairs: tuple[tuple[ModelName, ModelName], ...] = ()
    sync_param_pairs: tuple[tuple[ModelName, ModelName], ...] = ()
    instantiate: tuple[ModelName, ...] = ()
    worker_info: WorkerInformation = field(default_factory=WorkerInformation)


@dataclass(frozen=True, kw_only=True)
class GenerationServer:
    """A process that serves generation requests."""

    base_seed: int = 1
    backend_type: str = "embedded"
    backend_args: Mapping[str, Any] = field(default_factory=dict)
    model_path: str = ""
    tp_size: int = 1
    worker_info: WorkerInformation = field(default_factory=WorkerInformation)


SCHEDULE_POLICIES = ("round_robin", "least_requests", "least_tokens", "sticky")
UPDATE_MODES = ("all_at_once", "rolling")


@dataclass(frozen=True, kw_only=True)
class GserverManager:
    """The process that routes rollouts to generation servers and brings new weights to them.

    Attributes:
        max_head_offpolicyness, train_batch_size, max_concurrent_rollouts: of the run, for who reads the
            plan: what may be made is the master's to say (``RolloutControl``).
        schedule_policy: one of ``SCHEDULE_POLICIES``; ``sticky`` keeps a group on one server.
        flush_request_timeout: seconds that one server may take for new weights.
        update_mode: one of ``UPDATE_MODES``; ``rolling`` updates ``update_share`` of them at a time,
            which take no new requests meanwhile.
        server_limit: most requests that one server gets at a time; 0: twice what it runs at a time.
        routes: rollout worker → the servers that it may use; those without an entry may use all.
        sick_after: requests that break in a row before a server is left out.
        check_every_s: seconds between two health checks of a server.
    """

    model_name: ModelName
    n_servers: int
    schedule_policy: str = option(
        "round_robin", "how a server is chosen", choices=SCHEDULE_POLICIES
    )
    max_head_offpolicyness: int = 0
    train_batch_size: int = 1
    flush_request_timeout: float = option(120.0, "for new weights", unit="seconds", gt=0)
    max_concurrent_rollouts: int = 1
    update_mode: str = option("all_at_once", "which servers at a time", choices=UPDATE_MODES)
    update_share: float = option(0.25, "of the servers at a time", gt=0, le=1)
    server_limit: int = option(0, "requests of one server", ge=0)
    routes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    sick_after: int = option(3, "requests that break in a row", ge=1)
    check_every_s: float = option(5.0, "between two checks", unit="seconds", gt=0)
    worker_info: WorkerInformation = field(default_factory=WorkerInformation)

    def __post_init__(self) -> None:
        for problem in range_problems(self, path="gserver_manager."):
            raise problem


@dataclass(frozen=True, kw_only=True)
class RolloutWorker:
    """A process that runs agents in environments.

    Attributes:
        tokenizer_path: Hugging Face directory of the policy: tokenizer and tokens that end an answer.
        new_tokens_per_chunk: most new tokens of one request; None: one request an answer.
        rollout_request_timeout: seconds for one answer, all its requests and retries included; one
            request gets half of what is left, so that another server can be tried.
        env, agent: registered names, made with ``env_args`` and ``agent_args``.
        gconfig: of each answer; ``n`` is ``group_size``.
        max_concurrent_rollouts: prompts that are worked on at a time.
        success_rate_lb, success_rate_ub: a group whose mean reward is outside is not trained on (0.01 and
            0.99 leave out what is all wrong or all right); None: no bound.
        dump_texts: groups for each version of the weights whose texts are written to ``rollouts``.
        dump: keep the tensors of all that was delivered, for a replay.
    """

    base_seed: int = 1
    model_name: ModelName = ModelName("actor")
    tokenizer_path: str = ""
    new_tokens_per_chunk: int | None = option(None, "most new tokens a request", ge=1)
    rollout_request_timeout: float = option(300.0, "for one answer", unit="seconds", gt=0)
    env: str = ""
    env_args: Mapping[str, Any] = field(default_factory=dict)
    agent: str = ""
    agent_args: Mapping[str, Any] = field(default_factory=dict)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    group_size: int = option(1, "answers a prompt", ge=1)
    max_concurrent_rollouts: int = option(16, "prompts at a time", ge=1)
    success_rate_lb: float | None = None
    success_rate_ub: float | None = None
    dump_texts: int = option(2, "groups a version whose texts are kept", ge=0)
    dump: bool = False
    datasets: tuple[DatasetAbstraction, ...] = ()
    worker_info: WorkerInformation = field(default_factory=WorkerInformation)

    def __post_init__(self) -> None:
        for problem in range_problems(self, path="rollout_worker."):
            raise problem


@dataclass(frozen=True, kw_only=True)
class MakerRoute:
    """One maker of a detached run: its processes, where its experience goes, whose weights it takes.

    Attributes:
        rollout_workers, servers: indices of its own; it uses no other servers.
        holders: model workers that it sends experience to.
        sources: model workers that its servers take weights from.
        tickets: most prompts that each of its rollout workers takes in the whole run; None: any number.
    """

    name: str
    rollout_workers: tuple[int, ...]
    servers: tuple[int, ...]
    holders: tuple[int, ...]
    sources: tuple[int, ...]
    tickets: int | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutControl:
    """How the master lets rollout workers make experience, and how old it may be when it is trained on.

    Attributes:
        model_name: whose weights the generation servers have.
        max_staleness: most steps between the weights of a sample's oldest token and those it trains.
        policy: ``wait``: batches in the order of the data; ``window``: what is finished first, but
            nothing so that something else gets too old; ``drop``: what is finished first, and what got
            too old is made again.
        max_in_flight: most prompts given out at a time; None: as many as the staleness allows.
        weights_through: ``stream`` (from process to process) or ``disk``.
        wire_dtype: in which streamed weights travel; empty: as they are held.
        delta: stream what changed since the version before, where that is little.
        update_steps: the servers get every so-many-th version.
        makers: of a detached run; none: every rollout worker uses every server.
        buffer_limit: most prompts that wait for one model worker, those in the making among them.
        trains: False: nothing does; the servers keep the weights that they start with, and no answer is
            too old.
    """

    model_name: ModelName = ModelName("actor")
    max_staleness: int = 0
    policy: str = "wait"
    max_in_flight: int | None = None
    weights_through: str = "stream"
    wire_dtype: str = ""
    delta: bool = False
    update_steps: int = 1
    makers: tuple[MakerRoute, ...] = ()
    buffer_limit: int | None = None
    trains: bool = True


@dataclass(frozen=True, kw_only=True)
class MasterWorker:
    """The process that walks the dataflow graph."""

    base_seed: int = 1
    exp_ctrl: ExperimentSaveEvalControl = field(default_factory=ExperimentSaveEvalControl)
    n_model_workers: int = 1
    shuffle_dataset: bool = True
    max_staleness: int = 0
    rollout: RolloutControl | None = None
    replay: str | None = None
    # resolved
    model_rpcs: tuple[MFCDef, ...] = ()
    model_topos: tuple[tuple[ModelName, ProcessTopology], ...] = ()
    msid2mwid: tuple[tuple[ModelShardID, int], ...] = ()
    data_transfer_pairs: tuple[tuple[ModelName, ModelName], ...] = ()
    sync_param_pairs: tuple[tuple[ModelName, ModelName], ...] = ()
    worker_info: WorkerInformation = field(default_factory=WorkerInformation)


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """A process that evaluates the saved checkpoints of one role beside the training, one by one.

    Attributes:
        base_seed: of the data sets, and of answers that are sampled.
        role: whose checkpoints; one that is trained.
        dtype: torch's name of the type that weights are loaded in.
        datasets: held-out questions by name; of several, the name stands before each figure.
        reward: registered rule; an answer that it scores above 0.5 is right.
        gconfig: of the answers; accuracy is that of greedy ones.
        n: answers a question for pass@1 … pass@n, sampled as ``gconfig`` says; 1: none.
        max_tries: of a checkpoint; then it is noted as failed, and the run goes on.
    """

    base_seed: int = 1
    role: str = "actor"
    dtype: str = "float32"
    datasets: Mapping[str, DatasetAbstraction] = field(default_factory=dict)
    reward: str = "math_verify"
    gconfig: GenerationHyperparameters = field(
        default_factory=lambda: GenerationHyperparameters(greedy=True)
    )
    n: int = option(1, "answers a question for pass@k", ge=1)
    batch_size: int = option(128, "questions at a time", ge=1)
    num_threads: int | None = None
    poll_s: float = option(2.0, "between two looks for a checkpoint", unit="seconds", gt=0)
    max_tries: int = option(3, "of a checkpoint", ge=1)
    retry_s: float = option(30.0, "before it is tried again", unit="seconds", ge=0)
    worker_info: WorkerInformation = field(default_factory=WorkerInformation)

    def __post_init__(self) -> None:
        for problem in range_problems(self, path="evaluator."):
            raise problem


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What follows from an experiment's parts. See ``ExperimentConfig.lazy_init``."""

    model_topos: tuple[tuple[ModelName, ProcessTopology], ...]
    msid2mwid: tuple[tuple[ModelShardID, int], ...]
    data_transfer_pairs: tuple[tuple[ModelName, ModelName], ...]
    sync_param_pairs: tuple[tuple[ModelName, ModelName], ...]
    instantiate: tuple[ModelName, ...]


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """What every worker of an experiment does.

    ``dataset_keys`` are the tensors that the data set gives each datapoint; ``main_roles`` are saved
    as Hugging Face folders, the first of them is the run's product. ``max_staleness`` is how many
    steps generation may run ahead of the update; ``pools`` are named groups of model workers, for
    those who read a plan; ``weights_through`` is ``memory`` or ``disk``: how copies are filled.
    With ``rollout`` the datapoints come from rollout workers, not from a data set on model workers.
    ``replay`` is the ledger of an earlier run: each step trains on the datapoints of that run's step.
    """

    exp_ctrl: ExperimentSaveEvalControl
    model_rpcs: tuple[MFCDef, ...]
    model_worker: tuple[ModelWorker, ...]
    dataset_keys: tuple[str, ...] = ("packed_prompts",)
    generation_server: tuple[GenerationServer, ...] = ()
    gserver_manager: tuple[GserverManager, ...] = ()
    rollout_worker: tuple[RolloutWorker, ...] = ()
    master_worker: tuple[MasterWorker, ...] = ()
    wandb: WandbOptions = field(default_factory=WandbOptions)
    tensorboard: bool = True
    evaluator: tuple[Evaluator, ...] = ()
    max_staleness: int = 0
    weights_through: str = "memory"
    rollout: RolloutControl | None = None
    replay: str | None = None
    pools: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    resolved: Resolution | None = None

    def graph(self) -> DataflowGraph:
        """The checked dataflow graph."""
        return build_graph(self.model_rpcs, dataset_keys=self.dataset_keys)

    def lazy_init(self) -> ExperimentConfig:
        """The same with one master worker and ``resolved`` filled in.

        Raises:
            ConfigErrors: every inconsistency, each with the worker, model or call that causes it.
        """
        problems: list[ConfigError] = []
        try:
            self.graph()
        except ConfigErrors as errors:
            problems.extend(errors.problems)
        except ConfigError as error:
            problems.append(error)
        if not self.model_worker:
            problems.append(
                ConfigError("no model workers", where="ExperimentConfig", fix="add at least one")
            )
        topos = _collect_topologies(self.model_worker, problems)
        _check_replicas(topos, problems)
        trained = _trained_replicas(self.model_rpcs, problems)
        _check_calls(self.model_rpcs, topos, problems)
        sync_pairs = _sync_param_pairs(self.model_rpcs, topos, problems)
        _check_weights(self.model_rpcs, topos, trained, problems)
        _check_rollout(self, trained, problems)
        _check_evaluator(self, trained, problems)
        if problems:
            raise problems[0] if len(problems) == 1 else ConfigErrors(problems)
        resolved = Resolution(
            model_topos=tuple(topos.items()),
            msid2mwid=tuple(
                (shard.id, i) for i, w in enumerate(self.model_worker) for shard in w.shards
            ),
            data_transfer_pairs=_data_transfer_pairs(self.graph()),
            sync_param_pairs=sync_pairs,
            instantiate=tuple(n for n in topos if trained.get(n.role, n) == n),
        )
        first = self.model_worker[0]
        master = MasterWorker(
            base_seed=first.base_seed,
            exp_ctrl=self.exp_ctrl,
            n_model_workers=len(self.model_worker),
            shuffle_dataset=first.shuffle_dataset,
            max_staleness=self.max_staleness,
            rollout=self.rollout,
            replay=self.replay,
        )
        return replace(self, master_worker=(master,), resolved=resolved)

    def workers(self, kind: WorkerType) -> tuple[Any, ...]:
        """The configured workers of a kind."""
        return getattr(self, kind.value)  # type: ignore[no-any-return]

    def set_worker_information(self, experiment_name: str, trial_name: str) -> ExperimentConfig:
        """The same with every worker told who and where it is.

        Workers watch the master's key, but for those that work on when it has left.
        """
        changed: dict[str, Any] = {}
        for kind in WorkerType:
            workers = self.workers(kind)
            alone = kind is WorkerType.MASTER_WORKER or kind in DISPENSABLE
            watch = () if alone else ("worker/master_worker/0",)
            changed[kind.value] = tuple(
                replace(
                    w,
                    worker_info=w.worker_info.system_setup(
                        experiment_name=experiment_name,
                        trial_name=trial_name,
                        worker_type=kind,
                        worker_index=i,
                        worker_count=len(workers),
                        watch_keys=watch,
                    ),
                )
                for i, w in enumerate(workers)
            )
        return replace(self, **changed)

    def resolve_worker_config(
        self, kind: WorkerType | str, index: int, *, like: int | None = None
    ) -> Any:
        """One worker's configuration with the resolved fields filled in.

        Args:
            like: for a worker that was added to the run: whose configuration it has.
        Raises:
            ConfigError: there is no such worker, or the configuration was not resolved.
        """
        try:
            kind = WorkerType(kind)
        except ValueError:
            raise ConfigError(
                f"no kind of worker called {kind!r}",
                where="resolve_worker_config",
                fix=did_you_mean(kind, [k.value for k in WorkerType]),
            ) from None
        workers = self.workers(kind)
        if self.resolved is None:
            raise ConfigError(
                "the experiment is not resolved", where="resolve_worker_config", fix="lazy_init()"
            )
        place = index if like is None else like
        if not 0 <= place < len(workers) or (like is not None and kind not in SCALED):
            raise ConfigError(
                f"no {kind.value}/{place}; there are {len(workers)}"
                + ("" if like is None else f", and {kind.value}/{index} can't be added like it"),
                where="resolve_worker_config",
                fix="use an index below that",
            )
        worker = workers[place]
        if like is not None:
            info = replace(
                worker.worker_info, worker_index=index, host_key=f"worker/{kind.value}/{index}"
            )
            return replace(worker, worker_info=info)
        if not isinstance(worker, ModelWorker | MasterWorker):
            return worker
        shared: dict[str, Any] = {
            "model_rpcs": self.model_rpcs,
            "model_topos": self.resolved.model_topos,
            "msid2mwid": self.resolved.msid2mwid,
            "data_transfer_pairs": self.resolved.data_transfer_pairs,
            "sync_param_pairs": self.resolved.sync_param_pairs,
        }
        if isinstance(worker, ModelWorker):
            shared["instantiate"] = self.resolved.instantiate
        return replace(worker, **shared)


def _collect_topologies(
    workers: Iterable[ModelWorker], problems: list[ConfigError]
) -> dict[ModelName, ProcessTopology]:
    """Topology of each model; its shards' ranks must be exactly 0 … world size − 1."""
    topos: dict[ModelName, ProcessTopology] = {}
    ranks: dict[ModelName, list[int]] = {}
    for i, worker in enumerate(workers):
        here = [s.id.model_name for s in worker.shards]
        for name in sorted({n for n in here if here.count(n) > 1}):
            problems.append(
                ConfigError(
                    f"two shards of {name} on one worker",
                    where=f"model_worker/{i}",
                    fix="place each shard of a model on a worker of its own",
                )
            )
        for shard in worker.shards:
            name = shard.id.model_name
            known = topos.setdefault(name, shard.id.topo)
            if known != shard.id.topo:
                problems.append(
                    ConfigError(
                        f"shards of {name} disagree on the topology: {known} and {shard.id.topo}",
                        where=f"model_worker/{i}",
                        fix="use one topology for a model name, or another replica id",
                    )
                )
            ranks.setdefault(name, []).append(shard.id.parallelism_rank)
    for name, found in ranks.items():
        expected = list(range(topos[name].world_size))
        if sorted(found) != expected:
            problems.append(
                ConfigError(
                    f"parallelism ranks of {name} are {sorted(found)}, "
                    f"its topology {topos[name]} needs exactly {expected}",
                    where=f"shards of {name}",
                    fix="give each rank to one worker",
                )
            )
    return topos


def _check_replicas(topos: Iterable[ModelName], problems: list[ConfigError]) -> None:
    by_role: dict[str, list[int]] = {}
    for name in topos:
        by_role.setdefault(name.role, []).append(name.replica_id)
    for role, ids in by_role.items():
        if sorted(ids) != list(range(len(ids))):
            problems.append(
                ConfigError(
                    f"replica ids of role {role!r} are {sorted(ids)}",
                    where=f"model names of role {role!r}",
                    fix=f"number its replicas 0 … {len(ids) - 1}",
                )
            )


def _trained_replicas(rpcs: Iterable[MFCDef], problems: list[ConfigError]) -> dict[str, ModelName]:
    trained: dict[str, MFCDef] = {}
    for rpc in rpcs:
        if not rpc.is_train:
            continue
        other = trained.setdefault(rpc.role, rpc)
        if other is not rpc:
            problems.append(
                ConfigError(
                    f"role {rpc.role!r} has two train steps: {other.name} and {rpc.name}",
                    where="model_rpcs",
                    fix="train a role in one call, or use two roles",
                )
            )
    return {role: rpc.model_name for role, rpc in trained.items()}


def _check_calls(
    rpcs: Iterable[MFCDef],
    topos: Mapping[ModelName, ProcessTopology],
    problems: list[ConfigError],
) -> None:
    for rpc in rpcs:
        if rpc.model_name not in topos:
            problems.append(
                ConfigError(
                    f"call {rpc.name} runs on {rpc.model_name}, which no worker holds",
                    where=f"MFC {rpc.name!r}, model_name",
                    fix=did_you_mean(str(rpc.model_name), [str(n) for n in topos]),
                )
            )
            continue
        data = topos[rpc.model_name].data
        if rpc.n_seqs < data * rpc.min_n_seqs_per_pass:
            problems.append(
                ConfigError(
                    f"{rpc.n_seqs} datapoints a call are too few for {data} data-parallel ranks "
                    f"of at least {rpc.min_n_seqs_per_pass}",
                    where=f"MFC {rpc.name!r}, n_seqs",
                    fix=f"use {data * rpc.min_n_seqs_per_pass} or more, or fewer ranks",
                )
            )


def _check_weights(
    rpcs: Iterable[MFCDef],
    topos: Mapping[ModelName, ProcessTopology],
    trained: Mapping[str, ModelName],
    problems: list[ConfigError],
) -> None:
    """A replica beside the trained one is not instantiated: it needs weights from a hook."""
    rpcs = tuple(rpcs)
    filled = {hook.target or rpc.model_name for rpc, hook in _realloc_hooks(rpcs)}
    for rpc in rpcs:
        name = rpc.model_name
        if name in topos and trained.get(name.role, name) != name and name not in filled:
            problems.append(
                ConfigError(
                    f"{name} never gets weights: {trained[name.role]} is trained, no hook fills it",
                    where=f"MFC {rpc.name!r}, model_name",
                    fix=f"run it on {trained[name.role]}, or add ParamReallocHook(source=…)",
                )
            )


def _check_rollout(
    config: ExperimentConfig, trained: Mapping[str, ModelName], problems: list[ConfigError]
) -> None:
    """Servers, their manager and rollout workers come together, and what they serve is trained, or none."""
    parts = {
        "generation_server": len(config.generation_server),
        "gserver_manager": len(config.gserver_manager),
        "rollout_worker": len(config.rollout_worker),
    }
    if config.rollout is None:
        for kind, count in parts.items():
            if count:
                problems.append(
                    ConfigError(
                        f"{count} {kind} workers, and nobody gives them work",
                        where=f"initial_setup().{kind}",
                        fix="set rollout=RolloutControl(…)",
                    )
                )
        return
    for kind, count in parts.items():
        if not count or (kind == "gserver_manager" and count != 1):
            problems.append(
                ConfigError(
                    f"rollouts need {'one' if kind == 'gserver_manager' else 'at least one'} {kind}, "
                    f"there are {count}",
                    where=f"initial_setup().{kind}",
                    fix="add them, or leave out rollout",
                )
            )
    name = config.rollout.model_name
    if config.rollout.trains and trained.get(name.role) != name:
        problems.append(
            ConfigError(
                f"the servers have the weights of {name}, which nothing trains",
                where="initial_setup().rollout.model_name",
                fix=did_you_mean(str(name), [str(n) for n in trained.values()]),
            )
        )


def _check_evaluator(
    config: ExperimentConfig, trained: Mapping[str, ModelName], problems: list[ConfigError]
) -> None:
    """At most one, for a role that is saved, with something to ask."""
    if len(config.evaluator) > 1:
        problems.append(
            ConfigError(
                f"{len(config.evaluator)} evaluators would write the same files",
                where="initial_setup().evaluator",
                fix="use one; it takes the checkpoints one by one",
            )
        )
    for i, evaluator in enumerate(config.evaluator):
        where = f"initial_setup().evaluator[{i}]"
        if evaluator.role not in trained:
            problems.append(
                ConfigError(
                    f"nothing trains {evaluator.role!r}: it has no checkpoints to evaluate",
                    where=f"{where}.role",
                    fix=did_you_mean(evaluator.role, list(trained)),
                )
            )
        if not evaluator.datasets:
            problems.append(
                ConfigError(
                    "no questions to evaluate with",
                    where=f"{where}.datasets",
                    fix="name a data set, or leave out the evaluator",
                )
            )


def _sync_param_pairs(
    rpcs: Iterable[MFCDef],
    topos: Mapping[ModelName, ProcessTopology],
    problems: list[ConfigError],
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


def _data_transfer_pairs(graph: DataflowGraph) -> tuple[tuple[ModelName, ModelName], ...]:
    """Model → model for every edge, and from the first source call's model to the other sources'."""
    pairs = [(graph[a].model_name, graph[b].model_name) for a, b, _ in graph.edges()]
    first, *others = graph.sources
    pairs += [(first.model_name, other.model_name) for other in others]
    return tuple(dict.fromkeys(pairs))


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """An experiment that has to run first, once: its product is cached by content.

    Attributes:
        name: what the user sees as the phase's name.
        experiment_name: name in the registry.
        experiment: its options.
    """

    name: str
    experiment_name: str
    experiment: Experiment


class Experiment(abc.ABC):
    """A user's experiment: a frozen dataclass of options with these two answers."""

    @abc.abstractmethod
    def scheduling_setup(self) -> ExperimentScheduling:
        """Which tasks, with which resources."""

    @abc.abstractmethod
    def initial_setup(self) -> ExperimentConfig:
        """What the tasks do."""

    def problems(self) -> Iterator[ConfigError]:
        """Mistakes that only this experiment can see, checked before anything starts. No torch."""
        yield from ()

    def input_files(self) -> tuple[str, ...]:
        """Files whose content the product depends on: part of a preparation's cache key."""
        return ()

    def preparations(self) -> tuple[Preparation, ...]:
        """Experiments whose product this one starts from."""
        return ()

    def with_prepared(self, name: str, path: str) -> Experiment:
        """The same, starting from the product of preparation ``name`` at ``path``."""
        raise NotImplementedError(f"{type(self).__name__} has no preparation {name!r}")
