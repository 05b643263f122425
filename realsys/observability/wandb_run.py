"""Writes an optional copy of the metrics to Weights & Biases. Its failures never end a run.

The first failure is logged and switches it off; metrics.jsonl continues. The run's id is stored in the
phase's folder, so that a resumed trial stays one run there.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realsys.api.errors import ConfigError
from realsys.api.options import WandbOptions

logger = logging.getLogger(__name__)

STEP_KEY = "train_step"  # our own x axis: wandb's only grows, and a resumed run repeats steps

SETTINGS = {
    "console": "off",  # standard error belongs to the worker's log
    "init_timeout": 60.0,  # seconds
    "finish_timeout": 60.0,  # without it a lost network holds the end of the run for ever
    "finish_timeout_raises": True,
}


class WandbRun:
    """One run. Never raises."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, step: int, row: Mapping[str, float | int | str]) -> None:
        """Sends a row."""
        if self._run is None:
            return
        try:
            self._run.log({**row, STEP_KEY: step})
        except Exception as error:  # a copy of the metrics must never cost the run
            self._switch_off(error)

    def close(self) -> None:
        """Marks the run finished; may be called again."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            self._switch_off(error)
        self._run = None

    def _switch_off(self, error: Exception) -> None:
        self._run = None
        _warn(error)


def start_wandb(
    options: WandbOptions, *, folder: Path, run_name: str, config: Mapping[str, Any]
) -> WandbRun | None:
    """Starts a run; returns None if it is disabled or failed to start (logged).

    Raises:
        ConfigError: the package is not installed.
    """
    if options.mode == "disabled":
        return None
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            "the package wandb is not installed",
            where=f"wandb.mode={options.mode}",
            fix="pip install 'realsys[wandb]', or set wandb.mode=disabled",
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=options.project or run_name.partition("/")[0],
            entity=options.entity,
            name=run_name,
            id=_run_id(folder / "wandb_run.json"),
            resume="allow",
            dir=str(folder),
            mode=options.mode,
            config=dict(config),
            settings=_known_settings(wandb),
        )
        run.define_metric(STEP_KEY)
        run.define_metric("*", step_metric=STEP_KEY)
    except Exception as error:  # no network, no login, a full disk: the run goes on without
        _warn(error)
        return None
    return WandbRun(run)


def _known_settings(wandb: Any) -> dict[str, Any]:
    """Returns our settings that this version of wandb has; it refuses unknown ones."""
    known = getattr(getattr(wandb, "Settings", None), "model_fields", {})
    return {name: value for name, value in SETTINGS.items() if name in known}


def _run_id(path: Path) -> str:
    if path.exists():
        return str(json.loads(path.read_text())["id"])
    run_id = secrets.token_hex(8)
    path.write_text(json.dumps({"id": run_id}) + "\n")
    return run_id


def _warn(error: Exception) -> None:
    first_line = (str(error).splitlines() or [""])[0]
    logger.warning(
        "wandb switched off error=%s: %s; metrics.jsonl continues, `wandb sync` can send offline runs",
        type(error).__name__,
        first_line,
    )
