"""What srun says of failed tasks, as recorded from Slurm 22.05, read as return codes."""

from __future__ import annotations

import pytest

from realsys.supervisor.srun_messages import failed_tasks, last_trouble, return_code

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
