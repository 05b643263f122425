"""A good history passes, and each rule catches the history that breaks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from history_check import check_history, lineages, main, read_history

from realsys.observability.history import HistoryLog, Op, history_file
from realsys.trial.records import TrialFiles

MASTER, WORKER, SUPERVISOR = "master_worker/0", "model_worker/0", "supervisor"


def row(at: float, op: str, attempt: int = 1, step: int = 0, **more: Any) -> dict[str, Any]:
    speaker = SUPERVISOR if op == "took_attempt" else MASTER
    who = {"worker": speaker, "attempt": attempt, "token": f"t{attempt}", "step": step}
    return {"at": at, "op": op, **who, **more}


# Attempt 1 writes steps 1 to 4 and a checkpoint at 2. Attempt 2 goes on after 2 and finishes.
GOOD = [
    row(0, "took_attempt"),
    row(1, "resumed"),
    row(2, "step", step=1),
    row(3, "step", step=2),
    row(4, "checkpoint", step=2),
    row(5, "step", step=3),
    row(6, "step", step=4),
    row(7, "died", worker=WORKER),
    row(8, "lost", worker=WORKER),
    row(10, "took_attempt", attempt=2),
    row(11, "resumed", attempt=2, step=2, of=1),
    row(12, "step", attempt=2, step=3),
    row(13, "step", attempt=2, step=4),
    row(14, "checkpoint", attempt=2, step=4),
    row(15, "done", attempt=2, step=4),
]


def test_a_good_history_has_no_violation() -> None:
    assert check_history(GOOD, faults_known=True) == []
    assert lineages(GOOD)[""].limits == {2: None, 1: 2}


def test_rows_may_come_in_any_order() -> None:
    assert check_history(GOOD[::-1], faults_known=True) == []


def only_violation(*more: dict[str, Any], **options: Any) -> str:
    (found,) = check_history([*GOOD, *more], **options)
    return found


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (row(16, "took_attempt", attempt=1), "attempt 1 was taken again"),
        (row(16, "took_attempt", attempt=2, token="x"), "twice, by two supervisors"),
        (row(16, "step", attempt=2, step=4), "step 4 has two writers"),
        (row(12.5, "step", attempt=1, step=1), "step 1 has two writers"),
        (row(10.5, "checkpoint", step=5), "after took_attempt of attempt 2"),
        (row(10.5, "save", worker=WORKER), "after took_attempt of attempt 2"),
        (row(10.5, "done", step=4), "done 4 of master_worker/0 of attempt 1 was accepted"),
    ],
    ids=lambda case: case if isinstance(case, str) else case["op"],
)
def test_each_rule_catches_what_breaks_it(bad: dict[str, Any], said: str) -> None:
    assert any(said in found for found in check_history([*GOOD, bad]))


def test_a_metrics_row_that_counts_may_not_come_after_a_newer_attempts() -> None:
    rows = [r for r in GOOD if not (r["op"] == "step" and r["step"] == 2)]
    (found,) = check_history([*rows, row(12.5, "step", step=2)])
    assert found.startswith("step 2 of master_worker/0 of attempt 1 was accepted (at 12.500) after")


def test_a_metrics_row_of_a_dead_branch_does_no_harm() -> None:
    assert check_history([*GOOD, row(12.5, "step", step=3)]) == []


def test_without_resumed_rows_every_branch_is_alive() -> None:
    rows = [r for r in GOOD if r["op"] != "resumed"]
    assert "step 3 has two writers" in check_history(rows)[0]


def test_each_phase_counts_its_steps_anew() -> None:
    rows = [row(0, "took_attempt")]
    rows += [
        row(1 + i, op, step=i, phase="sft") for i, op in enumerate(("resumed", "step", "step"))
    ]
    rows += [
        row(5 + i, op, step=i, phase="ppo") for i, op in enumerate(("resumed", "step", "step"))
    ]
    rows += [row(9, "took_attempt", 2), row(10, "resumed", 2, step=1, of=1, phase="ppo")]
    assert check_history(rows) == []
    assert lineages(rows)["ppo"].limits == {2: None, 1: 1}
    assert lineages(rows)["sft"].limits == {1: None}
    (found,) = check_history([*rows, row(11, "step", 2, step=1, phase="ppo")])
    assert found.startswith("step 1 has two writers")


def test_a_fenced_write_counts_from_when_it_was_sent() -> None:
    # Accepted at 9.9, its process stood still before it could say so: nothing is wrong.
    assert check_history([*GOOD, row(10.5, "save", began=9.8)]) == []
    assert "after took_attempt" in only_violation(row(10.5, "save", began=10.1))
    assert check_history([*GOOD, row(10.5, "save", began=10.1)], slack_s=0.2) == []


def test_a_death_must_be_noticed_in_time() -> None:
    rows = [r for r in GOOD if float(r["at"]) <= 7]
    assert "the death of model_worker/0" in check_history(rows)[0]
    assert check_history(rows, until=20.0, detect_within_s=15.0) == []  # there was no time yet
    late = [*rows, row(30, "lost", worker=WORKER)]
    assert "noticed after 23.0 s, allowed 15 s" in check_history(late, detect_within_s=15.0)[0]


@pytest.mark.parametrize(
    "end",
    [
        row(8, "exited", worker=WORKER),
        row(8, "exited", worker=SUPERVISOR),
        row(8, "died", worker=SUPERVISOR),
        row(8, "done"),
        row(8, "took_attempt", attempt=2),
    ],
    ids=lambda end: f"{end['worker']} {end['op']}",
)
def test_a_death_is_noticed_by_more_than_one_word(end: dict[str, Any]) -> None:
    rows = [r for r in GOOD if float(r["at"]) <= 7]
    assert check_history([*rows, end], detect_within_s=15.0) == []


def test_who_was_well_may_not_be_declared_lost() -> None:
    lost = row(7.5, "lost", worker="model_worker/1")
    said = "model_worker/1 of attempt 1 was declared lost (at 7.500) and nothing was wrong"
    assert said in only_violation(lost, faults_known=True)
    assert check_history([*GOOD, lost]) == []  # production: faults are not in the history
    for fault in ("died", "cut_off", "hung"):
        known = row(7, fault, worker="model_worker/1")
        assert check_history([*GOOD, known, lost], faults_known=True) == []


def test_what_processes_note_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for number, worker, at in ((1, MASTER, 5.0), (2, WORKER, 3.0)):
        folder = TrialFiles(tmp_path).attempt(number).history
        path = history_file(folder, worker)
        log = HistoryLog(path, worker=worker, attempt=number, token="t", clock=lambda at=at: at)
        log.note(Op.STEP, step=number, began=at - 0.5)
        log.close()
    first = {
        "at": 3.0,
        "op": "step",
        "worker": WORKER,
        "attempt": 2,
        "token": "t",
        "step": 2,
        "phase": "",
    }
    rows = read_history(tmp_path)
    assert rows[0] == {**first, "began": 2.5}
    assert [r["at"] for r in rows] == [3.0, 5.0]
    assert main([str(tmp_path)]) == 1  # the older attempt's row is the later one
    assert "violation: step 1 of master_worker/0 of attempt 1" in capsys.readouterr().out


def test_the_verdict_on_no_history_is_not_good(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == "0 rows, 0 attempts, 0 violations\n"
    assert main([]) == 2


def test_a_row_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    folder = TrialFiles(tmp_path).attempt(1).history
    folder.mkdir(parents=True)
    path = history_file(folder, MASTER)
    path.write_text(json.dumps(row(1, "step", step=1)) + '\n{"at": 2, "op"')
    assert [r["step"] for r in read_history(tmp_path)] == [1]


def test_an_attempt_that_woke_up_and_that_nobody_built_on_does_no_harm() -> None:
    """Attempt 2 stood still before it said from where it goes on; 3 took over from 1's last one."""
    rows = [
        row(0, "took_attempt"),
        row(1, "resumed"),
        *(row(1 + step, "step", step=step) for step in range(1, 10)),
        row(20, "took_attempt", 2),
        row(30, "took_attempt", 3),
        row(31, "resumed", 3, step=9, of=1),
        row(32, "step", 3, step=10),
        row(33, "resumed", 2, step=6, of=1),
        row(34, "step", 2, step=7),
        row(35, "step", 3, step=11),
    ]
    assert check_history(rows) == []
