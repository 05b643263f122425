"""`realsys exec`: the command beside a worker, on its node on Slurm, in its environment here."""

from __future__ import annotations

import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import golden
import pytest
from stand_in_slurm import calls, make_plan, program, wait_until

from launcher.control.worker_shell import run_in_place, shell_command, step_beside
from launcher.trials.submission import Submission
from launcher.trials.trial_view import Records
from realsys.api.cluster import ContainerSpec
from realsys.api.errors import ClusterError, TrialError
from realsys.api.plan import JobLayout, LaunchPlan
from realsys.trial.records import (
    AttemptRecord,
    TrialFiles,
    WorkerRecord,
    process_start,
    write_record,
)

BESIDE = ["--overlap", "--nodes=1", "--ntasks=1", "--nodelist=n2", "--mem=0", "--job-name=exec"]


def reader(
    plan: LaunchPlan | None,
    *,
    job_ids: tuple[str, ...] = ("7",),
    host: str = "n2",
    pid: int = 1,
    start: int = 1,
):
    """A trial whose model_worker/0 and master are registered."""
    workers = {
        name: WorkerRecord(worker=name, host=host, pid=pid, start=start, attempt=1, token="t")
        for name in ("master_worker/0", "model_worker/0")
    }
    attempt = AttemptRecord(
        number=1,
        token="t",
        host="n1",
        supervisor_pid=1,
        supervisor_start=1,
        started_at=1.0,
        job_id=job_ids[0] if job_ids else "99",
    )
    records = Records(trial="ppo-math/run1", folder="/x", now=1.0, workers=workers, attempt=attempt)
    files = TrialFiles(Path(plan.trial_dir) if plan else Path("/nowhere"))
    if job_ids:
        submission = Submission(
            job_id=job_ids[0],
            scheduler="slurm",
            job_ids=job_ids,
            host="login",
            after_attempt=0,
            at=1.0,
        )
        write_record(files.submission, submission)
    return SimpleNamespace(records=lambda: records, files=files, plan=plan)


def argv(plan: LaunchPlan, words: list[str], *, terminal: bool = False, **changes) -> list[str]:
    found, _ = shell_command(reader(plan, **changes), "model_worker/0", words, terminal=terminal)
    return found


def test_on_slurm_it_is_a_step_that_shares_the_workers_node(tmp_path):
    assert argv(make_plan(tmp_path), ["nvidia-smi", "-l"]) == [
        "srun", "--jobid=7", *BESIDE, "nvidia-smi", "-l",
    ]  # fmt: skip


def test_without_a_command_it_is_the_users_shell_on_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/zsh")
    plan = make_plan(tmp_path)
    assert argv(plan, [], terminal=True)[-2:] == ["--pty", "/bin/zsh"]
    monkeypatch.delenv("SHELL")
    assert argv(plan, [])[-1] == "/bin/sh"


def test_a_container_is_the_workers_own(tmp_path):
    plan = make_plan(
        tmp_path,
        container=ContainerSpec(runtime="apptainer"),
        step={"container_image": "/i/gpu.sif", "gpus_per_task": 1.0},
    )
    found = argv(plan, ["ls"])
    assert found[: 2 + len(BESIDE)] == ["srun", "--jobid=7", *BESIDE]
    assert found[-2:] == ["/i/gpu.sif", "ls"]
    assert "--nv" in found


def test_in_a_heterogeneous_job_it_is_in_the_workers_component(tmp_path):
    plan = make_plan(tmp_path, layout=JobLayout.HET)
    assert argv(plan, ["ls"]) == ["srun", "--jobid=7", "--het-group=1", *BESIDE, "ls"]
    master, model = plan.phases[0].steps
    assert (master.component, model.component) == (0, 1)
    beside = step_beside(plan, master, "7", "n1", ["ls"], terminal=False)
    assert beside[1:3] == ["--jobid=7", "--het-group=0"]


def test_in_the_layout_split_it_is_in_the_workers_own_job(tmp_path):
    plan = make_plan(tmp_path, layout=JobLayout.SPLIT)
    assert argv(plan, ["ls"], job_ids=("7", "8")) == ["srun", "--jobid=8", *BESIDE, "ls"]


