"""What is known of each checkpoint's evaluation: a file a checkpoint, and a line for each that is over.

``evaluations/<role>-step-000200.json`` also tells tries that have begun, so that one that takes its
process down counts. ``evaluations.jsonl`` is made from these files: whatever is over and has no line gets
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
    """How an evaluation stands."""

    TRYING = "trying"  # begun; if nobody is at it, its process has died of it or was ended
    RETRY = "retry"  # the last try failed, another one will be made
    DONE = "done"
    FAILED = "failed"  # no more tries


OVER = frozenset({EvaluationState.DONE, EvaluationState.FAILED})


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One checkpoint's.

    Attributes:
        weights: digest of the weights that it is about; others of the same step are another checkpoint's.
        stamp: size and time of those files, so that they need not be read again to know the digest.
        tries: that have begun, this one among them.
        attempt: of the trial, that began the last one.
        at: when ``standing`` changed, seconds since the epoch.
        seconds: that the last try took, loading included.
        figures: name → value, without the prefix that they have in the report.
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
    """Reads and writes them for one role of one phase. One process at a time writes."""

    def __init__(self, files: PhaseFiles, role: str) -> None:
        self._files, self._role = files, role

    def read(self) -> dict[int, Evaluation]:
        """Step → evaluation. A damaged file is none: its checkpoint is evaluated anew."""
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
        """The file of its checkpoint, whole."""
        name = f"{evaluation.role}-step-{evaluation.step:06d}.json"
        write_record(self._files.evaluation_results / name, evaluation)

    def tell(self) -> list[dict[str, Any]]:
        """Appends a line for each evaluation that is over and has none; returns these lines.

        Raises:
            ClusterError: no space, no permission.
        """
        told = {(row.get("role"), row.get("step"), row.get("weights")) for row in self.rows()}
        over = [e for e in self.read().values() if e.standing in OVER]
        new = [row_of(e) for e in over if (e.role, e.step, e.weights) not in told]
        if new:
            with JsonlAppender(self._files.evaluations) as file:
                for row in new:
                    file.append(row)
        return new

    def rows(self) -> list[dict[str, Any]]:
        """The lines so far, in the order of writing; damaged ones left out."""
        try:
            return list(parse_jsonl(self._files.evaluations.read_bytes()).rows)
        except FileNotFoundError:
            return []


def row_of(evaluation: Evaluation) -> dict[str, Any]:
    """Its line in ``evaluations.jsonl``."""
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
