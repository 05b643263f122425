"""Unbiased pass@k from n sampled answers per question (Chen et al., arXiv:2107.03374, section 2.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from realsys.api.errors import InternalError


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


def mean_pass_at_k(num_correct: Sequence[int], num_answers: int) -> dict[str, float]:
    """Returns ``pass@1``, ``pass@2``, ``pass@4``, … and ``pass@n``: means over the questions.

    Args:
        num_correct: right answers to each question, of ``num_answers``.
    """
    ks = sorted({num_answers, *(2**i for i in range(num_answers.bit_length()))})
    return {
        f"pass@{k}": math.fsum(pass_at_k(num_answers, c, k) for c in num_correct)
        / max(len(num_correct), 1)
        for k in ks
        if k <= num_answers
    }
