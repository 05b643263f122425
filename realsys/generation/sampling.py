"""The next token of each row: which one, and with what log-probability.

Randomness is counter-based: the uniform number behind token ``t`` of a row is a hash of the row's
seed and ``t``. There is no generator whose state could depend on who else is in the batch, on the
data-parallel layout or on what was sampled before, so a run can be repeated and a row replayed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from realsys.api.model import GenerationHyperparameters


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


# splitmix64 (Steele, Lea and Flood, OOPSLA 2014); torch multiplies int64 modulo 2^64.
_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)

# Probabilities become integers in units of 2^-52: their running sum is exact, hence the same for
# every order of summation (CPU, CUDA, any batch), and never moves at a token of weight 0. The sum
# stays below 2^53, where float64 still holds every integer.
_WEIGHT_ONE = float(1 << 52)


def row_seed(base_seed: int, sample_id: str, index_in_group: int, version: int) -> int:
    """Seed of one answer as an int64, the same in every process.

    Args:
        base_seed: of the run.
        sample_id: of the prompt.
        index_in_group: 0 … n-1 among the answers to this prompt.
        version: what makes a second visit to the prompt draw anew: the step of the weights.
    """
    # The id comes last: the numbers hold no separator, so that two inputs never spell one text.
    text = f"{base_seed}:{index_in_group}:{version}:{sample_id}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniforms(row_seeds: Tensor, num_positions: int) -> Tensor:
    """float64 ``[B, num_positions]`` in [0, 1): the random number of each row and position.

    Args:
        row_seeds: int64 ``[B]``; any values, neighbouring ones too.
    """
    positions = torch.arange(1, num_positions + 1, device=row_seeds.device)
    bits = _mix(_mix(row_seeds)[:, None] + positions * _GAMMA)
    return _shift_right(bits, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


@dataclass(frozen=True)
class Sampler:
    """Picks tokens as a ``GenerationHyperparameters`` says.

    Attributes:
        stop_ids: int64 ``[S]``, tokens that end an answer; not picked before ``min_new_tokens``.
    """

    gconfig: GenerationHyperparameters
    stop_ids: Tensor

    def pick(self, logits: Tensor, uniform: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Tokens (int64 ``[B]``) and their log-probs (float32 ``[B]``).

        The log-prob is that of ``softmax(logits / temperature)`` over the whole vocabulary, for
        greedy picks too: what a trainer recomputes from the same weights.

        Args:
            logits: ``[B, V]`` of the next token.
            uniform: float64 ``[B]`` in [0, 1).
            position: index of the token in the answer, from 0.
        """
        logprob_BV = torch.log_softmax(logits.float() / self.gconfig.temperature, dim=-1)
        allowed = logprob_BV
        if position < self.gconfig.min_new_tokens:
            allowed = logprob_BV.index_fill(1, self.stop_ids, -torch.inf)
        if self.gconfig.greedy:
            token = allowed.argmax(dim=-1)
        else:
            token = sample(
                allowed.exp(), uniform, top_k=self.gconfig.top_k, top_p=self.gconfig.top_p
            )
        return token, logprob_BV.gather(1, token[:, None])[:, 0]


def sample(probs: Tensor, uniform: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Inverse-CDF draw (int64 ``[B]``). Never a token of probability 0, never out of range.

    ``top_k`` (0: off) keeps the most probable tokens, the first of equals; ``top_p`` then keeps the
    fewest whose share of what is left reaches it, at least one.

    Args:
        probs: float32 ``[B, V]``; need not sum to 1, at most to a little more.
        uniform: float64 ``[B]`` in [0, 1).
    """
    order = None
    if top_k or top_p < 1:
        probs, order = probs.sort(dim=-1, descending=True, stable=True)
        if top_k:
            probs = probs[:, :top_k]
    weight = (probs.double() * _WEIGHT_ONE).long()
    running = weight.cumsum(dim=-1)
    total = running[:, -1:]
    if top_p < 1:
        kept = running - weight < total.double() * top_p
        total = (running * kept).amax(dim=-1, keepdim=True)
    # uniform < 1 and total < 2^53: the product rounds to less than total.
    target = (uniform[:, None] * total.double()).long()
    index = torch.searchsorted(running, target, right=True)
    return (index if order is None else order.gather(1, index))[:, 0]
