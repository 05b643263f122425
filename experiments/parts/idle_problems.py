"""Settings that a run would read and not act on, refused with what does what was meant (pure).

For experiments on questions. What reaches no worker at all the launcher finds by itself
(launcher/plan/idle_settings.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from realsys.api.errors import ConfigError
from realsys.api.options import ModelOptions, PPOHyperparameters


def idle_problems(
    ppo: PPOHyperparameters, ref: ModelOptions, *, follows: bool
) -> Iterator[ConfigError]:
    """Answers a question by another name than group_size, and adapters of a frozen reference.

    Args:
        follows: the reference follows the actor (``ref_ema_eta``): then it has the actor's adapters.
    """
    if ppo.gen.n != 1:
        yield ConfigError(
            f"ppo.gen.n is {ppo.gen.n}, and group_size alone says how many answers a question has",
            where="ppo.gen.n",
            fix=f"use group_size={ppo.gen.n}, and leave ppo.gen.n out",
        )
    if ref.lora.rank and not follows:
        yield ConfigError(
            f"ref.lora.rank is {ref.lora.rank}, and adapters of a frozen reference learn nothing",
            where="ref.lora.rank",
            fix="leave it out; actor.lora.rank trains adapters of the policy",
        )
