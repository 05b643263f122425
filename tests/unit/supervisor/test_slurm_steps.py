"""How the supervisor learns that a Slurm task ended, and how it starts and ends steps.

srun is a script on PATH that says and does what the test wants.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import golden
import pytest
from stand_in_slurm import make_plan, program, wait_until, write_plan

from realsys.api.errors import ClusterError
from realsys.api.plan import JobLayout
from realsys.name_resolve.file.folder_changes import FileWrites
from realsys.runtime import worker_exit_codes
from realsys.slurm import srun_messages
from realsys.supervisor.steps import slurm_step, slurm_steps
from realsys.supervisor.steps.slurm_steps import SlurmSteps, component_nodes
from realsys.trial.records import AttemptFiles, WorkerExit, process_start, read_record, write_record
from realsys.worker.task_place import TaskPlace

WHEN_TOLD = 'while [ ! -e "$SLURM_HOSTFILE.go" ]; do sleep 0.01; done'
LATER = "exec sleep 300"
FAILED = "srun: error: n2: task 1: Exited with exit code 3"


class Started:
    """One attempt's steps, with the model workers' only unless told otherwise."""

    def __init__(self, root: Path, **plan: object) -> None:
        self.bin = root / "bin"
        self.plan = make_plan(root, **plan)  # type: ignore[arg-type]
        self.files = write_plan(self.plan).attempt(1)
        self.steps = SlurmSteps(self.plan, "hash", self.files, {0: ["n1", "n2"], 1: ["n3"]})
        (self.phase,) = self.plan.phases
        self.model_only = replace(self.phase, steps=self.phase.steps[1:])
        self.tasks: list = []

    def srun(self, shell: str) -> Started:
        """What srun does from now on."""
        program(self.bin, "srun", shell)
        return self

    def start(self) -> list:
        self.tasks = self.steps.start(self.model_only)
        return self.tasks

    def told(self, index: int, returncode: int) -> WorkerExit:
        """What the task's own parent writes down."""
        record = WorkerExit(
            worker=f"model_worker/{index}", host="n9", pid=77, returncode=returncode, at=5.0
        )
        write_record(self.files.exit_of(record.worker), record)
        return record

    def go(self) -> None:
        """Lets an srun go on that waits WHEN_TOLD."""
        (self.files.hosts / "main-model_worker.go").touch()

    def ends(self) -> list[tuple[int | None, str]]:
        """(return code, hint) of each task, once srun itself has ended."""
        process = self.tasks[0].step.process
        process.wait(60)
        wait_until(lambda: all(task.poll() is not None for task in self.tasks))
        return [(task.returncode, task.hint) for task in self.tasks]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[Started] = []
    sruns: list[subprocess.Popen[bytes]] = []
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    class Noted(subprocess.Popen):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[call-overload]
            sruns.append(self)

    monkeypatch.setattr(slurm_steps.subprocess, "Popen", Noted)

    def start(**plan: object) -> Started:
        made.append(Started(tmp_path, **plan))
        return made[-1]

    yield start
    for one in made:
        one.steps.end(one.tasks, grace_s=0.0)
    for srun in sruns:  # of tasks that were started again, too
        srun.kill()
        srun.wait()


# ---- ends ------------------------------------------------------------------------------------------


def test_a_task_that_srun_names_has_ended_while_the_others_run(make):
    trial = make().srun(f"echo '{FAILED}'; {LATER}")
    first, second = trial.start()
    wait_until(lambda: second.poll() is not None)
    golden.check((second.returncode, second.host, second.hint))
    assert (first.worker, first.poll(), first.host, first.ended_at) == (
        "model_worker/0",
        None,
        "n1",
        None,
    )


def test_the_tasks_own_record_counts_more_than_sruns_words(make):
    trial = make().srun(f"{WHEN_TOLD}; echo '{FAILED}'; {LATER}")
    _, second = trial.start()
    trial.told(1, -int(signal.SIGSEGV))
    trial.go()
    wait_until(lambda: second.poll() is not None)
    assert (second.returncode, second.host, second.pid, second.ended_at, second.hint) == (
        -11,
        "n9",
        77,
        5.0,
        "",
    )


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("Exited with exit code 137", -9),  # the task's parent passes a signal on as shells do
        ("Segmentation fault (core dumped)", -11),
        ("Terminated", -15),
        ("Out Of Memory", -9),
    ],
)
def test_a_signal_is_a_negative_code(make, how, code):
    trial = make().srun(f"echo 'srun: error: n1: task 0: {how}'; {LATER}")
    first, _ = trial.start()
    wait_until(lambda: first.poll() is not None)
    assert (first.returncode, first.hint) == (code, f"srun: {how} on n1")


