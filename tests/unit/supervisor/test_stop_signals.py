"""What each signal asks of an attempt, and how a job is given back to Slurm."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import golden
import pytest
from stand_in_slurm import SUBMITTED, calls, make_plan, program, write_plan

from realsys.api.cluster import SlurmSpec
from realsys.api.plan import plan_hash, plan_text
from realsys.slurm.job_identity import JobIdentity, Ownership
from realsys.supervisor import signals, supervisor_main
from realsys.supervisor.health.failure_report import LEASE_ENDED
from realsys.supervisor.own_jobs import ownerships
from realsys.supervisor.signals import (
    cancel_job,
    is_cancelled,
    listen_to_signals,
    requeue_job,
)
from realsys.trial.records import ExitMarker, Failure, Result

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class Asked(list[tuple[str, float]]):
    """In the supervisor's place: notes what is asked of it."""

    is_first = True

    def request_stop(self, by: str, *, grace_s: float) -> bool:
        self.append((by, grace_s))
        return self.is_first


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield Asked()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_local_run_is_given_a_minute(asked, tmp_path, number):
    requeue = listen_to_signals(asked, replace(make_plan(tmp_path), job=None))
    os.kill(os.getpid(), number)
    assert (asked, requeue.is_set()) == ([(number.name, 60.0)], False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_on_slurm_a_cancellation_leaves_20_s_and_is_not_requeued(asked, tmp_path, number):
    requeue = listen_to_signals(asked, make_plan(tmp_path, requeue=True))
    os.kill(os.getpid(), number)
    golden.check(asked)
    assert not requeue.is_set()


@pytest.mark.parametrize("planned", [True, False])
def test_the_announcement_of_the_end_requeues_only_when_planned(asked, tmp_path, planned):
    slurm = SlurmSpec(grace_seconds=120)
    requeue = listen_to_signals(asked, make_plan(tmp_path, requeue=planned, slurm=slurm))
    os.kill(os.getpid(), signal.SIGUSR2)
    golden.check(asked)
    assert requeue.is_set() is planned


def test_whom_somebody_has_stopped_before_is_not_requeued(asked, tmp_path):
    requeue = listen_to_signals(asked, make_plan(tmp_path, requeue=True))
    asked.is_first = False
    os.kill(os.getpid(), signal.SIGUSR2)
    assert len(asked) == 1
    assert not requeue.is_set()


def test_a_short_announcement_leaves_at_least_5_s(asked, tmp_path):
    listen_to_signals(asked, make_plan(tmp_path, slurm=SlurmSpec(grace_seconds=12)))
    os.kill(os.getpid(), signal.SIGUSR2)
    assert [grace_s for _, grace_s in asked] == [5.0]


@pytest.mark.parametrize(
    ("left_s", "why"),
    [(60, "Slurm (time limit)"), (180, "Slurm (time limit)"), (3600, "Slurm (preemption)")],
)
def test_the_jobs_end_time_tells_why(asked, tmp_path, monkeypatch, left_s, why):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + left_s))
    listen_to_signals(asked, make_plan(tmp_path, slurm=SlurmSpec(grace_seconds=120)))
    os.kill(os.getpid(), signal.SIGUSR2)
    assert asked == [(why, 110.0)]


