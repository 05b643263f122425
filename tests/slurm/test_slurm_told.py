"""What a real Slurm knows and a user is told: limits, reservations, drained nodes, a node that failed."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from real_trials import LONG_PPO, explain, metrics_of, name_of, wait_until
from slurm_cluster import SlurmCluster
from slurm_trials import SlurmTrials
from told import row

from launcher.slurm.discovery.discover import discover_site as discover
from launcher.slurm.discovery.site_yaml import site_yaml
from launcher.slurm.doctor.login_checks import account_findings, partition_findings
from launcher.slurm.query.job_query import query_jobs
from launcher.slurm.query.job_rows import JobInfo
from launcher.submit.executors.slurm_executor import BatchExecutor
from launcher.trials.job_board import JobBoard
from launcher.trials.status import StatusReader, trial_view
from launcher.trials.submission import JobMemory, Submission
from realsys.api.cluster import ClusterSpec, PartitionSpec, SlurmSpec
from realsys.observability.metrics import deterministic, read_metrics
from realsys.trial.records import ExitMarker, read_record
from realsys.trial.trial_state import State

POOL = "add qos pool MaxTRESPerUser=cpu=4,node=1 GrpTRESMins=cpu=1000"


@pytest.fixture
def site(other_slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The second cluster, for questions from this process, with a QOS that several jobs share."""
    monkeypatch.setenv("SLURM_CONF", other_slurm.environment["SLURM_CONF"])
    for line in (POOL, "modify user root set qos+=pool"):
        other_slurm.run("sacctmgr", "--immediate", *line.split())
    yield other_slurm
    other_slurm.clear()
    for line in ("modify user root set qos-=pool", "delete qos pool"):
        other_slurm.run("sacctmgr", "--immediate", *line.split(), check=False)


def told_of(job_id: int) -> JobInfo:
    """What a board says of a job that is no trial's."""
    (shown,) = query_jobs([str(job_id)], accounting=False).jobs.values()
    assert shown.submitted_at is not None
    submission = Submission(
        job_id=str(job_id), scheduler="slurm", job_ids=(str(job_id),), host="h", after_attempt=0, at=1.0,
        job=JobMemory(submitted={str(job_id): shown.submitted_at}, cluster_name=shown.cluster),
    )  # fmt: skip
    job = JobBoard().job(submission)
    assert job is not None
    return job


def told(job_id: int) -> JobInfo:
    """What the launcher says of a job that waits, as soon as Slurm has a reason."""
    deadline = time.monotonic() + 240
    while True:
        job = told_of(job_id)
        if job.reason not in ("", "None", "Priority") or time.monotonic() > deadline:
            return job
        time.sleep(0.3)


def test_a_job_that_exceeds_a_shared_limit_alone_never_starts(site: SlurmCluster) -> None:
    options = ("--account=lab", "--qos=pool", "--time=10")
    job = told(site.submit(*options, "--ntasks=8", command="true"))
    assert job.reason == "QOSMaxCpuPerUserLimit"
    assert "it requests 8 CPUs" in job.reason_words
    assert "(MaxTRESPerUser of QOS pool)" in job.reason_words
    assert job.fix.startswith("cancel it")
    first = site.submit(*options, "--ntasks=4", command="sleep 300")
    site.wait_for_job(first, "RUNNING")
    second = told(site.submit(*options, "--ntasks=2", command="true"))
    assert second.reason == "QOSMaxCpuPerUserLimit"
    assert "never" not in second.reason_words


def test_drained_nodes_and_reservations_are_told(site: SlurmCluster) -> None:
    site.run("scontrol", "update", "nodename=b1", "state=drain", "reason=bad fan in rack 3")
    try:
        options = ("--account=lab", "--partition=big", "--time=10")
        drained = told(site.submit(*options, "--nodelist=b1", command="true"))
        assert "b1 is drained since" in drained.reason_words
        assert drained.reason_words.endswith("fan in rack 3")
    finally:
        site.run("scontrol", "update", "nodename=b1", "state=resume")
    settings = ("StartTime=now+1hour", "Duration=60", "Nodes=b1", "Users=root")
    site.run("scontrol", "create", "reservation", "ReservationName=later", *settings)
    try:
        mine = told(site.submit(*options, "--reservation=later", command="true"))
        assert mine.reason_words.startswith("its reservation has not begun: later lasts from 20")
        long = ("--account=lab", "--partition=big", "--time=120", "--nodelist=b1")
        waits = told(site.submit(*long, command="true"))
        assert "holds b1 from 20" in waits.reason_words, waits
    finally:
        site.clear()
        site.run("scontrol", "delete", "ReservationName=later")


