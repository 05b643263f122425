"""What jobs of one trial tell each other, and what follows: reports, presence, orders."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from realsys.supervisor.split_jobs.component_board import submitted_comment
from realsys.supervisor.split_jobs.components import (
    Action,
    ComponentRecord,
    Order,
    Presence,
    Report,
    TaskEnd,
    is_joinable,
    report_of,
)
from realsys.trial.records import AttemptRecord, TrialFiles, dumps, loads

HERE = ComponentRecord(
    index=1, agent="a1", job_id="121", host="n2", nodes="n2", attempt=3, token="t"
)
ATTEMPT = AttemptRecord(
    number=3, token="t", host="n1", supervisor_pid=1, supervisor_start=1, started_at=1.0
)


@dataclass
class Ended:
    """A task with a known end, or none."""

    worker: str
    code: int | None
    ended_at: float | None = None
    host: str = "n2"
    pid: int = 5
    hint: str = ""

    def poll(self) -> int | None:
        return self.code


def tasks_with(*codes: int | None) -> list[Ended]:
    return [Ended(f"rollout_worker/{i}", code, ended_at=10.0 - i) for i, code in enumerate(codes)]


def ends(report: Report, count: int) -> list[int | None]:
    found = [report.end_of(f"rollout_worker/{i}") for i in range(count)]
    return [end.returncode if end else None for end in found]


@pytest.mark.parametrize(
    ("codes", "most", "listed", "rest"),
    [
        ((None, 0, -9), 1000, ["2", "1"], None),
        ((0, 0, 0), 1000, ["0", "1", "2"], 0),
        ((0, None, 3), 2, ["2"], None),  # of many, those that ended well wait for the last
        ((0, 0, 3), 2, ["2"], 0),
        ((3, 4, 5), 2, ["2", "1"], 3),  # earliest first; what does not fit gives rest its code
        ((), 2, [], 0),
    ],
)
def test_a_report_names_failures_first_and_says_the_rest_in_a_number(codes, most, listed, rest):
    report = report_of(HERE, 1, tasks_with(*codes), most=most)
    assert [worker.partition("/")[2] for worker in report.ended] == listed
    assert report.rest == rest
    if rest is not None:
        assert ends(report, len(codes)) == list(codes)


def test_a_report_is_read_back_exactly():
    report = report_of(HERE, 2, tasks_with(-11, None))
    assert report.ended == {
        "rollout_worker/0": TaskEnd(returncode=-11, host="n2", pid=5, ended_at=10.0)
    }
    assert loads(Report, dumps(report), where="") == report


def test_a_report_of_ten_thousand_failures_stays_far_below_a_values_limit():
    tasks = [replace(t, hint="srun: Exited with exit code 1 on n2") for t in tasks_with(1)] * 10_000
    tasks = [replace(t, worker=f"rollout_worker/{i}") for i, t in enumerate(tasks)]
    report = report_of(HERE, 1, tasks)
    assert len(report.ended) == 1000
    assert len(dumps(report)) < 256 * 1024
    assert report.end_of("rollout_worker/9999") == TaskEnd(returncode=1)


def test_a_key_is_gone_when_answers_miss_it_for_longer_than_the_slack():
    presence = Presence(5.0)
    told = [
        presence.is_gone(there, now_s=now)
        for now, there in [(0, False), (5, False), (5.1, False), (6, True), (7, False), (12, False)]
    ]
    assert told == [False, False, True, False, False, False]


def test_no_answer_begins_the_slack_anew():
    presence = Presence(5.0)
    assert not presence.is_gone(False, now_s=0)
    assert not presence.is_gone(None, now_s=4)
    assert not presence.is_gone(False, now_s=100)
    assert presence.is_gone(False, now_s=105.5)


def test_an_order_is_for_the_agents_that_the_attempt_began_with():
    order = Order(attempt=3, token="t", sequence=1, action=Action.START, agents={"1": "a1"})
    assert order.is_for(HERE)
    assert not order.is_for(replace(HERE, agent="restarted"))
    assert not order.is_for(replace(HERE, attempt=4))
    assert not order.is_for(replace(HERE, token="older"))
    assert replace(order, agents={}).is_for(HERE)  # LEAVE before all had come


@pytest.mark.parametrize(
    ("number", "supervisor", "joinable"),
    [
        (3, replace(HERE, index=0), True),
        (2, replace(HERE, index=0), False),
        (4, replace(HERE, index=0), False),
        (3, replace(HERE, index=0, token="older"), False),
        (3, None, False),
    ],
)
def test_an_attempt_can_be_joined_once_its_own_supervisor_is_there(number, supervisor, joinable):
    assert is_joinable(ATTEMPT, supervisor, number=number) is joinable
    assert not is_joinable(None, supervisor, number=number)


@pytest.mark.parametrize(
    ("noted", "comment"),
    [
        ({"comment": "realsys a/b attempt 1", "submitted": {"121": 5.0}}, "realsys a/b attempt 1"),
        ({"comment": "realsys a/b attempt 1", "submitted": {}}, ""),  # a site may have dropped it
        ({"comment": "realsys a/b attempt 1"}, ""),
        (None, ""),
    ],
)
def test_only_a_comment_that_slurm_showed_identifies_the_other_jobs(
    tmp_path: Path, noted: dict[str, object] | None, comment: str
) -> None:
    files = TrialFiles(tmp_path)
    files.submitit.mkdir()
    files.submission.write_text(json.dumps({"job_ids": ["121"], "job": noted}))
    assert submitted_comment(files) == comment
