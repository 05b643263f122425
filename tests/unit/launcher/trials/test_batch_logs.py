"""What `realsys logs` shows of batch scripts, and from when on."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import golden
import pytest

from launcher.trials.merged_logs import BATCH, TrialLogs, since_stamp
from launcher.trials.submission import Submission
from realsys.api.errors import ConfigError
from realsys.trial.records import AttemptRecord, TrialFiles, write_record

NOW = datetime(2026, 11, 21, 9, 30, 5, 700_000)


def takes(files: TrialFiles, number: int, job_id: str) -> None:
    """The attempt that this job took."""
    record = AttemptRecord(
        number=number,
        token="t",
        host="n1",
        supervisor_pid=5,
        supervisor_start=1,
        started_at=1.0,
        job_id=job_id,
    )
    write_record(files.attempt(number).record, record)


def handed_over(files: TrialFiles, *job_ids: str, folder: str = "") -> None:
    note = Submission(
        job_id=job_ids[0],
        scheduler="slurm",
        job_ids=job_ids,
        host="login",
        after_attempt=0,
        at=1.0,
        folder=folder,
    )
    write_record(files.submission, note)


def writes(folder: Path, name: str, *lines: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(f"{line}\n" for line in lines))


def shown(files: TrialFiles, **options: object) -> list[tuple[int, str, str]]:
    logs = TrialLogs(files, **options)  # type: ignore[arg-type]
    return [(line.attempt, line.worker, line.text) for line in logs.read(last=True)]


@pytest.fixture
def files(tmp_path: Path) -> TrialFiles:
    return TrialFiles(tmp_path / "run1")


# ---- batch scripts ---------------------------------------------------------------------------------


def test_what_the_batch_script_wrote_is_the_attempts(files):
    handed_over(files, "7")
    takes(files, 1, "7")
    writes(files.submitit, "7_0_log.out", "loading modules")
    writes(files.submitit, "7_0_log.err", "module: not found")
    writes(files.submitit, "77_0_log.err", "another job's")
    writes(files.submitit, "7_submission.sh", "#!/bin/bash")
    assert shown(files) == [(1, BATCH, "module: not found"), (1, BATCH, "loading modules")]
    assert TrialLogs(files).workers() == [BATCH]
    assert shown(files, pattern="batch") == shown(files)
    assert shown(files, pattern="model_worker") == []


def test_all_jobs_of_the_layout_split_belong_to_the_last_attempt(files):
    handed_over(files, "9", "10")
    takes(files, 1, "7")
    takes(files, 2, "9")
    for job_id in ("7", "8", "9", "10"):
        writes(files.submitit, f"{job_id}_0_log.err", f"of {job_id}")
    assert shown(files) == [(1, BATCH, "of 7"), (2, BATCH, "of 10"), (2, BATCH, "of 9")]


def test_an_element_of_an_array_writes_into_the_first_trials_folder(files, tmp_path):
    shared = tmp_path / "run0" / "submitit"
    handed_over(files, "41_1", folder=str(shared))
    takes(files, 1, "41_1")
    writes(shared, "41_0_0_log.err", "of the other")
    writes(shared, "41_1_0_log.err", "ours")
    writes(shared, "41_11_0_log.err", "of the eleventh")
    assert shown(files) == [(1, BATCH, "ours")]


def test_a_trial_on_this_machine_has_submitits_files_too(files):
    takes(files, 1, "1234")
    writes(files.submitit, "1234_0_log.err", "Traceback")
    assert shown(files) == [(1, BATCH, "Traceback")]


def test_an_attempt_without_a_record_or_a_job_has_none(files):
    files.attempt(1).root.mkdir(parents=True)
    takes(files, 2, "")
    writes(files.submitit, "_0_log.err", "whose?")
    assert shown(files) == []


# ---- since -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stamp"),
    [
        ("0s", "2026-11-21T09:30:05"),
        ("90s", "2026-11-21T09:28:35"),
        ("10m", "2026-11-21T09:20:05"),
        ("2h", "2026-11-21T07:30:05"),
        ("1d", "2026-11-20T09:30:05"),
        ("2026-11-21", "2026-11-21T00:00:00"),
        ("2026-11-21 09:30", "2026-11-21T09:30:00"),
        ("2026-11-21T09:30:00.9", "2026-11-21T09:30:00"),
    ],
)
def test_a_time_ago_or_a_time_is_a_stamp(text, stamp):
    assert since_stamp(text, NOW) == stamp


@pytest.mark.parametrize(
    "text", ["", "10", "m", "-5m", "1w", "yesterday", "9" * 12 + "d", "999999d"]
)
def test_anything_else_is_an_error(text):
    with golden.raises(ConfigError) as caught:
        since_stamp(text, NOW)
    assert caught.value.where == "--since"


@pytest.mark.parametrize("offset_h", [0, -8, 5.5])
def test_a_time_of_another_zone_is_told_in_ours_as_stamps_are(offset_h):
    there = timezone(timedelta(hours=offset_h))
    at = datetime(2026, 11, 21, 9, 30, tzinfo=there)
    here = at.astimezone().strftime("%Y-%m-%dT%H:%M:%S")
    assert since_stamp(at.isoformat(), NOW) == here


def test_lines_from_then_on_are_shown_with_what_belongs_to_them(files):
    log = files.attempt(1).logs
    writes(
        log,
        "model_worker-0.log",
        "no stamp yet",
        "2026-11-21T09:19:59.999 INFO early",
        "  and its traceback",
        "2026-11-21T09:20:05.000 INFO just in time",
        "  and its traceback",
    )
    assert [text for _, _, text in shown(files, since=since_stamp("10m", NOW))] == [
        "2026-11-21T09:20:05.000 INFO just in time",
        "  and its traceback",
    ]
