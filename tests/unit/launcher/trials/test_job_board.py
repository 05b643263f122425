"""Many trials cost Slurm one question, and an answer is as fresh as what it is shown beside."""

from __future__ import annotations

import time
from types import SimpleNamespace

import golden
import pytest

from launcher.slurm.query.job_query import CachedAnswer, JobInfo
from launcher.trials import job_board
from launcher.trials.job_board import NEWS_AGE_S, WATCH_AGE_S, JobBoard, _keys
from launcher.trials.status import trial_view
from launcher.trials.submission import Submission
from realsys.trial.records import AttemptRecord, ExitMarker, Result, TrialFiles, write_record
from realsys.trial.trial_state import JobState, State


class Slurm:
    """Answers about every job, and notes what was asked: (ids, accounting, max_age_s)."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.asked: list[tuple[list[str], bool | None, float]] = []
        self.knows_not: set[str] = set()
        self.accounting_off = False
        self.problems: tuple[str, ...] = ()

    def __call__(
        self, ids: list[str], *, accounting: bool | None, max_age_s: float
    ) -> CachedAnswer:
        self.asked.append((ids, accounting, max_age_s))
        jobs = {
            job_id: JobInfo(job_id=job_id, state=JobState.RUNNING)
            for job_id in ids
            if job_id not in self.knows_not
        }
        return CachedAnswer(
            jobs=jobs,
            asked_at=self.now,
            problems=self.problems,
            accounting_off=self.accounting_off,
        )


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    found = Slurm()
    monkeypatch.setattr(job_board, "time", SimpleNamespace(time=lambda: found.now))
    return found


def submission(*job_ids: str) -> Submission:
    return Submission(
        job_id=job_ids[0], scheduler="slurm", job_ids=job_ids, host="login", after_attempt=0, at=1.0
    )


def test_many_trials_are_one_question(slurm):
    board = JobBoard(query=slurm)
    trials = [submission("1"), submission("2", "3"), submission("4_0")]
    board.expect(trials)
    found = [board.job(trial) for trial in trials]
    assert [job.job_id for job in found if job] == ["1", "2", "4_0"]
    assert slurm.asked == [(["1", "2", "3", "4_0"], None, 0.0)]
    assert [job.job_id for job in board.jobs_of(trials[1])] == ["2", "3"]


def test_a_trial_that_was_not_expected_costs_a_fresh_question_about_all(slurm):
    board = JobBoard(max_age_s=WATCH_AGE_S, query=slurm)
    board.job(submission("1"))
    board.job(submission("2"))
    assert slurm.asked == [(["1"], None, 0.0), (["1", "2"], None, 0.0)]


def test_an_old_submission_without_a_list_of_jobs_has_one(slurm):
    board = JobBoard(query=slurm)
    old = Submission(job_id="9", scheduler="slurm", host="login", after_attempt=0, at=1.0)
    assert board.job(old).job_id == "9"
    assert slurm.asked == [(["9"], None, 0.0)]


def test_without_an_age_an_answer_never_gets_too_old(slurm):
    board = JobBoard(query=slurm)
    for _ in range(3):
        board.job(submission("1"))
        slurm.now += 86_400
    assert len(slurm.asked) == 1


def test_a_live_view_asks_again_when_its_answer_is_too_old(slurm):
    board = JobBoard(max_age_s=WATCH_AGE_S, query=slurm)
    for _ in range(25):  # s
        board.job(submission("1"))
        slurm.now += 1
    # The first answer is fresh; the others may be what another view got.
    assert [age for _, _, age in slurm.asked] == [0.0, WATCH_AGE_S, WATCH_AGE_S]


def test_news_of_the_trial_make_an_older_answer_stale_at_most_every_2_s(slurm):
    board = JobBoard(max_age_s=WATCH_AGE_S, query=slurm)
    board.job(submission("1"))
    news_at = slurm.now + 1
    slurm.now += NEWS_AGE_S
    board.job(submission("1"), news_at=news_at)
    assert len(slurm.asked) == 1  # 2 s old: not yet
    slurm.now += 0.5
    for _ in range(3):
        board.job(submission("1"), news_at=news_at)
    assert slurm.asked[1:] == [(["1"], None, NEWS_AGE_S)]


def test_news_older_than_the_answer_are_in_it(slurm):
    board = JobBoard(max_age_s=None, query=slurm)
    board.job(submission("1"))
    slurm.now += 5
    board.job(submission("1"), news_at=slurm.now - 6)
    assert len(slurm.asked) == 1


def test_news_count_for_a_board_that_has_no_age_too(slurm):
    board = JobBoard(query=slurm)
    board.job(submission("1"))
    slurm.now += 5
    board.job(submission("1"), news_at=slurm.now - 1)
    assert slurm.asked[1:] == [(["1"], None, NEWS_AGE_S)]


def test_a_cluster_without_accounts_is_asked_for_them_once(slurm):
    slurm.accounting_off = True
    board = JobBoard(query=slurm)
    board.job(submission("1"))
    slurm.accounting_off = False
    for job_id in ("2", "3"):
        board.job(submission(job_id))
    assert [accounting for _, accounting, _ in slurm.asked] == [None, False, False]


@pytest.mark.parametrize("accounting", [True, False])
def test_what_the_cluster_spec_says_of_accounting_is_passed_on(slurm, accounting):
    board = JobBoard(query=slurm)
    board.job(submission("1"), accounting=accounting)
    board.job(submission("2"))
    assert [told for _, told, _ in slurm.asked] == [accounting, accounting]


def test_before_a_question_there_is_nothing_to_tell(slurm):
    board = JobBoard(query=slurm)
    assert (board.problems, board.jobs_of(submission("1")), slurm.asked) == ((), [], [])


def test_a_slurm_that_does_not_answer_is_told_as_a_problem(slurm):
    slurm.knows_not, slurm.problems = {"1"}, ("slurmctld does not answer: no",)
    board = JobBoard(query=slurm)
    assert board.job(submission("1")) is None
    golden.check(board.problems)


def test_a_run_that_ends_while_slurm_is_asked_does_not_look_lost(tmp_path):
    """Its marker was not there when the records were read, and its job was over a moment later."""
    files = TrialFiles(tmp_path / "ppo-math" / "run1")
    attempt = files.attempt(1)
    start = AttemptRecord(
        number=1,
        token="t",
        host="n1",
        supervisor_pid=1,
        supervisor_start=1,
        started_at=time.time(),
        job_id="7",
    )
    write_record(attempt.record, start)
    handed_over = Submission(
        job_id="7", scheduler="slurm", job_ids=("7",), host="login", after_attempt=0, at=time.time()
    )
    write_record(files.submission, handed_over)

    def ends_meanwhile(ids, **more):
        end = ExitMarker(result=Result.COMPLETED, attempt=1, ended_at=time.time(), phase="main")
        write_record(attempt.exit, end)
        over = JobInfo(job_id="7", state=JobState.DONE, slurm_state="COMPLETED")
        return CachedAnswer(jobs={"7": over}, asked_at=time.time())

    view = trial_view(files, board=JobBoard(query=ends_meanwhile))
    assert view.state is State.COMPLETED


def test_jobs_of_a_named_cluster_are_asked_of_that_one() -> None:
    """An empty name is that of slurm.conf; None is not recorded."""
    told = {"job_id": "9", "scheduler": "slurm", "host": "login", "after_attempt": 0, "at": 1.0}
    assert _keys(Submission(**told)) == ["9"]  # type: ignore[arg-type]
    for cluster, wanted in ((None, ["9", "10"]), ("", ["9;", "10;"]), ("c", ["9;c", "10;c"])):
        asked = Submission(**told, job_ids=("9", "10"), cluster=cluster)  # type: ignore[arg-type]
        assert _keys(asked) == wanted
