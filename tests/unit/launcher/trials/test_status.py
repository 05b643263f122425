"""What a trial's records mean: the table of states is total, and every row of the view is right."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import golden
import pytest
from stand_in_slurm import make_plan, write_plan

from launcher.cli.tables import print_status
from launcher.slurm.query.job_query import JobInfo
from launcher.trials import status
from launcher.trials.explain import explain
from launcher.trials.status import StatusReader, trial_view
from launcher.trials.submission import Submission
from launcher.trials.trial_view import KnownProgress, Records, _is_requeued, view_of
from realsys.api.errors import KeyNotFound
from realsys.api.plan import LaunchPlan, plan_text
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.name_resolve.store import Entry
from realsys.trial.liveness import Liveness, Process, liveness, processes_of
from realsys.trial.machine_identity import this_machine
from realsys.trial.records import (
    AssumedEnd,
    AttemptRecord,
    ExitMarker,
    Failure,
    Progress,
    Result,
    Resumed,
    StopRequest,
    TrialFiles,
    TrialRecord,
    WorkerRecord,
    WorkerStatus,
    dumps,
    process_start,
    write_record,
)
from realsys.trial.trial_reader import Attempt
from realsys.trial.trial_state import JobState, State, TrialFacts, decide

HOST, PID = socket.gethostname(), os.getpid()
START = process_start(PID) or 0
ALIVE, DEAD, NONE, UNKNOWN = Liveness.ALIVE, Liveness.DEAD, Liveness.NONE, Liveness.UNKNOWN
YES_NO = (False, True)
ON_SLURM = Submission(
    job_id="7", scheduler="slurm", job_ids=("7",), host=HOST, after_attempt=0, at=5.0
)
ALL_FACTS = [
    TrialFacts(
        planned=planned,
        pending=pending,
        supervisor=supervisor,
        result=result,
        stop_requested=stop,
        leases=leases,
        working=working,
    )
    for planned, pending, supervisor, result, stop, leases, working in itertools.product(
        YES_NO, Liveness, Liveness, (None, *Result), YES_NO, YES_NO, YES_NO
    )
]


def expected(f: TrialFacts) -> State:
    """The table, written the other way round: which facts make each state."""
    results = {
        Result.COMPLETED: State.COMPLETED,
        Result.STOPPED: State.STOPPED,
        Result.FAILED: State.FAILED,
    }
    handed_over = f.pending is not NONE
    had_attempt = not handed_over and f.supervisor is not NONE
    open_end = had_attempt and f.result is None
    visible = f.supervisor is ALIVE or (f.supervisor is UNKNOWN and f.leases)
    rows = {
        State.STARTING: (handed_over and f.pending is ALIVE)
        or (open_end and visible and not f.stop_requested and not f.working),
        State.LOST: (handed_over and f.pending is DEAD) or (open_end and f.supervisor is DEAD),
        State.UNKNOWN: (handed_over and f.pending is UNKNOWN)
        or (open_end and f.supervisor is UNKNOWN and not f.leases)
        or (not handed_over and not had_attempt and not f.planned),
        State.PLANNED: not handed_over and not had_attempt and f.planned,
        State.RUNNING: open_end and visible and not f.stop_requested and f.working,
        State.STOPPING: open_end and visible and f.stop_requested,
        **{s: had_attempt and f.result is r for r, s in results.items()},
    }
    (state,) = [s for s, holds in rows.items() if holds]  # exactly one
    return state


def test_every_combination_of_facts_has_exactly_one_state() -> None:
    assert len(ALL_FACTS) == 2 * 4 * 4 * 4 * 2 * 2 * 2
    for facts in ALL_FACTS:
        assert decide(facts) is expected(facts), facts


def test_completed_comes_from_the_exit_marker_alone() -> None:
    assert all(f.result is Result.COMPLETED for f in ALL_FACTS if decide(f) is State.COMPLETED)


def test_every_state_is_live_final_or_neither() -> None:
    assert not State.live() & State.final()
    assert set(State) - State.live() - State.final() == {State.PLANNED, State.UNKNOWN}


# ---- views of records -----------------------------------------------------------------------


def attempt(number: int = 1, *, pid: int = PID, start: int = START) -> AttemptRecord:
    return AttemptRecord(
        number=number,
        token="t",
        host=HOST,
        supervisor_pid=pid,
        supervisor_start=start,
        started_at=time.time() - 60,
    )


def submission(after: int = 0, *, pid: int = PID, start: int = START) -> Submission:
    return Submission(job_id="1", host=HOST, pid=pid, start=start, after_attempt=after, at=1.0)


def plan_at(root: Path) -> LaunchPlan:
    from launcher.plan.resolve import resolve
    from realsys.api import registry
    from realsys.api.cluster import ClusterSpec

    return resolve(
        "ppo-math",
        registry.make_experiment("ppo-math"),
        cluster=ClusterSpec(file_root=str(root), name_resolve=f"file://{root}/name_resolve"),
        trial_name="run1",
        user="me",
    )


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> LaunchPlan:
    return plan_at(tmp_path_factory.mktemp("root"))


@pytest.fixture
def plan(request: pytest.FixtureRequest, resolved: LaunchPlan, tmp_path: Path) -> LaunchPlan:
    """Of a root of the test's own where it writes files."""
    return plan_at(tmp_path) if "files" in request.fixturenames else resolved


