"""A trial whose host was renamed, or is gone, can be stopped, resumed and removed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import golden
import pytest
from stand_in_slurm import SUBMITTED, make_plan, program, queue_row, write_plan

from launcher.control.assume_end import assume_end
from launcher.control.remove import refusal
from launcher.control.stop import stop
from launcher.submit.submit import _resumable
from launcher.trials.status import StatusReader, trial_view
from launcher.trials.submission import Submission
from realsys.api.errors import StoreUnavailable, TrialError, TrialIsLive
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.trial.machine_identity import MachineIdentity, this_machine
from realsys.trial.records import AttemptRecord, TrialFiles, WorkerRecord, dumps, write_record
from realsys.trial.trial_state import State

GONE = MachineIdentity(boot="b", pid_namespace="pid:[1]", machine="m")
RENAMED = "the-name-it-had"


@pytest.fixture
def begun(tmp_path: Path) -> Callable[[MachineIdentity | None], TrialFiles]:
    """Makes a local trial whose supervisor, of that machine, has died without a word."""

    def make(machine: MachineIdentity | None) -> TrialFiles:
        files = write_plan(replace(make_plan(tmp_path), job=None))
        record = AttemptRecord(
            number=1,
            token="t",
            host=RENAMED,
            supervisor_pid=2**22 + 1,
            supervisor_start=1,
            started_at=1.0,
            machine=machine,
        )
        write_record(files.attempt(1).record, record)
        note = Submission(job_id="5", host=RENAMED, after_attempt=0, at=1.0, machine=machine)
        write_record(files.submission, note)
        return files

    return make


def test_a_renamed_host_is_the_same_machine(begun: Callable[..., TrialFiles]) -> None:
    """It was `unknown` for ever, and resume, stop and rm refused."""
    files = begun(this_machine())
    view = trial_view(files)
    assert view.state is State.LOST
    assert stop(files, grace_s=0.0).was_over
    assert _resumable(files, allow_completed=False).state is State.LOST
    assert refusal(view, pids=(), users=()) is None


@pytest.mark.parametrize("machine", [GONE, None])
def test_the_end_of_a_run_of_another_machine_can_be_assumed(
    begun: Callable[..., TrialFiles], machine: MachineIdentity | None
) -> None:
    files = begun(machine)
    view = trial_view(files)
    assert view.state is State.UNKNOWN
    assert "--assume-ended" in view.fix
    with pytest.raises(TrialError) as caught:
        stop(files, grace_s=0.0)
    assert "--assume-ended" in caught.value.fix
    assert assume_end(files).state is State.LOST
    assert _resumable(files, allow_completed=False).state is State.LOST
    assert refusal(trial_view(files), pids=(), users=()) is None
    # The next attempt is another matter.
    next_record = AttemptRecord(
        number=2, token="t", host=RENAMED, supervisor_pid=1, supervisor_start=1, started_at=2.0
    )
    write_record(files.attempt(2).record, next_record)
    assert trial_view(files).state is State.UNKNOWN


def test_a_run_whose_workers_hold_leases_has_not_ended(begun: Callable[..., TrialFiles]) -> None:
    files = begun(GONE)
    with closing(StatusReader(files)) as reader:
        plan = reader.plan
    assert plan is not None
    worker = WorkerRecord(worker="m/0", host=RENAMED, pid=1, start=1, attempt=1, token="t")
    with closing(open_store(plan.name_resolve_url)) as store:
        store.add(TrialKeys.of(plan).worker("model_worker", 0), dumps(worker))
        with pytest.raises(TrialIsLive):
            assume_end(files)
        assert not files.assumed_end.exists()
        # Nor does a reboot that seems to have been end it: a clone of a machine has its id.
        rebooted = replace(this_machine(), boot="another", machine=this_machine().machine or "m")
        begun(rebooted)
        assert trial_view(files).state is State.STARTING


def test_a_submission_of_another_machine_can_be_given_up(begun: Callable[..., TrialFiles]) -> None:
    files = begun(GONE)
    files.attempt(1).record.unlink()
    files.attempt(1).root.rmdir()
    assert trial_view(files).state is State.UNKNOWN
    with pytest.raises(TrialError):
        stop(files, grace_s=0.0)
    assert assume_end(files).state is State.LOST
    # A later process may have the pid that was its id, as the first of a new container.
    again = Submission(
        job_id="5", host=RENAMED, after_attempt=0, at=time.time() + 1.0, machine=GONE
    )
    write_record(files.submission, again)
    assert trial_view(files).state is State.UNKNOWN


def test_a_run_whose_store_can_t_be_read_is_not_assumed_to_have_ended(
    begun: Callable[..., TrialFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers may hold leases there."""

    def away(self: StatusReader) -> None:
        raise StoreUnavailable("etcd does not answer", where="etcd://n1", fix="try later")

    files = begun(GONE)
    with monkeypatch.context() as patched:
        patched.setattr(StatusReader, "_opened", away)
        with golden.raises(TrialError) as caught:
            assume_end(files)
        assert "realsys doctor" in caught.value.fix
        assert not files.assumed_end.exists()
    assert assume_end(files).state is State.LOST


def test_what_is_known_to_be_over_needs_no_assumption(begun: Callable[..., TrialFiles]) -> None:
    files = begun(this_machine())
    assert assume_end(files).state is State.LOST
    assert not files.assumed_end.exists()


def test_a_job_that_can_t_be_told_from_another_can_be_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    files = write_plan(make_plan(tmp_path))
    old = Submission(job_id="7", scheduler="slurm", host="h", after_attempt=0, at=SUBMITTED - 86400)
    write_record(files.submission, old)
    row = tmp_path / "bin" / "row"
    program(tmp_path / "bin", "squeue", f'cat "{row}"')
    row.write_text(queue_row("7", "RUNNING", restarts=1))
    view = trial_view(files)
    assert (view.state, "can't be told" in view.reason) == (State.UNKNOWN, True)
    assert assume_end(files).state is State.LOST
    files.assumed_end.unlink()
    program(tmp_path / "bin", "squeue", "echo 'squeue: error: Socket timed out' >&2; exit 1")
    with golden.raises(TrialError):
        assume_end(files)
    assert not files.assumed_end.exists()
