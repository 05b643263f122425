"""Whose a job is that has a remembered id: nothing is believed of another's, and none is cancelled.

job_identity.jsonl is by somebody who did not know the code: what was remembered, what squeue printed, what
is right. Rows judged otherwise are in OTHERWISE, with the reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from stand_in_slurm import SUBMITTED, queue_row

from launcher.slurm import slurm_commands
from launcher.slurm.query.job_query import query_jobs
from launcher.slurm.query.job_rows import JobInfo, read_sacct
from launcher.slurm.query.own_job import own_job
from launcher.trials.job_board import JobBoard
from launcher.trials.submission import (
    ArrayRecord,
    JobMemory,
    Submission,
    array_record,
    effective_submission,
    read_submission,
)
from realsys.api.errors import ClusterError
from realsys.slurm.job_identity import (
    CLOCK_TOLERANCE_S,
    JobIdentity,
    JobTraits,
    Ownership,
    ownership,
)
from realsys.trial.records import AttemptRecord, TrialFiles, write_record
from realsys.trial.trial_state import JobState

OURS, NOT_OURS, UNKNOWN, GONE = Ownership
COMMENT = "realsys ppo-math/t2 attempt 1 3f9a"
SEEN = JobIdentity(
    job_id="7", cluster="lab", comment=COMMENT, submitted_at=float(SUBMITTED), was_seen=True
)
SENT = replace(SEEN, was_seen=False, cluster="")
OLD = replace(SENT, comment="")
FOUND = JobTraits(cluster="lab", comment=COMMENT, submitted_at=float(SUBMITTED), restarts=0)


def found(**changes: Any) -> JobTraits:
    return replace(FOUND, **changes)


DAY = 86400.0
LATER = SUBMITTED + DAY


@pytest.mark.parametrize(
    ("identity", "job", "whose"),
    [
        (SEEN, FOUND, OURS),
        (SEEN, found(comment="", submitted_at=LATER), NOT_OURS),
        (SEEN, found(comment="realsys ppo-math/t9 attempt 1 3f9a", submitted_at=LATER), NOT_OURS),
        (SEEN, found(submitted_at=LATER), NOT_OURS),  # the same name, launched anew
        (SEEN, found(submitted_at=LATER, restarts=1), OURS),  # a requeue sets it anew
        (SEEN, found(submitted_at=LATER, restarts=None), OURS),
        (SEEN, found(submitted_at=SUBMITTED - DAY, restarts=1), NOT_OURS),  # ids wrapped
        (SEEN, found(comment=f"{COMMENT}1", submitted_at=LATER, restarts=1), NOT_OURS),
        (SEEN, found(comment=f"project=a {COMMENT}; x", submitted_at=LATER, restarts=1), OURS),
        (SEEN, found(comment="ticket 4711"), OURS),  # edited: the controller's second is ours
        (SEEN, found(comment="ticket 4711", submitted_at=LATER, restarts=1), NOT_OURS),
        (SEEN, found(comment=None, submitted_at=LATER, restarts=1), UNKNOWN),  # accounting
        (SEEN, found(comment=None, submitted_at=None), UNKNOWN),
        (
            SEEN,
            found(comment="mine", submitted_at=SUBMITTED + 1.0),
            NOT_OURS,
        ),  # slurmctld -c, at once
        (SEEN, found(submitted_at=None), OURS),
        (SEEN, found(cluster="egret", comment=""), NOT_OURS),
        # Slurm could not be asked at once: the launching host's clock.
        (SENT, FOUND, OURS),
        (SENT, found(comment="ticket 4711"), UNKNOWN),  # a site may rewrite what was sent,
        (SENT, found(comment=""), UNKNOWN),  # or drop it
        (SENT, found(comment="", submitted_at=LATER), NOT_OURS),
        (SENT, found(comment="", submitted_at=None), NOT_OURS),
        (SENT, found(submitted_at=SUBMITTED + CLOCK_TOLERANCE_S), OURS),
        (SENT, found(submitted_at=SUBMITTED + CLOCK_TOLERANCE_S + 1), NOT_OURS),
        # An older revision's, whose script is gone: the time alone.
        (OLD, found(comment=""), OURS),
        (OLD, found(comment="", submitted_at=LATER), NOT_OURS),
        (OLD, found(submitted_at=LATER, restarts=2), UNKNOWN),
        # Known only by the attempt that began in it.
        (JobIdentity(job_id="7", began_at=LATER), found(comment=""), OURS),
        (JobIdentity(job_id="7", began_at=SUBMITTED - DAY), found(comment=""), NOT_OURS),
        (JobIdentity(job_id="7", began_at=SUBMITTED - DAY), found(restarts=1), UNKNOWN),
        (
            JobIdentity(job_id="7", began_at=SUBMITTED - DAY, restarts=1),
            found(restarts=1),
            NOT_OURS,
        ),
        (JobIdentity(job_id="7"), FOUND, UNKNOWN),
    ],
)
def test_comment_submit_time_and_cluster_say_whose_a_job_is(
    identity: JobIdentity, job: JobTraits, whose: Ownership
) -> None:
    assert ownership(identity, job) is whose


def test_no_row_is_gone_only_if_slurm_answered() -> None:
    assert ownership(SEEN, None) is GONE
    assert ownership(SEEN, None, answered=False) is UNKNOWN
    elsewhere = found(cluster="egret", comment="")
    assert ownership(SEEN, elsewhere, answered=False) is UNKNOWN


# ---- the table of an outsider --------------------------------------------------------------------

ROWS = [
    json.loads(line)
    for line in Path(__file__).with_name("job_identity.jsonl").read_text().splitlines()
]
# Beginning of a row's reason → (our verdict, why).
OTHERWISE = {
    "DEBATABLE: id reused by a job of equal name": (
        NOT_OURS,
        "names are not compared: squeue tells every comment, and this job has none",
    ),
    "requeued on a site without comment in squeue's row": (
        NOT_OURS,
        "the same: what squeue shows of a comment at the submission is what is remembered",
    ),
    "admin edited the comment AND the job was requeued": (NOT_OURS, "nothing says that it is ours"),
    "accounting dropped the comment, submit time an hour off": (
        NOT_OURS,
        "times are asked for as seconds since 1970, by the same controller: no zone is in them",
    ),
    "clock an hour off the other way, comment equal": (
        NOT_OURS,
        "the same; and our comment holds no token, so an earlier trial of the name has an equal one",
    ),
    "DEBATABLE: submit time one second off": (
        NOT_OURS,
        "what is remembered is the controller's own second; a slurmctld that lost its state can give "
        "the id to the next job within two (tests/slurm/test_slurm_stop.py)",
    ),
    "row's submit time is N/A, comment empty": (NOT_OURS, "squeue tells every comment"),
    "comment cut by the width, time later": (NOT_OURS, "columns are asked for without a width"),
    "DEBATABLE: old launch remembered the id only": (
        UNKNOWN,
        "users are not compared; nothing is cancelled either way",
    ),
    "row without any field but the id": (NOT_OURS, "squeue tells every comment"),
    "row with all fields null": (NOT_OURS, "squeue tells every comment"),
    "cluster not remembered, the shell asks the default cluster": (
        GONE,
        "that is an old trial on a site of one cluster, which must be resumable; leases are looked at",
    ),
    "DEBATABLE: cluster not remembered; the default cluster knows another": (NOT_OURS, "the same"),
    "comment of ours copied by another user": (
        OURS,
        "users are not compared, and the row does not say that it was not requeued; Slurm lets nobody "
        "cancel another user's job",
    ),
    "another element of the same array": (GONE, "the element asked for has no row"),
    "another element, one comment": (GONE, "the element asked for has no row"),
    "DEBATABLE: pending array told as one row": (GONE, "squeue is asked with --array"),
    "range with a limit, our index in it": (GONE, "squeue is asked with --array"),
    "pending range without our index": (GONE, "squeue is asked with --array"),
    "DEBATABLE: element printed by its raw id": (GONE, "elements are asked for by index"),
    "raw id alone": (GONE, "elements are asked for by index"),
    "array's id reused by a plain job": (GONE, "a plain job is no element: ours has no row"),
    "DEBATABLE: het job: only a component's row": (GONE, "the leader runs the batch script"),
    "het component's raw id": (GONE, "it has another id"),
    "our id is a prefix of the row's": (GONE, "it has another id"),
}


def epoch(value: object) -> str:
    """As squeue prints it with SLURM_TIME_FORMAT=%s."""
    if isinstance(value, str) and value[:1].isdigit():
        at = datetime.fromisoformat(value)
        return str(int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()))
    return str(value if value is not None else "N/A")


@dataclass
class Answers:
    """Takes the place of Slurm's programs: cluster ("" without --clusters) → (rc, stdout, stderr)."""

    of: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    asked: list[list[str]] = field(default_factory=list)

    def popen(self, argv: list[str], **options: Any) -> Any:
        self.asked.append(argv)
        named = [word.partition("=")[2] for word in argv if word.startswith("--clusters=")]
        code, out, err = self.of[named[0] if named else ""]

        class Process:
            pid, returncode, stdout, stderr = 0, code, None, None

            def communicate(self, timeout: float | None = None) -> tuple[str, str]:
                return out, err

            def poll(self) -> int:
                return code

        return Process()


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Answers:
    answers = Answers()
    monkeypatch.setattr(slurm_commands.subprocess, "Popen", answers.popen)
    monkeypatch.delenv("SLURM_CLUSTERS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return answers


def verdict(info: JobInfo) -> Ownership:
    if info.doubt:
        return NOT_OURS if info.state is JobState.GONE else UNKNOWN
    return {JobState.GONE: GONE, JobState.UNKNOWN: UNKNOWN}.get(info.state, OURS)


@pytest.mark.parametrize("row", ROWS, ids=[row["why"][:60] for row in ROWS])
def test_an_outsiders_table(slurm: Answers, row: dict[str, Any]) -> None:
    stored, seen = row["stored"], row["seen"]
    text = ""
    if seen is not None:
        whole, _, component = seen["job_id"].partition("+")
        raw_id = str(int(whole) + int(component)) if component else whole
        raw = [
            raw_id,
            "RUNNING",
            "None",
            "n1",
            "N/A",
            epoch(seen.get("submit_time")),
            "N/A",
            "1:00:00",
        ]
        # The table says nothing of requeues.
        last = ["N/A", "0:0", seen.get("cluster") or "", seen.get("comment") or "(null)"]
        text = "\x1f".join([seen["job_id"], *raw, *last]) + "\x1e\n"
    slurm.of[""] = (row["rc"], text, row["stderr"])
    identity = JobIdentity(
        job_id=stored["job_id"],
        cluster=stored["cluster"] or "",
        comment=stored["comment"] or "",
        submitted_at=float(epoch(stored["submit_time"])) if stored["submit_time"] else None,
        was_seen=bool(stored["submit_time"]),
    )
    answer = query_jobs([stored["job_id"]], accounting=False)
    own = own_job(identity, answer.jobs[stored["job_id"]], answered=answer.reached)
    expected = [mine for why, (mine, _) in OTHERWISE.items() if row["why"].startswith(why)]
    assert verdict(own) is (expected[0] if expected else Ownership(row["verdict"]))
    if not expected:
        assert (verdict(own) is OURS) is row["may_cancel"]


def test_every_row_that_is_judged_otherwise_is_in_the_table() -> None:
    reasons = [row["why"] for row in ROWS]
    assert all(any(why.startswith(one) for why in reasons) for one in OTHERWISE)
    kinder = [
        row["why"]
        for row in ROWS
        for why, (mine, _) in OTHERWISE.items()
        if row["why"].startswith(why) and mine is OURS
    ]
    assert len(kinder) == 1  # the other user's job, which Slurm itself protects


# ---- several clusters ------------------------------------------------------------------------------

NO_JOB = "slurm_load_jobs error: Invalid job id specified"
AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def row_of(cluster: str, comment: str = COMMENT, **more: Any) -> str:
    return queue_row("7", "RUNNING", cluster=cluster, comment=comment, **more)


@pytest.mark.parametrize(
    ("heron", "egret", "state"),
    [
        ((0, row_of("heron"), ""), (1, "", NO_JOB), JobState.RUNNING),  # was told as lost
        ((1, "", NO_JOB), (0, row_of("egret"), ""), JobState.RUNNING),
        ((0, row_of("heron"), ""), (1, "", AWAY), JobState.RUNNING),
        ((0, row_of("heron", "mine"), ""), (0, row_of("egret"), ""), JobState.RUNNING),
        ((0, row_of("heron"), ""), (0, row_of("egret", "mine"), ""), JobState.RUNNING),
        ((1, "", NO_JOB), (1, "", AWAY), JobState.UNKNOWN),
        ((1, "", NO_JOB), (1, "", NO_JOB), JobState.GONE),
    ],
)
def test_each_of_several_clusters_is_asked(
    slurm: Answers, monkeypatch: pytest.MonkeyPatch, heron: Any, egret: Any, state: JobState
) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "heron,egret")
    slurm.of = {"heron": heron, "egret": egret}
    submission = Submission(
        job_id="7", scheduler="slurm", host="h", after_attempt=0, at=SUBMITTED, job=MEMORY
    )
    job = JobBoard(detail=lambda job: job).job(submission, accounting=False)
    assert job is not None
    assert job.state is state
    if state is JobState.RUNNING:
        assert job.comment == COMMENT