def records(plan: LaunchPlan, **changes: object) -> Records:
    base = Records(trial=plan.trial, folder=plan.trial_dir, now=1000.0, plan=plan)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_plan_alone_is_planned(plan: LaunchPlan) -> None:
    view = view_of(records(plan))
    assert (view.state, view.workers, view.phases) == (State.PLANNED, (), ("sft", "main"))


def test_a_resume_that_is_starting_hides_the_old_result(plan: LaunchPlan) -> None:
    marker = ExitMarker(result=Result.FAILED, attempt=1, ended_at=1.0, phase="main")
    view = view_of(
        records(
            plan,
            attempt=attempt(),
            supervisor=DEAD,
            exit=marker,
            submission=submission(after=1),
            submission_alive=ALIVE,
        )
    )
    assert view.state is State.STARTING


def test_a_lost_supervisor_says_who_and_how_to_go_on(plan: LaunchPlan) -> None:
    view = view_of(records(plan, attempt=attempt(pid=77), supervisor=DEAD))
    assert view.state is State.LOST
    assert "pid 77" in view.reason
    golden.check(view.reason)
    assert view.fix == "realsys resume ppo-math/run1"


def test_a_supervisor_that_never_took_an_attempt(plan: LaunchPlan) -> None:
    view = view_of(records(plan, submission=submission(), submission_alive=DEAD))
    assert view.state is State.LOST
    golden.check(view.reason)


def test_a_failure_names_worker_reason_and_repair(plan: LaunchPlan) -> None:
    failure = Failure(
        worker="model_worker/0",
        host="n1",
        pid=5,
        why="killed by SIGKILL",
        at=1.0,
        fix="more memory",
    )
    marker = ExitMarker(
        result=Result.FAILED, attempt=1, ended_at=1.0, phase="main", step=7, first_failure=failure
    )
    view = view_of(records(plan, attempt=attempt(), supervisor=DEAD, exit=marker))
    assert view.state is State.FAILED
    golden.check(view.reason)
    assert (view.fix, view.step) == ("more memory", 7)


def test_progress_and_stop_of_an_older_attempt_do_not_count(plan: LaunchPlan) -> None:
    old = Progress(attempt=1, phase="main", step=9, total_steps=10)
    stop = StopRequest(grace_seconds=1, by="x", at=1.0, attempt=1)
    view = view_of(records(plan, attempt=attempt(2), supervisor=ALIVE, progress=old, stop=stop))
    assert (view.state, view.step, view.progress) == (State.STARTING, 0, None)


def test_stopping_says_who_asked(plan: LaunchPlan) -> None:
    stop = StopRequest(grace_seconds=60, by="ann@n1", at=980.0, attempt=1)
    view = view_of(records(plan, attempt=attempt(), supervisor=ALIVE, stop=stop))
    assert view.state is State.STOPPING
    golden.check(view.reason)


@pytest.mark.parametrize(
    ("status", "registered", "alive", "state"),
    [
        (None, False, NONE, "not started"),
        ("starting", False, NONE, "starting"),
        ("ready", True, ALIVE, "ready"),
        ("running", True, ALIVE, "running"),
        ("running", True, UNKNOWN, "running"),
        ("running", True, DEAD, "gone"),
        ("running", False, NONE, "gone"),  # its lease ended
        ("done", False, NONE, "done"),
        ("failed", True, DEAD, "failed"),
        ("whatever", True, ALIVE, "whatever"),  # of a newer realsys
    ],
)
def test_a_worker_is_what_its_records_and_its_process_say(
    plan: LaunchPlan, status: str | None, registered: bool, alive: Liveness, state: str
) -> None:
    name = "model_worker/0"
    record = WorkerRecord(worker=name, host="n", pid=4, start=5, attempt=1, token="t")
    view = view_of(
        records(
            plan,
            attempt=attempt(),
            supervisor=ALIVE,
            workers={name: record} if registered else {},
            statuses={name: WorkerStatus(state=status, mfc="m", step=3)} if status else {},
            alive={name: alive} if registered else {},
        )
    )
    worker = next(w for w in view.workers if w.worker == name)
    assert worker.state == state
    assert worker.alive is {ALIVE: True, DEAD: False}.get(alive)
    assert [w.worker for w in view.workers] == ["model_worker/0", "master_worker/0"]


