"""Recipes that reproduce published results: sources of model and data, and the check that they are given.

A recipe is an experiment whose defaults are those of a published run, so that the curves can be compared.
It never makes a model of its own, because nothing could be compared then. docs/known_results.md has
sources, figures, and what was reproduced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from experiments.algorithm import GRPO, PPO
from experiments.compose import RLExperiment
from experiments.placement import Shared
from experiments.task import MathTask
from realsys.api.basics.losses import PPOLoss
from realsys.api.errors import ConfigError
from realsys.api.experiment import ChosenSetting, Preparation
from realsys.api.model import GenerationHyperparameters
from realsys.api.options import ModelOptions, OptimizerOptions
from realsys.api.scheduling import GroupOptions, SchedulingOptions
from realsys.api.worker_configs import ExperimentSaveEvalControl


@dataclass(frozen=True, kw_only=True)
class Source:
    """A name on the Hugging Face hub, and the revision that the published figures used."""

    name: str
    revision: str = ""  # empty: it does not change
    also: str = ""  # further instructions
    setting: str = ""  # names exactly these data on the hub; empty: they need the instructions

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
                fix=f"give {setting}={source.setting}, or download {source}; then give {setting}="
                if source.setting
                else f"download {source}; then give {setting}=",
            )


@dataclass(frozen=True, kw_only=True)
class KnownResult(RLExperiment):
    """A recipe for which model and data must be given."""

    sources: ClassVar[Mapping[str, Source]]

    def problems(self) -> Iterator[ConfigError]:
        """Yields missing sources; if there are none, the problems of every run."""
        needs = {name: (attrgetter(name)(self), s) for name, s in self.sources.items()}
        lacking = list(missing(needs))
        yield from lacking or super().problems()

    def chosen(self, given: Collection[str]) -> tuple[ChosenSetting, ...]:
        """None: the defaults are those of the published run."""
        return ()

    def preparations(self) -> tuple[Preparation, ...]:
        """Returns none: the model is given."""
        return ()


def gsm8k(split: str) -> Source:
    """A split of GSM8K."""
    revision = "e53f048856ff4f594e959d75785d2c2d37b678ee"
    return Source(
        name=f"data set openai/gsm8k (config main, split {split})",
        revision=revision,
        also='as JSONL of its fields "question" and "answer"',
        setting=f"hf:openai/gsm8k@{revision}/main/{split}-00000-of-00001.parquet",
    )


@dataclass(frozen=True, kw_only=True)
class QwenGSM8K(KnownResult):
    """Its sources: the policy, and both splits of the data set."""

    sources: ClassVar[Mapping[str, Source]] = {
        "actor.path": Source(
            name="Qwen/Qwen2.5-0.5B-Instruct", revision="7ae557604adf67be50417f59c2c2f167def9a775"
        ),
        "task.path": gsm8k("train"),
        "task.eval_path": gsm8k("test"),
    }


def qwen_gsm8k() -> QwenGSM8K:
    """PPO of Qwen2.5-0.5B on GSM8K: settings of verl's published baseline, not reproduced here yet."""
    return QwenGSM8K(
        exp_ctrl=ExperimentSaveEvalControl(
            total_train_epochs=15, eval_freq_steps=10, ckpt_freq_secs=1200, save_freq_steps=100
        ),
        task=MathTask(eval_size=1319, max_prompt_len=512),
        algorithm=PPO(kl_ctl=0.001, ppo_n_minibatches=4, recompute_logprob=True),
        placement=Shared(n_model_workers=4),
        actor=ModelOptions(optimizer=OptimizerOptions(lr=1e-6, beta2=0.999), recompute=True),
        critic=ModelOptions(optimizer=OptimizerOptions(lr=1e-5, beta2=0.999), recompute=True),
        gen=GenerationHyperparameters(max_new_tokens=512),
        train_bs_n_seqs=256,
        group_size=1,
        scheduling=SchedulingOptions(model_worker=GroupOptions(gpu=1.0)),
    )


@dataclass(frozen=True, kw_only=True)
class QwenDAPO(KnownResult):
    """Its sources: the policy with its longer context, the questions, and AIME's questions."""

    sources: ClassVar[Mapping[str, Source]] = {
        "actor.path": Source(
            name="Qwen/Qwen2.5-Math-7B",
            revision="b101308fe89651ea5ce025f25317fea6fc07e96e",
            also='set "max_position_embeddings": 32768 in its config.json, as the published run did',
        ),
        "task.path": Source(
            name="data set BytedTsinghua-SIA/DAPO-Math-17k",
            revision="65877096c24ffa7abc4e4fa5edb95cf3413a5674",
            also='as JSONL of {"prompt", "answer"}, each question once',
        ),
        "task.eval_path": Source(
            name="the 30 questions of AIME 2024 (data set BytedTsinghua-SIA/AIME-2024)",
            also='as JSONL of {"prompt", "answer"}, each question once',
        ),
    }


def qwen_dapo() -> QwenDAPO:
    """DAPO of Qwen2.5-Math-7B: settings of verl's published baseline, not reproduced here yet."""
    optimizer = OptimizerOptions(
        lr=1e-6, beta2=0.999, weight_decay=0.1, warmup_steps_proportion=0.05
    )
    return QwenDAPO(
        exp_ctrl=ExperimentSaveEvalControl(
            total_train_epochs=10,
            benchmark_steps=200,
            eval_freq_steps=10,
            save_freq_steps=20,
            ckpt_freq_secs=3600,
        ),
        task=MathTask(eval_size=32, max_prompt_len=2048),
        algorithm=GRPO(
            kl_ctl=0.0,
            loss=PPOLoss(eps_clip=0.2, eps_clip_higher=0.28, c_clip=10.0),
            ppo_n_minibatches=16,
            overlong_buffer_len=4096,
            recompute_logprob=True,
            early_stop_imp_ratio=None,
        ),
        placement=Shared(n_model_workers=32),
        actor=ModelOptions(optimizer=optimizer, recompute=True, max_tokens_per_mb=20480),
        gen=GenerationHyperparameters(max_new_tokens=8192),
        train_bs_n_seqs=512,
        group_size=16,
        scheduling=SchedulingOptions(model_worker=GroupOptions(gpu=1.0)),
    )