MEMORY = JobMemory(comment=COMMENT)


def test_rows_count_beside_another_clusters_refusal(slurm: Answers) -> None:
    """With SLURM_CLUSTERS=all one program asks them all."""
    slurm.of[""] = (1, f"CLUSTER: heron\n{row_of('heron')}", NO_JOB)
    assert query_jobs(["7"], accounting=False).jobs["7"].state is JobState.RUNNING
    slurm.of[""] = (1, f"CLUSTER: heron\n{row_of('heron')}", AWAY)
    answer = query_jobs(["7", "8"], accounting=False)
    assert (answer.jobs["7"].state, answer.jobs["8"].state) == (JobState.RUNNING, JobState.UNKNOWN)
    assert not answer.reached


def test_a_job_is_asked_for_where_sbatch_said_that_it_is(
    slurm: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "heron,egret")
    slurm.of = {"": (0, row_of("heron"), ""), "egret": (0, row_of("egret", "other"), "")}
    answer = query_jobs(["7;egret", "7;"], accounting=False)
    assert (answer.jobs["7;egret"].comment, answer.jobs["7;"].comment) == ("other", COMMENT)
    assert [argv[1] for argv in slurm.asked] == ["--clusters=egret", "--jobs=7"]


# ---- accounting --------------------------------------------------------------------------------------


