"""A trial's job is ended politely, then by force, and gone only when Slurm says so.

squeue and scancel are scripts: squeue prints what a file holds, scancel may change it.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import golden
import pytest
from stand_in_slurm import SUBMITTED, calls, make_plan, program, queue_row, write_plan

from launcher.control import stop as module
from launcher.sites.places import user_name
from launcher.trials.status import StatusReader
from launcher.trials.submission import Submission, read_submission
from realsys.api.cluster import SlurmSpec
from realsys.api.errors import ClusterError, KeyNotFound
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.trial.records import (
    AttemptRecord,
    ExitMarker,
    Result,
    StopRequest,
    WorkerRecord,
    dumps,
    loads,
    write_record,
)
from realsys.trial.trial_state import JobState, State

SILENT = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2"


class Trial:
    """A trial on Slurm: its records, and what Slurm says of its job."""

    def __init__(self, root: Path, *job_ids: str) -> None:
        self.bin = root / "bin"
        self.plan = make_plan(root)
        self.files = write_plan(self.plan)
        self.submission = Submission(
            job_id=job_ids[0],
            scheduler="slurm",
            job_ids=job_ids,
            host="login",
            after_attempt=0,
            at=SUBMITTED,
        )
        self.told: list[str] = []
        self.honours_the_request = False
        write_record(self.files.submission, self.submission)
        self.store = open_store(self.plan.name_resolve_url)
        program(self.bin, "squeue", f'cat "{self.bin}/queue"')
        program(self.bin, "sacct", "exit 1")
        self.cancelling("true")

    def job(self, state: str, name: str = "queue") -> None:
        """What Slurm says of all jobs."""
        rows = [queue_row(job_id, state) for job_id in self.submission.job_ids]
        (self.bin / name).write_text("".join(rows))

    def cancelling(self, shell: str) -> None:
        """What a scancel does."""
        program(self.bin, "scancel", shell)

    def cancel_ends_it(self, condition: str = "true", state: str = "CANCELLED") -> None:
        self.job(state, "ended")
        self.cancelling(f'if {condition}; then cp "{self.bin}/ended" "{self.bin}/queue"; fi')

    def runs(self) -> None:
        """Attempt 1, which does nothing."""
        record = AttemptRecord(
            number=1,
            token="t",
            host="n1",
            supervisor_pid=5,
            supervisor_start=1,
            started_at=SUBMITTED + 2.0,
            job_id=self.submission.job_id,
            nodes="n[1-2]",
        )
        write_record(self.files.attempt(1).record, record)
        self.job("RUNNING")

    def leaves_marker(self, result: Result = Result.STOPPED) -> None:
        marker = ExitMarker(result=result, attempt=1, ended_at=SUBMITTED + 3.0, phase="main")
        write_record(self.files.attempt(1).exit, marker)

    def stop(self, grace_s: float = 0.05) -> bool:
        stopping = module.stop(self.files, grace_s=grace_s, extra_s=0.05, on_action=self._did)
        return not stopping.was_over

    def _did(self, text: str) -> None:
        self.told.append(text)
        if self.honours_the_request and text.startswith("requested"):
            self.leaves_marker()
            self.job("COMPLETED")

    def request(self) -> StopRequest | None:
        key = TrialKeys.of(self.plan).stop
        try:
            return loads(StopRequest, self.store.get(key).value, where=key)
        except KeyNotFound:
            return None

    @property
    def cancelled(self) -> list[str]:
        return calls(self.bin, "scancel")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, seconds in {"QUIET_S": 0.05, "GONE_S": 0.2, "POLL_PAUSES_S": (0.01,)}.items():
        monkeypatch.setattr(module, name, seconds)
    made: list[Trial] = []

    def trial(*job_ids: str) -> Trial:
        made.append(Trial(tmp_path, *(job_ids or ("7",))))
        return made[-1]

    yield trial
    for one in made:
        one.store.close()


def test_a_waiting_job_is_cancelled_and_who_did_it_is_noted(make):
    trial = make()
    trial.job("PENDING")
    trial.cancel_ends_it()
    assert trial.stop() is True
    assert trial.cancelled == ["7"]
    assert trial.request() is None
    assert read_submission(trial.files).cancelled_by == user_name()
    golden.check(trial.told)
    with closing(StatusReader(trial.files)) as reader:
        view = reader.view()
    golden.check((view.state, view.reason))


def test_all_waiting_jobs_of_the_layout_split_are_cancelled_at_once(make):
    trial = make("7", "8")
    trial.job("PENDING")
    trial.cancel_ends_it()
    assert trial.stop() is True
    assert trial.cancelled == ["7 8"]
    golden.check(trial.told[-1])


def test_a_job_that_began_to_run_before_the_cancellation_is_killed(make):
    trial = make()
    trial.job("PENDING")
    trial.cancel_ends_it('[ "$1" = --full ]')
    assert trial.stop() is True
    assert trial.cancelled == ["7", "--full --signal=KILL 7", "7"]


def test_a_running_job_that_ends_when_asked_is_not_cancelled(make):
    trial = make()
    trial.runs()
    trial.honours_the_request = True
    assert trial.stop(grace_s=30) is True
    assert trial.request().grace_seconds == 30
    assert trial.cancelled == []
    golden.check(trial.told)


def test_a_job_whose_run_has_just_ended_is_given_time_to_leave(make, monkeypatch):
    monkeypatch.setattr(module, "QUIET_S", 100.0)
    trial = make()
    trial.runs()
    trial.leaves_marker()
    trial.job("COMPLETED", "ended")
    leaves = f'[ -e "{trial.bin}/looked" ] && cp "{trial.bin}/ended" "{trial.bin}/queue"'
    program(trial.bin, "squeue", f'cat "{trial.bin}/queue"; {leaves}; touch "{trial.bin}/looked"')
    assert trial.stop() is True
    assert trial.cancelled == []
    golden.check(trial.told)


def test_a_running_job_is_asked_first_then_killed_in_steps_and_script(make):
    trial = make()
    trial.runs()
    trial.cancel_ends_it('[ "$1" = --full ]')
    assert trial.stop(grace_s=0.5) is True
    request = trial.request()
    assert (request.attempt, request.grace_seconds) == (1, 0.5)
    assert request.by.startswith(f"{user_name()}@")
    assert trial.cancelled == ["--full --signal=KILL 7", "7"]
    golden.check(trial.told)


def test_a_trial_that_is_over_and_whose_job_has_left_is_nothing_to_stop(make):
    trial = make()
    trial.runs()
    trial.leaves_marker(Result.COMPLETED)
    trial.job("COMPLETED")
    assert trial.stop() is False
    assert (trial.cancelled, trial.told, trial.request()) == ([], [], None)


def test_a_trial_that_is_over_but_whose_job_hangs_is_killed(make):
    trial = make()
    trial.runs()
    trial.leaves_marker(Result.FAILED)
    trial.job("COMPLETING")
    trial.cancel_ends_it()
    assert trial.stop() is True
    assert trial.cancelled == ["--full --signal=KILL 7", "7"]
    assert trial.told[0] == "killing job 7"


def test_a_split_trial_is_gone_when_all_its_jobs_are(make):
    trial = make("7", "8")
    trial.runs()
    (trial.bin / "queue").write_text(queue_row("7", "COMPLETED") + queue_row("8", "RUNNING"))
    trial.leaves_marker()
    trial.cancel_ends_it()
    assert trial.stop() is True
    assert trial.cancelled == ["--full --signal=KILL 8", "8"]  # 7 has ended


def test_a_job_that_stays_after_it_was_killed_is_a_cluster_error(make):
    trial = make()
    trial.runs()
    with golden.raises(ClusterError) as caught:
        trial.stop()
    assert caught.value.where == "squeue -j 7"
    assert trial.cancelled == ["--full --signal=KILL 7", "7"]


def test_a_slurmctld_that_does_not_answer_is_a_cluster_error_after_asking(make):
    trial = make()
    trial.runs()
    program(trial.bin, "squeue", f"{SILENT}; exit 1")
    with golden.raises(ClusterError):
        trial.stop()
    assert trial.request().attempt == 1  # the run itself hears it without slurmctld
    assert trial.cancelled == []


def test_a_cancellation_that_slurm_refuses_is_not_noted_as_done(make):
    trial = make()
    trial.job("PENDING")
    trial.cancelling("echo 'scancel: error: Kill job error on job id 7: Access denied' >&2; exit 1")
    with golden.raises(ClusterError):
        trial.stop()
    assert read_submission(trial.files).cancelled_by == ""
    assert trial.told == []


@pytest.mark.parametrize(("accounting", "asked"), [(False, 0), (None, 1)])
def test_the_cluster_spec_says_whether_accounts_are_asked(tmp_path, make, accounting, asked):
    trial = make()
    trial.plan = make_plan(tmp_path, slurm=SlurmSpec(accounting=accounting))
    write_plan(trial.plan)
    trial.runs()
    trial.leaves_marker(Result.COMPLETED)
    (trial.bin / "queue").write_text("")
    program(trial.bin, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert trial.stop() is False
    assert len(calls(trial.bin, "sacct")) == asked


# ---- an id that is another job's by now -----------------------------------------------------------


def test_another_job_under_the_trials_id_is_not_cancelled(make):
    """It was: `killing job 7`, and the other work was gone."""
    trial = make()
    trial.runs()
    (trial.bin / "queue").write_text(queue_row("7", "RUNNING", submitted=SUBMITTED + 86400))
    assert trial.stop() is False
    assert trial.cancelled == []
    with closing(StatusReader(trial.files)) as reader:
        view = reader.view()
    assert (view.state, view.job.state) == (State.LOST, JobState.GONE)
    assert "another job" in view.reason


def test_a_job_that_becomes_another_while_it_is_asked_to_stop_is_not_killed(make):
    trial = make()
    trial.runs()
    (trial.bin / "later").write_text(queue_row("7", "RUNNING", submitted=SUBMITTED + 86400))
    act = trial._did

    def did(text: str) -> None:
        act(text)
        if text.startswith("requested"):
            (trial.bin / "queue").write_text((trial.bin / "later").read_text())

    trial._did = did
    trial.stop(grace_s=0.05)
    assert trial.cancelled == []


def holds_a_lease(trial: Trial) -> None:
    key = TrialKeys.of(trial.plan).worker("model_worker", 0)
    record = WorkerRecord(worker="model_worker/0", host="n2", pid=77, start=1, attempt=1, token="t")
    trial.store.add(key, dumps(record))


@pytest.mark.parametrize("queue", ["", queue_row("7", "RUNNING", submitted=SUBMITTED + 86400)])
def test_a_run_that_shows_that_it_lives_is_not_told_as_lost(make, queue):
    """With several clusters it was: lost, nothing runs, nothing was done."""
    trial = make()
    trial.runs()
    (trial.bin / "queue").write_text(queue)
    holds_a_lease(trial)
    with closing(StatusReader(trial.files)) as reader:
        for view in (reader.view(), reader.brief_view()):
            assert view.state is State.STARTING
            golden.check(view.reason)
    trial.honours_the_request = True
    assert trial.stop(grace_s=30) is True
    assert trial.request().grace_seconds == 30
    assert trial.cancelled == []


def test_a_run_that_slurm_can_t_end_is_told_with_its_places(make):
    trial = make()
    trial.runs()
    (trial.bin / "queue").write_text("")
    holds_a_lease(trial)
    with pytest.raises(ClusterError) as caught:
        trial.stop()
    assert "n2 (pid 77)" in caught.value.fix
    assert trial.cancelled == []
