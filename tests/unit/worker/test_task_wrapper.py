"""What srun starts for each task: it gives the worker its place, and writes down how it ended.

The worker is a shell command here; ``main`` runs in this process, but where its own end matters.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import golden
import pytest
from stand_in_slurm import make_plan, write_plan

from realsys.api.plan import plan_hash, plan_text
from realsys.api.scheduling import WorkerType
from realsys.trial.records import Failure, WorkerExit, read_record
from realsys.worker import srun_task as task
from realsys.worker.environment import write_exports

VISIBLE = {"gpus_per_task": 1.0, "gpus_per_node": 2, "gpu_binding": "visible"}
SLURM = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "4,6"}


class Wrapper:
    """The wrapper of model_worker/1 of attempt 3, whose worker is a shell command."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, **plan: object) -> None:
        cluster = {"interface": "lo", **plan}
        self.plan = make_plan(root, **cluster)  # type: ignore[arg-type]
        self.trial = write_plan(self.plan)
        self.files = self.trial.attempt(3)
        self.hash = plan_hash(plan_text(self.plan))
        self.monkeypatch, self.asked = monkeypatch, {}
        self.seen = root / "environment"
        self.worker, self.more = "model_worker/1", list[str]()

    @property
    def argv(self) -> list[str]:
        return [
            self.worker.partition("/")[0],
            f"--trial-dir={self.plan.trial_dir}",
            f"--plan-hash={self.hash}",
            "--phase=main",
            "--attempt=3",
            *self.more,
        ]

    def run(self, shell: str = "true") -> int:
        """The wrapper's exit code; the worker leaves its environment."""

        def command(**asked: object) -> list[str]:
            self.asked = asked
            return ["/bin/sh", "-c", f"env -0 > '{self.seen}'; {shell}"]

        self.monkeypatch.setattr(task, "command", command)
        self.monkeypatch.setattr(sys, "argv", ["task", *self.argv])
        return task.main()

    def environment(self) -> dict[str, str]:
        entries = self.seen.read_text().split("\0")
        return dict(entry.split("=", 1) for entry in entries if entry)

    def told(self) -> WorkerExit | None:
        return read_record(WorkerExit, self.files.exit_of(self.worker))

    def words(self) -> Failure | None:
        return read_record(Failure, self.files.failure_record(self.worker))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = signal.getsignal(signal.SIGTERM)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    # The children of this process are not a wrapper's.
    monkeypatch.setattr(task, "adopt_orphans", lambda: None)
    monkeypatch.setattr(task, "wait_for_children", lambda timeout_s: None)
    yield lambda **plan: Wrapper(tmp_path, monkeypatch, **plan)
    signal.signal(signal.SIGTERM, before)


# ---- who it is -------------------------------------------------------------------------------------


def test_the_worker_is_the_task_of_its_group_that_slurm_says(make):
    wrapper = make()
    assert wrapper.run() == 0
    assert wrapper.asked == {
        "trial_dir": wrapper.plan.trial_dir,
        "plan_hash": wrapper.hash,
        "phase": "main",
        "attempt": 3,
        "worker_type": "model_worker",
        "index": 1,
        "like": None,
    }
    assert wrapper.environment()["REALSYS_PARENT_PID"] == str(os.getpid())


@pytest.mark.parametrize(
    ("step", "devices"),
    [
        (VISIBLE, "6"),
        ({**VISIBLE, "gpus_per_task": 0.5, "gpus_per_node": 1}, "4"),  # both share the first
        ({**VISIBLE, "gpu_binding": "per_task"}, "4,6"),  # Slurm has chosen
        ({}, ""),  # a worker without GPUs sees none
    ],
)
def test_each_task_sees_its_own_gpus(make, step, devices):
    wrapper = make(step=step)
    assert wrapper.run() == 0
    assert wrapper.environment()["CUDA_VISIBLE_DEVICES"] == devices


