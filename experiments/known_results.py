"""Recipes that reproduce published results: sources of model and data, and the check that they are given.

A recipe is an experiment whose defaults are those of a published run, so that the curves can be compared.
It never makes a model of its own, because nothing could be compared then. docs/known_results.md has
sources, figures, and what was reproduced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from experiments.grpo_math import GRPOMathExperiment
from experiments.parts.math_rl import MathRLExperiment
from experiments.ppo_math import PPOMathExperiment
from realsys.api.errors import ConfigError
from realsys.api.experiment import Preparation
from realsys.api.model import GenerationHyperparameters
from realsys.api.options import (
    MOST_WORKERS,
    MathDatasetOptions,
    ModelOptions,
    OptimizerOptions,
    PPOHyperparameters,
    option,
)
from realsys.api.worker_configs import ExperimentSaveEvalControl


@dataclass(frozen=True, kw_only=True)
class Source:
    """A name on the Hugging Face hub, and the revision that the published figures used."""

    name: str
    revision: str = ""  # empty: it does not change
    also: str = ""  # further instructions

    def __str__(self) -> str:
        pinned = f" at revision {self.revision[:12]}" if self.revision else ""
        return f"{self.name}{pinned}{'; ' if self.also else ''}{self.also}"


def missing(needs: Mapping[str, tuple[object, Source]]) -> Iterator[ConfigError]:
    """Yields a problem for each setting of ``needs`` (value, source) that is not set."""
    for setting, (value, source) in needs.items():
        if value is None:
            yield ConfigError(
                "this recipe is compared with a published run and provides no model or data itself",
                where=setting,
                fix=f"download {source}; then give {setting}=",
            )


class KnownResult(MathRLExperiment):
    """A recipe for which model and data must be given."""

    def sources(self) -> Mapping[str, tuple[object, Source]]:
        """Maps each required setting to its value and source."""
        raise NotImplementedError

    def problems(self) -> Iterator[ConfigError]:
        """Yields missing sources; if there are none, the problems common to math experiments."""
        lacking = list(missing(self.sources()))
        yield from lacking or super().problems()

    def remarks(self, given: Collection[str]) -> Iterator[str]:
        """Omits the remarks on defaults of the toy model: a recipe's defaults suit its real model."""
        if self.actor.path is not None:
            defaults = {"actor.optimizer.lr", "critic.optimizer.lr", "ppo.gen.max_new_tokens"}
            yield from super().remarks({*given, *defaults, "dataset.eval_size"})

    def preparations(self) -> tuple[Preparation, ...]:
        """Returns none: the model is given."""
        return ()


GSM8K = Source(
    name="data set openai/gsm8k (config main)",
    revision="e53f048856ff4f594e959d75785d2c2d37b678ee",
    also='as JSONL of its fields "question" and "answer"',
)


@dataclass(frozen=True, kw_only=True)
class QwenGSM8K(KnownResult, PPOMathExperiment):
    """PPO of Qwen2.5-0.5B-Instruct on GSM8K: 36.4 to 56.7 % on the test split (verl's baselines)."""

    exp_ctrl: ExperimentSaveEvalControl = option(
        ExperimentSaveEvalControl(
            total_train_epochs=15, eval_freq_steps=10, ckpt_freq_secs=1200, save_freq_steps=100
        ),
        "how long to train, when to save and evaluate",
    )
    actor: ModelOptions = option(
        ModelOptions(optimizer=OptimizerOptions(lr=1e-6, beta2=0.999), recompute=True),
        "the policy; its path starts all roles",
    )
    critic: ModelOptions = option(
        ModelOptions(optimizer=OptimizerOptions(lr=1e-5, beta2=0.999), recompute=True),
        "the value model; without a path, the actor's body with a new head",
    )
    dataset: MathDatasetOptions = option(
        MathDatasetOptions(train_bs_n_seqs=256, eval_size=1319, max_prompt_len=512),
        "the questions",
    )
    group_size: int = option(1, "answers a question", ge=1)
    ppo: PPOHyperparameters = option(
        PPOHyperparameters(
            gen=GenerationHyperparameters(max_new_tokens=512),
            kl_ctl=0.001,
            ppo_n_minibatches=4,
            recompute_logprob=True,
        ),
        "the algorithm",
    )
    n_model_workers: int | None = option(
        4, "model workers, each with one GPU", ge=1, le=MOST_WORKERS
    )
    gpus_per_model_worker: float = option(1.0, "GPUs of a model worker", ge=0)

    def sources(self) -> Mapping[str, tuple[object, Source]]:
        """Maps the policy and both splits of the data set to their sources."""
        policy = Source(
            name="Qwen/Qwen2.5-0.5B-Instruct", revision="7ae557604adf67be50417f59c2c2f167def9a775"
        )
        return {
            "actor.path": (self.actor.path, policy),
            "dataset.path": (self.dataset.path, GSM8K),
            "dataset.eval_path": (self.dataset.eval_path, GSM8K),
        }


