"""The cluster that the other tests of this folder rely on does what they rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from slurm_cluster import SlurmCluster
from slurm_daemons import wait_until

START = Callable[..., SlurmCluster]


def image(folder: Path) -> Path:
    """A root file system with nothing of its own; programs come by a mount of /usr."""
    folder.mkdir()
    for name in ("bin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    (folder / "made_of").write_text("nothing")
    return folder


def command(pid: int) -> str:
    """Its arguments; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def runs(cluster: SlurmCluster, job: int, what: str = "sleep 300") -> bool:
    """Whether the job has come to its command."""
    return any(command(pid) == what for pid in cluster.processes_of(job))


def traces_of(folder: Path) -> list[str]:
    """Processes that name the folder in command line, environment, open files or mounts."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            texts = [(process / name).read_bytes() for name in ("cmdline", "environ", "mountinfo")]
            texts += [os.fsencode(os.readlink(fd)) for fd in (process / "fd").iterdir()]
        except OSError:
            continue
        if any(os.fsencode(folder) in text for text in texts):
            found.append(f"{process.name}: {texts[0]!r}")
    return found


def test_four_nodes_are_idle(slurm: SlurmCluster) -> None:
    assert slurm.node_states() == dict.fromkeys(("n1", "n2", "n3", "n4"), "idle")
    said = slurm.run("sinfo", "--noheader", "--Node", "--format=%N %c %m %G %f %P").stdout
    assert "n2 64 1000000 gpu:h200:8 n2,rack2 main*" in said.splitlines()
    partitions = slurm.run("sinfo", "--noheader", "--format=%P %l %N").stdout.splitlines()
    assert partitions == ["main* infinite n[1-4]", "small 5:00 n1"]


def test_a_step_runs_on_every_node(slurm: SlurmCluster) -> None:
    names = slurm.run("srun", "--nodes=4", "hostname").stdout.split()
    assert sorted(names) == ["n1", "n2", "n3", "n4"]


def test_nodes_find_each_other_by_name(slurm: SlurmCluster) -> None:
    said = slurm.run("srun", "--nodes=1", "--nodelist=n2", "getent", "hosts", "n3")
    assert said.stdout.split() == ["127.0.0.1", "n3"]


def test_accounting_knows_a_finished_job(slurm: SlurmCluster) -> None:
    job = slurm.submit("--gres=gpu:3", command="exit 7")
    assert slurm.wait_for_job(job, "FAILED")["ExitCode"] == "7:0"
    asked = ("sacct", "-n", "-X", "-P", f"--jobs={job}", "--format=State,ExitCode,AllocTRES")
    wait_until(
        lambda: "FAILED|7:0|" in slurm.run(*asked).stdout,
        lambda: slurm.run(*asked).stdout,
        timeout_s=60,
    )
    assert "gres/gpu=3" in slurm.run(*asked).stdout


def test_each_task_sees_its_gpus(slurm: SlurmCluster) -> None:
    task = ("sh", "-c", "echo $SLURMD_NODENAME $SLURM_LOCALID $CUDA_VISIBLE_DEVICES")
    said = slurm.run("srun", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=4", *task).stdout
    assert sorted(said.splitlines()) == [
        "n1 0 0,1,2,3",
        "n1 1 4,5,6,7",
        "n2 0 0,1,2,3",
        "n2 1 4,5,6,7",
    ]


def test_container_options_reach_the_task(slurm: SlurmCluster) -> None:
    options = {
        "container-image": "registry.example#team/image:1",
        "container-mounts": "/data:/data:ro",
        "container-workdir": "/data",
        "container-name": "kept",
        "container-env": "LANG",
    }
    flags = ("container-mount-home", "container-writable", "no-container-remap-root")
    words = [*(f"--{name}={value}" for name, value in options.items()), *(f"--{f}" for f in flags)]
    seen = slurm.run("srun", *words, "env").stdout.splitlines()
    for name, value in [*options.items(), *((flag, "1") for flag in flags)]:
        assert f"REALSYS_TEST_{name.upper().replace('-', '_')}={value}" in seen


def test_a_task_runs_in_its_image(slurm: SlurmCluster, tmp_path: Path) -> None:
    root = image(tmp_path / "image")
    for name in ("read", "write"):
        (tmp_path / name).mkdir()
    (tmp_path / "read/old").write_text("here\n")
    script = (
        "cat /made_of /in/old; touch /in/new; touch /out/$SLURM_PROCID; touch /own; pwd; hostname"
    )
    done = slurm.run(
        *("srun", "--nodes=2", "--label", f"--container-image={root}", "--container-workdir=/out"),
        f"--container-mounts=/usr,{tmp_path}/read:/in:ro,{tmp_path}/write:/out",
        *("sh", "-c", f"{script}; true"),
    )
    assert [line[3:] for line in sorted(done.stdout.splitlines()) if line[0] == "0"] == sorted(
        ["nothinghere", "/out", "n1"]
    )
    assert done.stderr.count("Read-only file system") == 4  # /in/new and /own, of two tasks
    assert sorted(p.name for p in tmp_path.glob("*/*") if p.parent != root) == ["0", "1", "old"]
    assert sorted(p.name for p in root.iterdir()) == ["bin", "lib", "lib64", "made_of"]


def test_an_image_that_is_not_there_fails_the_step(slurm: SlurmCluster) -> None:
    done = slurm.run("srun", "--container-image=/nowhere", "true", check=False)
    assert done.returncode != 0
    assert "no image /nowhere" in done.stderr


def test_a_job_on_a_killed_node_fails(slurm: SlurmCluster) -> None:
    job = slurm.submit("--nodes=2", "--no-requeue", command="srun sleep 300")
    slurm.wait_for_job(job, "RUNNING")
    wait_until(lambda: bool(slurm.processes_of(job, node="n2")), lambda: "no task", timeout_s=60)
    slurm.kill_node("n2")
    assert slurm.processes_of(job, node="n2") == set()
    slurm.wait_for_job(job, "NODE_FAIL", timeout_s=120)
    assert slurm.node_states()["n2"] == "down*"
    slurm.start_slurmd("n2")


def test_a_job_outlives_slurmctld(slurm: SlurmCluster) -> None:
    job = slurm.submit(command="sleep 300")
    slurm.wait_for_job(job, "RUNNING")
    wait_until(lambda: runs(slurm, job), lambda: "no task", timeout_s=60)
    before = slurm.processes_of(job)
    slurm.restart_slurmctld()
    assert slurm.show_job(job)["JobState"] == "RUNNING"
    assert slurm.processes_of(job) == before


def test_urgent_preempts_spot(slurm: SlurmCluster) -> None:
    spot = slurm.submit("--qos=spot", "--nodes=4", "--exclusive", command="sleep 300")
    slurm.wait_for_job(spot, "RUNNING")
    urgent = slurm.submit("--qos=urgent", "--nodes=4", "--exclusive", command="sleep 300")
    slurm.wait_for_job(urgent, "RUNNING")
    assert slurm.show_job(spot)["JobState"] in ("PENDING", "PREEMPTED")


def test_without_accounting_a_partition_preempts(slurm_without_accounting: SlurmCluster) -> None:
    cluster = slurm_without_accounting
    low = cluster.submit("--partition=low", "--nodes=4", "--exclusive", command="sleep 300")
    cluster.wait_for_job(low, "RUNNING")
    cluster.submit("--partition=high", "--nodes=4", "--exclusive", command="sleep 300")
    cluster.wait_for_job(low, "PENDING", "PREEMPTED")
    refused = cluster.run("sacct", check=False)
    assert "storage is disabled" in refused.stderr


def test_a_full_queue_refuses(start_slurm: START) -> None:
    with start_slurm(nodes=1, accounting=False, settings={"MaxJobCount": "2"}) as cluster:
        cluster.submit("--hold", command="true")
        # It tries for two minutes.
        words = ["sbatch", "--hold", "--wrap=true"]
        environment = cluster.environment
        with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as sbatch:
            assert sbatch.stderr is not None
            told = sbatch.stderr.readline()
            sbatch.kill()
    assert "sleeping and retrying" in told


def test_an_account_that_is_not_ours_is_refused(start_slurm: START) -> None:
    with start_slurm(nodes=1, settings={"AccountingStorageEnforce": "associations,qos"}) as cluster:
        cluster.submit("--account=lab", "--qos=spot", "--hold", command="true")
        refused = cluster.run("sbatch", "--account=theirs", "--wrap=true", check=False)
    assert "Invalid account" in refused.stderr


def test_two_clusters_side_by_side(slurm: SlurmCluster, start_slurm: START) -> None:
    with start_slurm(nodes=2, gpus=0, accounting=False) as other:
        ours, theirs = slurm.submit(command="sleep 300"), other.submit(command="sleep 300")
        slurm.wait_for_job(ours, "RUNNING")
        other.wait_for_job(theirs, "RUNNING")
        assert slurm.show_job(theirs) == other.show_job(ours) == {}
        assert sorted(other.run("srun", "-N2", "hostname").stdout.split()) == ["n1", "n2"]
    assert slurm.show_job(ours)["JobState"] == "RUNNING"
    assert slurm.processes_of(ours) != set()


def test_nothing_is_left_of_a_cluster(start_slurm: START) -> None:
    with start_slurm(nodes=2, accounting=True) as cluster:
        # A child that has left the session and forgotten the environment, as a daemon would.
        job = cluster.submit("--nodes=2", command="env -i setsid sleep 301 & srun sleep 300")
        cluster.wait_for_job(job, "RUNNING")
        wait_until(
            lambda: bool(cluster.processes_of(job, node="n2")), lambda: "no step", timeout_s=60
        )
        client = subprocess.Popen(["srun", "sleep", "302"], env=cluster.environment)
        pids, folder = cluster.processes_of(job), cluster.shape.folder
        assert traces_of(folder)
    assert client.wait(60) == -signal.SIGKILL
    assert traces_of(folder) == []
    assert not folder.exists()
    assert [pid for pid in pids if command(pid)] == []  # a zombie has none


def test_daemons_end_with_the_tests(start_slurm: START, tmp_path: Path) -> None:
    script = (
        "import sys, time, pathlib, slurm_cluster as s\n"
        "with s.SlurmCluster(pathlib.Path(sys.argv[1]), nodes=1, accounting=False):\n"
        "    print('up', flush=True); time.sleep(300)\n"
    )
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "c")],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as tests:
        assert tests.stdout is not None
        assert tests.stdout.readline() == "up\n"
        tests.kill()
    wait_until(
        lambda: not traces_of(tmp_path / "c"), lambda: str(traces_of(tmp_path / "c")), timeout_s=60
    )
