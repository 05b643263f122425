"""Interfaces of agents and environments, as the rollout worker calls them. No torch.

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
    """Tokens that the policy generated for one request, each with its log-prob and weight version.

    ``stopped``: ended by a stop token; else truncated at the allowed number of tokens or at the
    model's context length. ``kept``: kept set of each token, where they are sampled from a part of the
    vocabulary (``GenerationHyperparameters.restricts``); an agent passes them on as they are.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stopped: bool
    kept: tuple[bytes, ...] = ()

    @property
    def is_none(self) -> bool:
        """True if the conversation already fills the model's context, so nothing could be generated."""
        return not self.tokens and not self.stopped


# (tokens so far, limit on new tokens or None for the run's own limit) → answer. Chunks, servers, weight
# updates and retries happen behind it.
Ask = Callable[[Sequence[int], int | None], Awaitable[Answer]]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Environment's response to an action; ``text`` is shown to the policy if the episode goes on."""

    text: str = ""
    reward: float = 0.0
    done: bool = True
    info: Mapping[str, float] = field(default_factory=dict)


class Environment(abc.ABC):
    """One episode. Created for each answer of each prompt; may be slow, must not block the event loop."""

    @abc.abstractmethod
    async def reset(self, record: Mapping[str, Any]) -> None:
        """Starts the episode from a data set record (``prompt``, ``answer``, …)."""

    def sampled(self, answer: Answer) -> None:
        """Receives the tokens of the action that follows; ignored unless an environment looks at them."""

    @abc.abstractmethod
    async def step(self, action: str) -> Observation:
        """Applies the policy's answer, given as text, and returns the observation."""

    async def close(self) -> None:
        """Frees the episode's resources. Called once, also after a failure."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """Training data of one episode. Every sequence field has one entry per token.

    Attributes:
        tokens: prompt, answers, observations.
        from_policy: True on tokens that the policy wrote; only they are trained on.
        logprobs, versions: of the policy's tokens; 0.0 and -1 elsewhere.
        truncated: the last answer was cut off without a stop token.
        kept: ``Answer.kept`` of the policy's tokens, ``b""`` elsewhere; left out where answers have none.
    """

    tokens: tuple[int, ...]
    from_policy: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float
    truncated: bool
    stats: Mapping[str, float] = field(default_factory=dict)
    kept: tuple[bytes, ...] = ()


class Agent(abc.ABC):
    """Runs an episode: queries the policy and acts in the environment."""

    @abc.abstractmethod
    async def run(
        self, prompt: Sequence[int], *, ask: Ask, environment: Environment, tokenizer: Any
    ) -> Trajectory:
        """Runs one episode from ``prompt`` in ``environment``, which was reset to the prompt's record."""
