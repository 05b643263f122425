"""What each signal asks of an attempt, and how a job is given back to Slurm."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from stand_in_slurm import calls, make_plan, program

from realsys.api.cluster import SlurmSpec
from realsys.supervisor import signals
from realsys.supervisor.signals import listen_to_signals, requeue_job

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
    assert asked == [(f"Slurm ({number.name}: cancelled or preempted)", 20.0)]
    assert not requeue.is_set()


@pytest.mark.parametrize("planned", [True, False])
def test_the_announcement_of_the_end_requeues_only_when_planned(asked, tmp_path, planned):
    slurm = SlurmSpec(grace_seconds=120)
    requeue = listen_to_signals(asked, make_plan(tmp_path, requeue=planned, slurm=slurm))
    os.kill(os.getpid(), signal.SIGUSR2)
    assert asked == [("Slurm (SIGUSR2: time limit or preemption)", 110.0)]
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
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(signals, "REQUEUE_TIMEOUT_S", 0.3)
    caplog.set_level(logging.INFO, logger=signals.__name__)
    return tmp_path / "bin"


def test_a_job_that_is_requeued_waits_for_slurm_to_end_it(bin_folder, caplog):
    program(bin_folder, "scontrol", "true")
    began = time.monotonic()
    requeue_job("7")
    assert time.monotonic() - began >= 0.3
    assert calls(bin_folder, "scontrol") == ["requeue 7"]
    assert caplog.messages == ["requeue asked job=7"]


def test_a_refused_requeue_is_told_in_the_log_and_not_waited_for(bin_folder, caplog, monkeypatch):
    monkeypatch.setattr(signals, "REQUEUE_TIMEOUT_S", 30.0)
    program(bin_folder, "scontrol", "echo 'Requested operation is presently disabled' >&2; exit 1")
    began = time.monotonic()
    requeue_job("7_3")
    assert time.monotonic() - began < 10
    assert caplog.messages == [
        "requeue asked job=7_3",
        "requeue refused job=7_3 said=Requested operation is presently disabled",
    ]


def test_an_scontrol_that_is_missing_or_hangs_is_told_in_the_log(
    bin_folder, caplog, monkeypatch, tmp_path
):
    program(bin_folder, "scontrol", "exec sleep 30")
    requeue_job("7")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    requeue_job("7")
    assert caplog.messages == [
        "requeue asked job=7",
        "requeue failed job=7 error=Command '['scontrol', 'requeue', '7']' timed out after "
        "0.3 seconds",
        "requeue asked job=7",
        "requeue failed job=7 error=[Errno 2] No such file or directory: 'scontrol'",
    ]
