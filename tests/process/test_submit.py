"""Plan → trial folder → a process of its own session; and the way back: stop, resume, refusals.

A stand-in for the supervisor is submitted through the real submitit: it writes the records that a
supervisor writes, and waits for a stop request or a signal.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import golden
import pytest

from launcher.control.stop import stop
from launcher.plan.resolve import resolve
from launcher.sites.places import user_name
from launcher.submit import dispatch_job
from launcher.submit import submit as submit_module
from launcher.submit.executors.local_executor import TIMEOUT_MIN, check_folder
from launcher.submit.submit import check_attempt_is_ours, resubmit, submit, translate_os_errors
from launcher.trials.status import trial_view
from launcher.trials.submission import Submission, read_submission
from launcher.trials.trial_view import TrialView
from realsys.api import registry
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ClusterError, TrialError, TrialIsLive
from realsys.api.plan import LaunchPlan, read_plan
from realsys.trial.liveness import processes_of
from realsys.trial.records import AttemptRecord, TrialFiles, TrialRecord, read_record, write_record
from realsys.trial.trial_state import State

SUPERVISOR = """
import os, signal, socket, subprocess, sys, time
from pathlib import Path
from realsys.api.errors import KeyNotFound
from realsys.api.plan import read_plan
from realsys.trial.records import *
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store

def supervise(trial_dir, plan_hash):
    files = TrialFiles(Path(trial_dir))
    plan = read_plan(files.plan, expected_hash=plan_hash)
    mode = os.environ["STAND_IN"]
    if mode == "dies at once":
        raise RuntimeError("no luck today")
    number = len(files.all_attempts()) + 1
    me = files.attempt(number)
    write_record(me.record, AttemptRecord(number=number, token="t", host=socket.gethostname(),
        supervisor_pid=os.getpid(), supervisor_start=process_start(os.getpid()),
        started_at=time.time()))
    print("session", os.getsid(0), "cuda", os.environ.get("CUDA_VISIBLE_DEVICES", "not set"), flush=True)
    def end(result):
        write_record(me.exit, ExitMarker(result=result, attempt=number, ended_at=time.time(),
            phase="main", resume="" if result == "completed" else f"realsys resume {plan.trial}"))
    if mode == "completes":
        return end(Result.COMPLETED)
    if mode == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c",
            "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(300)"])
    store = open_store(plan.name_resolve_url)
    while mode == "hangs" or not _asked(store, plan):
        time.sleep(0.05)
    end(Result.STOPPED)

def _asked(store, plan):
    try:
        return bool(store.get(TrialKeys.of(plan).stop))
    except KeyNotFound:
        return False
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes submit use the stand-in, in the given mode."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "stand_in_supervisor.py").write_text(SUPERVISOR)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setattr(dispatch_job, "SUPERVISOR", "stand_in_supervisor:supervise")
    monkeypatch.delitem(sys.modules, "stand_in_supervisor", raising=False)

    def mode(name: str) -> None:
        monkeypatch.setenv("STAND_IN", name)

    return mode


@pytest.fixture
def make_plan(tmp_path: Path) -> Iterator[Callable[..., LaunchPlan]]:
    """Plans under tmp_path. Whatever is left of their trials afterwards is killed."""
    made: list[LaunchPlan] = []

    def make(root: str = "root", trial: str = "run1") -> LaunchPlan:
        from launcher.sites.clusters import absolute_root, quote

        folder = absolute_root(str(tmp_path / root))
        cluster = ClusterSpec(file_root=folder, name_resolve=f"file://{quote(folder)}/name_resolve")
        plan = resolve(
            "ppo-math",
            registry.make_experiment("ppo-math"),
            cluster=cluster,
            trial_name=trial,
            user=user_name(),
        )
        made.append(plan)
        return plan

    yield make
    for plan in made:
        for process in processes_of(Path(plan.trial_dir)):
            process.send(signal.SIGKILL)


def wait_for(files: TrialFiles, *states: State, attempt: int = 1) -> TrialView:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        view = trial_view(files)
        if view.state in states and (view.attempt >= attempt or view.state is State.LOST):
            return view
        time.sleep(0.05)
    raise AssertionError(f"{view.state} after 30 s, waited for {states}: {view}")


def wait_until_started(files: TrialFiles, attempt: int = 1) -> TrialView:
    deadline = time.monotonic() + 90
    while (view := trial_view(files)).attempt < attempt:
        assert time.monotonic() < deadline, view
        time.sleep(0.05)
    return view


