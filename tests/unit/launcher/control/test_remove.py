"""`realsys rm`: which trials may go, what goes with them, and who is asked; and who may act on a folder."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import golden
import pytest

from launcher.cli.command_line import run
from launcher.cli.verbs import sweep_verbs
from launcher.control import remove
from launcher.control.remove import dependent_trials, last_activity, refusal
from launcher.control.stop import stop
from launcher.submit.planning import make_plan
from launcher.submit.submit import make_trial, record_of
from launcher.submit.submit_sweep import make_trials, plan_sweep
from launcher.trials.status import trial_view
from launcher.trials.submission import Submission
from launcher.trials.trial_view import TrialView
from realsys.api.errors import ClusterError, StoreUnavailable, TrialIsLive
from realsys.api.plan import LaunchPlan
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.trial_store import open_trial_store
from realsys.trial.folders import check_ours
from realsys.trial.records import AttemptRecord, ExitMarker, Result, TrialFiles, write_record
from realsys.trial.trial_state import State

pytestmark = pytest.mark.usefixtures("file_root")


def make(name: str) -> tuple[TrialFiles, LaunchPlan]:
    plan = make_plan("ppo-math", [], trial=name)
    return make_trial(plan, record_of(plan, ())), plan


def ended(files: TrialFiles, *, at: float = 50.0, result: Result = Result.COMPLETED) -> None:
    attempt = files.attempt(1)
    attempt.logs.mkdir(parents=True)
    record = AttemptRecord(
        number=1, token="t", host="h", supervisor_pid=1, supervisor_start=1, started_at=1.0
    )
    write_record(attempt.record, record)
    write_record(attempt.exit, ExitMarker(result=result, attempt=1, ended_at=at, phase="main"))


def keys_left(plan: LaunchPlan) -> list[str]:
    with closing(open_trial_store(plan, None)) as store:
        return store.find_subtree(TrialKeys.of(plan).root)


def add_key(plan: LaunchPlan) -> None:
    with closing(open_trial_store(plan, None)) as store:
        store.add(TrialKeys.of(plan).progress, b"x")


def test_a_trial_that_is_over_goes_with_its_keys_and_nothing_else_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (files, plan), (neighbour, other) = make("run1"), make("run10")
    for one in (files, neighbour):
        ended(one)
    for each in (plan, other):
        add_key(each)
    assert run(["rm", "ppo-math/run1", "--yes"]) == 0
    err = capsys.readouterr().err
    assert "ppo-math/run1  completed" in err
    assert re.search(r"removed ppo-math/run1: 5 files, \d+ KiB, 1 key in the store\n", err)
    assert [p.name for p in files.root.parent.iterdir()] == ["run10"]
    assert keys_left(plan) == []
    assert len(keys_left(other)) == 1
    assert run(["rm", "ppo-math/run1", "--yes"]) == 3


def test_it_asks_and_needs_a_yes_where_nobody_can_be_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, _ = make("run1")
    ended(files)
    assert run(["rm", "ppo-math/run1"]) == 2
    assert "needs confirmation" in capsys.readouterr().err
    monkeypatch.setattr(sweep_verbs, "is_confirmed", lambda doing, question: False)
    assert run(["rm", "ppo-math/run1"]) == 0
    assert files.plan.exists()
    assert run(["rm"]) == 2


def test_a_trial_of_which_a_process_is_left_stays(capsys: pytest.CaptureFixture[str]) -> None:
    files, plan = make("run1")
    add_key(plan)
    mine = AttemptRecord(
        number=1, token="t", host=os.uname().nodename, supervisor_pid=os.getpid(),
        supervisor_start=int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]),
        started_at=1.0,
    )  # fmt: skip
    write_record(files.attempt(1).record, mine)
    assert run(["rm", "ppo-math/run1", "--yes"]) == 1
    golden.check(capsys.readouterr().err)
    assert files.plan.exists()
    assert len(keys_left(plan)) == 1


@pytest.mark.parametrize("state", list(State))
def test_only_what_is_certainly_over_may_go(state: State) -> None:
    view = TrialView(trial="e/t", state=state, folder="/f")
    may = refusal(view, pids=(), users=()) is None
    assert may == (state in State.final() | {State.PLANNED})
    assert refusal(view, pids=(7,), users=()) is not None
    assert refusal(view, pids=(), users=("e/t-2",)) is not None


@pytest.mark.parametrize("is_linked", [False, True], ids=["", "root behind a link"])
def test_the_first_trial_of_a_sweep_stays_while_others_use_its_folder(
    is_linked: bool,
    file_root: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if is_linked:
        file_root.with_name("disk").mkdir()
        file_root.symlink_to("disk")
    planned = plan_sweep("ppo-math", ["seed=1,2,3"])
    first, second, third = trials = make_trials(planned, command=(), imports=())
    for files in trials:
        ended(files)
    note = Submission(job_id="9_1", host="h", after_attempt=0, at=1.0, folder=str(first.submitit))
    write_record(second.submission, note)
    third.code.symlink_to(os.path.relpath(first.code, third.root))
    assert dependent_trials(first) == ["ppo-math/sweep1-1", "ppo-math/sweep1-2"]
    assert dependent_trials(second) == dependent_trials(third) == []
    assert run(["rm", "ppo-math/sweep1-0", "--yes"]) == 1
    golden.check(capsys.readouterr().err)
    assert run(["rm", "ppo-math/sweep1", "--yes"]) == 0  # all of it: the first one goes last
    assert list(first.root.parent.iterdir()) == []


def test_a_sweep_of_which_one_trial_runs_stays_whole(capsys: pytest.CaptureFixture[str]) -> None:
    trials = make_trials(plan_sweep("ppo-math", ["seed=1,2"]), command=(), imports=())
    ended(trials[0])
    me = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    note = Submission(
        job_id="1", host=os.uname().nodename, pid=os.getpid(), start=me, after_attempt=0, at=1.0
    )
    write_record(trials[1].submission, note)
    assert run(["rm", "ppo-math/sweep1", "--yes"]) == 1
    golden.check(capsys.readouterr().err)
    assert all(files.plan.exists() for files in trials)


def test_older_than_takes_those_that_were_over_by_then(capsys: pytest.CaptureFixture[str]) -> None:
    (old, _), (new, _), (planned, _) = make("old"), make("new"), make("planned")
    ended(old, at=1e9, result=Result.STOPPED)
    ended(new, at=2e9)
    assert run(["rm", "--older-than", "2020-01-01", "--yes"]) == 0
    assert [f.plan.exists() for f in (old, new, planned)] == [False, True, True]
    assert run(["rm", "--older-than", "2020-01-01", "--yes"]) == 0
    assert "nothing was done" in capsys.readouterr().err
    assert run(["rm", "--older-than", "soon", "--yes"]) == 4
    assert "--older-than" in capsys.readouterr().err


def test_a_lost_trial_s_age_is_that_of_its_newest_log() -> None:
    files, _ = make("run1")
    log = files.attempt(1).log("model_worker/0")
    log.parent.mkdir(parents=True)
    log.touch()
    os.utime(log, (3e9, 3e9))
    view = replace(trial_view(files), started_at=1.0)
    assert last_activity(files, view) == 3e9
    assert last_activity(files, replace(view, ended_at=5.0)) == 5.0


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a folder away")
@pytest.mark.parametrize("part", ["", "attempts", "submitit"])
def test_what_another_user_wrote_is_not_acted_upon(part: str) -> None:
    files, _ = make("run1")
    ended(files)
    os.chown(files.root / part, 64002, 64002)
    with golden.raises(ClusterError):
        stop(files, grace_s=0)
    for words in (["stop"], ["rm", "--yes"], ["exec"], ["tell"], ["scale"]):
        rest = {"exec": ["model_worker/0", "true"], "tell": ["model_worker/0", "pause"]}
        assert run([*words, str(files.root), *rest.get(words[0], [])]) == 5, words
    assert files.plan.exists()


def test_what_others_can_write_is_not_acted_upon_and_ours_is() -> None:
    files, _ = make("run1")
    ended(files)
    check_ours(files)
    files.attempts.chmod(0o777)
    with golden.raises(ClusterError):
        stop(files, grace_s=0)


def test_a_command_at_the_same_time_is_one_too_many() -> None:
    from launcher.submit.submit import trial_lock

    files, _ = make("run1")
    ended(files)
    with trial_lock(files), golden.raises(TrialIsLive):
        remove.remove(files)


def test_a_copy_of_a_folder_goes_without_the_keys_of_its_original() -> None:
    files, plan = make("run1")
    ended(files)
    add_key(plan)
    copy = files.root.with_name("copy")
    shutil.copytree(files.root, copy)
    assert run(["rm", str(copy), "--yes"]) == 0
    assert not copy.exists()
    assert len(keys_left(plan)) == 1
    moved = files.root.rename(files.root.with_name("moved"))
    assert run(["rm", str(moved), "--yes"]) == 0
    assert keys_left(plan) == []


def test_a_store_that_does_not_answer_keeps_the_trial(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, _ = make("run1")
    ended(files)

    def away(*_: object) -> None:
        raise StoreUnavailable("nobody answers", where="etcd", fix="wait")

    monkeypatch.setattr(remove, "open_trial_store", away)
    assert run(["rm", "ppo-math/run1", "--yes"]) == 6
    golden.check(capsys.readouterr().err)
    assert files.plan.exists()