def account(state: str, submitted: int, comment: str = "") -> str:
    times = [str(submitted + 1), str(submitted), str(submitted + 9)]
    return "\x1f".join(["7", "7", state, "None", "n1", *times, "60", "0:0", comment]) + "\n"


@pytest.mark.parametrize(
    ("rows", "state", "restarts"),
    [
        ([("COMPLETED", 0)], JobState.DONE, 0),
        ([("COMPLETED", -900), ("TIMEOUT", 0)], JobState.FAILED, 0),  # an earlier job of the id
        ([("FAILED", 0), ("COMPLETED", 900)], JobState.FAILED, 0),  # a later one
        ([("PREEMPTED", 0), ("COMPLETED", 900)], JobState.DONE, 1),
        ([("RESIZING", 0), ("NODE_FAIL", 0), ("CANCELLED by 0", 900)], JobState.STOPPED, 1),
        ([("REQUEUED", 0)], JobState.WAITING, 1),
        ([("COMPLETED", 900)], JobState.GONE, None),
        ([("COMPLETED", -900)], JobState.GONE, None),
    ],
)
def test_of_accountings_rows_the_jobs_own_count(
    rows: list[tuple[str, int]], state: JobState, restarts: int | None
) -> None:
    text = "".join(account(slurm_state, SUBMITTED + after) for slurm_state, after in rows)
    own = own_job(SEEN, read_sacct(text).jobs["7"])
    assert (own.state, own.restarts) == (state, restarts)