def wait_for_processes(files: TrialFiles) -> None:
    """Until a supervisor that hangs has its child: then it does not hear SIGTERM either."""
    deadline = time.monotonic() + 240
    while len(processes_of(files.root)) < 3:  # controller, supervisor, child
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_submitted_trial_has_its_records(
    make_plan: Callable[..., LaunchPlan], stand_in: Callable[[str], None]
) -> None:
    stand_in("completes")
    plan = make_plan()
    files = submit(plan, command=("realsys", "launch", "ppo-math"))
    record = read_record(TrialRecord, files.record)
    assert record is not None
    assert record.command == ("realsys", "launch", "ppo-math")
    assert read_plan(files.plan, expected_hash=record.plan_hash) == plan
    assert files.secrets.stat().st_mode & 0o777 == 0o700
    assert wait_for(files, State.COMPLETED).state is State.COMPLETED


@pytest.mark.parametrize(
    "root", ["a b", "quo'te\"s", "ünï ☂", "line\nbreak", "$HOME;echo `x` *", "50% #1?", "-rf"]
)
def test_weird_file_roots(
    make_plan: Callable[..., LaunchPlan], stand_in: Callable[[str], None], root: str
) -> None:
    stand_in("stops when asked")
    files = submit(make_plan(root))
    assert wait_until_started(files).state is State.STARTING
    report = stop(files, grace_s=60)
    assert report.view.state is State.STOPPED
    assert processes_of(files.root) == []


def test_the_job_has_its_own_session_and_the_callers_devices(
    make_plan: Callable[..., LaunchPlan],
    stand_in: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stand_in("completes")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    files = submit(make_plan())
    wait_for(files, State.COMPLETED)
    (out,) = files.submitit.glob("*_log.out")
    line = next(x for x in out.read_text().splitlines() if x.startswith("session"))
    _, session, _, cuda = line.split()
    submission = read_submission(files)
    assert submission is not None
    assert int(session) == submission.pid != os.getsid(0)
    assert cuda == "3,5"
    assert capfd.readouterr() == ("", "")  # nothing on the terminal


def test_the_executors_clock_is_far_away() -> None:
    assert TIMEOUT_MIN > 9 * 365 * 24 * 60
    assert len(range(24 * 60 * TIMEOUT_MIN)) > 0  # submitit counts so many steps


@pytest.mark.parametrize("tag", ["%j", "%t", "%a", "%A"])
def test_a_folder_that_submitit_would_rewrite_is_refused(tag: str) -> None:
    with golden.raises(ClusterError):
        check_folder(Path(f"/data/x{tag}y"))
    check_folder(Path("/data/50%"))


def test_a_second_launch_of_a_live_trial_is_refused(
    make_plan: Callable[..., LaunchPlan], stand_in: Callable[[str], None]
) -> None:
    stand_in("stops when asked")
    plan = make_plan()
    files = submit(plan)
    with pytest.raises(TrialIsLive) as caught:
        submit(plan)
    assert "realsys watch ppo-math/run1" in caught.value.fix
    assert "realsys stop ppo-math/run1" in caught.value.fix
    wait_until_started(files)
    with pytest.raises(TrialIsLive):
        resubmit(files)
    stop(files, grace_s=60)
    with pytest.raises(TrialError) as ended:
        submit(plan)
    assert not isinstance(ended.value, TrialIsLive)
    assert "realsys resume ppo-math/run1" in ended.value.fix
    assert trial_view(files).state is State.STOPPED  # and nothing was touched


def test_resume_takes_the_next_attempt(
    make_plan: Callable[..., LaunchPlan], stand_in: Callable[[str], None]
) -> None:
    stand_in("stops when asked")
    files = submit(make_plan())
    wait_until_started(files)
    stop(files, grace_s=60)
    stand_in("completes")
    resubmit(files)
    assert wait_for(files, State.COMPLETED, attempt=2).attempt == 2
    with golden.raises(TrialError):
        resubmit(files)


def test_a_supervisor_that_dies_at_once_is_lost_and_says_why(
    make_plan: Callable[..., LaunchPlan], stand_in: Callable[[str], None]
) -> None:
    from launcher.trials.render import summary

    stand_in("dies at once")
    files = submit(make_plan())
    view = wait_for(files, State.LOST)
    assert "before its attempt" in view.reason
    assert any("no luck today" in line for line in summary(view, files))


def test_stop_kills_what_does_not_listen_and_leaves_nothing(
    make_plan: Callable[..., LaunchPlan], stand_in: Callable[[str], None]
) -> None:
    stand_in("hangs")
    files = submit(make_plan())
    wait_until_started(files)
    wait_for_processes(files)
    told: list[str] = []
    report = stop(files, grace_s=0.2, extra_s=0.2, term_s=0.5, on_action=told.append)
    assert processes_of(files.root) == []
    assert report.view.state is State.LOST  # it could not write an exit marker
    assert [text.split()[0] for text in told] == ["requested", "sent", "sent", "no"]
    assert "SIGKILL" in told[2]


def test_stop_after_the_supervisor_was_killed_ends_its_children(
    make_plan: Callable[..., LaunchPlan], stand_in: Callable[[str], None]
) -> None:
    stand_in("hangs")
    files = submit(make_plan())
    view = wait_until_started(files)
    wait_for_processes(files)
    os.kill(view.supervisor_pid or 0, signal.SIGKILL)
    assert wait_for(files, State.LOST).fix == "realsys resume ppo-math/run1"
    report = stop(files, grace_s=1)
    assert not report.was_over
    assert processes_of(files.root) == []


def test_stop_of_a_finished_trial_does_nothing(
    make_plan: Callable[..., LaunchPlan], stand_in: Callable[[str], None]
) -> None:
    stand_in("completes")
    files = submit(make_plan())
    wait_for(files, State.COMPLETED)
    while processes_of(files.root):
        time.sleep(0.05)
    report = stop(files, grace_s=60)
    assert (report.was_over, report.actions, report.view.state) == (True, [], State.COMPLETED)


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "REALSYS_FILE_ROOT"),
        (errno.EROFS, "REALSYS_FILE_ROOT"),
        (errno.ENAMETOOLONG, "shorter"),
        (errno.EIO, "check the folder"),
    ],
)
def test_what_the_file_system_refuses_is_a_cluster_error(number: int, fix: str) -> None:
    with pytest.raises(ClusterError) as caught, translate_os_errors(Path("/trial")):
        raise OSError(number, os.strerror(number), "/trial/plan.json")
    assert os.strerror(number) in caught.value.what
    assert caught.value.where == "/trial/plan.json"
    assert fix in caught.value.fix


