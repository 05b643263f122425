"""Conversion between the API's values and the embedded engine's (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from realsys.api.model import GenerationHyperparameters
from realsys.generation.engine.engine_requests import GenerationOutput, GenerationRequest
from realsys.generation.engine.sampling import row_seed
from realsys.generation.http.served_engine import EngineAnswer
from realsys.transport.generation_messages import Finish, GenerateRequest


def engine_request(
    request: GenerateRequest, *, eos_token_ids: Sequence[int], base_seed: int
) -> GenerationRequest:
    """Converts a request of the API to one of the engine."""
    sampling = request.sampling
    greedy = sampling.temperature == 0
    gconfig = GenerationHyperparameters(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        greedy=greedy,
        temperature=1.0 if greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
    )
    seed = sampling.sampling_seed
    return GenerationRequest(
        rid=request.rid,
        prompt=request.input_ids,
        gconfig=gconfig,
        seed=row_seed(base_seed, request.rid, 0, 0) if seed is None else seed,
        position=sampling.position,
        stop_ids=frozenset(
            {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
        ),
        stop_texts=sampling.stop,
    )


def answer_of(output: GenerationOutput, *, prompt_tokens: int) -> EngineAnswer:
    """Converts a copy of the engine's output so far."""
    return EngineAnswer(
        rid=output.rid,
        output_ids=list(output.tokens),
        logprobs=list(output.logprobs),
        versions=list(output.versions),
        finish=Finish(output.finish) if output.finish else None,
        prompt_tokens=prompt_tokens,
        cached_tokens=output.cached_tokens,
    )
