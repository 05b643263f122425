"""What lies behind Slurm's one word: limits that one job exceeds alone, drained nodes, reservations.

What the programs print was recorded from 22.05.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

import golden
import pytest
from stand_in_slurm import make_plan

from launcher.slurm.plan_lines import plan_lines
from launcher.slurm.query.job_query import CachedAnswer
from launcher.slurm.query.job_rows import JobInfo
from launcher.slurm.query.reasons import is_shared_limit, reason_fix, reason_sentence
from launcher.slurm.query.waiting import exceeded, one_line, tres, unavailable_nodes, with_detail
from launcher.submit.submit import without_start_conditions
from launcher.trials.explain_job import explain_job
from launcher.trials.job_board import JobBoard
from launcher.trials.submission import Submission
from launcher.trials.trial_view import Records
from realsys.api.errors import ClusterError
from realsys.trial.trial_state import JobState, State

JOB = (
    "JobId=30236002 JobName=j0 UserId=root(0) GroupId=root(0) MCS_label=N/A Account=root QOS={qos} "
    "JobState=PENDING Reason={reason} Dependency=(null) Requeue=1 RunTime=00:00:00 "
    "TimeLimit=00:05:00 TimeMin=N/A Partition=main AllocNode:Sid=localhost:7937 ReqNodeList={nodes} "
    "ExcNodeList=(null) NodeList= NumNodes=1 NumCPUs=8 TRES={tres} Socks/Node=* "
    "Features=(null) Reservation={reservation} Power= \n"
)
PARTITION = "PartitionName=main AllowGroups=ALL QoS={qos} DefaultTime=NONE Nodes=n[1-4] State=UP\n"
MAINTENANCE = (
    "ReservationName=maint StartTime=2026-11-23T04:05:27 EndTime=2026-11-23T05:05:27 "
    "Duration=01:00:00 Nodes=n1 NodeCnt=1 CoreCnt=16 Flags=MAINT,SPEC_NODES State=INACTIVE\n"
)


class Slurm:
    """Answers as the programs do, and notes what was asked."""

    def __init__(
        self, *, qos="small", reason="x", nodes="(null)", wants="cpu=8,mem=4000M,node=1,billing=8",
        reservation="(null)", of_partition="N/A", limits="", accounts=None, sinfo="", reserved="",
    ) -> None:  # fmt: skip
        self.job = JOB.format(
            qos=qos, reason=reason, nodes=nodes, tres=wants, reservation=reservation
        )
        self.partition = PARTITION.format(qos=of_partition)
        self.limits, self.accounts = limits, accounts or {}
        self.sinfo, self.reserved = sinfo, reserved
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str]) -> str:
        said = " ".join(argv)
        self.asked.append(said)
        if argv[0] == "sinfo":
            return self.sinfo
        if argv[0] == "sacctmgr" and "qos" in argv:
            return self.limits
        if argv[0] == "sacctmgr":
            (account,) = [a.partition("=")[2] for a in argv if a.startswith("account=")]
            return self.accounts.get(account, "")
        kinds = {"job": self.job, "partition": self.partition, "reservation": self.reserved}
        return kinds[argv[2]]


def waiting(reason: str) -> JobInfo:
    return JobInfo(
        job_id="7", state=JobState.WAITING, slurm_state="PENDING", reason=reason,
        reason_words=reason_sentence(reason),
    )  # fmt: skip


# A QOS with MaxTRESPerUser=cpu=4,gres/gpu=2, and one with GrpTRES=mem=1000M,node=1; in _OF_QOS's order.
SMALL = "|||||cpu=4,gres/gpu=2|\n"
GROUP = "mem=1000M,node=1||||||\n"
MINUTES = "|cpu=10|||||\n"


@pytest.mark.parametrize(
    ("reason", "wants", "limits", "told"),
    [
        (
            "QOSMaxCpuPerUserLimit",
            "cpu=8,mem=4000M,node=1,billing=8",
            SMALL,
            "it requests 8 CPUs, all jobs of a user together may have 4 (MaxTRESPerUser of QOS small)",
        ),
        (  # Slurm names the first limit that is reached now; another one is never met
            "QOSMaxCpuPerUserLimit",
            "cpu=1,mem=500M,node=1,billing=1,gres/gpu=4",
            SMALL,
            "it requests 4 GPUs, all jobs of a user together may have 2 (MaxTRESPerUser of QOS small)",
        ),
        (
            "QOSGrpNodeLimit",
            "cpu=2,mem=1000M,node=2,billing=2",
            GROUP,
            "it requests 2 nodes, all its jobs together may have 1 (GrpTRES of QOS small)",
        ),
        (
            "QOSGrpMemLimit",
            "cpu=1,mem=2G,node=1,billing=1",
            GROUP,
            "it requests 2048 MiB of memory, all its jobs together may have 1000 (GrpTRES of QOS small)",
        ),
        (  # 8 CPUs for 5 minutes
            "QOSGrpCPUMinutesLimit",
            "cpu=8,mem=4000M,node=1,billing=8",
            MINUTES,
            "it requests 40 minutes of CPUs, all its jobs together may have 10 "
            "(GrpTRESMins of QOS small)",
        ),
    ],
)
def test_a_limit_that_the_job_exceeds_alone_is_never_met(reason, wants, limits, told):
    job = with_detail(waiting(reason), ask=Slurm(wants=wants, limits=limits))
    golden.check(job.reason_words)
    golden.check(job)


def test_a_limit_that_others_use_up_is_waited_for():
    job = waiting("QOSMaxCpuPerUserLimit")
    assert with_detail(job, ask=Slurm(wants="cpu=3,mem=1500M,node=1", limits=SMALL)) == job
    golden.check(reason_fix(job.reason))


def test_limits_of_accounts_count_up_to_the_root():
    above = "lab||root|cpu=6||||\n"  # Account|User|ParentName|limits
    mine = "team||lab|||||\nteam|somebody||cpu=1||||\n"
    slurm = Slurm(accounts={"root": mine.replace("team", "root"), "lab": above})
    job = with_detail(waiting("AssocGrpCpuLimit"), ask=slurm)
    golden.check(job.reason_words)
    assert "of account lab" in job.reason_words


def test_a_partitions_qos_counts_too():
    slurm = Slurm(qos="normal", of_partition="small", limits="")
    with_detail(waiting("QOSMaxCpuPerUserLimit"), ask=slurm)
    assert [a for a in slurm.asked if "name=small" in a]


def test_only_limits_that_several_jobs_share_cost_a_question():
    shared = ["QOSGrpNodeLimit", "QOSMaxGRESPerUser", "MaxCpuPerAccount", "AssocGrpCPUMinutesLimit"]
    assert all(is_shared_limit(reason) for reason in shared)
    own = ["QOSMaxNodePerJobLimit", "QOSMinGRES", "MaxMemPerLimit", "Priority", "", "QOSMaxFlux"]
    assert not any(is_shared_limit(reason) for reason in own)
    for reason in (*own, "Resources", "Dependency"):
        slurm = Slurm()
        with_detail(waiting(reason), ask=slurm)
        assert slurm.asked == []


def test_why_nodes_can_not_be_had():
    sinfo = "n3|drained|bad fan in rack 3|2026-11-23T03:05:20\n"
    slurm = Slurm(nodes="n3", sinfo=sinfo)
    job = with_detail(waiting("ReqNodeNotAvail, UnavailableNodes:n3"), ask=slurm)
    told = "n3 is drained since 2026-11-23 03:05:20: bad fan in rack 3"
    assert job.reason_words.endswith(told)
    assert any(asked.startswith("sinfo") and "--nodes=n3" in asked for asked in slurm.asked)


def test_states_of_nodes_that_run_no_jobs():
    lines = (
        "n1|idle|none|Unknown\nn2|mixed|none|Unknown\nn3|draining|fan|2026-01-02T03:04:05\n"
        "n4|down*|Not responding|2026-01-02T03:04:05\nn5|allocated*|none|Unknown\nn6|maint|none|x\n"
    )
    found = list(unavailable_nodes(lines))
    assert [told.partition(" ")[0] for told in found] == ["n3", "n4", "n5", "n6"]
    golden.check(found[2])


def test_when_its_reservation_begins():
    slurm = Slurm(reservation="maint", reserved=MAINTENANCE)
    job = with_detail(waiting("Reservation"), ask=slurm)
    golden.check(job.reason_words)


@pytest.mark.parametrize(("nodes", "stands_in_the_way"), [("n[1-2]", True), ("n2", False)])
def test_which_reservation_stands_in_the_way(nodes, stands_in_the_way):
    slurm = Slurm(nodes=nodes, reserved=MAINTENANCE)
    job = with_detail(waiting("ReqNodeNotAvail, May be reserved for other job"), ask=slurm)
    told = "reservation maint holds n1 from 2026-11-23 04:05:27"
    assert (told in job.reason_words) == stands_in_the_way


def test_a_question_that_fails_changes_nothing():
    def refuses(argv: Sequence[str]) -> str:
        raise ClusterError("no slurmdbd", where="sacctmgr", fix="x")

    for ask in (refuses, lambda argv: "", lambda argv: "gibberish|x\n= ="):
        for reason in ("QOSGrpNodeLimit", "AssocGrpCpuLimit", "ReqNodeNotAvail", "Reservation"):
            assert with_detail(waiting(reason), ask=ask) == waiting(reason)


def test_a_job_that_runs_costs_no_question():
    slurm = Slurm()
    job = JobInfo(job_id="7", state=JobState.RUNNING, reason="QOSGrpNodeLimit")
    assert (with_detail(job, ask=slurm), slurm.asked) == (job, [])


def test_tres_and_pairs_as_slurm_writes_them():
    assert tres("cpu=4,mem=1.5G,gres/gpu:h200=2,fs/disk=-1") == {
        "cpu": 4, "mem": 1536, "gres/gpu:h200": 2,
    }  # fmt: skip
    assert tres("") == tres("(null)") == {}
    assert one_line("A=1 B=two words C:D=x=y\nA=2\n") == {"A": "1", "B": "two words", "C:D": "x=y"}
    assert list(exceeded({"cpu": 8}, None, "GrpTRESMins", {"cpu": 1})) == []  # no time limit known


def test_a_board_asks_once_for_a_trial_and_never_for_a_list():
    def query(ids, *, accounting, max_age_s):
        jobs = {job_id: waiting("Reservation") for job_id in ids}
        return CachedAnswer(jobs=jobs, asked_at=0.0)  # too old at once

    asked: list[JobInfo] = []

    def detail(job: JobInfo) -> JobInfo:
        asked.append(job)
        return with_detail(job, ask=Slurm(reservation="maint", reserved=MAINTENANCE))

    submission = Submission(
        job_id="7", scheduler="slurm", job_ids=("7",), host="h", after_attempt=0, at=1.0
    )
    board = JobBoard(max_age_s=0.0, query=query, detail=detail)
    told = {board.job(submission).reason_words for _ in range(3)}
    assert len(asked) == 1
    assert all("maint lasts" in words for words in told)
    board = JobBoard(query=query, detail=detail)
    board.expect([submission])
    golden.check(board.job(submission).reason_words)
    assert len(asked) == 1


def test_explain_says_that_it_never_starts_and_what_to_do():
    job = with_detail(waiting("QOSMaxCpuPerUserLimit"), ask=Slurm(limits=SMALL))
    submission = Submission(
        job_id="7", scheduler="slurm", job_ids=("7",), host="h", after_attempt=0, at=1.0
    )
    records = Records(trial="t/r", folder="/x", now=2.0, submission=submission, job=job)
    why, fix = explain_job(State.QUEUED, records)
    golden.check(why)
    assert fix == job.fix


@pytest.mark.parametrize(
    ("after", "reason", "why", "what_to_do"),
    [
        (
            "ppo-math/run1:ok",
            "Dependency",
            "it waits for ppo-math/run1",
            "realsys status ppo-math/run1",
        ),
        ("sweep1", "Dependency", "it waits for sweep1", "realsys status sweep1"),
        (
            "ppo-math/run1",
            "DependencyNeverSatisfied",
            "ppo-math/run1, which it waits for, did not end as required",
            "realsys status ppo-math/run1; then cancel",
        ),
        (None, "Dependency", "it waits for another job", "realsys status of that trial"),
    ],
)
def test_the_trial_that_it_waits_for_is_named(tmp_path, after, reason, why, what_to_do):
    plan = make_plan(tmp_path)
    plan = replace(plan, job=replace(plan.job, dependency="afterok:7", after=after))
    submission = Submission(
        job_id="8", scheduler="slurm", job_ids=("8",), host="h", after_attempt=0, at=1.0
    )
    records = Records(
        trial="t/r", folder="/x", now=2.0, plan=plan, submission=submission, job=waiting(reason)
    )
    told, fix = explain_job(State.QUEUED, records)
    assert why in told
    assert fix.startswith(what_to_do)
    line = next(text for text in plan_lines(plan, "h") if "waits for" in text)
    assert line == (f"  waits for {after} (job afterok:7)" if after else "  waits for afterok:7")
    assert without_start_conditions(plan, datetime.now()).job.after is None