def test_the_environment_comes_from_the_trials_file_the_site_and_the_step(make, monkeypatch):
    wrapper = make(env_vars={"SITE": "site", "BOTH": "site"}, step={"env_vars": {"BOTH": "step"}})
    monkeypatch.setenv("API_KEY", "of the node")
    wrapper.trial.secrets.mkdir()
    write_exports(wrapper.trial.task_environment, {"API_KEY": "s3cret 'x'", "SITE": "shell"})
    assert wrapper.run() == 0
    seen = wrapper.environment()
    names = ("API_KEY", "SITE", "BOTH", "REALSYS_TRIAL_DIR", "HF_HUB_OFFLINE")
    assert [seen[name] for name in names] == [
        "s3cret 'x'",
        "site",
        "step",
        wrapper.plan.trial_dir,
        "1",
    ]


def test_gloo_and_nccl_use_the_interface_that_we_listen_on(make):
    wrapper = make(interface="127.0.0.0/8", env_vars={"NCCL_SOCKET_IFNAME": "ib7"})
    assert wrapper.run() == 0
    seen = wrapper.environment()
    assert (seen["GLOO_SOCKET_IFNAME"], seen["NCCL_SOCKET_IFNAME"]) == ("lo", "ib7")


# ---- started again by itself -----------------------------------------------------------------------


@pytest.fixture
def make_server(make, monkeypatch):
    """The wrapper of generation_server/1, which may be started again."""

    def made(**step: object):
        wrapper = make(step={"worker_type": WorkerType.GENERATION_SERVER, **step})
        wrapper.worker = "generation_server/1"
        monkeypatch.setattr(task, "LOOK_S", 0.02)
        monkeypatch.setenv("SLURM_STEP_GPUS", "5,7")  # CUDA counts them otherwise: 4,6
        return wrapper

    return made


@pytest.mark.parametrize(
    ("step", "ids", "devices"),
    [
        (VISIBLE, ["7"], "1"),
        ({**VISIBLE, "gpu_binding": "per_task", "gpus_per_task": 2.0}, ["5", "7"], "0,1"),
        ({}, [], ""),
    ],
)
def test_one_that_is_started_again_keeps_its_index_its_gpus_and_its_cpus(
    make_server, monkeypatch, step, ids, devices
):
    wrapper = make_server(**step)
    assert wrapper.run() == 0
    cpus = sorted(os.sched_getaffinity(0))
    place = json.loads(wrapper.files.place_of(wrapper.worker).read_text())
    assert (place["gpu_ids"], place["cpus"]) == (ids, cpus)
    # A step of its own: it is task 0 there, and sees all GPUs of the job, counted from 0.
    for name in ("SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("SLURM_STEP_GPUS", "5,7,1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    place["cpus"] = cpus[:1]
    wrapper.files.place_of(wrapper.worker).write_text(json.dumps(place))
    wrapper.more = ["--first-index=1", "--restart=1"]
    try:
        assert wrapper.run() == 0
        assert os.sched_getaffinity(0) == set(cpus[:1])
    finally:
        os.sched_setaffinity(0, cpus)
    assert wrapper.asked["index"] == 1
    assert wrapper.environment()["CUDA_VISIBLE_DEVICES"] == devices


def test_where_slurm_tells_no_numbers_the_entries_stand(make_server, monkeypatch):
    wrapper = make_server(**VISIBLE)
    monkeypatch.delenv("SLURM_STEP_GPUS")
    assert wrapper.run() == 0
    monkeypatch.setenv("SLURM_PROCID", "0")
    wrapper.more = ["--first-index=1", "--restart=1"]
    assert wrapper.run() == 0
    assert wrapper.environment()["CUDA_VISIBLE_DEVICES"] == "6"


def test_a_place_that_is_not_known_leaves_last_words(make_server, monkeypatch):
    wrapper = make_server(**VISIBLE)
    monkeypatch.setenv("SLURM_PROCID", "0")
    wrapper.more = ["--first-index=1", "--restart=1"]
    assert wrapper.run() == 1
    golden.check(wrapper.words().why)


def test_it_is_killed_when_the_supervisor_says_so_by_a_file(make_server):
    wrapper = make_server()
    end = wrapper.files.end_of(wrapper.worker, "main", 0)
    other = wrapper.files.end_of(wrapper.worker, "main", 1)
    shell = f"mkdir -p '{end.parent}'; touch '{other}'; sleep 0.1; touch '{end}'; exec sleep 300"
    assert wrapper.run(shell) == 137
    assert wrapper.told().returncode == -9


# ---- how it ended ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shell", "code", "returncode"),
    [
        ("exit 0", 0, 0),
        ("exit 75", 75, 75),
        ("kill -KILL $$", 137, -9),
        ("kill -SEGV $$", 139, -11),
        ("kill -TERM $$; exit 5", 5, 5),  # SIGTERM is ignored: the supervisor ends us
    ],
)
def test_the_workers_end_is_written_down_and_passed_on(make, shell, code, returncode):
    wrapper = make()
    assert wrapper.run(f"echo $$ > '{wrapper.seen}.pid'; {shell}") == code
    told = wrapper.told()
    pid = int(Path(f"{wrapper.seen}.pid").read_text())
    assert told == WorkerExit(
        worker="model_worker/1",
        host=socket.gethostname(),
        pid=pid,
        returncode=returncode,
        at=told.at,
    )
    assert wrapper.words() is None