def test_a_view_has_each_record_and_what_is_absent_is_empty(plan: LaunchPlan) -> None:
    marker = ExitMarker(result=Result.COMPLETED, attempt=3, ended_at=90.0, phase="sft", step=7)
    name = "model_worker/0"
    status = WorkerStatus(
        state="done", mfc="m", step=3, since=990.0, reason="r", waits_for="w", stalled_s=2.0
    )
    full = {
        "attempt": replace(attempt(3), started_at=50.0),
        "supervisor": DEAD,
        "exit": marker,
        "record": TrialRecord(
            experiment_name="e",
            trial_name="run",
            user="me",
            cluster="local",
            plan_hash="0",
            created_at=40.0,
            launch_host="n1",
        ),
        "submission": replace(ON_SLURM, after_attempt=1),
        "statuses": {name: replace(status, stalled_where="there")},
        "heartbeats": {name: 4.0},
        "metrics": {"step": 7},
        "notes": ("a note",),
    }
    view = view_of(records(plan, **full))
    assert (view.attempt, view.host, view.supervisor_pid) == (3, HOST, PID)
    assert (view.created_at, view.started_at, view.ended_at) == (40.0, 50.0, 90.0)
    assert (view.phase, view.step, view.total_steps, view.job_ids) == ("sft", 7, 0, ("7",))
    assert (view.metrics, view.notes, view.exit, view.changes) == (
        {"step": 7},
        ("a note",),
        marker,
        (),
    )
    worker, master = view.workers
    assert (worker.mfc, worker.step, worker.seconds_in_state, worker.reason) == ("m", 3, 10.0, "r")
    assert (worker.waits_for, worker.stalled_s, worker.stalled_where) == ("w", 2.0, "there")
    assert (worker.heartbeat_age_s, worker.has_log, master.has_log) == (4.0, True, False)
    assert (worker.state, master.state) == ("done", "done")
    ended = replace(marker, result=Result.FAILED)
    assert view_of(records(plan, **{**full, "exit": ended})).workers[1].state == "ended"
    bare = view_of(records(plan))
    assert (bare.attempt, bare.host, bare.supervisor_pid, bare.step) == (0, "", None, 0)
    assert (bare.created_at, bare.started_at, bare.ended_at, bare.known_at) == (None,) * 4
    late = records(
        plan, attempt=attempt(), supervisor=ALIVE, statuses={name: replace(status, since=2e9)}
    )
    worker, master = view_of(late).workers
    assert (worker.seconds_in_state, master.seconds_in_state) == (0.0, None)
    assert (master.mfc, master.step, master.reason, master.waits_for) == ("", 0, "", "")
    assert (master.stalled_s, master.stalled_where) == (0.0, "")


@pytest.mark.parametrize(
    ("published", "progress", "known", "phase"),
    [
        ((), None, None, "sft"),
        (("sft",), None, None, "main"),
        (("sft", "main"), None, None, "sft"),
        ((), "main", None, "main"),
        ((), "gone", None, "sft"),
        ((), None, KnownProgress(has_begun=True, step=2), "main"),
        (("sft",), None, KnownProgress(has_begun=True, step=2, phase="sft"), "sft"),
        (("sft",), None, KnownProgress(has_begun=True, phase="sft"), "main"),
        ((), "main", KnownProgress(has_begun=True, step=2, phase="sft"), "main"),
    ],
)
def test_the_phase_that_a_run_is_in(plan: LaunchPlan, published, progress, known, phase) -> None:
    at = progress and Progress(attempt=1, phase=progress, step=1, total_steps=2)
    of = {"attempt": attempt(), "supervisor": ALIVE, "published": frozenset(published)}
    assert view_of(records(plan, **of, progress=at, known=known)).phase == phase