# ---- requeue ---------------------------------------------------------------------------------------


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses of the module, which are noted and not made."""
    made: list[float] = []
    played = SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=made.append)
    monkeypatch.setattr(signals, "time", played)
    return made


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog, slept) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(signals, "REQUEUE_TIMEOUT_S", 60.0)
    monkeypatch.setattr(signals, "REQUEUE_ASK_S", 60.0)
    caplog.set_level(logging.INFO, logger=signals.__name__)
    return tmp_path / "bin"


def test_a_job_that_is_requeued_waits_for_slurm_to_end_it(bin_folder, caplog, slept):
    program(bin_folder, "scontrol", "true")
    requeue_job("7")
    assert slept == [signals.ENDED_IN_S]
    assert calls(bin_folder, "scontrol") == ["requeue 7"]
    assert caplog.messages == ["requeue requested job=7"]


def test_a_refused_requeue_is_told_in_the_log_and_not_waited_for(bin_folder, caplog, slept):
    program(bin_folder, "scontrol", "echo 'Requested operation is presently disabled' >&2; exit 1")
    requeue_job("7_3")
    assert slept == []
    golden.check(caplog.messages)


def test_an_scontrol_that_is_missing_is_told_in_the_log(bin_folder, caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert requeue_job("7") is False
    golden.check(caplog.messages)


# ---- a stop that somebody wanted -------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
@pytest.mark.parametrize("end_in_s", [None, 60, 3600])
def test_what_slurm_announced_is_no_cancellation(asked, tmp_path, monkeypatch, number, end_in_s):
    if end_in_s is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + end_in_s))
    listen_to_signals(asked, make_plan(tmp_path))
    os.kill(os.getpid(), number)
    ((by, _),) = asked
    assert is_cancelled(by) == (number == signal.SIGTERM)
    assert is_cancelled("anna@login1")  # realsys stop


def test_a_job_that_somebody_stopped_is_cancelled_in_slurm_too(bin_folder, caplog):
    program(bin_folder, "scancel", "true")
    cancel_job("7_3")
    assert calls(bin_folder, "scancel") == ["7_3"]
    assert caplog.messages == []
    program(bin_folder, "scancel", "echo 'slurmctld is away' >&2; exit 1")
    cancel_job("7")  # the job then counts as failed there: our own records say what was
    golden.check(caplog.messages)


@pytest.mark.parametrize(
    "away",
    [
        "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1",
        "echo 'slurm_requeue error: Socket timed out on send/recv operation' >&2; exit 1",
    ],
)
def test_a_controller_that_is_away_is_asked_again_until_it_answers(bin_folder, caplog, slept, away):
    asked = f'n=$(wc -l < "{bin_folder}/scontrol.calls")'
    program(bin_folder, "scontrol", f"{asked}; if [ $n -le 2 ]; then {away}; fi")
    assert requeue_job("7") is True
    assert calls(bin_folder, "scontrol") == ["requeue 7"] * 3
    assert slept == [signals.REQUEUE_AGAIN_S] * 2 + [signals.ENDED_IN_S]
    assert [m.split(" job=")[0] for m in caplog.messages] == [
        "requeue requested",
        *["requeue not answered, retrying"] * 2,
    ]


def test_a_controller_that_hangs_is_asked_again_until_it_answers(bin_folder, caplog, monkeypatch):
    """However slow the machine is: only those that came as far as to hang are counted."""
    monkeypatch.setattr(signals, "REQUEUE_TIMEOUT_S", 0.3)
    asked = f'n=$(wc -l < "{bin_folder}/scontrol.calls")'
    program(bin_folder, "scontrol", f"{asked}; if [ $n -le 2 ]; then exec sleep 300; fi")
    assert requeue_job("7") is True
    assert set(calls(bin_folder, "scontrol")) == {"requeue 7"}
    assert len(calls(bin_folder, "scontrol")) >= 3
    first, *others = (m.split(" job=")[0] for m in caplog.messages)
    golden.check((first, set(others)))
    assert len(others) >= 2


def test_a_controller_that_stays_away_is_not_asked_for_ever(bin_folder, caplog, monkeypatch):
    monkeypatch.setattr(signals, "REQUEUE_PATIENCE_S", 0.1)
    program(bin_folder, "scontrol", "echo 'Socket timed out' >&2; exit 1")
    assert requeue_job("7") is False
    golden.check(caplog.messages[-1])


def supervised(tmp_path, monkeypatch, end, *, accepted=True):
    """What a supervisor does after the attempt that ``end`` plays, which returns its marker's fields."""
    plan, order = make_plan(tmp_path, requeue=True), []
    files = write_plan(plan)

    def run(supervisor, attempt_files, plan, number):
        fields = end(supervisor)
        return ExitMarker(attempt=number, ended_at=time.time(), phase="main", **fields)

    monkeypatch.setattr(supervisor_main, "_run", run)
    monkeypatch.setattr(supervisor_main, "log_to", lambda path, worker: None)
    monkeypatch.setattr(
        supervisor_main, "requeue_job", lambda *job: order.append("requeue") or accepted
    )
    monkeypatch.setattr(
        supervisor_main, "leave_out", lambda *lost, **identity: order.append("leave out")
    )
    monkeypatch.setattr(supervisor_main, "_write_artifacts", lambda files: order.append("pictures"))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    before = {number: signal.getsignal(number) for number in NUMBERS}
    try:
        with pytest.raises(SystemExit):
            supervisor_main.supervise(str(files.root), plan_hash(plan_text(plan)))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return order


@pytest.mark.parametrize(("accepted", "pictures"), [(True, 0), (False, 1)])
def test_a_job_is_given_back_before_pictures_are_drawn(tmp_path, monkeypatch, accepted, pictures):
    """What Slurm leaves after the announced time is seconds; drawing may take two minutes."""

    def end(supervisor):
        os.kill(os.getpid(), signal.SIGUSR2)
        return {"result": Result.STOPPED}

    order = supervised(tmp_path, monkeypatch, end, accepted=accepted)
    assert order == ["requeue", *["pictures"] * pictures]


@pytest.mark.parametrize(
    ("why", "done"),
    [
        (LEASE_ENDED, ["leave out", "requeue"]),  # it blames n2
        ("RuntimeError: Connection reset by peer", ["requeue"]),  # nobody
    ],
)
@pytest.mark.parametrize("by", ["", "Slurm (preemption)", "anna@login1"])
def test_a_run_that_a_user_stopped_does_not_go_on_by_itself(tmp_path, monkeypatch, why, done, by):
    """Though it failed after the request, or beside it."""
    first = Failure(
        worker="m/1", host="n2", pid=1, why=why, at=1.0, secondary=why is not LEASE_ENDED
    )

    def end(supervisor):
        supervisor.stop_watch.requested_by = by
        return {"result": Result.FAILED, "step": 9, "first_failure": first}

    expected = ["pictures"] if by == "anna@login1" else done
    assert supervised(tmp_path, monkeypatch, end) == expected