def test_an_end_that_can_not_be_written_down_is_printed(make, capsys):
    wrapper = make()
    wrapper.files.root.mkdir(parents=True)
    wrapper.files.exits.write_text("no folder")
    assert wrapper.run("exit 3") == 3
    golden.check(capsys.readouterr().err)


def test_a_sigterm_does_not_end_the_wrapper(make):
    wrapper = make()
    assert wrapper.run(f"kill -TERM {os.getpid()}; exit 4") == 4
    assert wrapper.told().returncode == 4


# ---- what keeps it from starting -------------------------------------------------------------------


def test_a_plan_that_was_changed_leaves_last_words(make, capsys):
    wrapper = make()
    wrapper.trial.plan.write_text(plan_text(replace(wrapper.plan, user="eve")))
    assert wrapper.run() == 1
    words = wrapper.words()
    assert (words.worker, words.host, words.pid) == (
        "model_worker/1",
        socket.gethostname(),
        os.getpid(),
    )
    golden.check(words.why)
    assert words.kind == "ConfigError"
    golden.check(words)
    assert words.why in capsys.readouterr().err
    assert (wrapper.told(), wrapper.seen.exists()) == (None, False)


def test_a_container_that_hides_slurms_variables_leaves_last_words(make, monkeypatch, capsys):
    wrapper = make(step=VISIBLE)
    monkeypatch.delenv("SLURM_LOCALID")
    assert wrapper.run() == 1
    words = wrapper.words()
    golden.check((words.why, words.kind))
    golden.check(words)
    golden.check(capsys.readouterr().err)


def test_fewer_gpus_than_planned_leave_last_words(make, monkeypatch):
    wrapper = make(step=VISIBLE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert wrapper.run() == 1
    golden.check(wrapper.words().why)


def test_an_interface_that_is_not_there_leaves_last_words(make):
    wrapper = make(interface="ib9")
    assert wrapper.run() == 1
    golden.check(wrapper.words().why)


def test_as_a_program_it_exits_with_1_and_its_words(make):
    wrapper = make()
    wrapper.hash = "0" * 64
    done = subprocess.run(
        [sys.executable, "-m", "realsys.worker.srun_task", *wrapper.argv],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    golden.check(done.stderr)
    assert wrapper.words().why == done.stderr.splitlines()[0]