HIDDEN = {"unread": "no store", "known": KnownProgress(has_begun=False)}
FAR = replace(attempt(), host="n9")
TOLD: dict[str, dict[str, object]] = {
    "failed without a reason": {
        "attempt": FAR,
        "supervisor": DEAD,
        "exit": ExitMarker(result=Result.FAILED, attempt=1, ended_at=1.0, phase="main"),
        "plan_fix": "install it",
    },
    "completed": {
        "attempt": FAR,
        "supervisor": DEAD,
        "exit": ExitMarker(result=Result.COMPLETED, attempt=1, ended_at=1.0, phase="main"),
        "plan_fix": "install it",
    },
    "never began": {"submission": submission(), "submission_alive": DEAD, "batch_log": "/l"},
    "grace is over": {
        "attempt": FAR,
        "supervisor": ALIVE,
        "stop": StopRequest(grace_seconds=60, by="ann@n1", at=900.0, attempt=1),
    },
    "elsewhere": {"attempt": FAR, "supervisor": UNKNOWN},
    "submitted elsewhere": {
        "submission": replace(submission(), host="n8"),
        "submission_alive": UNKNOWN,
    },
    "no records": {"plan": None},
    "an attempt without a plan": {"plan": None, "attempt": FAR, "supervisor": UNKNOWN},
    "a record that can't be read": {"unread_attempt": 2},
    "hidden": {"attempt": FAR, "supervisor": ALIVE, **HIDDEN},
    "hidden elsewhere": {"attempt": FAR, "supervisor": UNKNOWN, **HIDDEN},
    "hidden, ahead of us": {
        "attempt": FAR,
        "supervisor": ALIVE,
        **HIDDEN,
        "known": KnownProgress(has_begun=True, step=3, at=1001.0, phase="sft"),
    },
    "hidden on Slurm": {
        "submission": ON_SLURM,
        "attempt": FAR,
        "supervisor": UNKNOWN,
        "job": JobInfo(job_id="7", state=JobState.GONE),
        **HIDDEN,
    },
}  # fmt: skip


@pytest.mark.parametrize("what", TOLD)
def test_what_is_told_of_a_state(plan: LaunchPlan, what: str) -> None:
    view = view_of(replace(records(plan, trial="e/run", folder="/x"), **TOLD[what]))  # type: ignore[arg-type]
    golden.check(f"{view.state.value}: {view.reason} | {view.fix}")


@pytest.mark.parametrize(
    ("job", "requeued"),
    [
        (None, False),
        ({"state": JobState.WAITING}, True),
        ({"state": JobState.HELD}, True),
        ({"state": JobState.RUNNING, "started_at": 9.0}, False),
        ({"state": JobState.RUNNING, "started_at": 10.0}, False),
        ({"state": JobState.RUNNING, "started_at": 11.0}, True),
        ({"state": JobState.RUNNING}, False),
        ({"state": JobState.FAILED, "started_at": 11.0}, False),
        ({"state": JobState.FAILED, "restarts": 3}, True),
        ({"state": JobState.FAILED, "restarts": 2}, False),
        ({"state": JobState.FAILED, "restarts": 3, "job_id": "8"}, False),
    ],
)
def test_a_job_that_runs_again_after_an_attempt(plan: LaunchPlan, job, requeued: bool) -> None:
    marker = ExitMarker(result=Result.STOPPED, attempt=1, ended_at=10.0, phase="main")
    of = replace(attempt(), job_id="7", restart_count=2)
    info = job and JobInfo(**{"job_id": "7", **job})
    assert _is_requeued(records(plan, attempt=of, exit=marker, job=info)) is requeued
    assert _is_requeued(records(plan, attempt=of, job=info)) is False


# ---- reading --------------------------------------------------------------------------------


@pytest.fixture
def files(plan: LaunchPlan) -> TrialFiles:
    found = TrialFiles(Path(plan.trial_dir))
    found.root.mkdir(parents=True)
    found.plan.write_text(plan_text(plan))
    return found


def test_reading_a_running_trial(plan: LaunchPlan, files: TrialFiles) -> None:
    write_record(files.attempt(1).record, attempt())
    store, keys = open_store(plan.name_resolve_url), TrialKeys.of(plan)
    worker = WorkerRecord(
        worker="model_worker/0", host=HOST, pid=PID, start=START, attempt=1, token="t"
    )
    store.add(keys.worker("model_worker", 0), dumps(worker))
    status = WorkerStatus(state="running", mfc="actor_gen", step=3, since=time.time() - 2)
    store.add(keys.worker_status("model_worker", 0), dumps(status))
    progress = Progress(attempt=1, phase="main", step=3, total_steps=10, headline={"reward": 0.5})
    store.add(keys.progress, dumps(progress))
    store.close()
    view = trial_view(files)
    assert (view.state, view.step, view.total_steps, view.phase) == (State.RUNNING, 3, 10, "main")
    row = view.workers[0]
    assert (row.worker, row.state, row.mfc, row.pid, row.alive) == (
        "model_worker/0",
        "running",
        "actor_gen",
        PID,
        True,
    )
    assert row.seconds_in_state is not None
    assert 2 <= row.seconds_in_state < 200


def test_reading_makes_no_store_where_nothing_has_started(
    plan: LaunchPlan, files: TrialFiles
) -> None:
    assert trial_view(files).state is State.PLANNED
    assert not (Path(plan.cluster.file_root) / "name_resolve").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', '{"version": 1}', "\0"])
