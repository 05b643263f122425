"""Base of the reinforcement learning experiments on math questions: settings, checks, phases, placement.

A subclass defines the roles and the calls on them (``_all_roles``, ``_all_calls``). Without
``actor.path=``, ``sft-math`` first makes the starting policy (phase ``sft``), cached by content.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from experiments.parts.backend_args import (
    backend_of,
    compute_dtype,
    mb_spec_of,
    replica_backend_of,
)
from experiments.parts.evaluation import EvaluationOptions
from experiments.parts.idle_problems import idle_problems
from experiments.parts.layout_checks import (
    batch_problems,
    held_out_problems,
    layout_problems_of,
    reference_following_problems,
)
from experiments.parts.math_calls import (
    POLICY_KEYS,
    REFERENCE,
    policy_calls,
    rollout_end,
    to_reference,
)
from experiments.parts.math_files import (
    absolute,
    dataset_args,
    dataset_problems,
    model_problems,
    position_problems,
    position_remarks,
    sampled_remarks,
    start_problems,
    toy_remarks,
)
from experiments.parts.modes import ABOUT_TRAINING, MODES, Mode, mode_problems
from experiments.parts.placement import (
    Allocated,
    Copies,
    PlacementSettings,
    RolePlacement,
    allocate,
    place_models,
    with_copies,
)
from experiments.parts.replayed import replay_problems, replayed_ledger, replayed_rollouts
from experiments.parts.rollout_parts import MADE_BY_ROLLOUTS, ROLLOUT_KEYS, RolloutOptions
from experiments.parts.sft_math import SFTMathExperiment, math_scheduling
from experiments.parts.worker_resources import cpus_of_worker, mem_of_worker
from realsys.api import registry
from realsys.api.data import MicroBatchSpec
from realsys.api.dataflow import MFCDef
from realsys.api.errors import ConfigError
from realsys.api.experiment import Experiment, ExperimentConfig, Preparation
from realsys.api.model import (
    DatasetAbstraction,
    GenerationHyperparameters,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
)
from realsys.api.options import (
    LARGEST_SEED,
    MOST_WORKERS,
    MathDatasetOptions,
    ModelOptions,
    OptimizerOptions,
    PPOHyperparameters,
    WandbOptions,
    option,
    ppo_problems,
)
from realsys.api.plain import to_plain
from realsys.api.scheduling import ExperimentScheduling
from realsys.api.worker_configs import Evaluator, ExperimentSaveEvalControl
from realsys.planner.memory.copy_memory import Terms
from realsys.planner.memory.server_memory import ServerMemory, memory_of_evaluator, memory_of_server

PPO = PPOHyperparameters(
    gen=GenerationHyperparameters(max_new_tokens=16),
    kl_ctl=0.01,
    gae_lambda=0.95,
    entropy_coef=0.01,
)
# The policy of the last steps is the product: without a decay it swings by several points of accuracy.
OPTIMIZER: dict[str, Any] = {
    "weight_decay": 0.0,
    "lr_schedule": "linear",
    "warmup_steps_proportion": 0.05,
}
# Settings needed for answers sampled with older weights.
DECOUPLED: dict[str, Any] = {"use_decoupled_loss": True, "correction": "cap"}
RULES = ("reward",)  # roles without weights


@dataclass(frozen=True, kw_only=True)
class MathRLExperiment(Experiment):
    """Settings and phases; see the module."""

    seed: int = option(1, "of data order, sampling and everything drawn", ge=0, le=LARGEST_SEED)
    exp_ctrl: ExperimentSaveEvalControl = option(
        ExperimentSaveEvalControl(eval_freq_steps=10),
        "how long to train, when to save and evaluate",
    )
    actor: ModelOptions = option(
        ModelOptions(optimizer=OptimizerOptions(lr=3e-4, **OPTIMIZER)),
        "the policy; its path starts all roles",
    )
    ref: ModelOptions = option(
        ModelOptions(backend="inference"), "the frozen reference; without a path, the actor's start"
    )
    dataset: MathDatasetOptions = option(MathDatasetOptions(train_size=100 * 64), "the questions")
    group_size: int = option(4, "answers a question", ge=1)
    reward: str = option("math_verify", "registered rule that scores an answer")
    ppo: PPOHyperparameters = option(PPO, "the algorithm")
    sft: SFTMathExperiment = option(
        SFTMathExperiment(), "the run that makes the starting policy when actor.path is none"
    )
    placement: str = option(
        "shared",
        "shared: roles share the model workers; split: actor and reference on the first half, the "
        "others on the second",
        choices=("shared", "split"),
    )
    pools: Mapping[str, str] = option(
        {}, "named groups of model workers: how many (4, in the order listed), or which (0-3)"
    )
    allocation: str | None = option(
        None, "layout and pool of calls: actor_gen:d4t1p1@left,*:d2t2p1; none: the roles' own"
    )
    n_model_workers: int | None = option(
        None, "model workers, each with one GPU; none: as many as are needed", ge=1, le=MOST_WORKERS
    )
    mode: str = option(
        "sync",
        "sync: model workers sample, then train; one_step_off: they sample a step ahead; async: "
        "generation servers sample all the time; rollout: they do, and nothing trains",
        choices=tuple(MODES),
    )
    max_staleness: int | None = option(
        None,
        "most updates between the weights that sampled an answer and those that it trains; none: 0, with "
        "one_step_off 1, with async 1",
        unit="steps",
        ge=0,
    )
    rollout: RolloutOptions = option(
        RolloutOptions(), "servers and rollout workers of modes async and rollout"
    )
    replay_from: str | None = option(
        None,
        "main phase's folder of an asynchronous trial: train on what it trained on, in its order, without "
        "servers (realsys replay)",
    )
    auto_eval: bool = option(
        False, "evaluate every saved checkpoint of the actor beside the training (evaluator.*)"
    )
    evaluator: EvaluationOptions = option(EvaluationOptions(), "how, with which resources")
    weights_through: str = option(
        "memory",
        "how copies of a model get their weights: in memory, from process to process; or through "
        "files in the trial's folder",
        choices=("memory", "disk"),
    )
    ref_ema_eta: float | None = option(
        None,
        "after each update the reference moves so far towards the actor; none: it is frozen",
        gt=0,
        le=1,
    )
    cpus_per_model_worker: int | None = option(
        None, "cores and compute threads of a model worker; none: 2, with GPUs 6", ge=1
    )
    gpus_per_model_worker: float = option(0.0, "GPUs of a model worker", ge=0)
    mem_per_model_worker: int | None = option(
        None,
        "memory of a model worker; none: 8192, with GPUs what its models need beside them",
        unit="MiB",
        ge=1,
    )
    deterministic: bool | None = option(
        None,
        "equal runs give equal bits, on GPUs too, where they are slower then; none: on CPUs only",
    )
    tensorboard: bool = option(True, "write TensorBoard files")
    wandb: WandbOptions = option(WandbOptions(), "Weights & Biases")

    # ---- defined by subclasses ----------------------------------------------------------------

    @property
    @abc.abstractmethod
    def _all_roles(self) -> tuple[str, ...]:
        """All roles, in the order in which a worker lists them."""

    @property
    @abc.abstractmethod
    def _right_roles(self) -> tuple[str, ...]:
        """Roles on the second half of the workers under ``placement=split``."""

    @abc.abstractmethod
    def _all_calls(self) -> tuple[MFCDef, ...]:
        """Builds the calls of a synchronous run, all on copy 0 of their roles."""

    # ---- called by the launcher -------------------------------------------------------------

    def problems(self) -> Iterator[ConfigError]:
        """Yields unreadable files, unknown names, and batches and models that do not divide."""
        for role in self._model_roles:
            yield from model_problems(
                getattr(self, role), role, critic=role == "critic", generates=role == "actor"
            )
        yield from dataset_problems(self.dataset, tokenizer_dir=self.actor.path)
        if problem := registry.check("reward", self.reward, where="reward"):
            yield problem
        yield from start_problems(self.actor, self.sft.model, self.dataset)
        yield from position_problems(self.actor.path, answers=self.ppo.gen.max_new_tokens)
        if self.ppo.use_adaptive_kl_ctl and self.ppo.kl_ctl == 0:
            yield ConfigError(
                "an adaptive KL controller can't start from 0, because it multiplies the coefficient",
                where="ppo.use_adaptive_kl_ctl and ppo.kl_ctl",
                fix="give ppo.kl_ctl a starting value, e.g. 0.01",
            )
        if self.ref_ema_eta is not None and not self.ppo.needs_ref_logprobs:
            yield ConfigError(
                "ppo.kl_ctl is 0, so there is no reference that could follow the actor",
                where="ref_ema_eta and ppo.kl_ctl",
                fix="give ppo.kl_ctl a value above 0, e.g. 0.01, or leave ref_ema_eta out",
            )
        yield from ppo_problems(self.ppo)
        yield from idle_problems(self.ppo, self.ref, follows=self.ref_ema_eta is not None)
        yield from self._mode_problems()
        if self.auto_eval:
            yield from self.evaluator.problems(self.exp_ctrl, eval_size=self.dataset.eval_size)
        start, built_in = self.actor.path or self.sft.model.path, self.sft.init.shape()
        if self.ref_ema_eta is not None and "ref" in self._roles:
            yield from reference_following_problems(self.actor, self.ref, start, built_in)
        yield from batch_problems(
            self._copies.calls,
            self._allocated.calls,
            n_seqs=self.dataset.train_bs_n_seqs,
            n_minibatches=self.ppo.ppo_n_minibatches,
            where="parallel or allocation" if self.allocation else "parallel",
        )
        if (evaluated := self._allocated.calls.get(self._sampled_by)) is not None:
            yield from held_out_problems(
                self.dataset.eval_size,
                evaluated.topology.data,
                where="allocation" if self.allocation else "actor.parallel",
            )
        yield from layout_problems_of(
            self._copies.places,
            {role: getattr(self, role) for role in self._model_roles},
            default_path=start,
            built_in=built_in,
        )

    def _mode_problems(self) -> Iterator[ConfigError]:
        settings = {name: getattr(self, name) for name in ABOUT_TRAINING}
        yield from mode_problems(self._mode, max_staleness=self.max_staleness, settings=settings)
        if self.replay_from is not None:
            yield from replay_problems(self.replay_from, is_async=self.is_async)
        if self.is_async:
            yield from self.rollout.problems()

    def remarks(self, given: Collection[str]) -> Iterator[str]:
        """Warns of toy defaults on a real model, and reports how many questions were counted."""
        values = {
            "actor.optimizer.lr": self.actor.optimizer.lr,
            "ppo.gen.max_new_tokens": self.ppo.gen.max_new_tokens,
            "dataset.eval_size": self.dataset.eval_size,
        }
        if not self.gpus_per_model_worker:  # else it follows from the model
            values["mem_per_model_worker"] = self._mem
        if "critic" in self._model_roles:
            critic: ModelOptions = getattr(self, "critic")  # noqa: B009 - a subclass has it
            values["critic.optimizer.lr"] = critic.optimizer.lr
        yield from toy_remarks(self.actor.path or self.sft.model.path, values, given)
        yield from sampled_remarks(self.dataset, self.actor.path)
        yield from position_remarks(
            self.actor.path,
            prompt=self.dataset.max_prompt_len,
            answers=self.ppo.gen.max_new_tokens,
        )
        yield from self._without_gpus()
        if self.actor.path is None:
            of_sft = [g.removeprefix("sft.") for g in given if g.startswith("sft.")]
            yield from (f"phase sft: {remark}" for remark in self.sft.remarks(of_sft))

    def _without_gpus(self) -> Iterator[str]:
        """Warns of servers and evaluators on CPUs while the model workers have GPUs."""
        if not self.gpus_per_model_worker:
            return
        if self.has_servers and not self.rollout.gpus_per_server:
            yield (
                "model workers have GPUs, but generation servers have none and compute on CPUs. Set "
                "rollout.gpus_per_server=1, or more for a model that does not fit one GPU"
            )
        if self.auto_eval and not self.evaluator.gpus:
            yield (
                "model workers have GPUs, but the evaluator has none and computes on CPUs. Set "
                "evaluator.gpus=1"
            )

    def preparations(self) -> tuple[Preparation, ...]:
        """Returns ``sft-math``, unless a starting policy is given."""
        if self.actor.path is not None:
            return ()
        return (Preparation(name="sft", experiment_name="sft-math", experiment=self.sft),)

    def with_prepared(self, name: str, path: str) -> Self:
        """Returns the experiment starting from the fine-tuned policy at ``path``."""
        return replace(self, actor=replace(self.actor, path=path))

    def with_gpus(self, per_model_worker: float) -> Self:
        """Sets ``gpus_per_model_worker``, on which dtype and host memory depend."""
        return replace(self, gpus_per_model_worker=per_model_worker)

    def scheduling_setup(self) -> ExperimentScheduling:
        """Schedules the tasks of all worker types."""
        return self._scheduling()

    def _scheduling(self) -> ExperimentScheduling:
        """Schedules one master, the model workers for pools and layouts, and the rollout workers' tasks."""
        base = math_scheduling(
            self._allocated.n_workers,
            cpu=self._cpus,
            gpu=self.gpus_per_model_worker,
            mem=self._mem,
        )
        if self.auto_eval:
            base = self.evaluator.scheduling(
                base, needs=lambda: self._host_needs(memory_of_evaluator)
            )
        if not self.has_servers:
            return base
        return self.rollout.scheduling(base, needs=lambda: self._host_needs(memory_of_server))

    def _host_needs(self, memory_of: Callable[..., ServerMemory | None]) -> Terms | None:
        found = memory_of(self.initial_setup(), made_before=self.sft.init.shape())
        return None if found is None else found.host

    @property
    def _cpus(self) -> int:
        return cpus_of_worker(self.cpus_per_model_worker, gpu=self.gpus_per_model_worker)

    @property
    def _mem(self) -> int:
        return mem_of_worker(
            self.mem_per_model_worker,
            gpu=self.gpus_per_model_worker,
            config=self.initial_setup,
            made_before=self.sft.init.shape(),
        )

    def initial_setup(self) -> ExperimentConfig:
        """Places roles on workers and calls on copies."""
        calls = self._copies.calls
        prompts = DatasetAbstraction(
            "math_prompts", {**dataset_args(self.dataset), "split": "train"}
        )
        return ExperimentConfig(
            exp_ctrl=self.exp_ctrl,
            model_rpcs=calls,
            dataset_keys=ROLLOUT_KEYS if self.is_async else ("packed_prompts",),
            model_worker=place_models(
                self._copies.places,
                {role: self._model(role) for role in self._roles},
                n_workers=self._allocated.n_workers,
                base_seed=self.seed,
                # The copy that samples also answers the held-out questions: it has unsharded weights.
                evaluated=[c.model_name for c in calls if c.name == self._sampled_by],
                datasets=() if self.has_servers else (self._fed_from(prompts),),
                tokenizer_name_or_path=absolute(self.actor.path),
                shuffle_dataset=self.dataset.shuffle,
                num_threads=self._cpus,
            ),
            wandb=self.wandb,
            tensorboard=self.tensorboard,
            max_staleness=0 if self.is_async else self.staleness,
            weights_through=self.weights_through,
            deterministic=self.deterministic,
            pools=self._allocated.pools,
            replay=replayed_ledger(self.replay_from),
            evaluator=self._evaluators(),
            **(self._rollout_fields(prompts) if self.has_servers else {}),
        )

    def _evaluators(self) -> tuple[Evaluator, ...]:
        if not (self.auto_eval and self.trains):
            return ()
        evaluator = self.evaluator.evaluator(
            seed=self.seed,
            role="actor",
            dtype=self._dtype("actor"),
            held_out=self._held_out,
            reward=self.reward,
            gen=self.ppo.gen,
            mb_spec=mb_spec_of(self.actor),
        )
        return (evaluator,)

    @property
    def _held_out(self) -> DatasetAbstraction:
        return DatasetAbstraction("math_prompts", {**dataset_args(self.dataset), "split": "test"})

    def _fed_from(self, prompts: DatasetAbstraction) -> DatasetAbstraction:
        if self.replay_from is None:
            return prompts
        return replayed_rollouts(self.replay_from, keys=ROLLOUT_KEYS)

    def _rollout_fields(self, prompts: DatasetAbstraction) -> dict[str, Any]:
        """Builds the rollout fields of an asynchronous run's configuration."""
        start = absolute(self.actor.path) or ""
        return {
            "rollout": self.rollout.control(self.staleness, trains=self.trains),
            "generation_server": self.rollout.generation_servers(
                seed=self.seed,
                model_path=start,
                dtype=self._dtype("actor"),
                longest=self.dataset.max_prompt_len + self.ppo.gen.max_new_tokens,
            ),
            "gserver_manager": (
                self.rollout.manager(
                    max_staleness=self.staleness, batch_size=self.dataset.train_bs_n_seqs
                ),
            ),
            "rollout_worker": self.rollout.rollout_workers(
                seed=self.seed,
                tokenizer_path=start,
                gen=self.ppo.gen,
                group_size=self.group_size,
                reward=self.reward,
                dataset=prompts,
                all_texts=not self.trains,
            ),
        }

    # ---- mode ---------------------------------------------------------------------------------

    @property
    def _mode(self) -> Mode:
        return MODES[self.mode]

    @property
    def is_async(self) -> bool:
        """Whether answers come from rollout workers, in this run or in the replayed one."""
        return self._mode.has_rollouts

    @property
    def trains(self) -> bool:
        """Whether a model is trained on the answers."""
        return self._mode.trains

    @property
    def has_servers(self) -> bool:
        """Whether generation servers sample."""
        return self.is_async and self.replay_from is None

    @property
    def staleness(self) -> int:
        """``max_staleness``, or the mode's default."""
        return self._mode.staleness if self.max_staleness is None else self.max_staleness

    @property
    def _sampled_by(self) -> str:
        """The call whose copy answers held-out questions."""
        return "actor_train" if self.is_async else "actor_gen"

    @property
    def _roles(self) -> tuple[str, ...]:
        if not self.trains:
            return RULES
        # In an asynchronous run the rollout workers compute the rewards.
        left_out = (*(RULES if self.is_async else ()), *self._idle_roles)
        return tuple(role for role in self._all_roles if role not in left_out)

    @property
    def _idle_roles(self) -> tuple[str, ...]:
        """Roles that the settings do not need."""
        return () if self.ppo.needs_ref_logprobs else ("ref",)

    def _calls(self) -> tuple[MFCDef, ...]:
        if not self.trains:
            return (rollout_end(self._call, ROLLOUT_KEYS),)
        made = MADE_BY_ROLLOUTS if self.is_async else ()
        return tuple(
            call
            for call in self._all_calls()
            if call.name not in made and call.role not in self._idle_roles
        )

    # ---- places -------------------------------------------------------------------------------

    @property
    def _model_roles(self) -> tuple[str, ...]:
        return tuple(role for role in self._roles if role not in RULES)

    @cached_property
    def _allocated(self) -> Allocated:
        calls = self._calls()
        models = {role: getattr(self, role) for role in self._model_roles}
        return allocate(
            [(call.name, call.role) for call in calls],
            PlacementSettings(
                placement=self.placement,
                pools=self.pools,
                allocation=self.allocation,
                n_model_workers=self.n_model_workers,
            ),
            roles={
                role: (self._layout(role), m.pool) if (m := models.get(role)) else (None, None)
                for role in self._roles
            },
            right_roles=self._right_roles,
            trained={call.role: call.name for call in calls if call.is_train},
            rules=RULES,
            n_seqs=self.dataset.train_bs_n_seqs,
        )

    def _layout(self, role: str) -> str | None:
        """Returns the role's parallel layout, as set."""
        given: str | None = getattr(self, role).parallel
        return given

    @cached_property
    def _copies(self) -> Copies:
        offload = [role for role in self._model_roles if getattr(self, role).offload]
        return with_copies(self._calls(), self._allocated.calls, offload=offload)

    # ---- roles and calls --------------------------------------------------------------------

    @property
    def _experience(self) -> tuple[str, ...]:
        """Keys that every update reads."""
        return (*POLICY_KEYS, *((REFERENCE,) if self.ppo.needs_ref_logprobs else ()))

    def _model(self, role: str) -> RolePlacement:
        if role in RULES:
            return RolePlacement(
                model=ModelAbstraction("tokenizer_only", {"path": absolute(self.actor.path)}),
                backend=ModelBackendAbstraction("inference"),
            )
        options: ModelOptions = getattr(self, role)
        kind = "hf_critic" if role == "critic" else "hf_causal_lm"
        evaluated = role == "actor" and self.dataset.eval_size > 0
        return RolePlacement(
            model=ModelAbstraction(
                kind,
                {"path": absolute(options.path or self.actor.path), "dtype": self._dtype(role)},
            ),
            backend=backend_of(options, trained=role != "ref"),
            replica_backend=replica_backend_of(options),
            eval_dataset=self._held_out if evaluated else None,
        )

    def _dtype(self, role: str) -> str:
        """Returns a role's compute dtype; policies of different dtypes would differ in their log-probs."""
        return compute_dtype(getattr(self, role), self.actor, gpus=self.gpus_per_model_worker)

    def _call(
        self, name: str, role: str, kind: str, interface: ModelInterfaceAbstraction, **more: Any
    ) -> MFCDef:
        """Builds a call on copy 0 of ``role``; ``more`` are further fields."""
        return MFCDef(
            name=name,
            n_seqs=self.dataset.train_bs_n_seqs,
            interface_type=ModelInterfaceType(kind),
            interface_impl=interface,
            model_name=ModelName(role),
            mb_spec=MicroBatchSpec() if role in RULES else mb_spec_of(getattr(self, role)),
            n_minibatches=self.ppo.ppo_n_minibatches if kind == "train_step" else 1,
            **more,
        )

    def _policy_calls(self, *more_keys: str) -> dict[str, MFCDef]:
        """Builds the calls of actor, reference and reward; the update also reads ``more_keys``."""
        versions = ("packed_versions",) if self.is_async else ()
        hooks = () if self.ref_ema_eta is None else (to_reference(self.ref_ema_eta),)
        return policy_calls(
            self._call,
            ppo=self._ppo_args(),
            reward=self.reward,
            experience=(*self._experience, *more_keys, *versions),
            proximal=self.ppo.needs_prox_logprobs,
            max_staleness=self.staleness if self.is_async else None,
            after_update=hooks,
        )

    def _ppo_args(self) -> dict[str, Any]:
        return {**to_plain(self.ppo), "group_size": self.group_size}
