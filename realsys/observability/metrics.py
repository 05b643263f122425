"""Writes one row of numbers per step: metrics.jsonl always, TensorBoard and Weights & Biases on request.

The master owns the single writer of a phase. Each attempt writes files of its own: a run that resumes
after step k first copies every row up to step k, so that its files end up equal to those of an
uninterrupted run (``deterministic`` leaves out measured times), and a cut-off master that continues late
writes to files that no longer count. The phase's own names are links to the newest attempt's files.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realsys.api.options import WandbOptions
from realsys.observability.jsonl import JsonlAppender, copy_rows, read_jsonl, write_errors
from realsys.observability.metric_catalogue import with_current_names
from realsys.observability.tensorboard_files import TensorBoardFiles
from realsys.observability.wandb_run import WandbRun, start_wandb
from realsys.trial.records import PhaseFiles, replace_symlink

logger = logging.getLogger(__name__)

WALL_CLOCK_PREFIXES = ("time/", "perf/")


class MetricsWriter:
    """Writes the rows of one phase. Open it before the event log, the ledger and the samples.

    Args:
        files: the phase's files.
        run_name: ``<experiment>/<trial>``, with ``/<phase>`` for a preparing phase.
        config: shown by Weights & Biases.
        attempt: number of the attempt that writes.
        resume_step: last step to copy; None starts without rows.
        former: attempts whose rows count, newest first (trial/lineage.py).
    Raises:
        ConfigError: wandb is asked for and not installed.
        ClusterError: no space, no permission.
        DataError: a file to cut back holds a damaged line.
    """

    def __init__(
        self,
        files: PhaseFiles,
        *,
        tensorboard: bool,
        wandb: WandbOptions,
        run_name: str,
        config: Mapping[str, Any],
        attempt: int,
        resume_step: int | None,
        former: Sequence[int] = (),
    ) -> None:
        self._wandb: WandbRun | None = None
        self._tensorboard: TensorBoardFiles | None = None
        # Before any file changes: a missing package must not cost an earlier attempt's rows.
        self._wandb = start_wandb(wandb, folder=files.root, run_name=run_name, config=config)
        last_step = -1 if resume_step is None else resume_step
        self.own = start_from(files, attempt, last_step, former=former)
        self._file = JsonlAppender(self.own.metrics)
        if tensorboard:
            first_step = 0 if resume_step is None else resume_step + 1
            self._tensorboard = TensorBoardFiles(files.tensorboard, first_step=first_step)

    def write(self, step: int, row: Mapping[str, float | int | str]) -> None:
        """Appends the row of a step atomically.

        NaN and infinities become "nan", "inf", "-inf", with a warning that names the key.
        Raises ClusterError when the disk is full.
        """
        plain = {key: _json_value(key, value) for key, value in row.items()}
        for key, value in plain.items():
            if isinstance(value, str) and not isinstance(row[key], str):
                logger.warning("metric not finite key=%s value=%s at_step=%d", key, value, step)
        self._file.append({**plain, "step": step}, sort_keys=True)
        if self._tensorboard:
            self._tensorboard.write(step, row)
        if self._wandb:
            self._wandb.write(step, row)

    def sync(self) -> None:
        """Syncs the rows so far to the disk; those of TensorBoard can be recreated from them."""
        self._file.sync()

    def close(self) -> None:
        """Flushes and closes every file; may be called again."""
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def start_from(
    files: PhaseFiles, attempt: int, last_step: int, *, former: Sequence[int] = ()
) -> PhaseFiles:
    """Copies every row up to ``last_step`` into this attempt's own files, points the phase's names to
    them, and returns them.

    Rows are copied from the newest of ``former`` that has the file. The phase's names are no evidence: a
    cut-off master may have pointed them to its own rows just before.
    """
    own = files.rows_of(attempt)
    for name in _of_rows(files):
        copy_rows(source_of(files, name, former), own.root / name.name, last_step=last_step)
    point_to_newest(files)
    return own


def source_of(files: PhaseFiles, name: Path, former: Sequence[int]) -> Path:
    """Returns the file from which to copy the rows of ``name``: that of the newest of ``former`` that has
    it."""
    sources = [files.rows_of(number).root / name.name for number in former]
    return next((path for path in sources if path.exists()), name)


def point_to_newest(files: PhaseFiles) -> None:
    """Points the phase's names to the newest attempt's rows.

    Also called by an attempt that has been superseded without knowing: it checks again after changing a
    name, so that it never leaves one on its own rows if there are newer ones.

    It is called after each step: normally it lists one folder and reads four links.
    """
    attempts = _attempts(files)
    for name in _of_rows(files):
        while (link := _new_target(name, attempts)) is not None:
            with write_errors(name):
                replace_symlink(name, link)
            attempts = _attempts(files)


def _attempts(files: PhaseFiles) -> list[str]:
    """Returns the folders of attempts' rows, newest first."""
    try:
        found = [name for name in os.listdir(files.root / "rows") if name.isdecimal()]
    except FileNotFoundError:
        return []
    return sorted(found, key=int, reverse=True)


def _new_target(name: Path, attempts: Sequence[str]) -> str | None:
    """Returns the new target of ``name``, the file of the newest attempt that has it; None if it is
    already right."""
    for attempt in attempts:
        link = f"rows/{attempt}/{name.name}"
        if _points_to(name, link):
            return None
        if (name.parent / link).exists():
            return link
    return None


def _points_to(name: Path, link: str) -> bool:
    try:
        return os.readlink(name) == link
    except OSError:  # it is not there, or no link
        return False


def _of_rows(files: PhaseFiles) -> tuple[Path, ...]:
    return files.metrics, files.ledger, files.samples, files.events


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads rows in order of writing, under today's names; ``"nan"`` and ``"inf"`` stay text, so that rows
    compare equal.

    Raises DataError for a damaged line other than a torn last one.
    """
    return [with_current_names(row) for row in read_jsonl(path)]


def deterministic(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row without measured times: two runs of one seed agree on it bit for bit."""
    return {k: v for k, v in row.items() if not k.startswith(WALL_CLOCK_PREFIXES)}


def _json_value(key: str, value: float | int | str) -> float | int | str:
    if isinstance(value, str | bool | int):
        return value
    number = float(value)  # also numpy's scalars; repr of a Python float is exact
    return number if math.isfinite(number) else str(number)
