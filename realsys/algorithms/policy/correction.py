"""Training on answers of another policy: importance weights, and how far the two policies are apart.

Three policies: *behaviour* sampled the tokens (an older version, or another engine's numbers for the
same one), *proximal* is the trainer's own at the start of the update, and the third is being trained.
PPO's ratio is third over proximal (policy_loss.py); weights of proximal over behaviour are made here.
They are constants to the optimizer. Log-probabilities are of the sampled tokens, at one temperature.

Tensors are packed ``[N]`` (with the lengths of the sequences) or padded ``[B, T]``; a mask is 1 on
tokens that the policy wrote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch

from realsys.algorithms.advantage.kl import kl_estimate
from realsys.algorithms.sequence_sums import sum_per_sequence, to_tokens
from realsys.algorithms.tensor_checks import require_same_shape
from realsys.api.errors import ConfigError, did_you_mean

Correction = Literal["none", "cap", "tis", "icepop", "sequence_mask"]
Level = Literal["token", "sequence"]
CapMode = Literal["mask", "clamp"]
Action = Literal["train", "warn", "skip", "stop"]
_MAX_LOG_RATIO = 20.0  # a weight is at most e^20 ≈ 5e8, whatever the log-probabilities


@torch.no_grad()
def correction_weights(
    prox_logprobs: torch.Tensor,
    behav_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    method: Correction,
    low: float = 0.0,
    high: float = math.inf,
    cap_mode: CapMode = "mask",
    level: Level = "token",
    lengths: Sequence[int] | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weight of each token's loss: w = proximal over behaviour, bounded by ``method``.

    - ``none``: w, unbounded (decoupled PPO, Hilton et al., arXiv:2110.00641, sec. 3).
    - ``cap``: 0 where w > ``high``, or w held at ``high`` (AReaL, arXiv:2505.24298, sec. 5).
    - ``tis``: min(w, ``high``) (truncated importance sampling: IMPALA, arXiv:1802.01561, sec. 4; for
      this use Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training").
    - ``icepop``: 0 outside ``[low, high]`` (Ring-1T, arXiv:2510.18855).
    - ``sequence_mask``: w of the token; 0 on a whole sequence whose geometric mean of w (the ratio of
      GSPO, arXiv:2507.18071) is outside ``[low, high]``.

    A bound belongs to what is kept. What is left out has weight 0 and stays in the denominator of
    ``aggregate``: so it does not make the others count more.

    Args:
        cap_mode: of ``cap``: ``mask`` or ``clamp``.
        level: ``sequence``: every token weighs the product of its sequence's w. Not for
            ``sequence_mask``, which has both.
        lengths: of packed sequences; needed by whatever looks at sequences.
    Returns:
        float32 weights, 0 where the mask is 0; float32 statistics per token, 0 likewise:
        ``masked`` (1 where left out), ``clamped`` (1 where held at ``high``).
    """
    where = "correction_weights"
    require_same_shape(where, prox=prox_logprobs, behaviour=behav_logprobs, mask=mask)
    _check(method, low, high, cap_mode, level)
    off = ~mask.bool()
    log_ratio = (prox_logprobs.float() - behav_logprobs.float()).masked_fill(off, 0.0)
    if level == "sequence" and method != "sequence_mask":
        log_ratio = to_tokens(sum_per_sequence(log_ratio, lengths), log_ratio, lengths)
    weight = _bounded_exp(log_ratio)
    judged = weight
    if method == "sequence_mask":
        count = sum_per_sequence((~off).float(), lengths).clamp(min=1)
        mean = sum_per_sequence(log_ratio, lengths) / count
        judged = _bounded_exp(to_tokens(mean, log_ratio, lengths))

    clamps = method == "tis" or (method == "cap" and cap_mode == "clamp")
    # Asked for what is inside: what is no number is left out.
    inside = (judged >= (low if method in ("icepop", "sequence_mask") else 0.0)) & (judged <= high)
    masked = torch.zeros_like(off) if method == "none" or clamps else ~inside
    clamped = weight > high if clamps else torch.zeros_like(off)
    if clamps:
        weight = weight.clamp(max=high)
    stats = {
        "masked": masked.float().masked_fill(off, 0.0),
        "clamped": clamped.float().masked_fill(off, 0.0),
    }
    return weight.masked_fill(masked | off, 0.0), stats