def test_damaged_records_are_notes_and_never_an_exception(files: TrialFiles, text: str) -> None:
    files.plan.write_text(text)
    files.record.write_text(text)
    files.attempt(1).root.mkdir(parents=True)
    files.attempt(1).record.write_text(text)
    files.attempt(1).exit.write_text(text)
    view = trial_view(files)
    assert view.state is State.UNKNOWN
    assert view.trial == "ppo-math/run1"
    assert view.notes


def test_a_damaged_store_value_is_a_note(plan: LaunchPlan, files: TrialFiles) -> None:
    write_record(files.attempt(1).record, attempt())
    store, keys = open_store(plan.name_resolve_url), TrialKeys.of(plan)
    store.add(keys.progress, b"\xff not json")
    store.add(f"{keys.workers}/odd/0", b"[]")
    store.close()
    view = trial_view(files)
    assert view.state is State.STARTING
    assert len(view.notes) == 2


def test_a_file_where_the_store_should_be_is_a_note(plan: LaunchPlan, files: TrialFiles) -> None:
    write_record(files.attempt(1).record, attempt())
    (Path(plan.cluster.file_root) / "name_resolve").write_text("")
    view = trial_view(files)
    assert view.state is State.STARTING
    assert view.notes


def test_an_empty_folder_is_unknown_and_one_with_a_plan_has_its_name(
    files: TrialFiles, tmp_path: Path
) -> None:
    empty = TrialFiles(tmp_path / "exp" / "run9")
    view = trial_view(empty)
    assert (view.state, view.trial) == (State.UNKNOWN, "exp/run9")
    files.root.rename(empty.root.parent.parent / "run9")
    view = trial_view(TrialFiles(empty.root.parent.parent / "run9"))
    assert (view.state, view.trial) == (State.PLANNED, "ppo-math/run1")


def test_the_last_metrics_survive_a_torn_line(files: TrialFiles) -> None:
    TrialFiles.phase(files.root).metrics.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    reader = StatusReader(files)
    assert reader.view().metrics == {"step": 2}
    reader.close()


def test_a_reused_pid_is_another_process() -> None:
    assert liveness(HOST, PID, START) is ALIVE
    assert liveness(HOST, PID, START + 1) is DEAD
    assert liveness("another-host", PID, START) is UNKNOWN
    assert not Process(PID, START + 1).send(15)  # type: ignore[arg-type]


def test_our_own_process_is_never_among_those_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PID not in [p.pid for p in processes_of(Path("/no/such/trial"))]


