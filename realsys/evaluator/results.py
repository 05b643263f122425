"""Stores the evaluation of each checkpoint: one file per checkpoint, and a line for each finished one.

``evaluations/<role>-step-000200.json`` is also written when a try begins, so that one that crashes
counts. ``evaluations.jsonl`` is derived from these files: each finished evaluation without a line gets
one, so an evaluator that dies between the two loses nothing and writes nothing twice.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from realsys.api.errors import TrialError
from realsys.observability.jsonl import JsonlAppender, parse_jsonl
from realsys.trial.records import PhaseFiles, read_record, write_record

logger = logging.getLogger(__name__)


class EvaluationState(StrEnum):
    """State of an evaluation."""

    TRYING = "trying"  # begun; if it does not run, its process crashed or was ended
    RETRY = "retry"  # the last try failed, another one will be made
    DONE = "done"
    FAILED = "failed"  # no more tries


OVER = frozenset({EvaluationState.DONE, EvaluationState.FAILED})


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluation of one checkpoint.

    Attributes:
        weights: digest of the evaluated weights; other weights of the same step are another checkpoint.
        stamp: size and time of those files, so that they need not be read again for the digest.
        tries: number of tries begun, including this one.
        attempt: of the trial, that began the last try.
        at: when ``standing`` changed, seconds since the epoch.
        seconds: duration of the last try, loading included.
        figures: name → value, without their prefix in the report.
    """

    role: str
    step: int
    weights: str
    stamp: str = ""
    standing: EvaluationState
    tries: int
    attempt: int
    at: float
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


class Results:
    """Reads and writes the evaluations of one role of one phase. One process at a time writes."""

    def __init__(self, files: PhaseFiles, role: str) -> None:
        self._files, self._role = files, role

    def read(self) -> dict[int, Evaluation]:
        """Returns step → evaluation. A damaged file is skipped: its checkpoint is evaluated again."""
        found: dict[int, Evaluation] = {}
        for path in sorted(self._files.evaluation_results.glob(f"{self._role}-step-*.json")):
            try:
                evaluation = read_record(Evaluation, path)
            except TrialError as error:
                logger.warning("evaluation not read path=%s error=%s", path, error.what)
                continue
            if evaluation is not None and evaluation.role == self._role:
                found[evaluation.step] = evaluation
        return found

    def write(self, evaluation: Evaluation) -> None:
        """Writes the file of a checkpoint atomically."""
        name = f"{evaluation.role}-step-{evaluation.step:06d}.json"
        write_record(self._files.evaluation_results / name, evaluation)

    def append_finished(self) -> list[dict[str, Any]]:
        """Appends a line for each finished evaluation without one; returns these lines.

        Raises:
            ClusterError: no space, no permission.
        """
        recorded = {(row.get("role"), row.get("step"), row.get("weights")) for row in self.rows()}
        over = [e for e in self.read().values() if e.standing in OVER]
        new = [row_of(e) for e in over if (e.role, e.step, e.weights) not in recorded]
        if new:
            with JsonlAppender(self._files.evaluations) as file:
                for row in new:
                    file.append(row)
        return new

    def rows(self) -> list[dict[str, Any]]:
        """Returns the lines so far, in order of writing; damaged ones are skipped."""
        try:
            return list(parse_jsonl(self._files.evaluations.read_bytes()).rows)
        except FileNotFoundError:
            return []


def row_of(evaluation: Evaluation) -> dict[str, Any]:
    """Returns the evaluation's line in ``evaluations.jsonl``."""
    return {
        "step": evaluation.step,
        "role": evaluation.role,
        "result": evaluation.standing.value,
        "figures": dict(evaluation.figures),
        "seconds": round(evaluation.seconds, 3),
        "tries": evaluation.tries,
        "error": evaluation.error,
        "weights": evaluation.weights,
        "at": evaluation.at,
    }