@dataclass(frozen=True, kw_only=True)
class QwenDAPO(KnownResult, GRPOMathExperiment):
    """DAPO of Qwen2.5-Math-7B on DAPO-Math-17k: 36.3 % on AIME 2024 (verl's baselines)."""

    exp_ctrl: ExperimentSaveEvalControl = option(
        ExperimentSaveEvalControl(
            total_train_epochs=10,
            benchmark_steps=200,
            eval_freq_steps=10,
            save_freq_steps=20,
            ckpt_freq_secs=3600,
        ),
        "how long to train, when to save and evaluate",
    )
    actor: ModelOptions = option(
        ModelOptions(
            optimizer=OptimizerOptions(
                lr=1e-6, beta2=0.999, weight_decay=0.1, warmup_steps_proportion=0.05
            ),
            recompute=True,
            max_tokens_per_mb=20480,
        ),
        "the policy; its path starts all roles",
    )
    dataset: MathDatasetOptions = option(
        MathDatasetOptions(train_bs_n_seqs=512, eval_size=32, max_prompt_len=2048),
        "the questions",
    )
    group_size: int = option(16, "answers a question", ge=2)
    ppo: PPOHyperparameters = option(
        PPOHyperparameters(
            gen=GenerationHyperparameters(max_new_tokens=8192),
            advantage="grpo",
            adv_norm=False,
            kl_ctl=0.0,
            eps_clip=0.2,
            eps_clip_higher=0.28,
            c_clip=10.0,
            ppo_n_minibatches=16,
            overlong_buffer_len=4096,
            recompute_logprob=True,
            early_stop_imp_ratio=None,
        ),
        "the algorithm",
    )
    n_model_workers: int | None = option(
        32, "model workers, each with one GPU", ge=1, le=MOST_WORKERS
    )
    gpus_per_model_worker: float = option(1.0, "GPUs of a model worker", ge=0)

    def sources(self) -> Mapping[str, tuple[object, Source]]:
        """Maps the policy with its longer context, the questions, and AIME's questions to their sources."""
        policy = Source(
            name="Qwen/Qwen2.5-Math-7B",
            revision="b101308fe89651ea5ce025f25317fea6fc07e96e",
            also='set "max_position_embeddings": 32768 in its config.json, as the published run did',
        )
        questions = Source(
            name="data set BytedTsinghua-SIA/DAPO-Math-17k",
            revision="65877096c24ffa7abc4e4fa5edb95cf3413a5674",
            also='as JSONL of {"prompt", "answer"}, each question once',
        )
        aime = Source(
            name="the 30 questions of AIME 2024 (data set BytedTsinghua-SIA/AIME-2024)",
            also='as JSONL of {"prompt", "answer"}, each question once',
        )
        return {
            "actor.path": (self.actor.path, policy),
            "dataset.path": (self.dataset.path, questions),
            "dataset.eval_path": (self.dataset.eval_path, aime),
        }
