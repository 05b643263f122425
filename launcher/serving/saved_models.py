"""Finds the model that TRIAL or MODEL means: a Hugging Face directory, or a trial's saved checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launcher.trials.find_trials import find_trial, trial_name
from realsys.api.errors import ConfigError, NoSuchTrial, TrialError, did_you_mean
from realsys.trial.records import PhaseFiles, TrialFiles

_STEP = re.compile(r"step-(\d+)")
_CONFIG = "config.json"
_USUAL_ROLES = ("actor", "model")  # of reinforcement learning; of fine-tuning


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A model in a directory.

    Attributes:
        name: for people and for replies.
        trial: that saved it, at ``step``; None: it is nobody's.
    """

    path: Path
    name: str
    trial: TrialFiles | None = None
    role: str = ""
    step: int | None = None


def find_model(
    name: str, *, cluster: str | None = None, step: int | None = None, role: str | None = None
) -> SavedModel:
    """Finds a model; of a trial its newest checkpoint.

    Args:
        step: of the checkpoint. role: whose; None: the actor's, or the only one's.
    Raises:
        NoSuchTrial: it is no directory of a model either. TrialError: there is no such checkpoint.
    """
    folder = Path(name).expanduser()
    if (folder / _CONFIG).is_file():
        if step is not None or role is not None:
            raise ConfigError(
                f"{name} is one model, without steps and roles",
                where="--step and --role",
                fix="leave them out, or name a trial",
            )
        path = folder.resolve()
        return SavedModel(path=path, name=path.name)
    try:
        files = find_trial(name, cluster=cluster)
    except NoSuchTrial as error:
        what = f"{error.what}, and {name} holds no {_CONFIG} of a model"
        raise NoSuchTrial(what, where=error.where, fix=error.fix) from None
    return checkpoint_of(files, step=step, role=role)


def checkpoint_of(files: TrialFiles, *, step: int | None, role: str | None) -> SavedModel:
    """Finds a checkpoint of a trial, by default the newest."""
    folder = PhaseFiles(files.root).checkpoints
    roles = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    chosen = role or next((r for r in _USUAL_ROLES if r in roles), roles[0] if roles else "")
    found = _steps(folder / chosen) if chosen in roles else {}
    trial = trial_name(files)
    if not roles or (role is None and not found):
        raise TrialError(
            f"{trial} has saved no checkpoint yet",
            where=str(folder),
            fix="wait for one; exp_ctrl.save_freq_steps says how often they are saved",
        )
    if chosen not in roles:
        raise TrialError(
            f"{trial} has no checkpoints of {chosen!r}",
            where=str(folder),
            fix=did_you_mean(chosen, roles),
        )
    at = max(found, default=0) if step is None else step
    if at not in found:
        raise TrialError(
            f"{trial} has no checkpoint of {chosen} at step {at}",
            where=str(folder / chosen),
            fix="use one of the steps " + ", ".join(map(str, sorted(found))),
        )
    return SavedModel(path=found[at], name=f"{trial}@{at}", trial=files, role=chosen, step=at)


def _steps(folder: Path) -> dict[int, Path]:
    """Returns the whole checkpoints in a folder, by step."""
    named = [(m, path) for path in folder.iterdir() if (m := _STEP.fullmatch(path.name))]
    return {int(match[1]): path for match, path in named if (path / _CONFIG).is_file()}
