"""What srun says of failed tasks, as recorded from Slurm 22.05, read as return codes."""

from __future__ import annotations

import golden
import pytest

from realsys.slurm.srun_messages import (
    BUSY_S,
    LONGEST_S,
    failed_tasks,
    last_trouble,
    patience_s,
    return_code,
    step_wait,
    what_to_do,
)

RECORDED = """\
srun: Job 892000 step creation temporarily disabled, retrying (Requested nodes are busy)
srun: Step created for job 892000
srun: error: n2: task 2: Exited with exit code 8
slurmstepd-n1: error: execve(): /tmp/show.sh: Exec format error
srun: error: n1: tasks 0-1,5: Exited with exit code 137
srun: launch/slurm: _step_signal: Terminating StepId=892002.0
srun: error: n4: task 7: Killed
srun: error: n4: task 7: Exited with exit code 1
"""


def test_each_task_has_its_host_and_return_code_and_the_first_word_counts():
    assert failed_tasks(RECORDED) == {
        2: ("n2", 8, "Exited with exit code 8"),
        0: ("n1", -9, "Exited with exit code 137"),  # the task wrapper's 128 + SIGKILL
        1: ("n1", -9, "Exited with exit code 137"),
        5: ("n1", -9, "Exited with exit code 137"),
        7: ("n4", -9, "Killed"),
    }


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("Exited with exit code 1", 1),
        ("Exited with exit code 75", 75),
        ("Segmentation fault (core dumped)", -11),
        ("Terminated", -15),
        ("Out Of Memory", -9),
        ("Exited with exit code 255", 255),
        *(
            (f"Exited with exit code {c}", code)
            for c, code in ((128, 128), (129, -1), (159, -31), (160, 160))
        ),
        ("Hangup", -1),
        ("something new", 1),
    ],
)
def test_words_become_return_codes(how, code):
    assert return_code(how) == code


def test_the_last_complaint_about_no_single_task_is_the_trouble():
    text = RECORDED + "srun: error: Unable to create step for job 7: Invalid Trackable RESource\n"
    assert last_trouble(text) == "Unable to create step for job 7: Invalid Trackable RESource"
    assert last_trouble(RECORDED) == "execve(): /tmp/show.sh: Exec format error"
    assert last_trouble("") == ""


def test_garbage_is_no_task():
    assert failed_tasks("srun: error: n1: task : Killed\nsrun: error: tasks 1-: x\n\0\xff") == {}


WAIT = "Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"
STILL = "Job 7 step creation still disabled, retrying (Requested nodes are busy)"


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        (
            "srun: unrecognized option '--no-container-remap-root'\n"
            'Try "srun --help" for more information\n',
            "unrecognized option '--no-container-remap-root'",
        ),
        (
            "srun: error: fetch_config: DNS SRV lookup failed\n"
            "srun: fatal: Could not establish a configuration source\n",
            "Could not establish a configuration source",
        ),
        ("/opt/site/bin/srun: line 3: module: command not found\n",) * 2,
        (f"srun: {WAIT}\nsrun: Step created for StepId=7.1\n", ""),
        ("srun: error: n2: task 2: Exited with exit code 8\n", ""),
        ("srun: cluster configuration lacks support for cpu binding\n", ""),
        ("srun: launch/slurm: _step_signal: Terminating StepId=892002.0\n", ""),
    ],
)
def test_words_that_are_not_marked_as_an_error_are_told_as_well(text, trouble):
    assert last_trouble(text) == trouble.removesuffix("\n")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", ""),
        (f"srun: {WAIT}\n", WAIT),
        (f"srun: {WAIT}\nsrun: {STILL}\n", STILL),
        (f"srun: {WAIT}\nsrun: Step created for job 7\n", ""),
        (
            f"srun: {WAIT}\nsrun: Step created for StepId=7.1\nsrun: {WAIT}\n",
            WAIT,
        ),  # a later phase's
        (RECORDED, ""),
    ],
)
def test_a_step_waits_until_srun_says_that_it_is_created(text, sentence):
    assert step_wait(text) == sentence


def test_a_prolog_that_still_runs_is_given_more_time_than_nodes_that_stay_busy():
    assert patience_s(WAIT) == patience_s(STILL) == BUSY_S
    assert (
        patience_s("Job 7 step creation temporarily disabled, retrying (Prolog running)")
        == LONGEST_S
    )
    assert BUSY_S < LONGEST_S


def test_what_can_be_done_is_told_where_it_is_known():
    golden.check(what_to_do(f"srun could not start it for 180 s: {WAIT}"))
    golden.check(what_to_do("srun ended with 255: unrecognized option '--x'"))
    assert what_to_do("srun: Killed on n2") == ""