def test_a_site_file_and_doctor_know_what_slurm_knows(site: SlurmCluster) -> None:
    site.run("scontrol", "update", "nodename=g1", "state=drain", "reason=gpu 1 fell off")
    try:
        found = discover("lab")
    finally:
        site.run("scontrol", "update", "nodename=g1", "state=resume")
    main = found.spec.partitions["main"]
    assert (main.memory_mib, main.default_time) == (48_000, "00:20:00")
    assert found.kinds["main"][0].threads_per_core == 2
    assert found.kinds["main"][0].system_mib == 1000
    text = site_yaml(found)
    for line in (
        "# account:                  # yours: lab",
        "pool",
        "# its state is DOWN: it starts no jobs at present",
        "# only accounts theirs",
        "# MaxMemPerNode: a job can use at most 48000 MiB per node",
        "# MemSpecLimit: 1000 MiB per node are reserved for the system",
        "# 2 threads per core",
        "# g1 is IDLE+DRAIN: gpu 1 fell off",
    ):
        assert line in text, text
    wants = SlurmSpec(account="lab", time_limit="10")
    spec = ClusterSpec(partitions=found.spec.partitions, slurm=wants)
    findings = {f.name: f for f in partition_findings(spec, found)}
    bad = {name.removeprefix("partition ") for name, f in findings.items() if not f.ok}
    assert bad == {"broken", "theirs", "gpu"}, findings
    assert "gpu 1 fell off" in findings["partition gpu"].what
    assert [f.ok for f in account_findings(spec, found)] == [True]
    spec = ClusterSpec(slurm=SlurmSpec(account="theirs"))
    assert [f.ok for f in account_findings(spec, found)] == [False]
    wrong = {"main": PartitionSpec(nodes=2, cpus=16, memory_mib=64_000)}
    (finding,) = partition_findings(ClusterSpec(partitions=wrong, slurm=wants), found)
    assert "Slurm reports 48000" in finding.what


def test_a_plan_and_a_launch_tell_the_limit_that_slurm_takes_silently(
    site: SlurmCluster, tmp_path: Path, tiny_policy: Path
) -> None:
    """The site file says nothing of time: Slurm is asked for its DefaultTime."""
    trials = SlurmTrials(tmp_path / "root", site)
    path = trials.write_spec()
    path.write_text("".join(t for t in path.read_text().splitlines(True) if "time" not in t))
    words = ("plan", "ppo-math", *LONG_PPO, f"actor.path={tiny_policy}")
    plan = trials.run(*words)
    told = "00:20:00 (20 min), the partition's DefaultTime: none was requested"
    assert f"time limit {told}" in plan.stdout, plan.stdout + plan.stderr
    assert f"the time limit is {told}; set another with --time" in plan.stderr
    short = trials.run(*words, "--time", "2")
    assert short.returncode == 4
    assert "00:02:00 (2 min)" in short.stderr
    job = site.submit("--account=lab", command="sleep 300")  # and so it is
    site.wait_for_job(job, "RUNNING")
    assert told_of(job).time_limit_s == 1200


OUT_OF_MEMORY = """
import subprocess, sys
from realsys.runtime.oom_evidence import oom_evidence, read_oom_counts
before = read_oom_counts()
child = subprocess.run([sys.executable, "-c", "len(bytearray(1 << 30))"])
print(child.returncode, oom_evidence(before, read_oom_counts()), flush=True)
"""


def test_out_of_memory_is_told_with_the_limit_that_held(site: SlurmCluster) -> None:
    """With cgroup v1, where the task's own cgroup has no limit, and its step's and job's have."""
    assert site.shape.constrains_memory, "cgroup v1's memory controller is not here"
    python = ("env", f"PYTHONPATH={Path(__file__).parents[2]}", sys.executable)
    done = site.run("srun", "--account=lab", "--mem=200", *python, "-c", OUT_OF_MEMORY, check=False)
    told = "-9 its cgroup's memory limit of 200 MiB ran out (oom_kill 0 → 1)"
    assert told in done.stdout, done.stdout + done.stderr


