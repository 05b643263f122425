"""``ppo-math``: PPO with actor, critic, reference and a rule-based reward on math questions.

    actor_gen ─┬─ rew_inf ────┬─ actor_train
               ├─ ref_inf ────┤
               └─ critic_inf ─┴─ critic_train

Without ``actor.path=`` it first makes its starting policy by ``sft-math`` (phase ``sft``), cached by
content.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from experiments.math_files import absolute, dataset_args, dataset_problems, model_problems
from experiments.placement import RolePlacement, place_roles
from experiments.sft_math import SFTMathExperiment, math_scheduling
from realsys.api import registry
from realsys.api.data import MicroBatchSpec
from realsys.api.dataflow import MFCDef
from realsys.api.errors import ConfigError
from realsys.api.experiment import (
    Experiment,
    ExperimentConfig,
    ExperimentSaveEvalControl,
    Preparation,
)
from realsys.api.model import (
    DatasetAbstraction,
    GenerationHyperparameters,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    ProcessTopology,
)
from realsys.api.options import (
    MathDatasetOptions,
    ModelOptions,
    OptimizerOptions,
    PPOHyperparameters,
    WandbOptions,
    option,
)
from realsys.api.plain import to_plain
from realsys.api.scheduling import ExperimentScheduling

ROLES = ("actor", "critic", "ref", "reward")


@dataclass(frozen=True, kw_only=True)
class PPOMathExperiment(Experiment):
    """PPO on math questions."""

    seed: int = option(1, "of data order, sampling and everything drawn", ge=0)
    exp_ctrl: ExperimentSaveEvalControl = option(
        ExperimentSaveEvalControl(eval_freq_steps=10),
        "how long to train, when to save and evaluate",
    )
    actor: ModelOptions = option(
        ModelOptions(
            optimizer=OptimizerOptions(lr=3e-4, weight_decay=0.0, warmup_steps_proportion=0.05)
        ),
        "the policy; its path starts all roles",
    )
    critic: ModelOptions = option(
        ModelOptions(
            optimizer=OptimizerOptions(lr=1e-3, weight_decay=0.0, warmup_steps_proportion=0.05)
        ),
        "the value model; without a path, the actor's body with a new head",
    )
    ref: ModelOptions = option(
        ModelOptions(backend="inference"), "the frozen reference; without a path, the actor's start"
    )
    dataset: MathDatasetOptions = option(MathDatasetOptions(train_size=100 * 64), "the questions")
    group_size: int = option(4, "answers a question", ge=1)
    reward: str = option("math_verify", "registered rule that scores an answer")
    ppo: PPOHyperparameters = option(
        PPOHyperparameters(
            gen=GenerationHyperparameters(max_new_tokens=16),
            kl_ctl=0.01,
            gae_lambda=0.95,
            entropy_coef=0.01,
        ),
        "the algorithm",
    )
    sft: SFTMathExperiment = option(
        SFTMathExperiment(), "the run that makes the starting policy when actor.path is none"
    )
    cpus_per_model_worker: int = option(2, "cores and compute threads of a model worker", ge=1)
    gpus_per_model_worker: float = option(0.0, "GPUs of a model worker", ge=0)
    mem_per_model_worker: int = option(8192, "memory of a model worker", unit="MiB", ge=1)
    tensorboard: bool = option(True, "write TensorBoard files")
    wandb: WandbOptions = option(WandbOptions(), "Weights & Biases")

    # ---- what the launcher asks -------------------------------------------------------------

    def problems(self) -> Iterator[ConfigError]:
        """Unreadable files, unknown names, batches that do not divide."""
        for role in ("actor", "critic", "ref"):
            yield from model_problems(getattr(self, role), role)
        yield from dataset_problems(self.dataset, tokenizer_dir=self.actor.path)
        if problem := registry.check("reward", self.reward, where="reward"):
            yield problem
        if (
            self.actor.path is None
            and self.dataset.path is not None
            and self.sft.model.path is None
        ):
            yield ConfigError(
                "the built-in starting policy has only learned arithmetic",
                where="dataset.path without actor.path",
                fix="give actor.path=<Hugging Face directory> (or sft.model.path= and "
                "sft.dataset.path= to fine-tune one first)",
            )
        if self.ppo.use_adaptive_kl_ctl and self.ppo.kl_ctl == 0:
            yield ConfigError(
                "an adaptive KL controller can't start from 0: it multiplies",
                where="ppo.use_adaptive_kl_ctl and ppo.kl_ctl",
                fix="give ppo.kl_ctl a starting value, e.g. 0.01",
            )
        yield from self._batch_problems("actor")
        if self._topo("critic").data != self._topo("actor").data:
            yield from self._batch_problems("critic")

    def _batch_problems(self, role: str) -> Iterator[ConfigError]:
        ranks = self._topo(role).data
        pieces = ranks * self.ppo.ppo_n_minibatches
        if self.dataset.train_bs_n_seqs % pieces:
            yield ConfigError(
                f"a batch of {self.dataset.train_bs_n_seqs} questions does not divide into "
                f"{self.ppo.ppo_n_minibatches} minibatches on {ranks} data-parallel ranks",
                where=f"dataset.train_bs_n_seqs, ppo.ppo_n_minibatches and {role}.parallel",
                fix=f"use a multiple of {pieces}",
            )

    def preparations(self) -> tuple[Preparation, ...]:
        """``sft-math``, unless there is a starting policy."""
        if self.actor.path is not None:
            return ()
        return (Preparation(name="sft", experiment_name="sft-math", experiment=self.sft),)

    def with_prepared(self, name: str, path: str) -> PPOMathExperiment:
        """Starts from the fine-tuned policy at ``path``."""
        return replace(self, actor=replace(self.actor, path=path))

    def scheduling_setup(self) -> ExperimentScheduling:
        """One master, as many model workers as the largest role has processes."""
        return math_scheduling(
            max(self._topo(role).world_size for role in ROLES),
            cpu=self.cpus_per_model_worker,
            gpu=self.gpus_per_model_worker,
            mem=self.mem_per_model_worker,
        )

    def initial_setup(self) -> ExperimentConfig:
        """Four roles, six calls."""
        data = dataset_args(self.dataset)
        return ExperimentConfig(
            exp_ctrl=self.exp_ctrl,
            model_rpcs=self._calls(),
            dataset_keys=("packed_prompts",),
            model_worker=place_roles(
                {role: self._placement(role) for role in ROLES},
                base_seed=self.seed,
                datasets=(DatasetAbstraction("math_prompts", {**data, "split": "train"}),),
                tokenizer=absolute(self.actor.path),
                shuffle_dataset=self.dataset.shuffle,
                num_threads=self.cpus_per_model_worker,
            ),
            wandb=self.wandb,
            tensorboard=self.tensorboard,
        )

    # ---- roles and calls --------------------------------------------------------------------

    def _topo(self, role: str) -> ProcessTopology:
        if role == "reward":  # a rule costs little: one process beside the actor's first
            return ProcessTopology()
        return ProcessTopology.parse(getattr(self, role).parallel, where=f"{role}.parallel")

    def _placement(self, role: str) -> RolePlacement:
        if role == "reward":
            return RolePlacement(
                topo=self._topo(role),
                model=ModelAbstraction("tokenizer_only", {"path": absolute(self.actor.path)}),
                backend=ModelBackendAbstraction("inference"),
            )
        options: ModelOptions = getattr(self, role)
        kind = "hf_critic" if role == "critic" else "hf_causal_lm"
        trained = role != "ref"
        evaluated = role == "actor" and self.dataset.eval_size > 0
        return RolePlacement(
            topo=self._topo(role),
            model=ModelAbstraction(
                kind, {"path": absolute(options.path or self.actor.path), "dtype": options.dtype}
            ),
            backend=ModelBackendAbstraction(
                options.backend, {"optimizer": to_plain(options.optimizer)} if trained else {}
            ),
            eval_dataset=DatasetAbstraction(
                "math_prompts", {**dataset_args(self.dataset), "split": "test"}
            )
            if evaluated
            else None,
        )

    def _calls(self) -> tuple[MFCDef, ...]:
        ppo = to_plain(self.ppo)
        actor = ModelInterfaceAbstraction(
            "ppo_actor", {**ppo, "group_size": self.group_size, "reward": self.reward}
        )
        critic = ModelInterfaceAbstraction("ppo_critic", {**ppo, "group_size": self.group_size})
        reward = ModelInterfaceAbstraction("math_reward", {"reward": self.reward})
        answers = ("packed_input_ids", "prompt_mask")
        experience = (
            *answers,
            "packed_logprobs",
            "packed_ref_logprobs",
            "rewards",
            "values",
            "seq_no_eos_mask",
        )

        def call(name: str, kind: str, interface: ModelInterfaceAbstraction, **keys: Any) -> MFCDef:
            role = {"rew": "reward"}.get(name.split("_")[0], name.split("_")[0])
            limit = None if role == "reward" else getattr(self, role).max_tokens_per_mb
            return MFCDef(
                name=name,
                n_seqs=self.dataset.train_bs_n_seqs,
                interface_type=ModelInterfaceType(kind),
                interface_impl=interface,
                model_name=ModelName(role),
                mb_spec=MicroBatchSpec(max_tokens_per_mb=limit),
                **keys,
            )

        return (
            call(
                "actor_gen",
                "generate",
                actor,
                input_keys=("packed_prompts",),
                output_keys=(*answers, "packed_logprobs", "seq_no_eos_mask"),
            ),
            call("rew_inf", "inference", reward, input_keys=answers, output_keys=("rewards",)),
            call(
                "ref_inf",
                "inference",
                actor,
                input_keys=("packed_input_ids",),
                output_keys=("packed_ref_logprobs",),
                output_key_remap={"logprobs": "packed_ref_logprobs"},
            ),
            call(
                "critic_inf",
                "inference",
                critic,
                input_keys=("packed_input_ids",),
                output_keys=("values",),
            ),
            call("actor_train", "train_step", actor, input_keys=experience),
            call("critic_train", "train_step", critic, input_keys=experience),
        )
