"""Log-probabilities and entropy from logits, in float32 and at the sampling temperature.

Shapes: N packed tokens, V vocabulary. The trainer must divide by the temperature the tokens were
sampled with, otherwise the importance ratio of an unchanged policy is not 1.

Work goes through the rows in chunks, so that without gradients at most one chunk of float32
logits exists beside the (often bfloat16) original. With gradients each chunk's is kept: whose rows are
many takes predictions.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from realsys.algorithms.tensor_checks import require_same_shape
from realsys.api.errors import ConfigError, DataError

_CHUNK_ELEMENTS = 2**25  # 128 MiB of float32


def gather_logprobs(
    logits: torch.Tensor, labels: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """float32 in the shape of ``labels``: log softmax(logits / temperature) at them.

    Computed as the label's logit minus logsumexp: the ``[N, V]`` log-probabilities never exist.

    Args:
        logits: ``[N, V]``, any floating dtype. Row t belongs to label t: nothing is shifted here.
        labels: int64 ``[N]``, or ``[N, K]``: several of each row.
    """
    of_rows = labels if labels.ndim == 1 else labels[:, 0]
    require_same_shape("gather_logprobs", labels=of_rows, logits_rows=logits[:, 0])
    picked = [
        scaled.gather(1, rows) - scaled.logsumexp(dim=1)[:, None]
        if rows.ndim > 1
        else scaled.gather(1, rows[:, None]).squeeze(1) - scaled.logsumexp(dim=1)
        for scaled, rows in zip(
            _scaled_chunks(logits, temperature),
            torch.split(labels, _rows_per_chunk(logits)),
            strict=True,
        )
    ]
    return torch.cat(picked)


def entropy(logits: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """float32 ``[N]``: entropy in nats of softmax(logits / temperature), ``logits [N, V]``.

    Tokens ruled out by a logit of -inf contribute 0.
    """
    h: torch.Tensor = _Entropy.apply(logits, temperature)  # type: ignore[no-untyped-call]
    return h


class _Entropy(torch.autograd.Function):
    """H = log Σ exp z - m, and dH/dx = -p (z - m) / temperature, where z is a logit less its row's largest
    and m = Σ p z.

    Autograd's way is through the softmax, whose p of a vocabulary of 49,000 add up to 1 only to 1e-6 on
    CPUs, and through sums of p x that cancel: a gradient that is wrong by 2e-4 of its size. This one
    knows differences of logits only. It keeps nothing but the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        entropies = []
        for scaled in _scaled_chunks(logits, temperature, below_largest=True):
            _, mean, log_total = _mean_under_softmax(scaled)
            entropies.append((log_total - mean)[:, 0])
        ctx.save_for_backward(logits)
        ctx.temperature = temperature
        return torch.cat(entropies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor, None]:
        (logits,) = ctx.saved_tensors
        grad = torch.empty_like(logits)
        rows = _rows_per_chunk(logits)
        chunks = zip(
            _scaled_chunks(logits, ctx.temperature, below_largest=True),
            torch.split(grad_N[:, None] / -ctx.temperature, rows),
            torch.split(grad, rows),
            strict=True,
        )
        for scaled, factor, out in chunks:
            p, mean, _ = _mean_under_softmax(scaled)
            out.copy_(p * (scaled - mean) * factor)
        return grad, None


def _mean_under_softmax(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """p = softmax(z) ``[n, V]``, and ``[n, 1]`` each: Σ p z, log Σ exp z. The largest z is 0."""
    weight = z.exp()
    total = weight.sum(dim=1, keepdim=True)
    p = weight / total
    return p, (p * z).sum(dim=1, keepdim=True), total.log()


def shift_to_next_token(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """``[N]``: ``x [N]`` moved one token on within each sequence; 0 at each first position.

    It turns "computed from the prefix that ends at t" into "belongs to the token at t + 1": so a
    critic's output becomes the value of the state before each token.
    """
    if sum(lengths) != x.shape[0]:
        raise DataError(
            f"x has {x.shape[0]} rows, lengths add up to {sum(lengths)}",
            where="shift_to_next_token",
            fix="pass the lengths of the packed sequences",
        )
    firsts, start = [], 0
    for length in lengths:
        if length:  # an empty sequence has no first token
            firsts.append(start)
        start += length
    is_first = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    is_first[torch.tensor(firsts, dtype=torch.int64, device=x.device)] = True
    return x.roll(1).masked_fill(is_first, 0)


def _rows_per_chunk(logits: torch.Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // logits.shape[1])


def _scaled_chunks(
    logits: torch.Tensor, temperature: float, *, below_largest: bool = False
) -> Iterator[torch.Tensor]:
    if not temperature > 0:
        raise ConfigError(
            f"temperature is {temperature}",
            where="log-probabilities",
            fix="use the temperature of sampling; 1.0 for greedy answers",
        )
    for chunk in torch.split(logits, _rows_per_chunk(logits)):
        wide = chunk.float()
        if below_largest:  # before the division, so that it rounds differences only
            wide = wide - wide.amax(dim=1, keepdim=True)
        scaled = wide if temperature == 1.0 else wide / temperature
        # 0 · -inf would be nan
        yield scaled.clamp(min=torch.finfo(torch.float32).min) if below_largest else scaled
