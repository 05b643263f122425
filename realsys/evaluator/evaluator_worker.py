"""The evaluator's loop: find checkpoints, evaluate what is due, record and publish the result.

pending.py decides what to do next. A failing evaluation does not end the loop: it is retried, and finally
recorded as failed. The loop ends when the training is over and nothing is pending, or on request; pending
evaluations are left to the next attempt.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from realsys.api.worker_configs import Evaluator
from realsys.evaluator.checkpoints import SavedCheckpoints
from realsys.evaluator.evaluation_errors import BenchmarksFailed, LeaveRequested, one_line
from realsys.evaluator.pending import (
    Action,
    EvaluateNow,
    GiveUpOnCheckpoint,
    SavedCheckpoint,
    next_action,
)
from realsys.evaluator.results import Evaluation, EvaluationState, Results
from realsys.runtime.progress import tick

logger = logging.getLogger(__name__)

EvaluateOne = Callable[[SavedCheckpoint, Callable[[], None]], Mapping[str, float]]
CUT_OFF = "its process ended while it was at it"
SURE_S = 10.0  # interval of checking the files of checkpoints with unchanged names


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The loop's connections to the trial.

    Attributes: is_over: whether no more checkpoints will be saved. may_write: called before a result is
    written; raises if another attempt has taken over. begins, ends: called around each evaluation. shows:
    called with the lines added to ``evaluations.jsonl``, at first with all of them.
    """

    is_over: Callable[[], bool]
    may_write: Callable[[], None] = lambda: None
    begins: Callable[[SavedCheckpoint], None] = lambda checkpoint: None
    ends: Callable[[], None] = lambda: None
    shows: Callable[[Sequence[Mapping[str, Any]]], None] = lambda rows: None


class EvaluatorLoop:
    """Evaluates the checkpoints of one role. ``build.run`` creates one and calls ``run``.

    Args:
        attempt: of the trial.
        evaluate: a checkpoint → its figures; calls what it is given before each batch.
    """

    def __init__(
        self,
        config: Evaluator,
        *,
        attempt: int,
        saved: SavedCheckpoints,
        results: Results,
        evaluate: EvaluateOne,
        world: Surroundings,
    ) -> None:
        self._config, self._attempt = config, attempt
        self._saved, self._results = saved, results
        self._evaluate, self._world = evaluate, world
        self._leaving = threading.Event()
        self._idle: list[str] | None = None  # names of checkpoints of which none was pending
        self._sure_s = 0.0

    def leave(self) -> None:
        """Makes ``run`` return after the current batch (from any thread)."""
        self._leaving.set()

    def run(self) -> None:
        """Runs until nothing is pending and no more checkpoints will be saved, or until ``leave``."""
        for known in self._results.read().values():
            self._saved.add_known(known.step, known.stamp, known.weights)
        self._world.shows(self._results.rows())
        self._tell()
        while not self._leaving.is_set():
            tick()
            is_over = self._world.is_over()  # before the look: it must see what was saved last
            action = self._next(is_over=is_over)
            if isinstance(action, EvaluateNow):
                self._try(action)
            elif isinstance(action, GiveUpOnCheckpoint):
                self._give_up(action)
            elif action is None and is_over:
                return
            else:
                self._leaving.wait(self._config.poll_s)

    def _next(self, *, is_over: bool) -> Action:
        """Returns the next action. While nothing is pending it lists only names, and the files from time
        to time."""
        names, now_s = self._saved.names(), time.monotonic()
        if names == self._idle and now_s < self._sure_s and not is_over:
            return None
        action = next_action(
            self._saved.present(),
            self._results.read(),
            attempt=self._attempt,
            now=time.time(),
            max_tries=self._config.max_tries,
            retry_s=self._config.retry_s,
        )
        self._idle, self._sure_s = (names if action is None else None), now_s + SURE_S
        return action

    def _try(self, action: EvaluateNow) -> None:
        checkpoint, began_s = action.checkpoint, time.monotonic()
        trying = Evaluation(
            role=checkpoint.role,
            step=checkpoint.step,
            weights=checkpoint.weights,
            stamp=checkpoint.stamp,
            standing=EvaluationState.TRYING,
            tries=action.number,
            attempt=self._attempt,
            at=time.time(),
        )
        self._write(trying)
        self._world.begins(checkpoint)
        try:
            figures = self._evaluate(checkpoint, self._go_on)
        except LeaveRequested:
            return
        except Exception as error:  # whatever it is: to try again is the design
            logger.warning("evaluation failed step=%d", checkpoint.step, exc_info=True)
            figures = error.figures if isinstance(error, BenchmarksFailed) else {}
            outcome = replace(self._failed(trying, one_line(error)), figures=figures)
        else:
            finite = {name: value for name, value in figures.items() if math.isfinite(value)}
            if len(finite) < len(figures):  # of a rule of one's own; results are JSON
                left_out = ", ".join(sorted(figures.keys() - finite.keys()))
                logger.warning("figures left out, not finite names=%s", left_out)
            outcome = replace(trying, standing=EvaluationState.DONE, figures=finite)
        finally:
            self._world.ends()
        if not self._saved.is_unchanged(checkpoint):
            # Saved again or removed meanwhile: the weights of these figures are unknown.
            logger.warning("checkpoint changed while it was evaluated step=%d", checkpoint.step)
            outcome = replace(trying, standing=EvaluationState.RETRY, tries=action.number - 1)
        seconds = time.monotonic() - began_s
        self._write(replace(outcome, at=time.time(), seconds=seconds))
        self._tell()

    def _failed(self, trying: Evaluation, error: str) -> Evaluation:
        is_last = trying.tries >= self._config.max_tries
        standing = EvaluationState.FAILED if is_last else EvaluationState.RETRY
        return replace(trying, standing=standing, error=error)

    def _give_up(self, action: GiveUpOnCheckpoint) -> None:
        error = action.evaluation.error or CUT_OFF
        self._write(
            replace(action.evaluation, standing=EvaluationState.FAILED, error=error, at=time.time())
        )
        self._tell()

    def _write(self, evaluation: Evaluation) -> None:
        self._world.may_write()
        self._results.write(evaluation)

    def _tell(self) -> None:
        rows = self._results.append_finished()
        for row in rows:
            figures = " ".join(f"{name}={value:.4g}" for name, value in row["figures"].items())
            logger.log(
                logging.INFO if row["result"] == EvaluationState.DONE else logging.WARNING,
                "checkpoint evaluated role=%s at_step=%d result=%s tries=%d seconds=%.1f %s",
                row["role"],
                row["step"],
                row["result"],
                row["tries"],
                row["seconds"],
                " ".join(part for part in (figures, row["error"]) if part),
            )
        if rows:
            self._world.shows(rows)

    def _go_on(self) -> None:
        tick()
        if self._leaving.is_set():
            raise LeaveRequested
