"""Interfaces of agents and environments, as the rollout worker calls them. No torch.

An *agent* turns one question into one episode by asking the policy (``Ask``) and acting in an
*environment*: in tokens (``Agent``), or through an endpoint that it gives to a program
(realsys/rollout/runners/). Both are looked up by name (realsys.api.registry, kinds ``agent`` and
``environment``).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from realsys.api.basics.thoughts import opened_thoughts
from realsys.api.errors import DataError, RolloutError


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Tokens that the policy generated for one request, each with its log-prob and weight version.

    ``stopped``: ended by a stop token; else truncated at the allowed number of tokens or at the
    model's context length. ``kept``: kept set of each token, where they are sampled from a part of the
    vocabulary (``GenerationHyperparameters.restricts``); an agent passes them on as they are.
    ``opened``: the mark with which the context had opened thoughts, so that the answer begins within
    them; empty: it had not, or nobody looked. ``context_length``: most tokens of prompt and answer
    together, told where none was left for an answer; 0: nobody has said.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stopped: bool
    kept: tuple[bytes, ...] = ()
    opened: str = ""
    context_length: int = 0

    @property
    def is_none(self) -> bool:
        """True if the conversation already fills the model's context, so nothing could be generated."""
        return not self.tokens and not self.stopped

    def part(self, start: int, stop: int) -> Answer:
        """Returns an answer of a part of the tokens, which ends as this one does."""
        return replace(
            self,
            tokens=self.tokens[start:stop],
            logprobs=self.logprobs[start:stop],
            versions=self.versions[start:stop],
            kept=self.kept[start:stop],
        )

    def joined(self, rest: Answer) -> Answer:
        """Returns an answer of these tokens and those of ``rest``, which ends as that one does."""
        return replace(
            rest,
            tokens=self.tokens + rest.tokens,
            logprobs=self.logprobs + rest.logprobs,
            versions=self.versions + rest.versions,
            kept=self.kept + rest.kept,
            opened=self.opened or rest.opened,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class AnswerSoFar(Sequence[int]):
    """Tokens of an answer that grows, with what is known of each: as ``on_tokens`` gets them.

    It looks at lists that may grow further, and copies nothing.

    Attributes:
        kept: as of ``Answer``; empty where answers have none.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    kept: Sequence[bytes] = ()

    @classmethod
    def of(cls, answer: Answer) -> AnswerSoFar:
        """Returns all of an answer."""
        return cls(
            tokens=answer.tokens,
            logprobs=answer.logprobs,
            versions=answer.versions,
            kept=answer.kept,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: Any) -> Any:
        return self.tokens[place]

    def first(self, count: int) -> Answer:
        """Returns an answer of the first ``count`` tokens, which no stop token has ended."""
        return Answer(
            tokens=tuple(self.tokens[:count]),
            logprobs=tuple(self.logprobs[:count]),
            versions=tuple(self.versions[:count]),
            kept=tuple(self.kept[:count]),
            stopped=False,
        )


class Ask(Protocol):
    """Has the policy answer. Chunks, servers, weight updates and retries happen behind it."""

    async def __call__(
        self,
        tokens: Sequence[int],
        limit: int | None = None,
        /,
        *,
        stop: Sequence[str] = (),
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        grammar: str = "",
        answer_prefix: int = 0,
    ) -> Answer:
        """Returns the answer to ``tokens``.

        Args:
            limit: most new tokens; None: as many as the run allows.
            stop: texts at which the answer may end early; it holds the one that ended it, and where it
                came in pieces more may follow.
            on_tokens: called with the answer so far (``AnswerSoFar``) whenever a piece of it has come.
            grammar: what the answer must be, in llguidance's dialect of Lark; the embedded engine takes it.
            answer_prefix: so many of the last ``tokens`` are the answer's own beginning. Returned is the
                rest; ``limit`` and ``grammar`` are of the whole.
        Raises:
            WaitTimeout, RemoteError: there is none.
        """


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

    def opening(self) -> str:
        """Returns what the environment shows behind the question, before the first answer; after
        ``reset``.
        """
        return ""

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Returns the tools that a chat agent offers to the policy, in the form of Chat Completions; after
        ``reset``.
        """
        return ()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Calls one of ``tools`` and returns its result; what the policy did wrong is told in its text.

        Raises:
            DataError: this environment has no tools.
        """
        raise DataError(
            f"no tool can be called, {name!r} neither",
            where=f"environment {type(self).__name__}",
            fix="an environment with tools() implements call()",
        )

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
        role: who speaks, where an episode has several speakers: sequences are compared within their role.
    """

    tokens: tuple[int, ...]
    from_policy: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float
    truncated: bool
    stats: Mapping[str, float] = field(default_factory=dict)
    kept: tuple[bytes, ...] = ()
    role: str = ""


def rewards_of_roles(sequences: Iterable[Trajectory]) -> dict[str, list[float]]:
    """Returns the rewards of each role's sequences, in order; a role without a name is one, too."""
    found: dict[str, list[float]] = {}
    for one in sequences:
        found.setdefault(one.role, []).append(one.reward)
    return found


def mean_of(rewards: Sequence[float]) -> float:
    """Returns their mean; of equal ones exactly that."""
    return rewards[0] if min(rewards) == max(rewards) else fmean(rewards)


@dataclass(frozen=True, kw_only=True)
class AnsweredRequest:
    """A request of an agent behind the endpoint, and the policy's answer to it; for people to read.

    Attributes:
        id: of the answer, as the client knows it.
        continues: number (from 0) of the episode's answer behind which its conversation goes on; None: a
            beginning.
        messages: of the conversation, the answer among them.
        prompt_tokens, tokens: of the conversation before the answer; of the answer.
        stopped: it ended by itself.
        read: the client got it; else it is not trained on, unless its branch goes on.
        calls: names of the tools that it calls.
        reward: of this answer alone; None: none was set.
    """

    id: str
    role: str = ""
    continues: int | None = None
    messages: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    stopped: bool = True
    read: bool = True
    calls: tuple[str, ...] = ()
    reward: float | None = None

    def as_row(self) -> dict[str, Any]:
        """Returns it for a line of JSON: only what differs from the defaults."""
        return {
            f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default
        }


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What became of an episode: sequences to train on, and its reward.

    Attributes:
        reward: for metrics and filters: the mean of its sequences', of several roles the mean of the roles'
            means, unless an agent says otherwise.
        sequences: one, or several where the conversation has branches. Each has a reward of its own,
            which is the episode's unless single answers were rewarded.
        stats: numbers for the metrics, ``rollout/agent/<name>``.
        shares_reward: all sequences of a role have the same reward, so that a group compares episodes; else
            it compares sequences.
        problem: why the agent failed, though there is a reward; empty: it did not.
        was_doubtful: the problem would have been a ``DoubtfulEnd``, had it been the episode's first.
        answers: of an agent behind the endpoint, in the order in which they were given.
    """

    sequences: tuple[Trajectory, ...]
    reward: float
    stats: Mapping[str, float] = field(default_factory=dict)
    shares_reward: bool = True
    problem: str = ""
    was_doubtful: bool = False
    answers: tuple[AnsweredRequest, ...] = ()


class DoubtfulEnd(RolloutError):
    """An episode ended in a way that the policy's text may have caused, or something else.

    It is played again once; a try that ends so again is the policy's doing (``EpisodeTask.is_doubtful``).
    """


@dataclass(frozen=True, kw_only=True)
class EpisodeTask:
    """One episode to run.

    Attributes:
        id: unique in the run; other than that of the same question's other episodes and tries.
        prompt: the question's tokens.
        record: the data set's record: ``prompt`` as text, ``answer``, and what else it tells.
        environment: already reset to the record.
        is_doubtful: an earlier try of this episode raised ``DoubtfulEnd``: this one is scored instead.
    """

    id: str
    prompt: Sequence[int]
    record: Mapping[str, Any]
    ask: Ask
    environment: Environment
    tokenizer: Any
    is_doubtful: bool = False


@dataclass(frozen=True, kw_only=True)
class AgentHost:
    """The worker that an agent runs in.

    Attributes:
        name: of the worker.
        end_ids: tokens that end an answer.
        folder: for logs of what the agent starts; made when it is needed.
        host: address at which other nodes reach this one; "127.0.0.1" where there are none.
        ports: that it may listen on; None: any.
        secret: of the trial, from which keys of endpoints are derived.
        place: text that it shares with whoever takes its place after a kill, and with nobody else; empty:
            nobody does.
    """

    name: str
    tokenizer: Any
    end_ids: frozenset[int]
    folder: Path
    host: str = "127.0.0.1"
    ports: Sequence[int] | None = None
    secret: bytes = field(default=b"", repr=False)
    place: str = ""


class EpisodeAgent(abc.ABC):
    """Runs episodes, any number at the same time. Made once a worker."""

    own_prompt = True  # its sequences may begin otherwise than with the question's tokens

    async def open(self, host: AgentHost) -> None:
        """Gets ready; called once, before the first episode."""

    async def close(self) -> None:
        """Ends everything that it has started; called once, after the last episode."""

    @abc.abstractmethod
    async def run_episode(self, task: EpisodeTask) -> Episode:
        """Runs one episode. What it raises fails the question, which is then answered anew."""


class _AskSeeingThoughts:
    """Has the policy answer, and notes whether the context had opened its thoughts."""

    def __init__(self, ask: Ask, tokenizer: Any) -> None:
        self._ask, self._tokenizer = ask, tokenizer

    async def __call__(
        self, tokens: Sequence[int], limit: int | None = None, /, **how: Any
    ) -> Answer:
        opened = opened_thoughts(self._tokenizer, tokens)
        answer = await self._ask(tokens, limit, **how)
        return replace(answer, opened=opened) if opened else answer


class Agent(EpisodeAgent):
    """An agent that speaks in tokens: one sequence an episode, which begins with the question's prompt."""

    own_prompt = False

    @abc.abstractmethod
    async def run(
        self, prompt: Sequence[int], *, ask: Ask, environment: Environment, tokenizer: Any
    ) -> Trajectory:
        """Runs one episode from ``prompt`` in ``environment``, which was reset to the prompt's record."""

    async def run_episode(self, task: EpisodeTask) -> Episode:
        """Runs ``run``."""
        ask = _AskSeeingThoughts(task.ask, task.tokenizer)
        made = await self.run(
            task.prompt, ask=ask, environment=task.environment, tokenizer=task.tokenizer
        )
        return Episode(sequences=(made,), reward=made.reward, stats=made.stats)
