"""Agents and environments: what they promise each other and the rollout worker. No torch.

An *agent* turns one prompt into one trajectory by asking the policy (``Ask``) and acting in an
*environment*. Both are looked up by name (realsys.api.registry, kinds ``agent`` and ``environment``).
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the policy said to a sequence of tokens: one log-prob and one weight version each.

    ``stopped``: by a stop token; else it was cut at the number of tokens that was allowed, or where the
    model has no room for more.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stopped: bool

    @property
    def is_none(self) -> bool:
        """The conversation fills the model: nothing can be said to it."""
        return not self.tokens and not self.stopped


# (tokens so far, most new tokens or None for what the run allows) → answer. Chunks, servers, weight
# updates and retries happen behind it.
Ask = Callable[[Sequence[int], int | None], Awaitable[Answer]]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the environment says to an action: ``text`` is shown to the policy, if the episode goes on."""

    text: str = ""
    reward: float = 0.0
    done: bool = True
    info: Mapping[str, float] = field(default_factory=dict)


class Environment(abc.ABC):
    """One episode. Made for each answer of each prompt; may be slow, must not block the event loop."""

    @abc.abstractmethod
    async def reset(self, record: Mapping[str, Any]) -> None:
        """Begins with a record of the data set (``prompt``, ``answer``, …)."""

    @abc.abstractmethod
    async def step(self, action: str) -> Observation:
        """Takes what the policy said, as text."""

    async def close(self) -> None:
        """Frees what the episode holds. Called once, also after a failure."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """What one episode gives the trainer. All sequences have one entry a token.

    Attributes:
        tokens: prompt, answers, observations.
        from_policy: True on tokens that the policy wrote; only they are trained on.
        logprobs, versions: of the policy's tokens; 0.0 and -1 elsewhere.
        truncated: the last answer was cut.
    """

    tokens: tuple[int, ...]
    from_policy: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float
    truncated: bool
    stats: Mapping[str, float] = field(default_factory=dict)


class Agent(abc.ABC):
    """Asks the policy and acts."""

    @abc.abstractmethod
    async def run(
        self, prompt: Sequence[int], *, ask: Ask, environment: Environment, tokenizer: Any
    ) -> Trajectory:
        """One episode from ``prompt``; the environment was reset to its record."""
