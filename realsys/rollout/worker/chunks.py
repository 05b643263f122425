"""The requests that an answer is made of, and what comes back for them (pure).

An answer may take several requests: chunks, weight updates that interrupt one, servers that break. The
random number behind a token belongs to the answer's seed and the token's place in the answer, so the
tokens don't depend on where the cuts are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from realsys.api.agent import Answer
from realsys.api.model import GenerationHyperparameters
from realsys.transport.generation_messages import Finish, GenerateRequest, GenerateResult, Sampling


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How answers are made.

    Attributes:
        gconfig: ``n`` is not looked at; ``max_new_tokens`` is for a whole answer.
        end_ids: tokens that end an answer, beside ``gconfig.stop_token_ids``.
        base_seed: of the run.
        chunk: most new tokens a request; None: one request an answer, if nothing comes in between.
        timeout_s: for a whole answer, all retries included.
    """

    gconfig: GenerationHyperparameters
    end_ids: frozenset[int]
    base_seed: int
    chunk: int | None = None
    timeout_s: float = 300.0

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """All of them, ascending."""
        return tuple(sorted({*self.end_ids, *self.gconfig.stop_token_ids}))

    def limit(self, asked: int | None) -> int:
        """Most tokens of an answer for which an agent asked at most ``asked``."""
        most = self.gconfig.max_new_tokens
        return most if asked is None else min(asked, most)


@dataclass(kw_only=True)
class PartialAnswer:
    """The tokens of an answer that are there already."""

    prompt: Sequence[int]
    limit: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ended: bool = False
    stopped: bool = False

    def take(self, result: GenerateResult, *, asked: int) -> None:
        """Adds what a request for ``asked`` tokens gave. An aborted one leaves the answer unfinished."""
        self.tokens += result.output_ids
        self.logprobs += result.logprobs
        self.versions += result.versions
        self.stopped = result.finish is Finish.STOP
        # LENGTH with fewer tokens than asked for: the model has no room for more.
        short = result.finish is Finish.LENGTH and len(result.output_ids) < asked
        self.ended = self.stopped or short or len(self.tokens) >= self.limit

    def answer(self) -> Answer:
        """As an agent gets it."""
        return Answer(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            stopped=self.stopped,
        )


def next_request(part: PartialAnswer, settings: AnswerSettings, *, rid: str) -> GenerateRequest:
    """Goes on where ``part`` ends."""
    gconfig, position = settings.gconfig, len(part.tokens)
    count = part.limit - position
    if settings.chunk is not None:
        count = min(count, settings.chunk)
    return GenerateRequest(
        rid=rid,
        input_ids=(*part.prompt, *part.tokens),
        sampling=Sampling(
            max_new_tokens=count,
            min_new_tokens=min(count, max(0, gconfig.min_new_tokens - position)),
            temperature=0.0 if gconfig.greedy else gconfig.temperature,
            top_p=gconfig.top_p,
            top_k=gconfig.top_k or -1,
            stop_token_ids=settings.stop_token_ids,
            sampling_seed=part.seed,
            position=position,
        ),
    )


def fault_of(
    result: GenerateResult, request: GenerateRequest, *, min_version: int, must_answer: bool = True
) -> str:
    """Why nothing of ``result`` may be used; empty: it is good.

    Args:
        must_answer: there is room for a token; else the end without one means that the model is full.
    """
    count, asked = len(result.output_ids), request.sampling.max_new_tokens
    if not count == len(result.logprobs) == len(result.versions):
        return (
            f"it gave {count} tokens, {len(result.logprobs)} log-probs and "
            f"{len(result.versions)} versions"
        )
    if count > asked:
        return f"it gave {count} tokens, {asked} were asked for"
    if must_answer and result.finish is Finish.LENGTH and not count:
        return (
            f"it gave no token to {len(request.input_ids)} tokens, and calls that the end: "
            "has the model room for as many and an answer?"
        )
    if count and (oldest := min(result.versions)) < min_version:
        return f"its weights are of version {oldest}, the oldest allowed is {min_version}"
    return ""