def test_tasks_that_ended_well_say_so_themselves(make):
    trial = make().srun(WHEN_TOLD)
    trial.start()
    for index in range(2):
        trial.told(index, 0)
    trial.go()
    assert trial.ends() == [(0, ""), (0, "")]
    assert [task.pid for task in trial.tasks] == [77, 77]


def test_an_srun_that_ends_with_0_and_no_records_has_run_nothing(make):
    trial = make().srun("true")
    trial.start()
    why = "no exit record and srun ended with 0: no task ran, or Slurm ended it"
    assert trial.ends() == [(1, why), (1, why)]


def test_what_a_node_complained_of_is_told_with_it(make):
    trial = make().srun("echo 'slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED ***' >&2")
    trial.start()
    why = (
        "no exit record and srun ended with 0: no task ran, or Slurm ended it "
        "(*** STEP 7.0 ON n1 CANCELLED ***)"
    )
    assert trial.ends() == [(1, why), (1, why)]


def test_an_srun_that_fails_before_a_task_has_a_log_has_started_none(make):
    trial = make().srun("echo 'srun: error: Unable to create step for job 7: no'; exit 4")
    trial.start()
    why = "srun ended with 4: Unable to create step for job 7: no"
    assert trial.ends() == [(worker_exit_codes.NOT_STARTED, why)] * 2


def test_an_srun_that_fails_later_ends_all_tasks_with_its_code_and_its_words(make):
    trial = make().srun(f"{WHEN_TOLD}; echo 'slurmstepd: error: lost'; exit 4")
    trial.start()
    for index in range(2):
        trial.files.log(f"model_worker/{index}").touch()
    trial.go()
    golden.check(trial.ends())


def test_of_thousands_of_tasks_that_ended_well_one_record_is_looked_at(make, monkeypatch):
    monkeypatch.setattr(slurm_step, "STRICT_TASKS", 1)
    trial = make().srun(WHEN_TOLD)
    trial.start()
    trial.told(0, 0)
    trial.go()
    assert trial.ends() == [(0, ""), (0, "")]


def test_words_and_records_of_an_earlier_phase_are_no_news(make):
    trial = make().srun("exit 0")
    trial.files.logs.mkdir(parents=True)
    (trial.files.logs / "srun-model_worker.log").write_text(FAILED + "\n")
    trial.told(0, 0)
    trial.start()
    assert [code for code, _ in trial.ends()] == [1, 1]
    assert trial.tasks[1].hint.startswith("no exit record")


def test_an_srun_that_complains_at_once_is_heard(make, monkeypatch):
    trial = make().srun(f"echo '{FAILED}'; exit 3")
    real = subprocess.Popen

    def slow(*args, **options):
        process = real(*args, **options)
        process.wait(60)  # srun is faster than we are
        return process

    monkeypatch.setattr(slurm_steps.subprocess, "Popen", slow)
    trial.start()
    monkeypatch.undo()
    golden.check(trial.ends())


# ---- starting --------------------------------------------------------------------------------------