def test_accounting_alone_does_not_end_a_job_while_slurmctld_is_silent() -> None:
    other = read_sacct(account("COMPLETED", SUBMITTED - 900)).jobs["7"]
    assert own_job(SEEN, other, answered=False).state is JobState.UNKNOWN


# ---- what is remembered --------------------------------------------------------------------------------


def test_an_older_revisions_comment_is_read_from_its_script(tmp_path: Path) -> None:
    files = TrialFiles(tmp_path / "run1")
    old = {"job_id": "7", "scheduler": "slurm", "job_ids": ["7"], "host": "h"}
    files.submitit.mkdir(parents=True)
    files.submission.write_text(json.dumps({**old, "after_attempt": 0, "at": float(SUBMITTED)}))
    found = read_submission(files)
    assert found is not None
    assert found.identities() == [JobIdentity(job_id="7", submitted_at=float(SUBMITTED))]
    script = f'#!/bin/bash\n#SBATCH --signal=x\n#SBATCH --comment="{COMMENT}"\n'
    (files.submitit / "7_submission.sh").write_text(script)
    found = read_submission(files)
    assert found is not None
    assert [one.comment for one in found.identities()] == [COMMENT]


def test_each_job_of_a_submission_has_its_own_time_and_an_adopted_one_only_its_attempts(
    tmp_path: Path,
) -> None:
    memory = JobMemory(comment=COMMENT, submitted={"8": 5.0, "9": 6.0}, cluster_name="lab")
    note = Submission(
        job_id="8",
        scheduler="slurm",
        job_ids=("8", "9"),
        host="h",
        after_attempt=0,
        at=4.0,
        job=memory,
    )
    times = [(one.submitted_at, one.was_seen) for one in note.identities()]
    assert times == [(5.0, True), (6.0, True)]
    attempt = AttemptRecord(
        number=1,
        token="t",
        host="n",
        supervisor_pid=1,
        supervisor_start=1,
        started_at=8.0,
        job_id="7",
    )
    first, *others = effective_submission(note, attempt).identities()
    assert first == JobIdentity(job_id="7", comment="realsys ppo-math/t2 attempt 1", began_at=8.0)
    assert others == note.identities()


