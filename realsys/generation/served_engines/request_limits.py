"""What a child server can be requested to do: refusals, and how much an answer has room for (pure)."""

from __future__ import annotations

from msgspec import structs

from realsys.api.errors import ConfigError
from realsys.transport.generation_messages import GenerateRequest


def refuse_kept(request: GenerateRequest, *, engine: str) -> None:
    """Refuses to return kept sets where sampling leaves tokens out, since the child does not tell which.

    Without ``top_p``, ``top_k`` and ``min_new_tokens`` they are the whole vocabulary, as the child's
    log-probs are.

    Raises:
        ConfigError: they are requested.
    """
    sampling = request.sampling
    narrowing = {
        "top_p": (sampling.top_p, sampling.top_p < 1),
        "top_k": (sampling.top_k, sampling.top_k > 0),
        "min_new_tokens": (sampling.min_new_tokens, sampling.min_new_tokens > 0),
    }
    found = [f"{name}={value}" for name, (value, is_on) in narrowing.items() if is_on]
    if sampling.return_kept and sampling.temperature > 0 and found:
        raise ConfigError(
            f"{engine} does not tell which tokens {' and '.join(found)} kept",
            where=f"/generate, request {request.rid!r}",
            fix="leave that out, or use the embedded engine (server_backend=embedded)",
        )


def refuse_grammar(request: GenerateRequest, *, engine: str) -> None:
    """Refuses a grammar: the child would not say which tokens it left, nor go on within one.

    Raises:
        ConfigError: there is one.
    """
    if request.sampling.grammar:
        raise ConfigError(
            f"{engine} can't hold an answer to a grammar here",
            where=f"/generate, request {request.rid!r}",
            fix="leave it out, or use the embedded engine (server_backend=embedded)",
        )


def within_room(request: GenerateRequest, left: int) -> GenerateRequest:
    """Limits ``request`` to ``left`` tokens: servers differ in handling more."""
    sampling = request.sampling
    if sampling.max_new_tokens <= left:
        return request
    least = min(sampling.min_new_tokens, left)
    clipped = structs.replace(sampling, max_new_tokens=left, min_new_tokens=least)
    return structs.replace(request, sampling=clipped)
