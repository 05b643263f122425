"""Experiments, and the resolution of a complete configuration from its parts.

A user's ``Experiment`` (a frozen dataclass of options) defines which tasks run (``scheduling_setup``)
and what they do (``initial_setup``: a configuration for each worker, worker_configs.py).
``ExperimentConfig.lazy_init`` then checks the complete configuration (experiment_checks.py), names the
worker, model or call behind every mistake, and fills in what follows from the parts: graph, topologies,
the worker of each shard, which data and weights move between which models. Pure: values in, values out.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from realsys.api.basics.option_fields import option
from realsys.api.dataflow import DataflowGraph, MFCDef, build_graph
from realsys.api.errors import ConfigError, Problems, collected, did_you_mean, raise_all
from realsys.api.experiment_checks import (
    check_calls,
    check_evaluator,
    check_replicas,
    check_rollout,
    check_weights,
    collect_topologies,
    data_transfer_pairs,
    sync_param_pairs,
    trained_replicas,
)
from realsys.api.model import ModelName, ModelShardID, ProcessTopology
from realsys.api.options import WandbOptions
from realsys.api.scheduling import (
    OPTIONAL,
    SCALED,
    ExperimentScheduling,
    SchedulingOptions,
    WorkerType,
)
from realsys.api.worker_configs import (
    CurriculumControl,
    DynamicSamplingControl,
    Evaluator,
    ExperimentSaveEvalControl,
    GenerationServer,
    GserverManager,
    MasterWorker,
    ModelWorker,
    RewardWorker,
    RolloutControl,
    RolloutWorker,
)


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """Values derived from an experiment's parts, see ``ExperimentConfig.lazy_init``."""

    model_topos: tuple[tuple[ModelName, ProcessTopology], ...]
    data_transfer_pairs: tuple[tuple[ModelName, ModelName], ...]
    sync_param_pairs: tuple[tuple[ModelName, ModelName], ...]
    instantiate: tuple[ModelName, ...]


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Configuration of every worker of an experiment.

    ``dataset_keys`` are the tensors that the data set gives each datapoint; ``main_roles`` are saved
    as Hugging Face folders, the first of them is the run's product. ``max_staleness`` is how many
    steps generation may run ahead of the update; ``pools`` are named groups of model workers, for
    those who read a plan; ``weights_through`` is ``memory`` or ``disk``: how copies are filled.
    With ``rollout`` the datapoints come from rollout workers, not from a data set on model workers.
    ``replay`` is the ledger of an earlier run: each step trains on the datapoints of that run's step.
    ``deterministic``: equal runs give equal bits, on a GPU too; None: on the CPU they do.
    ``curriculum``: how often the data set's sources come, by their success; None: as the data set has them.
    ``dynamic_sampling``: which questions of a synchronous run are trained on; None: all.
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
    reward_worker: tuple[RewardWorker, ...] = ()
    max_staleness: int = 0
    weights_through: str = "memory"
    rollout: RolloutControl | None = None
    replay: str | None = None
    deterministic: bool | None = None
    curriculum: CurriculumControl | None = None
    dynamic_sampling: DynamicSamplingControl | None = None
    pools: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    resolved: Resolution | None = None

    def graph(self) -> DataflowGraph:
        """Builds the validated dataflow graph."""
        return build_graph(self.model_rpcs, dataset_keys=self.dataset_keys)

    def lazy_init(self) -> ExperimentConfig:
        """Returns the configuration with one master worker and ``resolved`` filled in.

        Raises:
            ConfigErrors: every inconsistency, each with the worker, model or call that causes it.
        """
        problems = Problems()
        with collected(problems):
            self.graph()
        if not self.model_worker:
            problems.add("no model workers", where="ExperimentConfig", fix="add at least one")
        topos = collect_topologies(self.model_worker, problems)
        check_replicas(topos, problems)
        trained = trained_replicas(self.model_rpcs, problems)
        check_calls(self.model_rpcs, topos, problems)
        sync_pairs = sync_param_pairs(self.model_rpcs, topos, problems)
        check_weights(self.model_rpcs, topos, trained, problems)
        check_rollout(self, trained, problems)
        check_evaluator(self, trained, problems)
        raise_all(problems)
        resolved = Resolution(
            model_topos=tuple(topos.items()),
            data_transfer_pairs=data_transfer_pairs(self.graph()),
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
            curriculum=self.curriculum,
            dynamic_sampling=self.dynamic_sampling,
        )
        return replace(self, master_worker=(master,), resolved=resolved)

    def workers(self, kind: WorkerType) -> tuple[Any, ...]:
        """Configurations of the workers of a kind."""
        return getattr(self, kind.value)  # type: ignore[no-any-return]

    @property
    def msid2mwid(self) -> tuple[tuple[ModelShardID, int], ...]:
        """Which model worker holds a shard."""
        return tuple((shard.id, i) for i, w in enumerate(self.model_worker) for shard in w.shards)

    def set_worker_information(self, experiment_name: str, trial_name: str) -> ExperimentConfig:
        """Returns the configuration with every worker's name and place in the trial filled in.

        Workers watch the master's key, except those that keep working after the master has exited; reward
        workers also the keys of these, which they may score for.
        """
        changed: dict[str, Any] = {}
        for kind in WorkerType:
            workers = self.workers(kind)
            alone = kind is WorkerType.MASTER_WORKER or kind in OPTIONAL
            watch = [] if alone else ["worker/master_worker/0"]
            if kind is WorkerType.REWARD_WORKER and self.evaluator:
                watch.append("worker/evaluator/0")
            changed[kind.value] = tuple(
                replace(
                    w,
                    worker_info=replace(
                        w.worker_info,
                        experiment_name=experiment_name,
                        trial_name=trial_name,
                        worker_type=kind.value,
                        worker_index=i,
                        worker_count=len(workers),
                        host_key=f"worker/{kind.value}/{i}",
                        watch_keys=tuple(watch),
                    ),
                )
                for i, w in enumerate(workers)
            )
        return replace(self, **changed)

    def resolve_worker_config(
        self, kind: WorkerType | str, index: int, *, like: int | None = None
    ) -> Any:
        """Returns one worker's configuration with the resolved fields filled in.

        Args:
            like: for a worker that was added to a live run: index of the worker whose configuration
                it copies.
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
            "msid2mwid": self.msid2mwid,
        }
        if isinstance(worker, ModelWorker):
            shared["instantiate"] = self.resolved.instantiate
        return replace(worker, **shared)


@dataclass(frozen=True, kw_only=True)
class ChosenSetting:
    """A value that neither user nor recipe gave, chosen for the model at hand, and why; or what exactly a
    name on a hub stands for."""

    path: str
    value: Any
    why: str


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """An experiment that must run first, once; its product is cached by content.

    Attributes:
        name: the phase's name, as shown to the user.
        experiment_name: name in the registry.
        experiment: its options.
    """

    name: str
    experiment_name: str
    experiment: Experiment


@dataclass(frozen=True, kw_only=True)
class Experiment(abc.ABC):
    """Base class of a user's experiment: a frozen dataclass of options.

    The launcher applies ``scheduling`` to the tasks of ``scheduling_setup``.
    """

    scheduling: SchedulingOptions = option(SchedulingOptions(), "resources of the tasks")

    @abc.abstractmethod
    def scheduling_setup(self) -> ExperimentScheduling:
        """Returns the tasks and the resources of each."""

    @abc.abstractmethod
    def initial_setup(self) -> ExperimentConfig:
        """Returns the configuration of every worker."""

    def problems(self) -> Iterator[ConfigError]:
        """Yields mistakes that only this experiment can detect, before anything starts. No torch."""
        yield from ()

    def chosen(self, given: Collection[str]) -> tuple[ChosenSetting, ...]:
        """Values for settings that are not in ``given``, where a default suits this run better than the
        declared one. What can't be read is ``problems``' business.
        """
        return ()

    def remarks(self, given: Collection[str]) -> Iterator[str]:
        """Yields warnings that are no errors, such as defaults that the user should know about.

        Args:
            given: paths of the settings that the user set.
        """
        yield from ()

    def trusted_rules(self) -> tuple[str, ...]:
        """Names of reward rules that run in the workers' own process, without walls or limits."""
        return ()

    def input_files(self) -> tuple[str, ...]:
        """Files that the product depends on by content; part of a preparation's cache key."""
        return ()

    def preparations(self) -> tuple[Preparation, ...]:
        """Experiments whose products this one starts from."""
        return ()

    def prepared_by(self) -> tuple[Preparation, ...]:
        """``preparations`` with this experiment's ``scheduling``, over which their own wins."""
        return tuple(
            replace(
                p,
                experiment=replace(
                    p.experiment, scheduling=p.experiment.scheduling.on(self.scheduling)
                ),
            )
            for p in self.preparations()
        )

    def with_prepared(self, name: str, path: str) -> Experiment:
        """Returns the experiment set to start from the product of preparation ``name`` at ``path``."""
        raise NotImplementedError(f"{type(self).__name__} has no preparation {name!r}")