def test_a_launch_that_fails_halfway_leaves_no_folder(
    make_plan: Callable[..., LaunchPlan],
    stand_in: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    plan = make_plan()
    monkeypatch.setattr(submit_module, "write_text", full)
    with golden.raises(ClusterError):
        submit(plan)
    assert not Path(plan.trial_dir).exists()
    monkeypatch.undo()


def test_a_name_that_is_too_long_for_the_file_system(make_plan: Callable[..., LaunchPlan]) -> None:
    with golden.raises(ClusterError):
        submit(make_plan("x" * 300))


def test_of_several_resumes_at_once_one_goes_on_and_the_others_say_so(
    make_plan: Callable[..., LaunchPlan], stand_in: Callable[[str], None]
) -> None:
    """As threads: each opens the lock file anew, as processes do."""
    stand_in("stops when asked")
    files = submit(make_plan())
    wait_until_started(files)
    stop(files, grace_s=60)
    gate, won, lost = threading.Barrier(4), [], []

    def go_on() -> None:
        gate.wait(60)
        try:
            won.append(resubmit(files))
        except TrialIsLive as error:
            lost.append(error)

    threads = [threading.Thread(target=go_on) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(won), len(lost)) == (1, 3)
    assert {error.exit_code for error in lost} == {1}
    assert all("ppo-math/run1" in error.what for error in lost)
    assert wait_until_started(files, attempt=2).attempt == 2
    stop(files, grace_s=60)
    assert read_submission(files) == won[0]


def test_a_resume_whose_attempt_somebody_elses_job_took_says_so(tmp_path: Path) -> None:
    """On a file system without locks, or from two hosts that do not see each other's."""
    files = TrialFiles(tmp_path / "ppo-math" / "run1")
    me = Submission(job_id="9", scheduler="slurm", host="login", after_attempt=1, at=1.0)
    record = AttemptRecord(
        number=2,
        token="t",
        host="n1",
        supervisor_pid=1,
        supervisor_start=1,
        started_at=1.0,
        job_id="8",
    )
    check_attempt_is_ours(files, 1, me)  # the attempt before: nobody has begun yet
    write_record(files.attempt(2).record, record)
    with golden.raises(TrialIsLive):
        check_attempt_is_ours(files, 2, me)
    write_record(files.attempt(2).record, replace(record, job_id="9"))
    check_attempt_is_ours(files, 2, me)
