"""Settings of the evaluation of saved checkpoints during training (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from realsys.api.errors import ConfigError, did_you_mean
from realsys.api.options import option
from realsys.api.worker_configs import ExperimentSaveEvalControl


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Settings of ``auto_eval``: sampling and retries. ``loop`` are fields of ``Evaluator``."""

    n: int = option(
        1, "sampled answers a question for pass@1 … pass@n; 1: the greedy one only", ge=1
    )
    n_of: Mapping[str, int] = option(
        {}, "the same for benchmarks of these names, e.g. evaluator.n_of.aime=32"
    )
    batch_size: int = option(128, "questions at a time", ge=1)
    max_tries: int = option(3, "of a checkpoint; then it is noted as failed", ge=1)
    retry_s: float = option(30.0, "before a checkpoint is tried again", unit="seconds", ge=0)
    poll_s: float = option(2.0, "between two looks for a checkpoint", unit="seconds", gt=0)

    @property
    def loop(self) -> dict[str, Any]:
        """What is the same for all benchmarks."""
        return {k: v for k, v in vars(self).items() if k not in ("n", "n_of")}

    def problems(
        self, exp_ctrl: ExperimentSaveEvalControl, *, asked: Collection[str]
    ) -> Iterator[ConfigError]:
        """Yields runs that save nothing to evaluate, or ask nothing.

        Args:
            asked: names of the benchmarks, that of the task's own questions included.
        """
        periods = (exp_ctrl.save_freq_steps, exp_ctrl.save_freq_epochs, exp_ctrl.save_freq_secs)
        if not any(periods):
            yield ConfigError(
                "auto_eval evaluates saved checkpoints, but none is saved before the end",
                where="auto_eval and exp_ctrl.save_freq_steps",
                fix="set exp_ctrl.save_freq_steps (or …_epochs, …_secs), or leave auto_eval out",
            )
        for name, n in self.n_of.items():
            if name not in asked or n < 1:
                yield ConfigError(
                    f"{n} answers a question of benchmark {name!r}",
                    where=f"evaluator.n_of.{name}",
                    fix=did_you_mean(name, asked) if name not in asked else "use 1 or more",
                )
        if not asked:
            yield ConfigError(
                "auto_eval has no held-out questions",
                where="auto_eval and task.eval_size",
                fix="set task.eval_size to 1 or more, name benchmarks, or leave auto_eval out; clients of "
                "agent external can't be evaluated",
            )
