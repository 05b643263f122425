"""Replays an asynchronous trial on the samples it trained on, and compares the two bit for bit."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from launcher.submit.other_code import check_settings_readable, refused_with_revision
from launcher.submit.planning import import_all, make_plan
from launcher.trials.changed_settings import change_lines
from realsys.api.basics.choice import KIND
from realsys.api.errors import TrialError
from realsys.api.plan import LaunchPlan, read_plan
from realsys.observability.metrics import deterministic, read_metrics
from realsys.trial.records import PhaseFiles, TrialFiles, TrialRecord, read_record

# Metrics that only the original has, because its answers came from rollout workers, for chosen questions.
_OF_ROLLOUTS = ("rollout/", "curriculum/")


def plan_replay(files: TrialFiles, *, trial: str | None) -> LaunchPlan:
    """Plans the same run, fed from the dump of the trial in ``files``.

    Raises:
        TrialError: it was not asynchronous. ConfigErrors: it left no dump to replay.
        MadeByOtherCode: this code can't read its settings.
    """
    with refused_with_revision(files, "replay"):
        old = read_plan(files.plan)
        import_all(old.imports)
        # Those of a copy of the code too: a replay is launched, and runs this code.
        check_settings_readable(files, replace(old, snapshot=False))
    schedule = old.options.get("schedule")
    if not isinstance(schedule, dict) or "max_staleness" not in schedule:
        raise TrialError(
            f"{old.trial} was not asynchronous, and its seed alone repeats it",
            where=str(files.root),
            fix="launch it again, or replay a trial of an asynchronous experiment, e.g. ppo-math-async",
        )
    options = {**old.options, **_layouts(old.options)}
    options["schedule"] = {
        KIND: "replay",
        "folder": str(files.root),
        "max_staleness": schedule["max_staleness"],
    }
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "options.yaml"
        config.write_text(yaml.safe_dump(_with_what_is_set(options)))
        return make_plan(
            old.experiment_name,
            config=config,
            trial=trial,
            cluster=None if old.job is None else old.cluster.name,
            imports=old.imports,
        )


def _with_what_is_set(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without groups in which nothing is set: a file of settings gives values."""
    read = {k: _with_what_is_set(v) if isinstance(v, dict) else v for k, v in options.items()}
    return {k: v for k, v in read.items() if k != "scheduling" or v}


def _layouts(options: Mapping[str, Any]) -> dict[str, Any]:
    """The models' settings, in the layout of a detached run's trainers where they have none."""
    if options["schedule"][KIND] != "detached":
        return {}
    layout = f"d{len(options['schedule']['trainers'])}"
    models = {k: v for k, v in options.items() if isinstance(v, dict) and "parallel" in v}
    return {k: {**v, "parallel": v["parallel"] or layout} for k, v in models.items()}


def replay_warnings(files: TrialFiles) -> list[str]:
    """Lists what a replay of that trial must report: settings changed between its attempts."""
    record = read_record(TrialRecord, files.record)
    changed = change_lines(record.changes) if record is not None else []
    if not changed:
        return []
    return [
        f"settings were changed during the trial ({'; '.join(changed)}): the replay uses the last values "
        "from its first step, so the two may differ before the change"
    ]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The agreement of a replay with its original.

    Attributes:
        steps: number of steps for which both have metrics.
        first_difference: the first difference, as text; empty: none.
        same_weights: role → whether the saved weights are equal; None: they are of different steps.
    """

    steps: int
    first_difference: str
    same_weights: dict[str, bool | None]

    @property
    def is_exact(self) -> bool:
        """Whether nothing differs."""
        return not self.first_difference and all(self.same_weights.values())


def compare(original: TrialFiles, replay: TrialFiles) -> Comparison:
    """Compares the metrics of all steps, and the weights saved last."""
    rows = [_rows(PhaseFiles(files.root)) for files in (original, replay)]
    difference, common = "", sorted(set(rows[0]) & set(rows[1]))
    for step in common:
        one, other = rows[0][step], rows[1][step]
        names = [k for k in sorted(one.keys() | other.keys()) if one.get(k) != other.get(k)]
        if names:
            name = names[0]
            difference = f"step {step}: {name} was {one.get(name)}, is {other.get(name)}"
            break
    return Comparison(
        steps=len([step for step in common if step]),
        first_difference=difference,
        same_weights=_weights(PhaseFiles(original.root), PhaseFiles(replay.root)),
    )


def _rows(files: PhaseFiles) -> dict[int, dict[str, object]]:
    return {
        int(row["step"]): {
            k: v for k, v in deterministic(row).items() if not k.startswith(_OF_ROLLOUTS)
        }
        for row in read_metrics(files.metrics)
    }


def _weights(original: PhaseFiles, replay: PhaseFiles) -> dict[str, bool | None]:
    found: dict[str, bool | None] = {}
    for folder in sorted(replay.checkpoints.glob("*/latest")):
        role = folder.parent.name
        mine, theirs = folder, original.checkpoints / role / "latest"
        if not theirs.exists() or _step(mine) != _step(theirs):
            found[role] = None
            continue
        names = sorted(p.name for p in mine.glob("*.safetensors"))
        found[role] = all(_hash(mine / n) == _hash(theirs / n) for n in names)
    return found


def _step(latest: Path) -> str:
    return os.path.realpath(latest).rpartition("step-")[2].partition(".")[0]


def _hash(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
