"""Splits an answer into generation requests and merges their results (pure).

An answer may take several requests: chunks, interruptions by weight updates, failed servers. A token's
random number depends on the answer's seed and the token's position, so tokens don't depend on the split
(with SGLang and vLLM they do, see ``seed_of_piece``). Long answers come in chunks by themselves: with a
server that is lost, no more than a chunk of each is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from realsys.api.agent import Answer, AnswerSoFar
from realsys.api.model import GenerationHyperparameters
from realsys.transport.generation_messages import Finish, GenerateRequest, GenerateResult, Sampling

LONG, LONG_CHUNK = 8192, 4096  # tokens: longer answers come in such chunks


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """Generation settings of answers.

    Attributes:
        gconfig: ``n`` is ignored; ``max_new_tokens`` is for a whole answer.
        end_ids: tokens that end an answer, besides ``gconfig.stop_token_ids``.
        base_seed: seed of the run.
        chunk: maximum number of new tokens per request; None: one request per answer, or ``LONG_CHUNK``
            where it may be longer than ``LONG``.
        timeout_s: longest silence of an answer: time in which it gets no token, all retries included.
        kept_sets: record the kept set of each token.
    """

    gconfig: GenerationHyperparameters
    end_ids: frozenset[int]
    base_seed: int
    chunk: int | None = None
    timeout_s: float = 300.0
    kept_sets: bool = False

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """All stop tokens, ascending."""
        return tuple(sorted({*self.end_ids, *self.gconfig.stop_token_ids}))

    def limit(self, asked: int | None) -> int:
        """Token limit of an answer for which an agent requested at most ``asked``."""
        most = self.gconfig.max_new_tokens
        return most if asked is None else min(asked, most)

    def chunk_of(self, limit: int) -> int:
        """Maximum number of new tokens per request for an answer of at most ``limit``."""
        if self.chunk is not None:
            return self.chunk
        return LONG_CHUNK if limit > LONG else limit


@dataclass(kw_only=True)
class PartialAnswer:
    """Tokens of an answer that were generated so far.

    Attributes:
        answer_prefix: so many of ``tokens`` were there before, and nothing else is known of them.
    """

    prompt: Sequence[int]
    limit: int
    seed: int
    stop: tuple[str, ...] = ()
    grammar: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    ended: bool = False
    stopped: bool = False
    answer_prefix: int = 0
    context_length: int = 0

    @classmethod
    def to(
        cls, tokens: Sequence[int], *, answer_prefix: int = 0, limit: int, **how: Any
    ) -> PartialAnswer:
        """Begins an answer to ``tokens``, the last ``answer_prefix`` of which are its own."""
        prompt, own = tuple(tokens), list[int]()
        if answer_prefix:
            prompt, own = prompt[:-answer_prefix], list(prompt[-answer_prefix:])
        is_whole = answer_prefix > 0 and answer_prefix >= limit
        return cls(
            prompt=prompt,
            tokens=own,
            answer_prefix=answer_prefix,
            limit=limit,
            ended=is_whole,
            **how,
        )

    def take(self, result: GenerateResult, *, asked: int) -> None:
        """Adds the result of a request for ``asked`` tokens. An aborted one leaves the answer
        unfinished.
        """
        self.tokens += result.output_ids
        self.logprobs += result.logprobs
        self.versions += result.versions
        self.kept += result.kept
        self.stopped = result.finish is Finish.STOP
        self.context_length = result.context_length
        # LENGTH with fewer tokens than requested: the model's context is full.
        short = result.finish is Finish.LENGTH and len(result.output_ids) < asked
        self.ended = self.stopped or short or len(self.tokens) >= self.limit

    def answer(self) -> Answer:
        """Returns the answer in the form that agents get, without the prefix that was there before."""
        return Answer(
            tokens=tuple(self.tokens[self.answer_prefix :]),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            kept=tuple(self.kept),
            stopped=self.stopped,
            context_length=self.context_length,
        )

    def so_far(self) -> AnswerSoFar:
        """Returns what is there now, without the prefix that was there before."""
        return AnswerSoFar(
            tokens=self.tokens[self.answer_prefix :] if self.answer_prefix else self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            kept=self.kept,
        )


def next_request(
    part: PartialAnswer, settings: AnswerSettings, *, rid: str, whole: bool = False
) -> GenerateRequest:
    """Makes the request that continues ``part``, to its end if ``whole``, else for a chunk."""
    gconfig, position = settings.gconfig, len(part.tokens)
    count = part.limit - position
    if not whole:
        count = min(count, settings.chunk_of(part.limit))
    return GenerateRequest(
        rid=rid,
        input_ids=(*part.prompt, *part.tokens),
        sampling=Sampling(
            max_new_tokens=count,
            min_new_tokens=min(count, max(0, gconfig.min_new_tokens - position)),
            temperature=0.0 if gconfig.greedy else gconfig.temperature,
            top_p=gconfig.top_p,
            top_k=gconfig.top_k or -1,
            stop=part.stop,
            stop_token_ids=settings.stop_token_ids,
            sampling_seed=part.seed,
            position=position,
            return_kept=settings.kept_sets,
            grammar=part.grammar,
        ),
    )


def result_fault(
    result: GenerateResult, request: GenerateRequest, *, min_version: int, must_answer: bool = True
) -> str:
    """Returns why ``result`` can't be used; empty if it is valid.

    Args:
        must_answer: at least one token fits; otherwise an end without tokens means a full context.
    """
    count, asked = len(result.output_ids), request.sampling.max_new_tokens
    if not count == len(result.logprobs) == len(result.versions):
        return (
            f"it gave {count} tokens, {len(result.logprobs)} log-probs and "
            f"{len(result.versions)} versions"
        )
    if len(result.kept) != (count if request.sampling.return_kept else 0):
        return f"it gave {count} tokens and {len(result.kept)} kept sets"
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