def test_an_srun_that_is_not_there_is_a_cluster_error_with_a_fix(make, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with golden.raises(ClusterError) as caught:
        make().start()
    assert caught.value.where == "step model_worker"


def test_a_start_that_fails_midway_ends_what_it_has_started(make):
    trial = make(layout=JobLayout.HET)  # the second component has one node, and needs two
    trial.srun(f'echo $$ > "{trial.bin}/pid"; {LATER}')
    real, started = trial.steps._start, []

    def start_one(phase, step):
        started.append(step.worker_type.value)
        found = real(phase, step)
        wait_until(lambda: (trial.bin / "pid").exists() and (trial.bin / "pid").read_text())
        return found

    trial.steps._start = start_one
    with golden.raises(ClusterError):
        trial.steps.start(trial.phase)
    assert started == ["master_worker", "model_worker"]
    assert process_start(int((trial.bin / "pid").read_text())) is None


def test_a_step_is_told_its_hosts_and_its_command_is_written_down(make):
    trial = make().srun("true")
    trial.start()
    assert (trial.files.hosts / "main-model_worker").read_text() == "n1\nn2\n"
    (line,) = trial.files.steps.read_text().splitlines()
    told = json.loads(line)
    assert (told["phase"], told["step"], told["argv"][0]) == ("main", "model_worker", "srun")
    assert "--ntasks=2" in told["argv"]
    assert [(task.worker, task.host) for task in trial.tasks] == [
        ("model_worker/0", "n1"),
        ("model_worker/1", "n2"),
    ]


def test_steps_of_other_components_are_not_ours(make):
    trial = make(layout=JobLayout.SPLIT).srun("true")
    trial.steps.components = {0: ["n1"]}
    trial.tasks = trial.steps.start(trial.phase)
    assert [task.worker for task in trial.tasks] == ["master_worker/0"]


def test_secrets_and_the_batch_steps_options_do_not_reach_srun(make, monkeypatch):
    trial = make(secrets=("API_KEY",), env_vars={"SITE": "1"})
    trial.srun(f'env > "{trial.bin}/env"')
    for name, value in {"API_KEY": "s3cret", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    trial.start()
    trial.ends()
    seen = dict(line.split("=", 1) for line in (trial.bin / "env").read_text().splitlines())
    names = {"API_KEY", "SITE", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_HOSTFILE"}
    assert {name: seen[name] for name in sorted(names & seen.keys())} == {
        "SITE": "1",
        "SLURM_HOSTFILE": str(trial.files.hosts / "main-model_worker"),
        "SLURM_JOB_ID": "7",
    }
    assert "s3cret" not in (trial.bin / "env").read_text()


# ---- ending ----------------------------------------------------------------------------------------


def test_ending_terminates_srun_once_for_all_its_tasks(make):
    trial = make()
    tasks = trial.srun(f'touch "{trial.bin}/up"; {LATER}').start()
    wait_until((trial.bin / "up").exists)
    trial.steps.end(tasks, grace_s=0.0)
    assert [task.returncode for task in tasks] == [-15, -15]
    assert [task.hint for task in tasks] == ["srun ended with -15"] * 2
    trial.steps.end(tasks, grace_s=0.0)  # and again: nothing is left to do


def test_an_srun_that_does_not_listen_is_killed(make, monkeypatch, caplog):
    monkeypatch.setattr(slurm_steps, "END_S", 0.2)
    trial = make()
    tasks = trial.srun(f"trap '' TERM; touch '{trial.bin}/up'; exec sleep 300").start()
    wait_until((trial.bin / "up").exists)
    trial.steps.end(tasks, grace_s=0.0)
    assert [task.returncode for task in tasks] == [-9, -9]
    golden.check(caplog.messages)


# ---- one task alone --------------------------------------------------------------------------------


def killed(trial: Started, index: int) -> None:
    """The task's wrapper does as it was asked."""
    end = trial.files.end_of(f"model_worker/{index}", "main", 0)
    wait_until(end.exists)
    trial.told(index, -9)


def test_one_task_is_killed_by_its_wrapper_and_srun_need_not_know(make):
    trial = make().srun(LATER)
    first, second = trial.start()
    trial.steps.kill(second)
    assert second.poll() is None
    killed(trial, 1)
    wait_until(lambda: second.poll() is not None)
    assert (second.returncode, first.poll()) == (-9, None)


def test_a_task_is_started_again_in_a_step_of_its_own_beside_the_others(make):
    trial = make(step=GPUS).srun(LATER)
    first, second = trial.start()
    trial.steps.kill(second)
    killed(trial, 1)
    wait_until(lambda: second.poll() is not None)
    again = trial.steps.restart(second)
    trial.tasks.append(again)
    assert (again.worker, again.host, again.poll(), first.poll()) == (
        "model_worker/1",
        "n2",  # Slurm's name of the node, not the worker's own of its host
        None,
        None,
    )
    assert not trial.files.exit_of("model_worker/1").exists(), "that was the former one's end"
    assert (trial.files.hosts / "main-model_worker-1").read_text() == "n2\n"
    old, new = [json.loads(line)["argv"] for line in trial.files.steps.read_text().splitlines()]
    removed, added = [w for w in old if w not in new], [w for w in new if w not in old]
    logs = trial.files.logs
    assert removed == [
        "--nodes=2",
        "--ntasks=2",
        "--exact",
        "--cpus-per-task=1",
        "--gres=gpu:1",
        f"--output={logs}/model_worker-%t.log",
    ]
    assert added == [
        "--nodes=1",
        "--ntasks=1",
        "--overlap",  # without --gres it sees all GPUs that the job has there
        f"--output={logs}/model_worker-1.log",
        "--first-index=1",
        "--restart=1",
    ]


GPUS = {"gpus_per_task": 1.0, "gpus_per_node": 1, "gpu_binding": "visible"}


def test_a_worker_without_gpus_takes_none_when_it_is_started_again(make):
    trial = make().srun("true")
    first, _ = trial.start()
    trial.ends()
    trial.tasks.append(trial.steps.restart(first))
    old, new = [json.loads(line)["argv"] for line in trial.files.steps.read_text().splitlines()]
    assert "--gres=none" in old
    assert "--gres=none" in new


def test_a_worker_is_added_on_the_node_with_the_fewest_of_its_kind(make):
    trial = make().srun(LATER)
    first, second = trial.start()
    added = trial.steps.add("model_worker/2", like=second, running=[first], left=[])
    trial.tasks.append(added)
    assert (added.worker, added.host, added.poll()) == ("model_worker/2", "n2", None)
    argv = json.loads(trial.files.steps.read_text().splitlines()[-1])["argv"]
    assert argv[-3:] == ["--first-index=2", "--restart=0", "--like=1"]
    assert {"--ntasks=1", "--overlap", "--gres=none"} <= set(argv)
    trial.tasks.append(trial.steps.restart(added))
    argv = json.loads(trial.files.steps.read_text().splitlines()[-1])["argv"]
    assert argv[-3:] == ["--first-index=2", "--restart=1", "--like=1"]
    assert trial.tasks[-1].host == "n2"


def test_a_worker_with_gpus_is_added_in_the_place_of_one_that_left(make):
    trial = make(step=GPUS).srun(LATER)
    first, second = trial.start()
    with golden.raises(ClusterError):
        trial.steps.add("model_worker/2", like=first, running=[first, second], left=[])
    place = TaskPlace(cpus=(1,), gpu_ids=("3",), devices="0")
    write_record(trial.files.place_of("model_worker/1"), place)
    added = trial.steps.add("model_worker/2", like=first, running=[first], left=[second])
    trial.tasks.append(added)
    assert added.host == "n2"
    assert read_record(TaskPlace, trial.files.place_of("model_worker/2")) == place
    argv = json.loads(trial.files.steps.read_text().splitlines()[-1])["argv"]
    assert argv[-3:] == ["--first-index=2", "--restart=1", "--like=0"]  # it keeps to that place
    with golden.raises(ClusterError):
        trial.steps.add("model_worker/3", like=first, running=[first, added], left=[second])


def test_the_second_restart_is_told_apart_and_srun_has_a_log_of_its_own(make):
    trial = make().srun(f"echo '{FAILED}'; exit 3")
    trial.start()
    trial.ends()
    trial.srun("echo 'srun: error: n2: task 0: Exited with exit code 5'; exit 5")
    again = trial.steps.restart(trial.tasks[1])
    wait_until(lambda: again.poll() is not None)
    golden.check((again.returncode, again.hint))
    third = trial.steps.restart(again)
    wait_until(lambda: third.poll() is not None)
    argv = json.loads(trial.files.steps.read_text().splitlines()[-1])["argv"]
    assert argv[-2:] == ["--first-index=1", "--restart=2"]
    assert "task 0" not in (trial.files.logs / "srun-model_worker.log").read_text()
    trial.steps.kill(third)
    assert trial.files.end_of("model_worker/1", "main", 2).exists()


def test_a_step_of_which_all_tasks_were_started_again_is_ended_as_well(make):
    trial = make().srun(LATER)
    trial.start()
    old = list(trial.tasks)
    for index, task in enumerate(old):
        trial.steps.kill(task)
        killed(trial, index)
        wait_until(lambda task=task: task.poll() is not None)
        trial.tasks[index] = trial.steps.restart(task)
    assert old[0].step.process.poll() is None, "srun waits for its step"
    trial.steps.end(trial.tasks, grace_s=0.0)
    processes = {t.step.process for t in (*old, *trial.tasks)}
    assert [p.poll() is None for p in processes] == [False] * 3


def test_a_late_word_of_the_srun_before_is_not_about_the_new_task(make):
    late = 'while [ ! -e "$SLURM_HOSTFILE.go" ]; do sleep 0.01; done'
    trial = make().srun(LATER)
    first, _ = trial.start()
    trial.told(0, -9)
    trial.steps.kill(first)
    wait_until(lambda: first.poll() is not None)
    trial.srun(f"{late}; echo 'srun: error: n1: task 0: Exited with exit code 137'; exit 137")
    second = trial.steps.restart(first)
    trial.told(0, -9)
    trial.steps.kill(second)
    wait_until(lambda: second.poll() is not None)
    trial.srun(LATER)
    third = trial.steps.restart(second)
    trial.tasks.append(third)
    (trial.files.hosts / "main-model_worker-0.go").touch()
    second.step.process.wait(60)
    third.step._next_refresh = 0.0
    assert third.poll() is None


# ---- where we are ----------------------------------------------------------------------------------


def test_the_nodes_of_one_job_are_in_slurms_order(tmp_path):
    job = make_plan(tmp_path).job
    assert component_nodes(job, {"SLURM_JOB_NODELIST": "n[3-4,1]"}) == [["n3", "n4", "n1"]]


def test_a_het_job_has_a_list_for_each_component(tmp_path):
    job = make_plan(tmp_path, layout=JobLayout.HET).job
    environ = {
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]",
    }
    assert component_nodes(job, environ) == [["n1"], ["n2", "n3"]]
    alone = replace(job, components=job.components[:1])  # Slurm makes a plain job of it
    assert component_nodes(alone, {"SLURM_JOB_NODELIST": "n1"}) == [["n1"]]


def test_a_job_of_the_layout_split_holds_its_own_component(tmp_path):
    job = make_plan(tmp_path, layout=JobLayout.SPLIT).job
    assert component_nodes(job, {"SLURM_JOB_NODELIST": "n5"}) == [["n5"]]


def test_outside_a_batch_step_there_are_no_nodes(tmp_path):
    job = make_plan(tmp_path, layout=JobLayout.HET).job
    with golden.raises(ClusterError):
        component_nodes(job, {"SLURM_JOB_NODELIST_HET_GROUP_0": "n1"})


# ---- steps that can't start ------------------------------------------------------------------------

BUSY = "Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"


def test_a_step_for_which_nothing_is_free_is_given_up_with_sruns_sentence(make, monkeypatch):
    monkeypatch.setattr(srun_messages, "BUSY_S", 0.2)
    trial = make()
    trial.srun(f'echo $$ > "{trial.bin}/pid"; echo "srun: {BUSY}"; {LATER}')
    tasks = trial.start()
    wait_until(lambda: all(task.poll() is not None for task in tasks))
    why = f"srun could not start its step for 0 s: {BUSY}"  # which is BUSY_S
    assert [(t.returncode, t.hint) for t in tasks] == [(worker_exit_codes.NOT_STARTED, why)] * 2
    tasks[0].step.process.wait(60)  # it is ended: nobody would expect its tasks any more
    assert process_start(int((trial.bin / "pid").read_text())) is None


def test_a_step_that_started_after_a_wait_is_not_given_up(make, monkeypatch):
    monkeypatch.setattr(srun_messages, "BUSY_S", 0.2)
    started = "srun: Step created for StepId=7.1"
    trial = make()
    trial.srun(f"printf '%s\\n' 'srun: {BUSY}' '{started}'; {WHEN_TOLD}")  # both in one write
    trial.start()
    step = trial.tasks[0].step

    def has_waited() -> bool:
        assert [task.poll() for task in trial.tasks] == [None, None]
        return started in step._said and time.monotonic() > step._began_s + 0.4

    wait_until(has_waited)
    for index in range(2):
        trial.told(index, 0)
    trial.go()
    assert trial.ends() == [(0, ""), (0, "")]


def test_a_step_of_which_nothing_is_heard_is_given_up_later(make, monkeypatch):
    monkeypatch.setattr(srun_messages, "LONGEST_S", 0.3)
    trial = make().srun(LATER)
    first, second = trial.start()
    wait_until(lambda: first.poll() is not None)
    why = "srun could not start its step for 0 s: no message"
    assert (first.hint, second.returncode) == (why, worker_exit_codes.NOT_STARTED)


def test_a_step_whose_task_has_a_log_is_up_whatever_srun_does_not_say(make, monkeypatch):
    monkeypatch.setattr(srun_messages, "LONGEST_S", 0.3)
    trial = make().srun(LATER)
    trial.start()
    trial.files.log("model_worker/1").touch()
    step = trial.tasks[0].step
    wait_until(lambda: step.refresh() or step._is_up)
    assert [task.poll() for task in trial.tasks] == [None, None]


def test_of_an_option_that_srun_does_not_know_its_words_are_told(make):
    words = "unrecognized option '--no-container-remap-root'"
    help_ = 'Try "srun --help" for more information'
    trial = make().srun(f"echo \"srun: {words}\"; echo '{help_}'; exit 255")
    trial.start()
    golden.check(trial.ends())


def test_a_restart_that_srun_refuses_may_be_tried_again(make):
    trial = make().srun("exit 3")
    trial.start()
    trial.ends()
    trial.srun("echo 'srun: error: Unable to contact slurm controller'; exit 1")
    again = trial.steps.restart(trial.tasks[0])
    wait_until(lambda: again.poll() is not None)
    assert again.returncode == 1


def test_an_sruns_log_is_opened_once_and_read_on_where_it_has_grown(tmp_path, monkeypatch):
    log, opened, read = tmp_path / "srun.log", [], []
    real_open, real_pread = os.open, os.pread
    monkeypatch.setattr(slurm_step, "srun_log", lambda *_: log)
    monkeypatch.setattr(os, "open", lambda *a, **k: opened.append(a[0]) or real_open(*a, **k))
    monkeypatch.setattr(os, "pread", lambda *a: read.append(a[1:]) or real_pread(*a))
    log.write_text("of an earlier srun: srun: error: n1: task 0: Exited with exit code 9\n")
    process = SimpleNamespace(returncode=None, poll=lambda: process.returncode)
    files = AttemptFiles(tmp_path / "0001")
    step = slurm_step.Step(None, None, process, files, log.stat().st_size, FileWrites(tmp_path))
    step.tasks = [slurm_step.SlurmTask(f"model_worker/{i}", step, "n1") for i in range(2)]

    def look(said: str) -> list[int | None]:
        with log.open("a") as file:
            file.write(said)
        step._next_refresh = step._next_look = 0.0
        return [task.poll() for task in step.tasks]

    first, second = "srun: error: n1: task 0: Exited with ex", "it code 3\n"
    assert look("") == [None, None]
    assert look(first) == [None, None]
    assert look(second) == [3, None]
    for _ in range(20):
        assert look("") == [3, None]
    process.returncode = 7  # its last word has no end of line
    assert look("srun: error: n1: task 1: Killed") == [3, -9]
    assert opened.count(log) == 1
    assert [size for size, _ in read] == [len(first), len(second), 31]


@pytest.mark.parametrize("hears", [True, False])
def test_an_sruns_log_is_looked_at_when_the_kernel_says_so_or_once_a_second(
    tmp_path, monkeypatch, hears
):
    now_s, looks, log = 100.0, [], tmp_path / "srun-x.log"
    monkeypatch.setattr(slurm_step.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(slurm_step, "srun_log", lambda *_: log)
    written = FileWrites(tmp_path if hears else tmp_path / "not there")
    assert written.is_active == hears
    process = SimpleNamespace(poll=lambda: None)
    step = slurm_step.Step(None, None, process, AttemptFiles(tmp_path / "0001"), 0, written)
    monkeypatch.setattr(step, "_news", lambda *, is_last: looks.append(round(now_s, 2)) or "")
    while now_s < 110.0:
        step.refresh()
        if round(now_s, 2) == 105.5:
            log.write_text("srun: error: n1: task 0: Killed\n")
            (tmp_path / "worker.log").write_text("of no srun\n")
        now_s += 0.01
    if hears:
        assert looks == [100.0, pytest.approx(105.55, abs=0.04)]
    else:
        assert len(looks) == 10
