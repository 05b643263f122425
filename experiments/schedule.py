"""Schedules: when answers are sampled, and when models train on them. ``schedule=async``.

sync          model workers sample, then train
one_step_off  they sample the next batch while they train
async         generation servers sample all the time (asynchronous.py)
detached      the same with named makers and trainers (detached.py)
rollout       servers sample, nothing trains (asynchronous.py)
replay        trains on the recorded samples of an asynchronous run
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from realsys.api.basics.bounded_files import parse_json, read_bounded_text
from realsys.api.basics.choice import Choice
from realsys.api.errors import ConfigError
from realsys.api.model import DatasetAbstraction, ProcessTopology
from realsys.api.options import option
from realsys.api.worker_configs import DynamicSamplingControl
from realsys.trial.records import RUN_FILE, PhaseFiles


@dataclass(frozen=True, kw_only=True)
class Schedule(Choice, abc.ABC):
    """Base.

    Attributes:
        trains: a model is trained on the answers.
        is_async: answers come from rollout workers, in this run or in the replayed one.
        has_servers: generation servers sample in this run.
    """

    choice = "schedule"
    trains: ClassVar[bool] = True
    is_async: ClassVar[bool] = False
    has_servers: ClassVar[bool] = False

    @property
    def staleness(self) -> int:
        """Most updates between the weights that sampled a token and those that it trains."""
        return 0

    @property
    def environment_s(self) -> float | None:
        """Most time of a call of an environment; None: training has none."""
        return None

    @property
    def default_layout(self) -> str | None:
        """Parallel layout of models without one; None: one process each."""
        return None

    def problems(self, *, batch_size: int, num_prompts: int | None) -> Iterator[ConfigError]:
        """Yields inconsistent settings.

        Args:
            batch_size: questions a step. num_prompts: those that the run trains on; None: unknown.
        """
        yield from ()

    def layout_problems(
        self, trained: Mapping[str, ProcessTopology], *, backend: str
    ) -> Iterator[ConfigError]:
        """Yields layouts of trained roles (role → its own) that do not suit the schedule."""
        yield from ()


@dataclass(frozen=True, kw_only=True)
class Filtering(Schedule):
    """Base of schedules that can leave questions out by the rewards of their answers."""

    success_range: tuple[float, float] | None = option(
        None,
        "lowest and highest mean reward of a question that is trained on (dynamic sampling, "
        "arXiv:2503.14476), e.g. 0.01,0.99; none: all are",
    )

    def problems(self, *, batch_size: int, num_prompts: int | None) -> Iterator[ConfigError]:
        """Yields inconsistent settings."""
        if self.success_range is not None and not self.success_range[0] <= self.success_range[1]:
            low, high = self.success_range
            yield ConfigError(
                f"schedule.success_range goes from {low} to {high}: no question would be trained on",
                where="schedule.success_range",
                fix="use the lower first, e.g. 0.01,0.99",
            )


MAX_GEN_BATCHES = 10  # as NeMo-RL's dynamic_sampling_max_gen_batches


@dataclass(frozen=True, kw_only=True)
class Sync(Filtering):
    """Model workers sample, then train; with ``success_range`` until a batch is full (docs/dapo.md)."""

    kind = "sync"

    max_gen_batches: int = option(
        MAX_GEN_BATCHES,
        "most questions that a step asks to fill its batch with those in success_range; then the run ends",
        unit="batches",
        ge=1,
    )

    def problems(self, *, batch_size: int, num_prompts: int | None) -> Iterator[ConfigError]:
        """Yields inconsistent settings, and a limit on nothing."""
        yield from super().problems(batch_size=batch_size, num_prompts=num_prompts)
        if self.success_range is None and self.max_gen_batches != MAX_GEN_BATCHES:
            yield ConfigError(
                f"schedule.max_gen_batches is {self.max_gen_batches}, and a step without "
                "schedule.success_range asks one batch",
                where="schedule.max_gen_batches",
                fix="add schedule.success_range=0.01,0.99, or leave it out",
            )

    @property
    def dynamic_sampling(self) -> DynamicSamplingControl | None:
        """The master's settings; None: each step trains on the questions that it asks."""
        if self.success_range is None:
            return None
        lowest, highest = self.success_range
        return DynamicSamplingControl(
            lowest=lowest, highest=highest, max_gen_batches=self.max_gen_batches
        )


@dataclass(frozen=True, kw_only=True)
class OneStepOff(Schedule):
    """Model workers sample the next batch while the step before is trained."""

    kind = "one_step_off"

    @property
    def staleness(self) -> int:
        """One update."""
        return 1


@dataclass(frozen=True, kw_only=True)
class Replay(Schedule):
    """Trains on what an asynchronous run trained on, in its order, without servers (`realsys replay`)."""

    kind = "replay"
    is_async = True

    folder: str | None = option(None, "main phase's folder of an asynchronous trial")
    max_staleness: int = option(
        1,
        "of that run: most updates between the weights that sampled an answer and those that it trains",
        unit="steps",
        ge=0,
    )

    @property
    def staleness(self) -> int:
        """That of the replayed run."""
        return self.max_staleness

    def problems(self, *, batch_size: int, num_prompts: int | None) -> Iterator[ConfigError]:
        """Yields why a run can't be replayed."""
        if self.folder is None:
            yield ConfigError(
                "there is no run to replay",
                where="schedule.folder",
                fix="give the main phase's folder of an asynchronous trial, or use `realsys replay TRIAL`",
            )
            return
        files = self._files
        missing = [p for p in (files.ledger, files.rollout_dump / RUN_FILE) if not p.is_file()]
        if missing:
            yield ConfigError(
                f"no {missing[0].name} of an asynchronous run",
                where=f"schedule.folder, {missing[0]}",
                fix="give the main phase's folder of a trial that ran with schedule.dump=true",
            )
        recorded = self._recorded_batch_size
        if recorded is not None and recorded != batch_size:
            yield ConfigError(
                f"the recorded run trained on {recorded} questions a step, this one would on {batch_size}",
                where="schedule.folder and train_bs_n_seqs",
                fix=f"use train_bs_n_seqs={recorded}",
            )

    @property
    def _recorded_batch_size(self) -> int | None:
        """Questions a step of the recorded run; None: its plan does not say."""
        try:
            plan = parse_json(read_bounded_text(self._files.root / "plan.json"))
            found = plan["options"]["train_bs_n_seqs"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if isinstance(found, int) else None

    @property
    def _files(self) -> PhaseFiles:
        return PhaseFiles(Path(os.path.abspath(self.folder or "")))

    @property
    def ledger(self) -> str:
        """Path of the ledger, which records what each step trained on."""
        return str(self._files.ledger)

    def rollouts(self, keys: tuple[str, ...]) -> DatasetAbstraction:
        """The run's recorded rollouts as a data set."""
        folder = str(self._files.rollout_dump)
        return DatasetAbstraction("rollout_dump", {"folder": folder, "keys": list(keys)})
