"""The terms of the policy's objective: each a loss of every token, its weight, and the count that divides
it.

policy_objective.py adds them up. To add one: a function here that returns a ``Term``, a line in ``terms``,
and one in ``PolicyObjective.has_gradient`` if it has a gradient where the advantage is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from realsys.algorithms.advantage.kl import kl_loss
from realsys.algorithms.policy.correction import drifted_sequences
from realsys.algorithms.policy.policy_loss import policy_loss
from realsys.algorithms.predictions import Predictions
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import answer_tokens, of_tokens
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.ppo.batch_checks import BEHAVIOUR, REFERENCE
from realsys.interfaces.ppo.off_policy import WEIGHTS
from realsys.interfaces.ppo.ppo_experience import EQUAL_SCORES
from realsys.interfaces.ppo.teacher import TOP_IDS, TOP_LOGPROBS, forward_kl
from realsys.interfaces.ppo.token_selection import CHOSEN

POLICY, NLL = "policy", "nll"  # components: each is divided by its own count


@dataclass(frozen=True, kw_only=True)
class LossTokens:
    """The R tokens of a micro-batch that have a loss.

    Attributes:
        mask_N: which of the micro-batch's tokens they are.
        logprob_R, entropy_R: of the policy that is trained, with their gradients.
        old_logprob_R: what ratios are to.
        lengths_R: how many of each sequence there are; None if nothing needs them.
    """

    mb: SequenceSample
    mask_N: torch.Tensor
    predictions: Predictions
    logprob_R: torch.Tensor
    entropy_R: torch.Tensor
    old_logprob_R: torch.Tensor
    lengths_R: list[int] | None

    def of(self, key: str) -> torch.Tensor:
        """A key of the batch at these tokens."""
        return self.mb.data[key][self.mask_N]


@dataclass(frozen=True, kw_only=True)
class Term:
    """A part of the objective: coef · (sum of the losses over a count).

    Attributes:
        losses_R: of each token.
        counts_R: bool, the tokens that its component counts; None: all R.
        figure: its statistic's name, a mean over tokens; empty: none.
    """

    losses_R: torch.Tensor
    coef: float = 1.0
    component: str = POLICY
    counts_R: torch.Tensor | None = None
    figure: str = ""


def terms(
    tokens: LossTokens,
    settings: PPOSettings,
    *,
    kl_coef: float,
    entropy_coef: float,
    teachers: Mapping[str, float],
) -> Iterator[Term]:
    """Yields the terms beside the policy's loss.

    Args:
        kl_coef, entropy_coef: 0: there is no such term. teachers: weights of forward KLs, by name.
    """
    if entropy_coef:
        equal = EQUAL_SCORES in tokens.mb.keys
        differ_R = ~tokens.of(EQUAL_SCORES) if equal else None
        yield Term(losses_R=tokens.entropy_R, coef=-entropy_coef, counts_R=differ_R)
    if kl_coef:
        yield _kl(tokens, settings, kl_coef)
    for name, weight in teachers.items():
        yield _forward_kl(tokens, name, weight, settings.gen.temperature)
    if settings.nll_coef:
        yield _likelihood(tokens, settings.nll_coef)


def policy_tokens(
    tokens: LossTokens, settings: PPOSettings
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The chosen loss ``[R]``, weighted, and figures ``[R]`` by the names of their statistics."""
    weight_R = tokens.of(WEIGHTS) if WEIGHTS in tokens.mb.keys else None
    more: dict[str, torch.Tensor] = {}
    if settings.opsm_delta is not None:
        drifted_R = drifted_sequences(
            tokens.logprob_R,
            tokens.of(BEHAVIOUR),
            tokens.of("advantages"),
            lengths=tokens.lengths_R or [],
            delta=settings.opsm_delta,
        )
        weight_R = torch.ones_like(tokens.logprob_R) if weight_R is None else weight_R
        weight_R = weight_R.masked_fill(drifted_R, 0.0)
        more = {"drifted": drifted_R.float()}
    loss_R, found = policy_loss(
        settings.loss,
        tokens.logprob_R,
        tokens.old_logprob_R,
        tokens.of("advantages"),
        torch.ones_like(tokens.logprob_R, dtype=torch.bool),
        lengths=tokens.lengths_R,
        weights=weight_R,
        chosen=tokens.of(CHOSEN) if CHOSEN in tokens.mb.keys else None,
    )
    return loss_R, {
        "importance_weight": found["importance_ratio"],
        "clip_ratio": found["clip_fraction"],
        "dual_clip_ratio": found["dual_clip_fraction"],
        "approx_kl": found["approx_kl_k3"],
        "entropy": tokens.entropy_R.detach(),
        **more,
    }


def rewarded(data: SequenceSample) -> torch.Tensor:
    """Bool ``[N]``: tokens of answers with a reward above 0."""
    return of_tokens(data.data["rewards"] > 0, data)


def _kl(tokens: LossTokens, settings: PPOSettings, coef: float) -> Term:
    """KL to the reference."""
    kl_R = kl_loss(
        tokens.logprob_R,
        tokens.of(REFERENCE),
        settings.kl_estimate_by,  # type: ignore[arg-type]  # its options are checked at use
        old_logprobs=tokens.old_logprob_R if settings.kl_unbiased else None,
    )
    return Term(losses_R=kl_R, coef=coef, figure="kl_loss")


def _forward_kl(tokens: LossTokens, name: str, weight: float, temperature: float) -> Term:
    """KL of a teacher to the policy, over the teacher's most probable tokens."""
    ids_RK = tokens.of(TOP_IDS + name).long()
    rows_N = answer_tokens(tokens.mb, tokens.mask_N)[1]
    teacher_RK = tokens.of(TOP_LOGPROBS + name)
    # A larger model of the same tokens may have more rows, whose last ones are padding: no token is theirs.
    is_row_RK = ids_RK < tokens.predictions.vocab_size
    own_RK = tokens.predictions.logprobs(ids_RK * is_row_RK, rows_N, temperature=temperature)
    apart_R = forward_kl(torch.where(is_row_RK, own_RK, teacher_RK), teacher_RK)
    return Term(losses_R=apart_R, coef=weight, figure=f"teacher/{name}/forward_kl")


def _likelihood(tokens: LossTokens, coef: float) -> Term:
    """−log π of answers with a reward, over their own count (VAPO, arXiv:2504.05118, sec. 4.3)."""
    right_R = rewarded(tokens.mb)[tokens.mask_N]
    return Term(losses_R=-tokens.logprob_R, coef=coef, component=NLL, counts_R=right_R)