def test_a_job_that_a_silent_controller_took_is_found(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch submits it, and says that nobody answered."""
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    deaf = tmp_path / "bin" / "sbatch"
    deaf.parent.mkdir()
    words = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    real = shutil.which("sbatch")
    deaf.write_text(f"#!/bin/sh\n{real} \"$@\" >/dev/null\necho '{words}' >&2\nexit 1\n")
    deaf.chmod(0o755)
    monkeypatch.setenv("PATH", f"{deaf.parent}:{os.environ['PATH']}")
    folder = tmp_path / "submitit"
    folder.mkdir()
    executor = BatchExecutor(folder, script=lambda command: f"#!/bin/bash\n{command}\n")
    job = executor.start("sleep 300")
    assert slurm.wait_for_job(int(job), "RUNNING")["Command"].startswith(
        f"{folder}/.submission_file"
    )


# ---- a node that fails ------------------------------------------------------------------------------


def fall_silent(cluster: SlurmCluster, node: str, job_id: int) -> Callable[[], None]:
    """A node whose tasks do nothing any more, while Slurm thinks well of it. Returns what undoes it."""
    pids = [
        pid
        for pid in cluster.processes_of(job_id, node=node)
        if "slurmstepd" not in Path(f"/proc/{pid}/comm").read_text()
    ]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)

    def undo() -> None:
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGCONT)

    return undo


def test_after_a_node_rebooted_a_requeue_takes_the_others_and_computes_the_same(
    slurm: SlurmCluster, slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    """Everything on it dies at once, and slurmd is back before a lease has ended. Its peer's connections
    are reset, and Slurm ends the step that the node no longer knows: the peer's node is not to blame."""
    words = ("actor.parallel=d2t1p1", "scheduling.model_worker.mem=600000", "--requeue")
    files = slurm_trials.launch("ppo-math", "n", *LONG_PPO, *words, f"actor.path={tiny_policy}")
    view = slurm_trials.wait_for_step(files, 4)  # a step after a checkpoint
    node = next(w.host for w in view.workers if w.host != view.host)
    slurm.kill_node(node)
    slurm.start_slurmd(node, wait=False)
    again = wait_until(files, lambda v: v.attempt == 2 and v.state is State.RUNNING, timeout_s=240)
    assert again.job_ids == view.job_ids, explain(files, again)
    assert node not in {worker.host for worker in again.workers}
    assert slurm.show_job(again.job_ids[0])["ExcNodeList"] == node
    marker = read_record(ExitMarker, files.attempt(1).exit)
    assert marker is not None
    assert marker.first_failure is not None
    assert (marker.first_failure.host, marker.first_failure.secondary) == (node, False)
    with closing(StatusReader(files)) as reader:
        assert reader.view().time is not None  # and the limit starts anew
    rows = read_metrics(files.phase(files.root).rows_of(1).metrics)
    assert len(rows) > 3  # more than the checkpoint had: these are computed twice, to the same bits
    wait_until(files, lambda _: len(metrics_of(files)) > len(rows), timeout_s=240)
    assert metrics_of(files)[: len(rows)] == [deterministic(row) for row in rows]


def test_after_a_node_fell_silent_a_resume_offers_the_others(
    slurm: SlurmCluster, slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    words = ("actor.parallel=d2t1p1", "scheduling.model_worker.mem=600000")
    files = slurm_trials.launch("ppo-math", "o", *LONG_PPO, *words, f"actor.path={tiny_policy}")
    view = slurm_trials.wait_for_step(files, 2)
    node = next(w.host for w in view.workers if w.host != view.host)
    undo = fall_silent(slurm, node, int(view.job_ids[0]))
    try:
        failed = wait_until(files, lambda v: v.state is State.FAILED, timeout_s=180)
    finally:
        undo()
    row("a worker's node is lost").check(failed)
    assert failed.fix == f"realsys resume {name_of(files)} --exclude {node}, which uses other nodes"
    done = slurm_trials.run("resume", name_of(files), "--detach", "--exclude", node)
    assert done.returncode == 0, done.stderr
    again = wait_until(files, lambda v: v.attempt == 2 and bool(v.workers), timeout_s=180)
    slurm_trials.wait_for_step(files, failed.step + 1)
    assert node not in {worker.host for worker in trial_view(files).workers}, explain(files, again)
