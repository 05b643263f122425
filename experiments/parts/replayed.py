"""Locates the recorded rollouts of an asynchronous run, to repeat its training on them (pure)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from realsys.api.errors import ConfigError
from realsys.api.model import DatasetAbstraction
from realsys.trial.records import RUN_FILE, PhaseFiles


def replay_problems(folder: str, *, is_async: bool) -> Iterator[ConfigError]:
    """Yields why a run can't be replayed."""
    files = PhaseFiles(Path(os.path.abspath(folder)))
    if not is_async:
        yield ConfigError(
            "a synchronous run is repeated by its seed; there is nothing to replay",
            where="replay_from and mode",
            fix="launch it again, or use mode=async",
        )
    missing = [p for p in (files.ledger, files.rollout_dump / RUN_FILE) if not p.is_file()]
    if missing:
        yield ConfigError(
            f"no {missing[0].name} of an asynchronous run",
            where=f"replay_from, {missing[0]}",
            fix="give the main phase's folder of a trial that ran with rollout.dump=true",
        )


def replayed_ledger(folder: str | None) -> str | None:
    """Returns the path of the ledger, which records what each step trained on."""
    return None if folder is None else str(PhaseFiles(Path(os.path.abspath(folder))).ledger)


def replayed_rollouts(folder: str, *, keys: tuple[str, ...]) -> DatasetAbstraction:
    """Returns the run's recorded rollouts as a data set."""
    dump = PhaseFiles(Path(os.path.abspath(folder))).rollout_dump
    return DatasetAbstraction("rollout_dump", {"folder": str(dump), "keys": list(keys)})
