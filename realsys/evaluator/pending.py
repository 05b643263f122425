"""Decides an evaluator's next action from the present checkpoints and their evaluations (pure).

Checkpoints are taken in order of steps. A failed evaluation is retried after ``retry_s``; later
checkpoints are evaluated meanwhile.
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
    """Evaluate this checkpoint, as attempt ``number``."""

    checkpoint: SavedCheckpoint
    number: int


@dataclass(frozen=True, kw_only=True)
class GiveUpOnCheckpoint:
    """Record this checkpoint as failed: its last attempt ended with its process."""

    checkpoint: SavedCheckpoint
    evaluation: Evaluation


@dataclass(frozen=True)
class Wait:
    """Something is pending, but not due yet."""


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
    """Returns the action for the first due checkpoint; ``Wait`` if none is due.

    Args:
        evaluations: by step.
        attempt: the trial's current attempt.
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
    """Returns the number of tries that failed or crashed. A try that ended with an earlier attempt of the
    trial is not counted: the attempt's end ended it."""
    if known is None:
        return 0
    cut_off = known.standing is EvaluationState.TRYING and known.attempt != attempt
    return known.tries - cut_off


def _rests(known: Evaluation, *, now: float, retry_s: float) -> bool:
    """Returns whether its pause is not over yet. A clock that was set back does not prolong it."""
    return known.standing is EvaluationState.RETRY and 0 <= now - known.at < retry_s
