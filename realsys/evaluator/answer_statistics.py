"""Figures of scored answers to many questions, with 95 % intervals (pure).

Questions are the units: answers to one question resemble one another, so intervals are over questions. Of
one answer a question the share of right ones has Wilson's interval (J. Am. Stat. Assoc. 22, 1927); all else
has percentiles of a seeded bootstrap, which takes the questions with replacement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from realsys.api.errors import InternalError

ACCURACY = "accuracy"  # share of answers, or episodes, that a rule calls right
SUCCESS = "success"  # the same where no rule says what is right: reward above 0.5
RESAMPLES = 10_000
_AT_ONCE = 1 << 22  # drawn indices
_Z = 1.959963984540054  # 97.5th percentile of the normal distribution


@dataclass(frozen=True, kw_only=True)
class QuestionResult:
    """The scored answers to one question.

    Attributes:
        rewards: one an answer; empty: the question has no score, since the rule could give none or an
            environment was away.
        lengths: tokens of each answer. truncated: whether it was cut off.
        source: of a mixture, else empty.
        stats: other numbers, of an agent's episodes; means over them.
        problem: why there is no reward, or why the agent failed, as far as that is known.
    """

    id: str
    rewards: tuple[float, ...]
    num_correct: int
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    source: str = ""
    stats: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with its 95 % interval. ``interval``: ``wilson`` or ``bootstrap``."""

    value: float
    low: float
    high: float
    interval: str


def figures_of(
    results: Sequence[QuestionResult], *, num_answers: int, seed: int, right: str = ACCURACY
) -> dict[str, Estimate]:
    """Returns ``accuracy``, ``mean_reward``, ``response_length/mean``, ``truncated``; of several answers a
    question also ``pass@1`` … ``pass@n``; of a mixture also ``accuracy/<source>``; and ``stats``. Those
    without a value are left out, and so are questions without a score.

    Args:
        num_answers: to each question.
        right: name of the share of right answers, in place of ``accuracy``.
    """
    results = scored_ones(results)
    found = {right: _accuracy(results, num_answers, seed)} if results else {}
    for name, values in (
        ("mean_reward", [_mean(r.rewards) for r in results]),
        ("response_length/mean", [_mean(r.lengths) for r in results if r.lengths]),
        ("truncated", [_mean(r.truncated) for r in results if r.truncated]),
    ):
        if values:
            found[name] = bootstrapped(values, seed=seed)
    if num_answers > 1 and results:
        for k in ks_of(num_answers):
            values = [pass_at_k(num_answers, r.num_correct, k) for r in results]
            found[f"pass@{k}"] = bootstrapped(values, seed=seed)
    for source in sorted({r.source for r in results if r.source}):
        of_source = [r for r in results if r.source == source]
        found[f"{right}/{source}"] = _accuracy(of_source, num_answers, seed)
    for name in sorted({name for r in results for name in r.stats}):
        found[name] = bootstrapped([r.stats[name] for r in results if name in r.stats], seed=seed)
    return found


def scored_ones(results: Sequence[QuestionResult]) -> list[QuestionResult]:
    """Returns the questions that have a score: the others are neither right nor wrong."""
    return [result for result in results if result.rewards]


def _accuracy(results: Sequence[QuestionResult], num_answers: int, seed: int) -> Estimate:
    if num_answers == 1:
        return wilson(sum(r.num_correct for r in results), len(results))
    return bootstrapped([r.num_correct / num_answers for r in results], seed=seed)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def wilson(num_correct: int, num_questions: int) -> Estimate:
    """Returns the share of right answers with Wilson's score interval.

    >>> one = wilson(0, 4)  # z² / (n + z²) at the upper end
    >>> one.low, round(one.high, 3)
    (0.0, 0.49)
    """
    n, share = num_questions, num_correct / num_questions
    middle = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    # At the ends the formula is exact; rounding would leave 1e-17.
    low, high = (0.0 if num_correct == 0 else low), (1.0 if num_correct == n else high)
    return Estimate(value=share, low=low, high=high, interval="wilson")


def bootstrapped(values: Sequence[float], *, seed: int) -> Estimate:
    """Returns the mean of a value for each question, with percentiles of ``RESAMPLES`` resampled means."""
    rows, n = torch.tensor(values, dtype=torch.float64), len(values)
    drawing = torch.Generator().manual_seed(seed)
    means = []
    left = RESAMPLES
    while left:
        count = min(left, max(1, _AT_ONCE // n))
        drawn = torch.randint(n, (count, n), generator=drawing)
        means.append(rows[drawn].mean(dim=1))
        left -= count
    low, high = torch.quantile(torch.cat(means), torch.tensor([0.025, 0.975]).double()).tolist()
    return Estimate(value=_mean(values), low=low, high=high, interval="bootstrap")


# ---- Unbiased pass@k from n sampled answers per question (Chen et al., arXiv:2107.03374, section 2.1).


def pass_at_k(num_answers: int, num_correct: int, k: int) -> float:
    """Returns the probability that one of ``k`` answers, drawn without replacement from ``num_answers``,
    is correct.

    Raises:
        InternalError: not 0 <= num_correct <= num_answers, or not 1 <= k <= num_answers.
    """
    if not (0 <= num_correct <= num_answers and 1 <= k <= num_answers):
        raise InternalError(
            f"pass@{k} of {num_correct} right answers out of {num_answers}", where="pass_at_k"
        )
    # Of whole numbers, so that nothing cancels; comb is 0 where fewer than k are wrong.
    return 1.0 - math.comb(num_answers - num_correct, k) / math.comb(num_answers, k)


def ks_of(num_answers: int) -> list[int]:
    """Returns the k of ``pass@k``: 1, 2, 4, … and ``num_answers``."""
    ks = {num_answers, *(2**i for i in range(num_answers.bit_length()))}
    return sorted(k for k in ks if k <= num_answers)


def mean_pass_at_k(num_correct: Sequence[int], num_answers: int) -> dict[str, float]:
    """Returns ``pass@1``, ``pass@2``, ``pass@4``, … and ``pass@n``: means over the questions.

    Args:
        num_correct: right answers to each question, of ``num_answers``.
    """
    return {
        f"pass@{k}": math.fsum(pass_at_k(num_answers, c, k) for c in num_correct)
        / max(len(num_correct), 1)
        for k in ks_of(num_answers)
    }