def test_an_arrays_elements_have_its_submit_time(tmp_path: Path) -> None:
    files = TrialFiles(tmp_path / "s-3")
    note = Submission(job_id="", scheduler="slurm", host="h", after_attempt=0, at=4.0, index=3)
    write_record(files.submission, note)
    memory = JobMemory(comment=COMMENT, submitted={"7": 5.0})
    array = ArrayRecord(job_id="7", at=4.5, cluster="egret", job=memory)
    write_record(array_record(files.submitit), array)
    found = read_submission(files)
    assert found is not None
    assert found.cluster == "egret"
    (identity,) = found.identities()
    assert (identity.job_id, identity.submitted_at, identity.was_seen) == ("7_3", 5.0, True)


def test_a_job_that_can_t_be_told_is_never_cancelled(slurm: Answers) -> None:
    old = Submission(job_id="7", scheduler="slurm", host="h", after_attempt=0, at=SUBMITTED - DAY)
    slurm.of[""] = (0, queue_row("7", "RUNNING", restarts=1), "")
    board = JobBoard(detail=lambda job: job)
    job = board.job(old, accounting=False)
    assert job is not None
    assert job.state is JobState.UNKNOWN
    with pytest.raises(ClusterError) as caught:
        board.cancellable(old)
    assert "scancel 7" in caught.value.fix
    slurm.of[""] = (0, queue_row("7", "RUNNING"), "")
    board = JobBoard(detail=lambda job: job)
    board.job(old, accounting=False)
    assert board.cancellable(old) == []
