"""Checks between the parts of a reinforcement learning run (pure).

Settings that a run would read and not act on are refused with what does what was meant. What reaches no
worker at all the launcher finds by itself (launcher/plan/idle_settings.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.sft import SFTExperiment
from experiments.task import Task
from realsys.api.errors import ConfigError
from realsys.api.model import GenerationHyperparameters
from realsys.api.options import ModelOptions


def missing_critic(algorithm: str) -> ConfigError:
    """The algorithm trains a critic, and there is none."""
    return ConfigError(
        f"algorithm {algorithm} trains a critic, but this recipe has none",
        where="algorithm and critic",
        fix="use a recipe with one, e.g. ppo-math, or set critic.optimizer.lr=1e-5",
    )


def start_problems(task: Task, actor: ModelOptions, sft: SFTExperiment) -> Iterator[ConfigError]:
    """Yields a starting policy that was fine-tuned on something else than the run is about."""
    if actor.path is not None or sft.model.path is not None:
        return
    if not task.is_generated:
        yield ConfigError(
            "the built-in starting policy knows only questions that are made, not those of a file",
            where="task.path without actor.path",
            fix="give actor.path=<Hugging Face directory> (or sft.model.path= and "
            "sft.task.path= to fine-tune one first; what task holds out is held out there too)",
        )
    elif sft.task.kind != task.kind:
        yield ConfigError(
            f"the starting policy would be fine-tuned on task {sft.task.kind}, and the run is about task "
            f"{task.kind}",
            where="task and sft.task",
            fix=f"set sft.task={task.kind}, or give actor.path=<Hugging Face directory>",
        )


def idle_problems(
    gen: GenerationHyperparameters, ref: ModelOptions, *, follows: bool
) -> Iterator[ConfigError]:
    """Yields the number of answers under another name than group_size, and adapters of a frozen reference.

    Args:
        follows: the reference follows the actor (``ref_ema_eta``): then it has the actor's adapters.
    """
    if gen.n != 1:
        yield ConfigError(
            f"gen.n is {gen.n}, and group_size alone says how many answers a question has",
            where="gen.n",
            fix=f"use group_size={gen.n}, and leave gen.n out",
        )
    if ref.lora.rank and not follows:
        yield ConfigError(
            f"ref.lora.rank is {ref.lora.rank}, and adapters of a frozen reference learn nothing",
            where="ref.lora.rank",
            fix="leave it out; actor.lora.rank trains adapters of the policy",
        )
