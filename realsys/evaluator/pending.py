"""What an evaluator does next (pure): which checkpoints are there, what is known of them → one action.

In the order of steps. A try that failed waits ``retry_s``, and the later checkpoints are taken meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from realsys.evaluator.results import OVER, Evaluation, EvaluationState


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A saved model directory. ``weights`` and ``stamp`` as in ``Evaluation``."""

    role: str
    step: int
    path: Path
    weights: str
    stamp: str = ""


@dataclass(frozen=True, kw_only=True)
class EvaluateNow:
    """Try this one, for the ``number``-th time."""

    checkpoint: SavedCheckpoint
    number: int


@dataclass(frozen=True, kw_only=True)
class GiveUpOnCheckpoint:
    """Its last try has ended with its process: there are no more."""

    checkpoint: SavedCheckpoint
    evaluation: Evaluation


@dataclass(frozen=True)
class Wait:
    """Something is pending, and not due yet."""


Action = EvaluateNow | GiveUpOnCheckpoint | Wait | None  # None: nothing is pending


def next_action(
    checkpoints: Iterable[SavedCheckpoint],
    evaluations: Mapping[int, Evaluation],
    *,
    attempt: int,
    now: float,
    max_tries: int,
    retry_s: float,
) -> Action:
    """The first in the order of steps that is due; ``Wait`` where all that is pending is not.

    Args:
        evaluations: by step.
        attempt: of the trial, which asks.
        now: seconds since the epoch, on the clock of ``Evaluation.at``.
    """
    action: Action = None
    for checkpoint in sorted(checkpoints, key=lambda c: c.step):
        known = evaluations.get(checkpoint.step)
        if known is not None and known.weights != checkpoint.weights:
            known = None  # saved anew by a resumed run, with other weights
        if known is not None and known.standing in OVER:
            continue
        tries = counted_tries(known, attempt=attempt)
        if known is not None and tries >= max_tries:
            return GiveUpOnCheckpoint(checkpoint=checkpoint, evaluation=known)
        if known is not None and _rests(known, now=now, retry_s=retry_s):
            action = Wait()
            continue
        return EvaluateNow(checkpoint=checkpoint, number=tries + 1)
    return action


def counted_tries(known: Evaluation | None, *, attempt: int) -> int:
    """Tries that have failed or taken their process down. One that ended with an earlier attempt of
    the trial does not count: the attempt's end ended it."""
    if known is None:
        return 0
    cut_off = known.standing is EvaluationState.TRYING and known.attempt != attempt
    return known.tries - cut_off


def _rests(known: Evaluation, *, now: float, retry_s: float) -> bool:
    """Whether its pause is not over. A clock that was put back doesn't make it longer."""
    return known.standing is EvaluationState.RETRY and 0 <= now - known.at < retry_s
