"""Advantages of answers by name: each a short function of scores and groups.

What they get is prepared, and what they return is spread over tokens and normalised, in
realsys/interfaces/ppo/. Settings and their meaning are in realsys/api/basics/estimators.py; how to add one:
docs/adding_an_algorithm.md.
"""

from __future__ import annotations

from collections.abc import Callable
from math import comb
from typing import Any

import torch

from realsys.algorithms.advantage.advantages import group_advantages
from realsys.algorithms.advantage.group_scores import GroupScores
from realsys.api.basics.choice import formula_of
from realsys.api.basics.estimators import (
    AnswerEstimator,
    DrGRPOAdvantage,
    GDPOAdvantage,
    GRPOAdvantage,
    MaxRLAdvantage,
    NoAdvantage,
    PassAtKAdvantage,
    ReinforcePPAdvantage,
    ReinforcePPBaselineAdvantage,
    RLOOAdvantage,
)
from realsys.api.basics.reward import CORRECT, UNFINISHED_THOUGHTS, is_count
from realsys.api.errors import ConfigError, DataError, did_you_mean


@torch.no_grad()
def answer_advantages(estimator: AnswerEstimator, answers: GroupScores) -> torch.Tensor:
    """float32 ``[B]``, by the kind that is chosen: a user's, or that of the built-in one it inherits."""
    formula = formula_of(estimator, _FORMULAS, own="answer_advantages")
    if formula is not None:
        return formula(estimator, answers)
    made = estimator.answer_advantages(answers)
    wanted = answers.scores.shape
    if not isinstance(made, torch.Tensor) or made.shape != wanted or not made.isfinite().all():
        raise ConfigError(
            f"answer_advantages of {type(estimator).__name__} returned something else than a finite number "
            f"for each of {len(answers.scores)} answers",
            where=f"{type(estimator).__module__}, class {type(estimator).__name__}",
            fix="return a tensor in the shape of answers.scores",
        )
    return made.float()


@torch.no_grad()
def penalty_advantages(estimator: AnswerEstimator, answers: GroupScores) -> torch.Tensor:
    """float32 ``[B]``: how much smaller a penalty (given as negative scores) is than that of the others.

    Never divided by a deviation: where all answers score the same, that of a small penalty would inflate
    it.
    """
    leave_one_out = isinstance(estimator, RLOOAdvantage)
    return group_advantages(
        answers.scores, answers.groups, normalise_std=False, leave_one_out=leave_one_out
    )


def _grpo(_: GRPOAdvantage, answers: GroupScores) -> torch.Tensor:
    return group_advantages(answers.scores, answers.groups, normalise_std=True)


def _centred(_: AnswerEstimator, answers: GroupScores) -> torch.Tensor:
    return group_advantages(answers.scores, answers.groups, normalise_std=False)


def _rloo(_: RLOOAdvantage, answers: GroupScores) -> torch.Tensor:
    return group_advantages(answers.scores, answers.groups, normalise_std=False, leave_one_out=True)


def _itself(_: ReinforcePPAdvantage, answers: GroupScores) -> torch.Tensor:
    return answers.scores.float()


def _none(_: NoAdvantage, answers: GroupScores) -> torch.Tensor:
    return torch.zeros_like(answers.scores, dtype=torch.float32)


def _maxrl(_: MaxRLAdvantage, answers: GroupScores) -> torch.Tensor:
    centred = group_advantages(answers.scores, answers.groups, normalise_std=False).double()
    mean = answers.group_mean(answers.scores.double())
    return torch.where(mean > 0, centred / mean.clamp(min=1e-12), 0.0).float()


def _pass_at_k(estimator: PassAtKAdvantage, answers: GroupScores) -> torch.Tensor:
    made = torch.zeros_like(answers.scores, dtype=torch.float64)
    for group in torch.unique(answers.groups):
        own_G = (answers.groups == group).nonzero().flatten()
        if len(own_G) > 1:
            made[own_G] = best_of_k_gains(answers.scores[own_G].double(), estimator.k)
    return made.float()


def best_of_k_gains(score_G: torch.Tensor, k: int | None) -> torch.Tensor:
    """float64 ``[G]``: mean over the k-subsets S with answer i of max(S) − max(S without i).

    Sorted, r₁ ≤ … ≤ r_G, an answer adds something only where it is the best of S; with r_j the second,
    the other k − 2 are among the j − 1 below. So
    gain_i = Σ_{j<i} (r_i − r_j) · C(j − 1, k − 2) / C(G − 1, k − 1). With k = G it is r_G − r_{G−1} for the
    best and 0 for the others (arXiv:2503.19595, sec. 3).

    Args:
        k: at least 2; None, or more than there are: all.
    """
    num = len(score_G)
    k = num if k is None else min(k, num)
    ordered_G, place_G = score_G.sort(stable=True)
    share_G = torch.tensor([comb(j, k - 2) / comb(num - 1, k - 1) for j in range(num)])
    share_G = share_G.to(score_G)
    below = torch.tril(torch.ones(num, num, dtype=torch.bool, device=score_G.device), -1)
    gain_GG = (ordered_G[:, None] - ordered_G[None, :]) * share_G[None, :]
    gain_G = gain_GG.masked_fill(~below, 0.0).sum(1)
    return torch.zeros_like(gain_G).scatter(0, place_G, gain_G)


# Parts that no rule gave as a reward
_NOT_COMPARED = frozenset({CORRECT, UNFINISHED_THOUGHTS})


def _gdpo(estimator: GDPOAdvantage, answers: GroupScores) -> torch.Tensor:
    # Answers on which a rule failed are counted, not rewarded, and have no parts.
    are_raised = any(map(is_count, answers.parts))
    scored = {name for name in answers.parts if name not in _NOT_COMPARED and not is_count(name)}
    names = tuple(estimator.weights) or tuple(sorted(scored))
    if not names and not are_raised:
        raise DataError(
            "rewards have no parts to normalise one by one",
            where="algorithm.advantage=gdpo",
            fix="return Score(value, parts={...}) from the reward, or use advantage=grpo",
        )
    made = torch.zeros_like(answers.scores)
    for name in names:
        if name not in answers.parts and are_raised and not scored:
            continue
        if name not in answers.parts:
            raise ConfigError(
                f"no answer of this batch has a reward part {name!r}",
                where="algorithm.advantage.weights",
                fix=did_you_mean(name, tuple(answers.parts)),
            )
        part = answers.parts[name].nan_to_num(0.0)
        weight = estimator.weights.get(name, 1.0)
        made += weight * group_advantages(part, answers.groups, normalise_std=True)
    return made


_FORMULAS: dict[type[AnswerEstimator], Callable[[Any, GroupScores], torch.Tensor]] = {
    GRPOAdvantage: _grpo,
    DrGRPOAdvantage: _centred,
    RLOOAdvantage: _rloo,
    ReinforcePPAdvantage: _itself,
    ReinforcePPBaselineAdvantage: _centred,
    MaxRLAdvantage: _maxrl,
    NoAdvantage: _none,
    PassAtKAdvantage: _pass_at_k,
    GDPOAdvantage: _gdpo,
}
