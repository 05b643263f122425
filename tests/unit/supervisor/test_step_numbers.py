"""A requeued job's steps have numbers that no step of its earlier incarnations had."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import golden
import pytest
from stand_in_slurm import calls, make_plan, program, write_plan

from realsys.supervisor.steps import step_numbers
from realsys.supervisor.steps.slurm_steps import SlurmSteps
from realsys.supervisor.steps.step_numbers import (
    SPARE,
    note_steps,
    numbers_to_skip,
    skip_former_numbers,
)
from realsys.trial.records import AttemptFiles, AttemptRecord, TrialFiles, write_record
from realsys.worker.requeued import former_attempts_of_same_job, newer_attempt_of_same_job


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialFiles:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    program(tmp_path / "bin", "srun", "")
    return write_plan(make_plan(tmp_path))


def attempt(files: TrialFiles, number: int, job_id: str, steps: int) -> AttemptFiles:
    """One of that job, which has started so many steps."""
    made = files.attempt(number)
    record = AttemptRecord(
        number=number,
        token="t",
        host="n1",
        supervisor_pid=1,
        supervisor_start=1,
        started_at=0.0,
        job_id=job_id,
    )
    write_record(made.record, record)
    if steps:
        note_steps(made, [{"step": "any"}] * steps)
    return made


def test_the_most_that_one_incarnation_used_and_some_to_spare():
    assert numbers_to_skip([]) == 0
    assert numbers_to_skip([0]) == SPARE  # it ended before it wrote down a step, or wrote none
    assert numbers_to_skip([2, 2 + SPARE + 4, 3]) == 2 + SPARE + 4 + SPARE


def test_a_first_incarnation_skips_none(files, tmp_path):
    attempt(files, 1, "7", 2)
    resumed = attempt(files, 2, "8", 0)  # another job: its numbers are its own
    assert skip_former_numbers(resumed, {}) == 0
    assert calls(tmp_path / "bin", "srun") == []
    assert not resumed.steps.exists()


def test_a_requeued_job_skips_those_of_all_its_incarnations(files, tmp_path, monkeypatch):
    attempt(files, 1, "6", 50)  # of another job
    attempt(files, 2, "7", 3)
    second = attempt(files, 3, "7", 0)
    assert skip_former_numbers(second, os.environ) == 3 + SPARE
    seen = calls(tmp_path / "bin", "srun")
    assert len(seen) == len(second.steps.read_text().splitlines()) == 3 + SPARE
    assert set(seen) == {
        "--job-name=unused --nodes=1 --ntasks=1 --overlap --mem=0 --gres=none --mpi=none "
        f"--export=NONE --chdir=/ --input=none --output=none {shutil.which('true')}"
    }
    note_steps(second, [{"step": "model_worker"}] * 2)
    third = attempt(files, 4, "7", 0)
    assert skip_former_numbers(third, os.environ) == 3 + SPARE + 2 + SPARE


def test_incarnations_are_told_by_the_jobs_id(files):
    for number, job_id in ((1, "7"), (2, "8"), (3, "7"), (4, "")):
        attempt(files, number, job_id, 0)
    former = {n: [a.number for a in former_attempts_of_same_job(files, n)] for n in range(1, 6)}
    assert former == {1: [], 2: [], 3: [1], 4: [], 5: []}
    newest = newer_attempt_of_same_job(files, 1)
    assert newest is None, "the newest is of another job"


def test_srun_hears_of_no_option_of_the_batch_step(files, tmp_path):
    attempt(files, 1, "7", 0)
    program(tmp_path / "bin", "srun", f'env > "{tmp_path}/env"')
    skip_former_numbers(
        attempt(files, 2, "7", 0),
        {"PATH": f"{tmp_path}/bin:/bin", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},
    )
    seen = (tmp_path / "env").read_text()
    assert "SLURM_JOB_ID=7" in seen
    assert "SLURM_NTASKS" not in seen


@pytest.mark.parametrize(
    ("srun", "timeout_s", "reason"),
    [
        ("echo 'srun: error: no' >&2; exit 4", 60.0, "srun ended with 4: srun: error: no"),
        ("exec sleep 30", 0.2, "srun did not end in 0.2 s"),
    ],
)
def test_what_fails_is_told_and_stops_nothing(
    files, tmp_path, monkeypatch, caplog, srun, timeout_s, reason
):
    monkeypatch.setattr(step_numbers, "TIMEOUT_S", timeout_s)
    program(tmp_path / "bin", "srun", srun)
    attempt(files, 1, "7", 0)
    assert skip_former_numbers(attempt(files, 2, "7", 0), os.environ) == SPARE
    (told,) = caplog.messages
    assert told.startswith("step numbers")
    assert told.endswith(f"first={reason}")


def test_without_srun_it_is_told(files, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    attempt(files, 1, "7", 0)
    skip_former_numbers(attempt(files, 2, "7", 0), os.environ)
    (told,) = caplog.messages
    golden.check(told)


def test_they_are_skipped_before_the_first_step_and_once(files, tmp_path):
    plan = make_plan(tmp_path)
    attempt(files, 1, "7", 2)
    second = attempt(files, 2, "7", 0)
    steps = SlurmSteps(plan, "hash", second, {0: ["n1", "n2"]})
    for _ in range(2):
        tasks = steps.start(plan.phases[0])
        steps.end(tasks, grace_s=0.0)
    names = [json.loads(line)["step"] for line in second.steps.read_text().splitlines()]
    skipped = 2 + SPARE
    assert names == ["unused"] * skipped + ["master_worker", "model_worker"] * 2


def test_steps_of_a_preflight_come_after_those_that_are_skipped(files, tmp_path):
    program(tmp_path / "bin", "srun", "exit 0")
    attempt(files, 1, "7", 2)
    second = attempt(files, 2, "7", 0)
    assert skip_former_numbers(second, os.environ) == 2 + SPARE
    note_steps(second, [{"phase": "", "step": "preflight", "argv": ["srun"]}])
    assert skip_former_numbers(second, os.environ) == 0  # before the workers' first step
    names = [json.loads(line)["step"] for line in second.steps.read_text().splitlines()]
    assert names == ["unused"] * (2 + SPARE) + ["preflight"]