@torch.no_grad()
def drifted_sequences(
    logprobs: torch.Tensor,
    behav_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    lengths: Sequence[int],
    delta: float,
) -> torch.Tensor:
    """bool ``[N]``: tokens of sequences of negative advantage whose mean of log behaviour − log π exceeds
    ``delta`` nats (off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556, eq. 8 and 9).

    Args:
        logprobs: of the policy being trained. All packed ``[N]``, of tokens that the policy wrote.
        advantages: of tokens; a sequence's is their mean.
    """
    require_same_shape(
        "drifted_sequences", logprobs=logprobs, behaviour=behav_logprobs, advantages=advantages
    )
    num_B = torch.tensor(list(lengths), device=logprobs.device).clamp(min=1)
    apart_B = sum_per_sequence(behav_logprobs.float() - logprobs.float(), lengths) / num_B
    worse_B = sum_per_sequence(advantages.float(), lengths) < 0
    return to_tokens(worse_B & (apart_B > delta), logprobs, lengths)


@torch.no_grad()
def mismatch(
    prox_logprobs: torch.Tensor, behav_logprobs: torch.Tensor, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """How far proximal and behaviour policy are apart, float32 per token, 0 where the mask is 0.

    ``kl_k3``: estimate of KL(behaviour ‖ proximal), at most 10 a token (see ``kl_estimate``);
    ``abs``: of the difference of log-probabilities; ``prob_abs``: of that of probabilities;
    ``weight``: proximal over behaviour, whose mean over the behaviour's own tokens is 1.
    """
    require_same_shape("mismatch", prox=prox_logprobs, behaviour=behav_logprobs, mask=mask)
    off = ~mask.bool()
    prox = prox_logprobs.float().masked_fill(off, 0.0)
    behaviour = behav_logprobs.float().masked_fill(off, 0.0)
    return {
        "kl_k3": kl_estimate(behaviour, prox, "k3"),
        "abs": (prox - behaviour).abs(),
        "prob_abs": (prox.exp() - behaviour.exp()).abs(),
        "weight": _bounded_exp(prox - behaviour).masked_fill(off, 0.0),
    }


def judge_mismatch(kl_k3: float, *, limit: float | None, on_mismatch: str) -> Action:
    """What to do with a batch: ``train`` up to the limit, else ``on_mismatch`` (warn, skip or stop).

    A figure that is not a number is past every limit. Pass the mean over all ranks, so that all
    decide alike.
    """
    if limit is None or kl_k3 <= limit:
        return "train"
    if on_mismatch not in get_args(Action)[1:]:
        fix = did_you_mean(on_mismatch, get_args(Action)[1:])
        raise ConfigError(f"on_mismatch is {on_mismatch!r}", where="judge_mismatch", fix=fix)
    return on_mismatch  # type: ignore[return-value]  # checked above


def _bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _check(method: str, low: float, high: float, cap_mode: str, level: str) -> None:
    known = (
        ("correction", method, get_args(Correction)),
        ("cap mode", cap_mode, get_args(CapMode)),
        ("level", level, get_args(Level)),
    )
    for name, value, values in known:
        if value not in values:
            raise ConfigError(
                f"no {name} {value!r}", where="correction_weights", fix=did_you_mean(value, values)
            )
    if not 0 <= low < high:
        raise ConfigError(
            f"bounds of the weight are {low} and {high}",
            where="correction_weights",
            fix="use 0 <= low < high; 1 is the weight of an unchanged policy",
        )
