"""Settings of the evaluation of saved checkpoints during training (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from realsys.api.errors import ConfigError
from realsys.api.options import option
from realsys.api.worker_configs import ExperimentSaveEvalControl


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Settings of ``auto_eval``: sampling and retries. Fields of ``Evaluator``, by the same names."""

    n: int = option(
        1, "sampled answers a question for pass@1 … pass@n; 1: the greedy one only", ge=1
    )
    batch_size: int = option(128, "questions at a time", ge=1)
    max_tries: int = option(3, "of a checkpoint; then it is noted as failed", ge=1)
    retry_s: float = option(30.0, "before a checkpoint is tried again", unit="seconds", ge=0)
    poll_s: float = option(2.0, "between two looks for a checkpoint", unit="seconds", gt=0)

    def problems(
        self, exp_ctrl: ExperimentSaveEvalControl, *, eval_size: int
    ) -> Iterator[ConfigError]:
        """Yields runs that save nothing to evaluate, or have no held-out questions."""
        periods = (exp_ctrl.save_freq_steps, exp_ctrl.save_freq_epochs, exp_ctrl.save_freq_secs)
        if not any(periods):
            yield ConfigError(
                "auto_eval evaluates saved checkpoints, but none is saved before the end",
                where="auto_eval and exp_ctrl.save_freq_steps",
                fix="set exp_ctrl.save_freq_steps (or …_epochs, …_secs), or leave auto_eval out",
            )
        if eval_size < 1:
            yield ConfigError(
                "auto_eval has no held-out questions",
                where="auto_eval and task.eval_size",
                fix="set task.eval_size to 1 or more, or leave auto_eval out",
            )
