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
class Sync(Schedule):
    """Model workers sample, then train."""

    kind = "sync"


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