def test_an_element_of_an_array_is_named_by_its_own_number(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    program(tmp_path / "bin", "squeue", "echo 45")
    found = argv(make_plan(tmp_path), ["ls"], job_ids=("41_3",))
    assert found == ["srun", "--jobid=45", *BESIDE, "ls"]
    assert calls(tmp_path / "bin", "squeue") == ["--noheader --jobs=41_3 --format=%A"]


@pytest.mark.parametrize(
    ("shell", "kind"),
    [
        ("true", TrialError),
        ("echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1", ClusterError),
    ],
)
def test_an_element_that_slurm_does_not_know_is_an_error(tmp_path, monkeypatch, shell, kind):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    program(tmp_path / "bin", "squeue", shell)
    with golden.raises(kind):
        argv(make_plan(tmp_path), ["ls"], job_ids=("41_3",))


def test_the_job_that_we_are_in_is_not_srun_s_matter(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("HOME", "/h")
    _, environment = shell_command(
        reader(make_plan(tmp_path)), "model_worker/0", ["ls"], terminal=False
    )
    assert ("SLURM_JOB_ID" in environment, environment["HOME"]) == (False, "/h")


def test_an_unknown_worker_is_told_with_those_there_are(tmp_path):
    with golden.raises(TrialError) as caught:
        shell_command(reader(make_plan(tmp_path)), "modl_worker/0", [], terminal=False)
    assert caught.value.where == "ppo-math/run1"
    with golden.raises(TrialError) as caught:
        shell_command(reader(make_plan(tmp_path)), "xyz", [], terminal=False)


def test_without_registered_workers_status_says_more(tmp_path):
    one = reader(make_plan(tmp_path))
    records = replace(one.records(), workers={})
    one.records = lambda: records
    with pytest.raises(TrialError) as caught:
        shell_command(one, "model_worker/0", [], terminal=False)
    assert caught.value.fix == "realsys status ppo-math/run1"


# ---- on this machine -------------------------------------------------------------------------------


def test_here_it_is_the_command_in_the_workers_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("OURS", "1")
    plan = replace(make_plan(tmp_path), job=None)
    program(tmp_path / "bin", "worker", "echo up; exec sleep 300")
    worker = subprocess.Popen(
        [tmp_path / "bin" / "worker"],
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "3", "LINES_": "a\nb=c"},
        stdout=subprocess.PIPE,
    )
    try:
        assert worker.stdout.readline() == b"up\n"
        wait_until(lambda: Path(f"/proc/{worker.pid}/comm").read_text() == "sleep\n")
        start = process_start(worker.pid)
        one = reader(plan, job_ids=(), pid=worker.pid, start=start, host=socket.gethostname())
        found, environment = shell_command(one, "model_worker/0", ["env"], terminal=True)
    finally:
        worker.kill()
        worker.communicate()
    assert found == ["env"]
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["LINES_"]) == ("3", "a\nb=c")
    assert "OURS" not in environment


def test_a_worker_that_does_not_run_here_is_an_error(tmp_path):
    plan = replace(make_plan(tmp_path), job=None)
    with golden.raises(TrialError) as caught:
        shell_command(
            reader(plan, job_ids=(), pid=1, start=-1), "model_worker/0", [], terminal=False
        )
    assert caught.value.where == "n2"


def test_a_command_that_is_not_there_is_an_error(tmp_path):
    with golden.raises(TrialError) as caught:
        run_in_place(["no-such-program"], {"PATH": str(tmp_path)})
    assert caught.value.fix == "check its name"


def test_the_node_is_named_as_slurm_does_which_may_differ_from_its_host_name(tmp_path):
    made = reader(make_plan(tmp_path), host="host-n2.cluster.example")
    for name, record in made.records().workers.items():
        made.records().workers[name] = replace(record, node="n2")
    found, _ = shell_command(made, "model_worker/0", ["ls"], terminal=False)
    assert found == ["srun", "--jobid=7", *BESIDE, "ls"]
