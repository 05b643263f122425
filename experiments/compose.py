"""Reinforcement learning: a task, an algorithm, a placement and a schedule make an experiment.

    Task ──────── what is asked, how an answer is scored          task.py
    Algorithm ─── hyper-parameters → calls on models              algorithm.py
    Placement ─── calls → model workers                           placement.py
    Schedule ──── who samples, how far ahead of the training      schedule.py, asynchronous.py, detached.py

``RLExperiment`` is these four values, the models and the run's length; a recipe (recipes.py) is a function
that gives them defaults. Without ``actor.path=``, the experiment ``sft`` first makes the starting policy,
cached by content.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, cast

from experiments.algorithm import GRPO, PPO, Algorithm, CallMaker, PolicyAlgorithm, kept_keys
from experiments.parts.backend_args import (
    backend_of,
    compute_dtype,
    mb_spec_of,
    replica_backend_of,
)
from experiments.parts.call_placement import (
    CallPlacements,
    Copies,
    RolePlacement,
    allocate,
    place_models,
    with_copies,
)
from experiments.parts.chosen_settings import chosen_for_own_model, chosen_for_rl
from experiments.parts.evaluation import EvaluationOptions
from experiments.parts.held_out_records import (
    ReadQuestions,
    held_out_problems_of,
    sizes_to_hold_out,
    trained_before,
)
from experiments.parts.layout_checks import (
    batch_problems,
    held_out_problems,
    layout_problems_of,
    reference_following_problems,
)
from experiments.parts.model_files import (
    model_problems,
    position_problems,
    position_remarks,
    reader_problems,
    starting_model,
    turn_end_warnings,
)
from experiments.parts.question_files import absolute
from experiments.parts.rule_trials import TRUSTED
from experiments.parts.teacher_calls import (
    TeacherOptions,
    taught_calls,
    teacher_problems,
    teacher_roles,
)
from experiments.parts.time_limits import argument_of, delivery_silence_s, time_limit_warnings
from experiments.placement import Placement, Shared
from experiments.preferences.scored_calls import (
    RewardModelOptions,
    reward_model_problems,
    scored_calls,
)
from experiments.run_checks import idle_problems, missing_critic, start_problems
from experiments.schedule import Replay, Schedule, Sync
from experiments.sft import SFTExperiment
from experiments.task import MathTask, Task
from experiments.tasks.benchmarks import (
    benchmark_problems,
    benchmark_warnings,
    benchmarks_of,
    can_be_asked,
    held_out_warnings,
)
from experiments.training_run import TrainingRun
from realsys.api.data import MicroBatchSpec
from realsys.api.dataflow import MFCDef
from realsys.api.errors import ConfigError
from realsys.api.experiment import ChosenSetting, ExperimentConfig, Preparation
from realsys.api.model import (
    DatasetAbstraction,
    GenerationHyperparameters,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
)
from realsys.api.options import ModelOptions, OptimizerOptions, option
from realsys.api.scheduling import ExperimentScheduling, WorkerType
from realsys.api.worker_configs import (
    HELD_OUT,
    DynamicSamplingControl,
    Evaluator,
    ExperimentSaveEvalControl,
    RewardWorker,
)

if TYPE_CHECKING:
    from experiments.asynchronous import Serving

WEIGHTLESS_ROLES = ("reward",)  # roles without weights
# Keys of a datapoint from a rollout worker; kept sets come beside them.
ROLLOUT_KEYS = tuple(
    "packed_input_ids prompt_mask packed_logprobs packed_versions seq_no_eos_mask rewards".split()
)
CALLS_OF_ROLLOUT_WORKERS = ("actor_gen", "rew_inf")  # calls that an asynchronous run does not need


@dataclass(frozen=True, kw_only=True)
class RLExperiment(TrainingRun):
    """Reinforcement learning of one policy."""

    exp_ctrl: ExperimentSaveEvalControl = option(
        ExperimentSaveEvalControl(eval_freq_steps=10),
        "how long to train, when to save and evaluate",
    )
    task: Task = option(MathTask(), "what is learned")
    algorithm: Algorithm = option(PPO(), "how it is learned")
    placement: Placement = option(Shared(), "which model workers compute what")
    schedule: Schedule = option(Sync(), "when answers are sampled, and when models train on them")
    actor: ModelOptions = option(
        ModelOptions(optimizer=OptimizerOptions()), "the policy; its path starts all roles"
    )
    critic: ModelOptions | None = option(
        None, "the value model of algorithm ppo; without a path, the actor's body with a new head"
    )
    ref: ModelOptions = option(
        ModelOptions(backend="inference"), "the frozen reference; without a path, the actor's start"
    )
    reward_model: RewardModelOptions | None = option(
        None, "a classifier that scores answers beside the rule"
    )
    teachers: Mapping[str, TeacherOptions] = option(
        {}, "frozen policies that the policy learns to be like on its own answers, by name"
    )
    gen: GenerationHyperparameters = option(GenerationHyperparameters(), "how the actor samples")
    group_size: int = option(4, "answers a question", ge=1)
    sft: SFTExperiment = option(
        SFTExperiment(), "the run that makes the starting policy when actor.path is none"
    )
    auto_eval: bool = option(
        False, "evaluate every saved checkpoint of the actor beside the training (evaluator.*)"
    )
    evaluator: EvaluationOptions = option(EvaluationOptions(), "how")
    benchmarks: Mapping[str, Task] = option(
        {},
        "tasks that auto_eval evaluates on besides, by names of yours, e.g. benchmarks.hard=file",
    )
    reward_workers: int = option(
        0,
        "processes that only score answers; 0: the workers that have the answers score them",
        ge=0,
    )

    # ---- called by the launcher -------------------------------------------------------------

    def problems(self) -> Iterator[ConfigError]:
        """Yields unreadable files, unknown names, settings that don't go together, and batches and models
        that do not divide.
        """
        if "critic" in self.algorithm.roles and self.critic is None:
            yield missing_critic(self.algorithm.kind)
            return
        if self.reward_model is not None:
            yield from reward_model_problems(
                self.reward_model,
                actor_path=self.actor.path,
                longest=self._longest,
                trains=self.schedule.trains,
            )
        yield from teacher_problems(
            self.teachers,
            actor_path=self.actor.path,
            longest=self._longest,
            trains=self.schedule.trains,
            needed=self.schedule.trains and self.algorithm.only_taught,
        )
        for role in self._model_roles:
            if role in self._scoring_roles:
                continue  # checked above
            yield from model_problems(
                self._options(role),
                role,
                critic=role == "critic",
                generates=role == "actor" and self._our_engine_answers,
            )
        yield from self._reader_problems()
        yield from self.task.problems(
            batch_size=self.train_bs_n_seqs, tokenizer_dir=self.actor.path
        )
        yield from self.task.reward_problems()
        if not self.schedule.has_servers and not isinstance(self.schedule, Replay):
            yield from self.task.agent_problems()
        yield from start_problems(self.task, self.actor, self.sft)
        if self.schedule.trains:
            benchmarks = {f"benchmarks.{name}": b for name, b in self.benchmarks.items()}
            asked = [
                *self.task.read_questions("task"),
                *(q for at, b in benchmarks.items() for q in b.as_benchmark().read_questions(at)),
            ]
            yield from held_out_problems_of(asked, self._trained_questions)
        yield from position_problems(self.actor.path, answers=self.gen.max_new_tokens)
        yield from self.algorithm.problems(self.gen, self.group_size)
        yield from idle_problems(self.gen, self.ref, follows=self._ref_follows)
        yield from self._schedule_problems()
        yield from self._layout_problems()

    @property
    def _trained_questions(self) -> tuple[ReadQuestions, ...]:
        """The files that this run and those before it train on."""
        own = tuple(self.task.read_questions("task"))
        return own if self.actor.path else (*own, *self.sft.task.read_questions("sft.task"))

    @property
    def _our_engine_answers(self) -> bool:
        """True if answers of the run, or of an evaluation, are made by the engine of this package."""
        serving = self._serving
        served = serving is not None and serving.server_backend != "embedded"
        return not served or self._evaluates

    @property
    def _evaluates(self) -> bool:
        return self.auto_eval or self._trainer_evaluates

    @property
    def _trainer_evaluates(self) -> bool:
        """Whether the trainer asks held-out questions: it can't have an agent play them."""
        return self.task.num_held_out > 0 and not self.task.is_played

    def _reader_problems(self) -> Iterator[ConfigError]:
        """Yields a reference or a critic of its own that can't read what the actor writes."""
        for role, reader in (("ref", "the reference"), ("critic", "the critic")):
            path = self._options(role).path if role in self._model_roles else None
            if path is not None and self.actor.path is not None:
                yield from reader_problems(
                    reader,
                    path,
                    self.actor.path,
                    where=role,
                    longest=self._longest,
                    tokenizer_must_be_known=False,
                )

    @property
    def _longest(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return self.task.longest_prompt + self.gen.max_new_tokens

    def _schedule_problems(self) -> Iterator[ConfigError]:
        size, made = self.train_bs_n_seqs, self.task.num_questions
        total = None if made is None else made * self.exp_ctrl.total_train_epochs // size * size
        if total is not None and self.exp_ctrl.benchmark_steps is not None:
            total = min(total, self.exp_ctrl.benchmark_steps * size)
        yield from self.schedule.problems(batch_size=size, num_prompts=total)
        if serving := self._serving:
            yield from serving.device_problems(self.resources(WorkerType.GENERATION_SERVER))
            yield from serving.sampling_problems(self.gen, by_schema=self.task.holds_to_schemas)
        if self.reward_workers and isinstance(self.schedule, Replay) and not self._evaluates:
            yield ConfigError(
                f"{self.reward_workers} reward workers would have nothing to score: the rollouts of "
                "schedule=replay have their rewards",
                where="reward_workers",
                fix="leave it out",
            )
        if self.reward_workers and not self.task.rule:
            yield ConfigError(
                f"{self.reward_workers} reward workers would have no rule to score by",
                where="reward_workers and task.reward",
                fix="leave it out, or name a rule",
            )
        if self.task.curriculum_control is not None and not self.schedule.trains:
            yield ConfigError(
                f"nothing trains with schedule={self.schedule.kind}, so a curriculum would follow a policy "
                "that stays the same",
                where="task.curriculum and schedule",
                fix="use task.curriculum=none, or schedule=async",
            )
        if self.auto_eval and not self.schedule.trains:
            yield ConfigError(
                f"nothing trains with schedule={self.schedule.kind}, so there is no checkpoint to evaluate",
                where="auto_eval and schedule",
                fix="leave auto_eval out, or use schedule=async",
            )
        elif self.auto_eval:
            asked = [*([HELD_OUT] if can_be_asked(self.task) else []), *self.benchmarks]
            yield from self.evaluator.problems(self.exp_ctrl, asked=asked)
        elif self.benchmarks:
            yield ConfigError(
                "benchmarks are for saved checkpoints, and these are not evaluated",
                where="benchmarks and auto_eval",
                fix="set auto_eval=true and exp_ctrl.save_freq_steps, or leave benchmarks out",
            )
        yield from benchmark_problems(self.benchmarks, tokenizer_dir=self.actor.path)

    def _layout_problems(self) -> Iterator[ConfigError]:
        start, built_in = self.actor.path or self.sft.model.path, self.sft.init.shape()
        by_allocation = self.placement.allocation is not None
        if self._ref_follows and "ref" in self._roles:
            yield from reference_following_problems(self.actor, self.ref, start, built_in)
        yield from batch_problems(
            self._copies.calls,
            self._allocated.calls,
            n_seqs=self.train_bs_n_seqs,
            where="parallel or placement.allocation" if by_allocation else "parallel",
        )
        if (evaluated := self._allocated.calls.get(self._sampled_by)) is not None:
            yield from held_out_problems(
                self.task.num_held_out if self._trainer_evaluates else 0,
                evaluated.topology.data,
                where="placement.allocation" if by_allocation else "actor.parallel",
            )
        yield from layout_problems_of(
            self._copies.places,
            {role: self._options(role) for role in self._model_roles},
            default_path=start,
            built_in=built_in,
        )
        trained = {
            call.role: self._allocated.calls[call.name].topology
            for call in self._calls
            if call.is_train
        }
        yield from self.schedule.layout_problems(trained, backend=self.actor.backend)

    def chosen(self, given: Collection[str]) -> tuple[ChosenSetting, ...]:
        """For a given model: entropy bonus and KL; for a real one also learning rates, lengths, batch,
        memory (parts/chosen_settings.py).
        """
        path = self.actor.path or self.sft.model.path
        found = () if path is None or not self.schedule.trains else self._own_objective(given)
        if path is not None and (model := starting_model(path)) is not None:
            trained = {"actor": self.actor, "critic": self.critic}
            questions = self.task.measured(path)
            measures = questions is not None and self.is_open("task.max_prompt_len", given)
            proposed = chosen_for_rl(
                model,
                questions,
                gpus=self.resources().gpu > 0,
                critic="critic" in self.algorithm.roles and self.critic is not None,
                adapters=frozenset(role for role, m in trained.items() if m and m.lora.rank),
                group_size=None if self.is_open("group_size", given) else self.group_size,
                max_prompt_len=None if measures else self.task.longest_prompt,
                min_new_tokens=self.gen.min_new_tokens,
            )
            asked = self.task.asks_itself
            proposed = (p for p in proposed if asked or not p.path.startswith("task."))
            without_ref = any(one.path == "algorithm.kl_ctl" for one in found) or not getattr(
                self.algorithm, "needs_ref_logprobs", True
            )
            proposed = (p for p in proposed if not (without_ref and p.path.startswith("ref.")))
            found += self.not_given(proposed, given)
        for phase in self.preparations():
            of_phase = [g.removeprefix("sft.") for g in given if g.startswith("sft.")]
            chosen = phase.experiment.chosen(of_phase)
            found += tuple(replace(c, path=f"{phase.name}.{c.path}") for c in chosen)
        held_out = self.task.read_questions("task")
        kept = tuple(sizes_to_hold_out(held_out, self._trained_questions, found, given))
        return (*(c for c in found if c.path not in {one.path for one in kept}), *kept)

    def _own_objective(self, given: Collection[str]) -> tuple[ChosenSetting, ...]:
        """Entropy bonus and KL weight for a policy that is given."""
        algorithm = self.algorithm
        if not isinstance(algorithm, PolicyAlgorithm):
            return ()
        proposed = chosen_for_own_model(
            steers_entropy=algorithm.entropy_target is not None,
            compares=isinstance(algorithm, GRPO)
            and not algorithm.reads_reference_otherwise
            and self.reward_model
            is None  # which a policy without a reference soon pleases too well
            and self.ref == ModelOptions(backend="inference")
            and "ref" not in re.split(r"\W|_inf", self.placement.allocation or ""),
        )
        return self.not_given(proposed, given)

    def remarks(self, given: Collection[str]) -> Iterator[str]:
        """Reports how many questions were counted, and warns of prompts without room for an answer."""
        yield from self.task.remarks(self.actor.path)
        yield from turn_end_warnings(self.actor.path)
        yield from trained_before(
            self.task.read_questions("task"), self.actor.path, setting="actor.path"
        )
        yield from map(TRUSTED.format, self.trusted_rules())
        yield from position_remarks(
            self.actor.path, prompt=self.task.longest_prompt, answers=self.gen.max_new_tokens
        )
        if self.schedule.trains:
            yield from held_out_warnings(self.task, auto_eval=self.auto_eval)
        yield from benchmark_warnings(
            self.benchmarks, model=self.actor.path, answers=self.gen.max_new_tokens
        )
        if serving := self._serving:
            yield from time_limit_warnings(
                self.task.agent,
                self.task.agent_args,
                self.task.env,
                self.task.env_args,
                answer_s=serving.rollout_request_timeout,
                max_new_tokens=self.gen.max_new_tokens,
            )
        yield from self._without_gpus()
        for phase in self.prepared_by():
            of_phase = [g.removeprefix("sft.") for g in given if g.startswith("sft.")]
            remarks = phase.experiment.remarks(of_phase)
            yield from (f"phase {phase.name}: {remark}" for remark in remarks)

    def trusted_rules(self) -> tuple[str, ...]:
        """Those of the task."""
        return self.task.trusted_rules()

    def _without_gpus(self) -> Iterator[str]:
        """Warns of servers and evaluators on CPUs while the model workers have GPUs."""
        if not self.resources().gpu:
            return
        if self._serving and not self.resources(WorkerType.GENERATION_SERVER).gpu:
            yield (
                "model workers have GPUs, but generation servers have none and compute on CPUs. Set "
                "scheduling.generation_server.gpu=1, or more for a model that does not fit one GPU"
            )
        if self.auto_eval and not self.resources(WorkerType.EVALUATOR).gpu:
            yield (
                "model workers have GPUs, but the evaluator has none and computes on CPUs. Set "
                "scheduling.evaluator.gpu=1"
            )

    def preparations(self) -> tuple[Preparation, ...]:
        """Returns the fine-tuning, unless a starting policy is given."""
        if self.actor.path is not None:
            return ()
        return (Preparation(name="sft", experiment_name="sft-math", experiment=self.sft),)

    def with_prepared(self, name: str, path: str) -> Self:
        """Returns the experiment starting from the fine-tuned policy at ``path``."""
        return replace(self, actor=replace(self.actor, path=path))

    def scheduling_setup(self) -> ExperimentScheduling:
        """Schedules the tasks of all worker types: one master, the model workers for pools and layouts, and
        those of schedule and evaluation.
        """
        counts = {WorkerType.MODEL_WORKER: self._allocated.n_workers}
        if self.auto_eval:
            counts[WorkerType.EVALUATOR] = 1
        if self.reward_workers:
            counts[WorkerType.REWARD_WORKER] = self.reward_workers
        if serving := self._serving:
            counts |= serving.counts
        return self.tasks(counts, self.sft.init.shape())

    def initial_setup(self) -> ExperimentConfig:
        """Places roles on workers and calls on copies."""
        calls, schedule = self._copies.calls, self.schedule
        return ExperimentConfig(
            exp_ctrl=self.exp_ctrl,
            model_rpcs=calls,
            dataset_keys=self._rollout_keys if schedule.is_async else self.task.prompt_keys,
            model_worker=place_models(
                self._copies.places,
                {role: self._model(role) for role in self._roles},
                n_workers=self._allocated.n_workers,
                base_seed=self.seed,
                # The copy that samples also answers the held-out questions: it has unsharded weights.
                evaluated=[c.model_name for c in calls if c.name == self._sampled_by],
                datasets=self._datasets,
                tokenizer_name_or_path=absolute(self.actor.path),
                shuffle_dataset=self.task.shuffle,
                num_threads=self.resources().cpu,
            ),
            wandb=self.wandb,
            tensorboard=self.tensorboard,
            max_staleness=0 if schedule.is_async else schedule.staleness,
            weights_through=self.placement.copies_through,
            deterministic=self.deterministic,
            pools=self._allocated.pools,
            replay=schedule.ledger if isinstance(schedule, Replay) else None,
            # A replay trains on what was chosen then.
            curriculum=None if isinstance(schedule, Replay) else self.task.curriculum_control,
            dynamic_sampling=self._dynamic_sampling,
            evaluator=self._evaluators(),
            reward_worker=(RewardWorker(**self.task.reward_rule),) * self.reward_workers,
            **(self._rollout_fields(serving) if (serving := self._serving) else {}),
        )

    @property
    def _dynamic_sampling(self) -> DynamicSamplingControl | None:
        """Which questions a synchronous run trains on; with servers, rollout workers leave others out."""
        return self.schedule.dynamic_sampling if isinstance(self.schedule, Sync) else None

    @property
    def _serving(self) -> Serving | None:
        """The schedule, if it has servers (its module is for those who have)."""
        return cast("Serving", self.schedule) if self.schedule.has_servers else None

    @property
    def _rollout_keys(self) -> tuple[str, ...]:
        """Keys of a datapoint from a rollout worker."""
        serving = self._serving
        if serving is None:
            return (*ROLLOUT_KEYS, *kept_keys(self._keeps_sets))
        by_schema = self.task.holds_to_schemas
        return (*ROLLOUT_KEYS, *kept_keys(serving.records_kept(self.gen, by_schema=by_schema)))

    @property
    def _keeps_sets(self) -> bool:
        """Whether some tokens are sampled from a part of the vocabulary."""
        return self.gen.restricts or self.task.holds_to_schemas

    @property
    def _datasets(self) -> tuple[DatasetAbstraction, ...]:
        """What model workers read; with servers, the rollout workers read the questions."""
        if isinstance(self.schedule, Replay):
            return (self.schedule.rollouts(self._rollout_keys),)
        return () if self.schedule.has_servers else (self.task.prompts("train"),)

    def _rollout_fields(self, schedule: Serving) -> dict[str, Any]:
        """Builds the rollout fields of the configuration."""
        start = absolute(self.actor.path) or ""
        return {
            "rollout": replace(
                schedule.control(),
                silence_s=delivery_silence_s(
                    argument_of("agent", self.task.agent, self.task.agent_args, "timeout_s"),
                    answer_s=schedule.rollout_request_timeout,
                    max_new_tokens=self.gen.max_new_tokens,
                ),
            ),
            "generation_server": schedule.generation_servers(
                seed=self.seed,
                model_path=start,
                dtype=self._dtype("actor"),
                longest=self._longest,
                task=self.resources(WorkerType.GENERATION_SERVER),
            ),
            "gserver_manager": (schedule.manager(batch_size=self.train_bs_n_seqs),),
            "rollout_worker": schedule.rollout_workers(
                seed=self.seed,
                tokenizer_path=start,
                gen=self.gen,
                group_size=self.group_size,
                task=self.task,
            ),
        }

    def _evaluators(self) -> tuple[Evaluator, ...]:
        if not (self.auto_eval and self.schedule.trains):
            return ()
        evaluator = Evaluator(
            base_seed=self.seed,
            dtype=self._dtype("actor"),
            benchmarks=benchmarks_of(
                self.task,
                self.benchmarks,
                self.evaluator,
                environment_s=self.schedule.environment_s,
            ),
            gconfig=replace(self.gen, n=1, greedy=True),  # as the trainer's own evaluation
            mb_spec=mb_spec_of(self.actor),
            num_threads=self.resources(WorkerType.EVALUATOR).cpu,
            **self.evaluator.loop,
        )
        return (evaluator,)

    # ---- calls and places ---------------------------------------------------------------------

    @cached_property
    def _calls(self) -> tuple[MFCDef, ...]:
        """The algorithm's calls, without those that the schedule does without; all on copies 0."""
        if not self.schedule.trains:  # one call consumes the rollouts, which ends the step
            end = ModelInterfaceAbstraction("rollout_end")
            return (
                self._call(
                    "rollout_end", "reward", "inference", end, input_keys=self._rollout_keys
                ),
            )
        is_async = self.schedule.is_async
        maker = CallMaker(
            make=self._call,
            gen=self.gen,
            group_size=self.group_size,
            keeps_sets=self._keeps_sets,
            reward=self.task.reward_rule,
            reward_keys=self.task.reward_keys,
            report_means=self._dynamic_sampling is not None,
            versions=is_async,
            max_staleness=self.schedule.staleness if is_async else None,
        )
        made = CALLS_OF_ROLLOUT_WORKERS if is_async else ()
        calls = tuple(call for call in self.algorithm.calls(maker) if call.name not in made)
        if self.reward_model is not None:
            calls = scored_calls(calls, self.reward_model, self._call)
        return taught_calls(calls, self.teachers, self._call) if self.teachers else calls

    def _call(
        self, name: str, role: str, kind: str, interface: ModelInterfaceAbstraction, **more: Any
    ) -> MFCDef:
        """Builds a call on copy 0 of ``role``; ``more`` are further fields."""
        weightless = role in WEIGHTLESS_ROLES
        return MFCDef(
            name=name,
            n_seqs=self.train_bs_n_seqs,
            interface_type=ModelInterfaceType(kind),
            interface_impl=interface,
            model_name=ModelName(role),
            mb_spec=MicroBatchSpec() if weightless else mb_spec_of(self._options(role)),
            **more,
        )

    @property
    def _roles(self) -> tuple[str, ...]:
        """Roles that have calls, in the algorithm's order."""
        used = {call.role for call in self._calls}
        roles = (*self.algorithm.roles, *self._scoring_roles, *WEIGHTLESS_ROLES)
        return tuple(dict.fromkeys(role for role in roles if role in used))

    @property
    def _scoring_roles(self) -> tuple[str, ...]:
        """Roles of frozen models that every algorithm may have beside its own."""
        return ("reward_model", *teacher_roles(self.teachers))

    @property
    def _model_roles(self) -> tuple[str, ...]:
        return tuple(role for role in self._roles if role not in WEIGHTLESS_ROLES)

    @property
    def _sampled_by(self) -> str:
        """The call whose copy answers held-out questions."""
        return "actor_train" if self.schedule.is_async else "actor_gen"

    @property
    def _ref_follows(self) -> bool:
        """Whether updates of the actor move the reference."""
        return getattr(self.algorithm, "ref_ema_eta", None) is not None

    @cached_property
    def _allocated(self) -> CallPlacements:
        calls = self._calls
        models = {role: self._options(role) for role in self._model_roles}
        default = self.schedule.default_layout
        return allocate(
            [(call.name, call.role) for call in calls],
            self.placement,
            roles={
                role: (m.parallel or default, m.pool) if (m := models.get(role)) else (None, None)
                for role in self._roles
            },
            right_roles=(*self.algorithm.right_roles, *self._scoring_roles),
            trained={call.role: call.name for call in calls if call.is_train},
            rules=WEIGHTLESS_ROLES,
            n_seqs=self.train_bs_n_seqs,
        )

    @cached_property
    def _copies(self) -> Copies:
        offload = [role for role in self._model_roles if self._options(role).offload]
        return with_copies(self._calls, self._allocated.calls, offload=offload)

    # ---- roles ----------------------------------------------------------------------------------

    def _options(self, role: str) -> ModelOptions:
        """The settings of a role with weights."""
        teachers = dict(zip(teacher_roles(self.teachers), sorted(self.teachers), strict=True))
        if role in teachers:
            return self.teachers[teachers[role]]
        found: ModelOptions | None = getattr(self, role)
        if found is None:
            raise missing_critic(self.algorithm.kind)
        return found

    def _model(self, role: str) -> RolePlacement:
        if role in WEIGHTLESS_ROLES:
            return RolePlacement(
                model=ModelAbstraction("tokenizer_only", {"path": absolute(self.actor.path)}),
                backend=ModelBackendAbstraction("inference"),
            )
        options = self._options(role)
        kind = "hf_critic" if role in ("critic", "reward_model") else "hf_causal_lm"
        evaluated = role == "actor" and self._trainer_evaluates
        return RolePlacement(
            model=ModelAbstraction(
                kind,
                {"path": absolute(options.path or self.actor.path), "dtype": self._dtype(role)},
            ),
            backend=backend_of(options, trained=role not in ("ref", *self._scoring_roles)),
            replica_backend=replica_backend_of(options),
            eval_dataset=self.task.prompts("test") if evaluated else None,
        )

    def _dtype(self, role: str) -> str:
        """Returns a role's compute dtype; policies of different dtypes would differ in their log-probs."""
        return compute_dtype(self._options(role), self.actor, gpus=self.resources().gpu)
