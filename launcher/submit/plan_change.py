"""Replaces a trial's plan atomically, for a resume that changes settings.

    plans/<hash>.json    the former plan, then the new one
    trial.json           names the new one by its hash: from here on it is the trial's
    plan.json            replaced by it

After a crash before trial.json the trial is unchanged; after a later crash, the next read for a start
completes the replacement. Only for the holder of the trial's lock (submit.trial_lock).
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from realsys.api.errors import TrialError
from realsys.api.plan import LaunchPlan, plan_hash, plan_text, read_plan
from realsys.trial.folders import make_folders, root_of
from realsys.trial.records import PlanChange, TrialFiles, TrialRecord, read_record, write_record


@dataclass(frozen=True, kw_only=True)
class StoredPlan:
    """A trial's record and the plan that belongs to it."""

    record: TrialRecord
    plan: LaunchPlan
    text: str  # of the plan, as on disk

    @property
    def hash(self) -> str:
        """Hash of the plan."""
        return self.record.plan_hash

    @property
    def raw(self) -> Mapping[str, Any]:
        """The plan's JSON, as on disk."""
        found: Mapping[str, Any] = json.loads(self.text)
        return found


def read_stored_plan(files: TrialFiles, *, finish: bool) -> StoredPlan:
    """Reads the trial's record and plan.

    Args:
        finish: complete an interrupted replacement of the plan; only under the trial's lock.
    Raises:
        TrialError: there is no record.
        ConfigError: its plan was modified by other means.
    """
    record = read_record(TrialRecord, files.record)
    if record is None:
        raise TrialError(
            "the trial's record is missing", where=str(files.record), fix="launch a new trial"
        )
    there, kept = _hash_of(files.plan), files.plan_of(record.plan_hash)
    cut_off = there != record.plan_hash and _hash_of(files.plan_of(there)) == there
    path = kept if cut_off and _hash_of(kept) == record.plan_hash else files.plan
    plan = read_plan(path, expected_hash=record.plan_hash)
    text = path.read_text(encoding="utf-8")
    if path is kept and finish:
        _write_whole(files.plan, text, like=kept)
    return StoredPlan(record=record, plan=plan, text=text)


def replace_plan(
    files: TrialFiles,
    old: StoredPlan,
    plan: LaunchPlan,
    *,
    settings: Mapping[str, tuple[Any, Any]],
    command: Sequence[str],
) -> StoredPlan:
    """Makes ``plan`` the trial's plan from its next attempt on.

    Raises:
        OSError: the file system refused; the trial is unchanged, or `read_stored_plan` will complete this.
    """
    text = plan_text(plan)
    make_folders(files.plans, root=root_of(files.root))
    for kept in (old.text, text):
        _write_whole(files.plan_of(plan_hash(kept)), kept, like=files.plan)
    attempts = files.all_attempts()
    change = PlanChange(
        from_attempt=attempts[-1].number + 1 if attempts else 1,
        plan_hash=plan_hash(text),
        at=time.time(),
        settings=dict(settings),
        command=tuple(command),
    )
    record = replace(old.record, plan_hash=change.plan_hash, changes=(*old.record.changes, change))
    write_record(files.record, record)
    _write_whole(files.plan, text, like=files.plan)
    return StoredPlan(record=record, plan=plan, text=text)


def restore_plan(files: TrialFiles, old: StoredPlan) -> None:
    """Restores the trial's former plan if the start with a new one failed."""
    write_record(files.record, old.record)
    _write_whole(files.plan, old.text, like=files.plan)


def _hash_of(path: Path) -> str:
    try:
        return plan_hash(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""


def _write_whole(path: Path, text: str, *, like: Path) -> None:
    """Writes a file durably and atomically, with the mode of ``like``."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), like.stat().st_mode & 0o777)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