def test_a_worker_that_was_started_again_says_how_often(
    files: TrialFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(files.attempt(1).record, attempt())
    first, second = (
        json.dumps({"worker": "model_worker/0", "number": n, "why": why})
        for n, why in ((1, "exited with code 3"), (2, "stands still"))
    )
    files.attempt(1).restarts.write_text(f"{first}\n{second}\n" + '{"worker": "mod')  # torn
    view = trial_view(files)
    row, *others = view.workers
    assert (row.worker, row.restarts, row.restart_why) == ("model_worker/0", 2, "stands still")
    assert {other.restarts for other in others} == {0}
    print_status(view)
    table = [line for line in capsys.readouterr().out.splitlines() if "model_worker/0" in line]
    assert "restarted 2 times" in table[0]
    told = [line for line in explain(view) if "restarted" in line]
    golden.check(told)
    files.attempt(1).restarts.write_text("no json\n{}\n")
    assert [note for note in trial_view(files).notes if "damaged" in note]


# ---- who lives, and which job counts ---------------------------------------------------------

HERE, THERE, REBOOTED = (
    this_machine(),
    replace(this_machine(), boot="other", machine="other"),
    replace(this_machine(), boot="other"),
)


def assumed(job_id: str = "1", at: float = 1.0) -> AssumedEnd:
    return AssumedEnd(attempt=1, job_id=job_id, by="ann", at=at)


@pytest.mark.parametrize(
    ("of", "end", "alive"),
    [
        (None, None, NONE),
        (ON_SLURM, assumed("7", 9.0), UNKNOWN),
        (submission(), None, ALIVE),
        (submission(start=START + 1), None, DEAD),
        (replace(submission(), host="elsewhere"), None, UNKNOWN),
        (replace(submission(), machine=THERE), None, UNKNOWN),
        (submission(), assumed(), DEAD),
        (submission(), assumed(at=0.9), ALIVE),  # a later process of the same id
        (submission(), assumed("2", at=9.0), ALIVE),
    ],
)
def test_whether_the_process_of_a_submission_lives(
    tmp_path: Path, of: Submission | None, end: AssumedEnd | None, alive: Liveness
) -> None:
    files = TrialFiles(tmp_path)
    for path, record in ((files.submission, of), (files.assumed_end, end)):
        path.parent.mkdir(exist_ok=True)
        if record is not None:
            write_record(path, record)
    assert StatusReader(files).records(workers=False).submission_alive is alive


@pytest.mark.parametrize(
    ("supervisor", "host", "machine", "registered", "end", "found"),
    [
        # workers hold their leases
        (DEAD, HOST, HERE, [2, 1], None, DEAD),  # under another name once, but here
        (DEAD, "old", HERE, [1], None, DEAD),
        (DEAD, "old", None, [1], None, UNKNOWN),
        (DEAD, HOST, REBOOTED, [1], None, UNKNOWN),
        (UNKNOWN, "old", THERE, [1], assumed(), UNKNOWN),
        # none does
        (DEAD, "old", None, [2], None, DEAD),
        (UNKNOWN, "old", THERE, [2], None, UNKNOWN),
        (UNKNOWN, "old", THERE, [], assumed(), DEAD),
        (UNKNOWN, "old", THERE, [], replace(assumed(), attempt=2), UNKNOWN),
        (ALIVE, HOST, HERE, [], assumed(), ALIVE),
    ],
)
def test_leases_count_more_than_a_supervisor_that_is_not_seen(
    tmp_path: Path, supervisor, host, machine, registered, end, found
) -> None:
    files = TrialFiles(tmp_path)
    if end is not None:
        write_record(files.assumed_end, end)
    workers = {
        f"m/{i}": WorkerRecord(worker=f"m/{i}", host="n", pid=4, start=5, attempt=number, token="t")
        for i, number in enumerate(registered)
    }
    of = replace(attempt(), host=host, machine=machine)
    assert StatusReader(files)._supervisor_by_leases(supervisor, of, workers) is found


@pytest.mark.parametrize(
    ("machine", "host", "alive"), [(HERE, HOST, ALIVE), (THERE, HOST, UNKNOWN), (THERE, "n", ALIVE)]
)
def test_a_worker_beside_its_supervisor_is_of_its_machine(machine, host, alive) -> None:
    record = WorkerRecord(worker="m/0", host=HOST, pid=PID, start=START, attempt=1, token="t")
    reader = StatusReader(TrialFiles(Path("/none")))
    of = replace(attempt(), host=host, machine=machine)
    assert reader._worker_liveness(record, of) is alive
    assert reader._worker_liveness(record, None) is ALIVE


def last(number: int = 1, ended_at: float | None = None, job_id: str = "7") -> Attempt:
    marker = ExitMarker(result=Result.STOPPED, attempt=1, ended_at=ended_at or 0, phase="main")
    record = replace(attempt(number), job_id=job_id, started_at=50.0)
    files = TrialFiles(Path("/x")).attempt(number)
    return Attempt(files, record, ALIVE, marker if ended_at else None)


@pytest.mark.parametrize(
    ("of", "newest", "requeue", "is_asked"),
    [
        (None, None, None, False),
        (submission(), None, None, False),
        (ON_SLURM, None, False, True),
        (ON_SLURM, last(), False, True),
        (ON_SLURM, last(ended_at=60.0), False, False),
        (ON_SLURM, last(ended_at=60.0), True, True),
        (ON_SLURM, last(ended_at=60.0), None, True),  # a plan that can't be read
        (ON_SLURM, last(ended_at=60.0, job_id="6"), False, True),  # of a resume beside it
        (replace(ON_SLURM, after_attempt=1), last(ended_at=60.0), False, True),
        (replace(ON_SLURM, after_attempt=1), last(2, ended_at=60.0), False, False),
    ],
)
def test_a_job_is_asked_for_until_nothing_of_it_can_change(
    tmp_path: Path, of, newest: Attempt | None, requeue: bool | None, is_asked: bool
) -> None:
    plan = make_plan(tmp_path)
    if requeue is not None:
        plan = replace(plan, job=replace(plan.job, requeue=requeue))
        write_plan(plan)
    reader = StatusReader(TrialFiles(Path(plan.trial_dir)))
    reader._submission = lambda: of  # type: ignore[method-assign]
    reader.last_attempt = lambda: newest  # type: ignore[method-assign]
    assert reader.unsettled_job() == (of if is_asked else None)
    unplanned = replace(plan, job=None)
    reader._plan = unplanned
    if of is ON_SLURM:
        assert reader._unsettled(of, newest) is of


class Board:
    """Knows the states of jobs, and notes what it is asked."""

    problems = ("sacct is slow",)

    def __init__(self, **states: JobState) -> None:
        self.jobs = {
            name[1:]: JobInfo(job_id=name[1:], state=state, doubt="?" if name == "j5" else "")
            for name, state in states.items()
        }
        self.asked = list[tuple[str, float, bool | None]]()
        self.expected = list[Submission]()

    def job(self, of: Submission, *, news_at: float, accounting: bool | None) -> JobInfo | None:
        self.asked.append((of.job_id, news_at, accounting))
        return self.jobs.get(of.job_id)

    def expect(self, submissions: list[Submission]) -> None:
        self.expected = submissions


RUNS, WAITS, FAILED, GONE = JobState.RUNNING, JobState.WAITING, JobState.FAILED, JobState.GONE


@pytest.mark.parametrize(
    ("newest", "states", "found", "asked"),
    [
        (None, {"j7": RUNS}, ("7", RUNS), [("7", 0.0)]),
        (None, {}, None, [("7", 0.0)]),
        (last(), {"j7": FAILED}, ("7", FAILED), [("7", 50.0)]),
        (last(ended_at=60.0), {"j7": WAITS}, ("7", WAITS), [("7", 60.0)]),
        (last(ended_at=40.0), {"j7": WAITS}, ("7", WAITS), [("7", 50.0)]),
        # Job 6 holds the attempt, 7 was handed over beside it.
        (last(job_id="6"), {"j6": RUNS, "j7": WAITS}, ("6", RUNS), [("6", 50.0)]),
        (last(job_id="6"), {"j6": FAILED, "j7": WAITS}, ("7", WAITS), [("6", 50.0), ("7", 50.0)]),
        (last(job_id="6"), {"j7": WAITS}, ("7", WAITS), [("6", 50.0), ("7", 50.0)]),
        (last(job_id="6"), {"j6": FAILED, "j7": GONE}, ("6", FAILED), [("6", 50.0), ("7", 50.0)]),
        (last(job_id="6"), {"j6": FAILED}, ("6", FAILED), [("6", 50.0), ("7", 50.0)]),
        # A user has said of both that they have ended; of 5 Slurm shows perhaps another's.
        (last(job_id="5"), {"j5": RUNS}, ("5", GONE), [("5", 50.0)]),
        (last(job_id="4"), {"j4": RUNS}, ("4", RUNS), [("4", 50.0)]),
    ],
)
def test_the_job_that_counts(files: TrialFiles, newest, states, found, asked) -> None:
    board = Board(**states)
    reader = StatusReader(files, board=board)  # type: ignore[arg-type]
    reader._plan, reader.notes = reader.summary, []
    write_record(files.assumed_end, assumed(newest.record.job_id if newest else "", at=9.0))
    job = reader._job(ON_SLURM, newest)
    assert (job and (job.job_id, job.state)) == found
    accounting = reader.summary.cluster.slurm.accounting
    assert board.asked == [(job_id, at, accounting) for job_id, at in asked]
    assert reader.notes == ["sacct is slow"]
    reader._plan = None
    reader._job(ON_SLURM, newest)
    assert board.asked[-1][2] is None
    assert reader._job(None, newest) is None


def test_many_trials_are_read_with_one_question(tmp_path, monkeypatch) -> None:
    trials, board = [TrialFiles(tmp_path / name) for name in "abc"], Board()
    submissions = (ON_SLURM, submission(), replace(ON_SLURM, job_id="8"))
    for files, record in zip(trials, submissions, strict=True):
        files.submission.parent.mkdir(parents=True)
        write_record(files.submission, record)
    monkeypatch.setattr(status, "JobBoard", lambda: board)
    assert [Path(view.folder).name for view in status.trial_views(trials)] == ["a", "b", "c"]
    assert [s.job_id for s in board.expected] == ["7", "8"]
    assert [job_id for job_id, *_ in board.asked] == ["7", "8"]


def test_what_the_folder_tells_without_a_store(files: TrialFiles, monkeypatch) -> None:
    reader, of = StatusReader(files), files.attempt(1)
    of.root.mkdir(parents=True)

    def known(phase: str = "", step: int | None = None, at: float = 0.0) -> tuple[object, ...]:
        if step is not None:
            folder = files.root / "prepare" / phase if phase else files.root
            rows = TrialFiles.phase(folder).rows_of(1).metrics
            rows.parent.mkdir(parents=True, exist_ok=True)
            rows.write_text(json.dumps({"step": step}) if step else "{}")
            os.utime(rows, (at, at))
        found = reader._last_known(of)
        return found.has_begun, found.step, found.at, found.phase

    assert known() == (False, 0, 0.0, "")
    write_record(of.resumed("sft"), Resumed(attempt=1, phase="sft", step=0))
    assert known() == (True, 0, 0.0, "")
    assert known("sft", 5, 10.0) == (True, 5, 10.0, "sft")
    assert known("", 0, 20.0) == (True, 5, 10.0, "sft")  # no step of it yet
    assert known("", 2, 20.0) == (True, 2, 20.0, "")
    assert known("", 2, 9.0) == (True, 5, 10.0, "sft")
    reader._last_progress = Progress(
        attempt=1, phase="main", step=3, total_steps=9, updated_at=15.0
    )
    assert known() == (True, 3, 15.0, "main")
    assert known("", 4, 15.5) == (True, 4, 15.5, "")
    reader._last_progress = replace(reader._last_progress, attempt=2)
    assert known("", 2, 9.0) == (True, 5, 10.0, "sft")


def test_who_watches_keeps_the_last_progress_while_the_store_is_away(files: TrialFiles) -> None:
    write_record(files.attempt(1).record, attempt())
    reader = StatusReader(files)
    progress = Progress(attempt=1, phase="main", step=3, total_steps=9, updated_at=15.0)

    def away(kind: type, name: str) -> None:
        reader.unread = "no store"

    reader._value = lambda kind, name: progress if kind is Progress else None  # type: ignore[method-assign]
    assert (reader.records().progress, reader.records().known) == (progress, None)
    reader._value = away  # type: ignore[method-assign]
    reader.plan_fix = "install it"  # of a look before, when its plan could not be read
    for _ in range(2):
        found = reader.records()
        assert found.plan_fix == ""
        assert (found.progress, found.unread) == (progress, "no store")
        assert found.known == KnownProgress(has_begun=True, step=3, at=15.0, phase="main")


# ---- how much is asked ----------------------------------------------------------------------


class Counted:
    """A store of 300 workers under leases, which counts what it is asked."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.keys, self.subtrees, self.ages = TrialKeys.of(plan), 0, 0

    def get_subtree(self, prefix: str) -> list[Entry]:
        self.subtrees += 1
        found = []
        for i in range(300):
            name = f"model_worker/{i}"
            record: object = WorkerStatus(state="running", attempt=1)
            if prefix == self.keys.workers:
                record = WorkerRecord(worker=name, host="h", pid=1, start=1, attempt=1, token="t")
            key = f"{prefix}/{name}"
            found.append(
                Entry(key=key, value=dumps(record), revision=1, version=1, lease_id=str(i))
            )
        return found

    def renewed_ago_s(self, lease_id: str) -> float:
        self.ages += 1
        return 1.0

    def get(self, key: str) -> Entry:
        raise KeyNotFound(f"no key {key}", where="store", fix="none")

    def close(self) -> None:
        pass


def test_a_look_asks_no_worker_for_its_age_and_status_of_two_hundred_at_most(
    plan: LaunchPlan, files: TrialFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With etcd each is a round trip: a watch of 10,000 workers took half a minute a look."""
    write_record(files.attempt(1).record, attempt())
    store = Counted(plan)
    monkeypatch.setattr("realsys.name_resolve.trial_store.open_trial_store", lambda *args: store)
    reader = StatusReader(files)
    assert len([w for w in reader.view().workers if w.host == "h"]) == 300
    assert (store.subtrees, store.ages) == (2, 0)
    brief = reader.brief_view()  # of those who wait for the end
    assert (brief.state, store.subtrees, store.ages) == (State.STARTING, 2, 0)
    view = trial_view(files, ages=True)
    assert (store.subtrees, store.ages) == (4, 200)
    assert len([w for w in view.workers if w.heartbeat_age_s is not None]) == 200


def test_who_waits_for_a_run_on_another_host_looks_for_its_leases(
    plan: LaunchPlan, files: TrialFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(files.attempt(1).record, replace(attempt(), host="elsewhere"))
    store = Counted(plan)
    monkeypatch.setattr("realsys.name_resolve.trial_store.open_trial_store", lambda *args: store)
    assert not StatusReader(files).brief_view().is_over
    assert store.subtrees == 2


def test_a_run_that_its_time_limit_stopped_is_told_how_it_gets_more(plan: LaunchPlan) -> None:
    marker = ExitMarker(result=Result.STOPPED, attempt=1, ended_at=1.0, phase="main")
    for by, fix in (
        ("ann@n1", f"realsys resume {plan.trial}"),
        (
            "Slurm (time limit)",
            f"realsys resume {plan.trial}; for a longer limit: realsys resume {plan.trial} --time LIMIT",
        ),
    ):
        stop = StopRequest(grace_seconds=60, by=by, at=1.0, attempt=1)
        view = view_of(
            records(plan, attempt=attempt(), supervisor=Liveness.DEAD, stop=stop, exit=marker)
        )
        assert (view.state, view.fix) == (State.STOPPED, fix)
