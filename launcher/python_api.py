"""The Python API: launches trials and looks after them from notebooks and scripts.

    import realsys

    trial = realsys.launch("ppo-math", actor={"optimizer": {"lr": 1e-4}}, seed=2)
    trial.wait()
    print(trial.metrics()[-1]["accuracy"])

``realsys.launch`` and ``realsys.Trial`` are these (docs/python.md). They do what the verbs do, raise the
same errors (realsys.api.errors), print nothing and import no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import is_dataclass
from enum import Enum
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from launcher.control import stop as stopping
from launcher.submit.job_options import JobOptions
from launcher.submit.remake import RequestedChanges
from launcher.submit.submit import launch_trial, resubmit
from launcher.trials.await_end import await_end
from launcher.trials.find_trials import all_trials, find_trial, trial_name
from launcher.trials.status import StatusReader
from launcher.trials.trial_view import TrialView
from realsys.api.errors import ConfigError
from realsys.api.plain import to_plain
from realsys.observability.jsonl import read_jsonl
from realsys.observability.metrics import read_metrics
from realsys.trial.records import PhaseFiles, TrialFiles

Settings = Mapping[str, Any]


def launch(
    recipe: str,
    settings: Settings | None = None,
    *,
    cluster: str | None = None,
    trial: str | None = None,
    config: str | PathLike[str] | None = None,
    imports: Sequence[str] = (),
    slurm: Mapping[str, Any] | None = None,
    snapshot: bool = True,
    **more: Any,
) -> Trial:
    """Launches a trial and returns at once; it goes on when this process ends.

    Args:
        recipe: a registered experiment, e.g. ``ppo-math`` (`realsys experiments`).
        settings, **more: by dotted name (``{"actor.optimizer.lr": 1e-5}``) or nested
            (``actor={"optimizer": {"lr": 1e-5}}``); both may be given.
        trial: its name; None takes the next free ``run<N>``.
        config: a YAML file of settings; those given here win over it.
        imports: files and modules that register plug-ins.
        slurm: the options of `realsys launch` about the job, e.g. ``{"partition": "a100", "time": "2h"}``.
        snapshot: on Slurm, run a copy of the code.
    Raises:
        ConfigErrors: every mistake in settings, experiment and job, before anything starts.
        TrialError: the name is taken. ClusterError: the site refuses the job.
    """
    words = [*settings_words(settings or {}), *settings_words(more)]
    plan, files = launch_trial(
        recipe,
        words,
        config=None if config is None else Path(config),
        trial=trial,
        cluster=cluster,
        imports=imports,
        job=job_options(slurm or {}),
        snapshot=snapshot,
        fetch=lambda _: None,
        command=("realsys.launch", recipe, *words, *sys.argv[:1]),
    )
    return Trial(plan.trial, files=files)


def trials(*, cluster: str | None = None) -> Iterator[Trial]:
    """All my trials at the known sites."""
    for files in all_trials(cluster=cluster):
        yield Trial(trial_name(files), files=files)


class Trial:
    """A trial of mine, running or over.

    Args:
        name: ``experiment/trial``, ``experiment`` (its newest trial), or its folder.
    Raises:
        NoSuchTrial: with the nearest names.
    """

    def __init__(
        self, name: str, *, cluster: str | None = None, files: TrialFiles | None = None
    ) -> None:
        self._files = files or find_trial(name, cluster=cluster)

    def __repr__(self) -> str:
        return f"Trial({self.name!r})"

    @property
    def name(self) -> str:
        """``experiment/trial``."""
        return trial_name(self._files)

    @property
    def folder(self) -> Path:
        """Where its plan, records, logs, metrics and checkpoints lie."""
        return self._files.root

    def status(self) -> TrialView:
        """State, reason, step, workers: what `realsys status` shows."""
        with closing(StatusReader(self._files)) as reader:
            return reader.view()

    def metrics(self) -> list[dict[str, Any]]:
        """One row a step, oldest first; empty before the first step."""
        path = PhaseFiles(self.folder).metrics
        return read_metrics(path) if path.exists() else []

    def samples(self) -> list[dict[str, Any]]:
        """Sampled answers of the evaluations, oldest first; empty before the first one."""
        path = PhaseFiles(self.folder).samples
        return read_jsonl(path) if path.exists() else []

    def wait(self, timeout_s: float | None = None) -> TrialView:
        """Returns the last status once the trial is over, whatever its result.

        Raises:
            WaitTimeout: it is not over after ``timeout_s``.
        """
        return await_end(self._files, timeout_s=timeout_s)

    def stop(self, grace_s: float = 60.0) -> TrialView:
        """Ends the trial after its current step and leaves no process behind.

        Args:
            grace_s: how long the current step may take to finish.
        Raises:
            TrialError: it runs on another host. ClusterError: a process survived SIGKILL.
        """
        return stopping.stop(self._files, grace_s=grace_s).view

    def resume(self, settings: Settings | None = None, **more: Any) -> Trial:
        """Goes on from the last checkpoint, with other limits, lengths or resources if given.

        Raises:
            ConfigErrors: a setting that a resume may not change. TrialError: the trial is live.
        """
        words = [*settings_words(settings or {}), *settings_words(more)]
        resubmit(
            self._files,
            changes=RequestedChanges(words=words, config=None, job=JobOptions()),
            command=("Trial.resume", self.name, *words),
        )
        return self


def settings_words(settings: Settings) -> Iterator[str]:
    """Settings as the words of the command line, so that one reader checks both.

    Raises:
        ConfigError: a value that no setting can have.
    """
    for name, value in settings.items():
        try:
            text = json.dumps(_plain(value), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{value!r:.80} is not the value of a setting",
                where=f"realsys.launch, {name}",
                fix="give a number, a text, true, false or None, or lists and dicts of them",
            ) from error
        yield f"{name}={text}"


def job_options(given: Mapping[str, Any]) -> JobOptions:
    """``slurm={…}`` as the options of `realsys launch`.

    Raises:
        ConfigError: no such option, or requeue is neither true nor false.
    """
    known = JobOptions.__dataclass_fields__
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(
            f"no such option of the job: {', '.join(unknown)}",
            where="realsys.launch, slurm",
            fix=f"use one of {', '.join(known)}",
        )
    requeue = given.get("requeue")
    if requeue is not None and not isinstance(requeue, bool):
        raise ConfigError(
            f"requeue is {requeue!r:.80}, neither True nor False",
            where="realsys.launch, slurm",
            fix="give requeue=True or False, or leave it out",
        )
    texts = {n: str(v) for n, v in given.items() if v is not None and n != "requeue"}
    return JobOptions(requeue=requeue, **texts)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):  # a group, or a kind of a choice
        return to_plain(value)
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
