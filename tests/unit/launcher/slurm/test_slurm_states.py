"""Slurm's states and reasons become our words, all of them, and nothing is ever an exception."""

from __future__ import annotations

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.slurm.query.reasons import REASONS, is_hold, reason_fix, reason_sentence
from launcher.slurm.query.states import STATE_TABLE, job_state
from realsys.trial.trial_state import JobState

BASE = """PENDING RUNNING SUSPENDED COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL PREEMPTED BOOT_FAIL
DEADLINE OUT_OF_MEMORY""".split()
FLAGS = """COMPLETING CONFIGURING STAGE_OUT RESIZING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT REVOKED
SIGNALING STOPPED RESV_DEL_HOLD LAUNCH_FAILED POWER_UP_NODE RECONFIG_FAIL UPDATE_DB EXPEDITING""".split()
COMPACT = "PD R S CD CA F TO NF PR BF DL OOM CG CF SO RS RQ RH RF SE RV SI ST RD".split()


def test_the_table_has_every_state_and_flag_of_slurm_and_no_other():
    assert sorted(STATE_TABLE) == sorted(BASE + FLAGS)
    assert sorted(row.compact for row in STATE_TABLE.values() if row.compact) == sorted(COMPACT)
    assert all(row.meaning for row in STATE_TABLE.values())