# ---- an id that is another job's by now --------------------------------------------------------------

ASK_S = signals.REQUEUE_ASK_S
BEGAN = JobIdentity(job_id="7", began_at=float(SUBMITTED + 2), restarts=1)


def in_job_row(restarts: int, *, later_s: int = 0, comment: str = "(null)") -> str:
    """What squeue prints of job 7 for ownerships()."""
    return "\x1f".join(["7", "7", str(SUBMITTED + later_s), str(restarts), comment]) + "\x1e\n"


@pytest.mark.parametrize(
    ("row", "requeued", "cancelled"),
    [
        (in_job_row(1), True, True),
        (in_job_row(2, later_s=86400), True, False),  # Slurm has requeued it by itself
        (in_job_row(0, later_s=86400), False, False),  # slurmctld lost its state
        ("", False, False),
    ],
)
def test_a_supervisor_that_outlived_its_job_touches_no_other(bin_folder, row, requeued, cancelled):
    program(bin_folder, "squeue", f"printf '%s' '{row}'")
    program(bin_folder, "scontrol", "true")
    program(bin_folder, "scancel", "true")
    assert requeue_job("7", BEGAN) is requeued
    cancel_job("7", BEGAN)
    assert calls(bin_folder, "scontrol") == ["requeue 7"] * requeued
    assert calls(bin_folder, "scancel") == ["7"] * cancelled


def test_a_slurm_that_does_not_say_whose_a_job_is_cancels_nothing(bin_folder, caplog):
    program(bin_folder, "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    program(bin_folder, "scontrol", "true")
    program(bin_folder, "scancel", "true")
    assert ownerships([BEGAN], timeout_s=60.0) is None
    cancel_job("7", BEGAN)
    assert calls(bin_folder, "scancel") == []
    assert requeue_job("7", BEGAN) is True  # scontrol asks again by itself


def test_a_requeued_component_is_known_by_its_comment(bin_folder):
    comment = "realsys ppo-math/run1 attempt 1"
    row = in_job_row(3, later_s=86400, comment=comment)
    program(bin_folder, "squeue", f"printf '%s' '{row}'")
    component = JobIdentity(job_id="7", comment=comment, began_at=float(SUBMITTED))
    assert ownerships([component], timeout_s=60.0) == {"7": Ownership.OURS}
    assert ownerships([replace(component, comment="")], timeout_s=60.0) == {"7": Ownership.UNKNOWN}


def test_a_squeue_that_hangs_takes_little_of_the_time_for_the_requeue(bin_folder, monkeypatch):
    """Slurm leaves some 10 s, and squeue took up to 20 s before every scontrol."""
    asked = []
    monkeypatch.setattr(signals, "REQUEUE_ASK_S", ASK_S)
    monkeypatch.setattr(
        signals, "ownerships", lambda identities, *, timeout_s: asked.append(timeout_s)
    )
    away = "echo 'Socket timed out' >&2; exit 1"
    program(
        bin_folder,
        "scontrol",
        f'if [ $(wc -l < "{bin_folder}/scontrol.calls") -le 2 ]; then {away}; fi',
    )
    assert requeue_job("7", BEGAN) is True
    assert asked == [3.0]
    assert len(calls(bin_folder, "scontrol")) == 3


@pytest.mark.parametrize(
    ("said", "whose"),
    [
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", Ownership.GONE),
        ("echo 'slurm_load_jobs error: INVALID JOB ID specified' >&2; exit 1", Ownership.GONE),
        ("exit 1", None),
        ("echo 'squeue: error: Invalid user id: 1000' >&2; exit 1", None),
        ("echo 'squeue: fatal: Could not establish a configuration source' >&2; exit 1", None),
        ("echo 'slurm_load_jobs error: Protocol authentication error' >&2; exit 1", None),
        ("true", Ownership.GONE),
    ],
)
def test_only_slurms_own_word_makes_a_job_gone(bin_folder, said, whose):
    program(bin_folder, "squeue", said)
    found = ownerships([BEGAN], timeout_s=60.0)
    assert found == (None if whose is None else {"7": whose})


def test_a_users_settings_of_squeue_change_no_verdict(bin_folder, monkeypatch):
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    monkeypatch.setenv("SLURM_CLUSTERS", "heron,egret")
    row = in_job_row(1)
    program(
        bin_folder,
        "squeue",
        f"env | grep -q ^SQUEUE_ || printf 'CLUSTER: heron\\n\\nCLUSTER: egret\\n%s' '{row}'",
    )
    assert ownerships([BEGAN], timeout_s=60.0) == {"7": Ownership.OURS}