@pytest.mark.parametrize("word", [word for word in BASE + FLAGS if word != "UPDATE_DB"])
def test_a_word_means_the_same_in_every_form_it_is_printed_in(word):
    row = STATE_TABLE[word]
    forms = [word, word.lower(), f" {word}\n", f"{word}*", f"{word}+", f'["{word}"]', f"['{word}']"]
    assert {job_state(form) for form in [*forms, row.compact or word]} == {row.state}
    assert row.state not in (JobState.UNKNOWN, JobState.GONE)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 0", JobState.STOPPED),
        ("CANCELLED by 1000", JobState.STOPPED),
        ("CANCELLED+", JobState.STOPPED),
        ("OUT_OF_ME+", JobState.FAILED),
        ("COMPLETI+", JobState.FINISHING),
        ("RE+", JobState.UNKNOWN),  # of seven words
        ("+", JobState.UNKNOWN),
        ('["RUNNING","COMPLETING"]', JobState.FINISHING),
        ('["RUNNING", "CONFIGURING"]', JobState.WAITING),
        ('["RUNNING", "STOPPED"]', JobState.PAUSED),
        ('["PENDING", "REQUEUE_HOLD"]', JobState.HELD),
        ('["RUNNING", "UPDATE_DB"]', JobState.RUNNING),
        ('["PENDING", "NEW_IN_2030"]', JobState.WAITING),
        ('["NEW_IN_2030"]', JobState.UNKNOWN),
        ("[]", JobState.UNKNOWN),
        ("UPDATE_DB", JobState.UNKNOWN),
        ("NEW_IN_2030", JobState.UNKNOWN),
        ("COMPLETININVALID", JobState.UNKNOWN),
        ("RUNNING AWAY", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_a_cut_word_a_list_and_an_unknown_word_are_not_guessed_at(text, state):
    assert job_state(text) is state


@given(st.text())
def test_any_text_has_a_state(text):
    assert isinstance(job_state(text), JobState)


def test_a_job_has_ended_only_when_it_will_not_start_again_by_itself():
    ended = {state for state in JobState if state.has_ended}
    assert ended == {
        JobState.INFRA_FAILURE,
        JobState.FAILED,
        JobState.STOPPED,
        JobState.DONE,
        JobState.GONE,
    }


# Names from src/common/job_state_reason.c, 22.05 to 26.11.
LIMITS = """AssocGrpBB AssocGrpBBMinutes AssocGrpBillingRunMinutes AssocGrpCPUMinutesLimit
AssocGrpCPURunMinutesLimit AssocGrpCpuLimit AssocGrpEnergy AssocGrpGRES AssocGrpGRESMinutes
AssocGrpJobsLimit AssocGrpLicense AssocGrpMemLimit AssocGrpMemRunMinutes AssocGrpNodeLimit
AssocGrpSubmitJobsLimit AssocGrpUnknown AssocGrpWallLimit AssocMaxBBMinutesPerJob
AssocMaxCpuMinutesPerJobLimit AssocMaxCpuPerJobLimit AssocMaxCpuPerNode AssocMaxGRESPerJob
AssocMaxGRESPerNode AssocMaxJobsLimit AssocMaxNodePerJobLimit AssocMaxSubmitJobLimit
AssocMaxWallDurationPerJobLimit MaxBBPerAccount MaxCpuPerAccount MaxCpuRunMinsPerUser
MaxGRESPerAccount MaxGRESRunMinsPerAccount MaxJobsPerAccount MaxMemoryPerAccount
MaxSubmitJobsPerAccount QOSGrpCPUMinutesLimit QOSGrpCPURunMinutesLimit QOSGrpGRES
QOSGrpJobsLimit QOSGrpMemLimit QOSGrpMemoryMinutes QOSGrpNodeLimit QOSGrpSubmitJobsLimit
QOSGrpWallLimit QOSMaxBillingPerUser QOSMaxCpuMinutesPerJobLimit QOSMaxCpuPerJobLimit
QOSMaxCpuPerNode QOSMaxCpuPerUserLimit QOSMaxGRESMinutesPerJob QOSMaxGRESPerJob
QOSMaxGRESPerNode QOSMaxGRESPerUser QOSMaxJobsPerUserLimit QOSMaxMemoryPerUser
QOSMaxNodePerJobLimit QOSMaxNodePerUserLimit QOSMaxSubmitJobPerUserLimit
QOSMaxWallDurationPerJobLimit QOSMinBB QOSMinCpuNotSatisfied QOSMinGRES QOSMinMemory QOSMinNode""".split()


@pytest.mark.parametrize("reason", [*LIMITS, *REASONS])
def test_every_reason_of_slurm_is_a_sentence_with_something_to_do(reason):
    assert reason_sentence(reason) != reason
    assert reason_fix(reason)
    if reason in LIMITS:
        assert reason in reason_sentence(reason)  # administrators need Slurm's own word


@pytest.mark.parametrize(
    ("reason", "sentence", "what_to_do"),
    [
        ("Priority", "jobs of higher priority are ahead of it", "wait"),
        (
            "(Resources)",
            "the nodes it needs are busy",
            "wait, or request fewer resources or less time",
        ),
        (
            "QOSMaxGRESPerUser",
            "your jobs together are at the limit on GPUs (QOSMaxGRESPerUser)",
            "wait until some of them end",
        ),
        (
            "AssocGrpGRES",
            "all jobs of your account together are at the limit on GPUs (AssocGrpGRES)",
            "wait until some of them end",
        ),
        (
            "AssocGrpCPUMinutesLimit",
            "all jobs of your account have used up their minutes of CPUs (AssocGrpCPUMinutesLimit)",
            "ask the administrator, or use another account or qos",
        ),
        (
            "QOSMaxNodePerJobLimit",
            "it exceeds the limit of its QOS on nodes of one job (QOSMaxNodePerJobLimit)",
            "it does not start as it is: cancel it and launch again with less, or use another qos",
        ),
        (
            "ReqNodeNotAvail, UnavailableNodes:n3",
            "nodes that it needs are down, drained or reserved (UnavailableNodes:n3)",
            "wait, or launch without nodelist",
        ),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "nodes that it needs are down, drained or reserved",
            "wait, or launch without nodelist",
        ),
        (
            "launch failed requeued held",
            "it could not be started and is held",
            "ask the administrator; then scontrol release the job",
        ),
        ("Reason of 2030", "Reason of 2030", ""),
        ("QOSMaxFlux", "QOSMaxFlux", ""),
        ("None", "", ""),
        ("(null)", "", ""),
        ("", "", ""),
    ],
)
def test_a_reason_says_what_and_what_to_do_and_an_unknown_one_is_slurms_own_word(
    reason, sentence, what_to_do
):
    assert (reason_sentence(reason), reason_fix(reason)) == (sentence, what_to_do)


def test_a_requeued_job_is_not_said_to_wait_for_a_begin_time_that_nobody_gave():
    golden.check(reason_sentence("BeginTime"))
    golden.check(reason_sentence("BeginTime", restarts=1))


def test_a_held_job_is_told_from_one_that_will_start_by_itself():
    held = ["JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "(JobHeldUser)"]
    held += ["job requeued in held state", "launch failed requeued held", "ReservationDeleted"]
    assert all(is_hold(reason) for reason in held)
    assert not any(
        is_hold(reason) for reason in ["Priority", "BeginTime", "Dependency", "", "held"]
    )


@given(st.text())
def test_any_text_is_a_reason(text):
    assert isinstance(reason_sentence(text), str)
    assert isinstance(reason_fix(text), str)
    assert isinstance(is_hold(text), bool)
