"""The main things again on the second cluster of this tier, of another shape (other_site.py).

On its nodes a core is two CPUs, host names are none of Slurm's, and too much memory kills. First that the
cluster is so.
"""

from __future__ import annotations

import json
from pathlib import Path

import other_site
import yaml
from real_trials import LONG_PPO, explain, small_ppo
from slurm_cluster import SlurmCluster
from slurm_trials import SlurmTrials

from launcher.trials.status import trial_view
from realsys.api.plan import read_plan
from realsys.trial.liveness import processes_of
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

AS_USER = ("setpriv", f"--reuid={other_site.USER}", "--regid=nogroup", "--clear-groups")


def test_nodes_have_threads_other_host_names_and_memory_of_their_own(
    other_slurm: SlurmCluster,
) -> None:
    said = other_slurm.run("sinfo", "--noheader", "--Node", "--format=%N %z %m %P").stdout
    assert "t2 2:4:2 64000 main*" in said.splitlines()
    hosts = other_slurm.run("srun", "--nodes=2", "--account=lab", "hostname").stdout.split()
    assert sorted(hosts) == ["host-t1.lab.example", "host-t2.lab.example"]
    node = other_slurm.run("scontrol", "show", "node", "t1").stdout
    assert "MemSpecLimit=1000" in node


def test_a_job_that_takes_more_memory_than_it_asked_for_is_killed(
    other_slurm: SlurmCluster,
) -> None:
    assert other_slurm.shape.constrains_memory, "cgroup v1's memory controller is not here"
    big = ("python3", "-c", "len(bytearray(400 << 20))")
    done = other_slurm.run("srun", "--account=lab", "--mem=100", *big, check=False)
    assert "Out Of Memory" in done.stderr, done.stderr


def test_partitions_qos_and_users_have_limits(other_slurm: SlurmCluster) -> None:
    def refused(*options: str) -> str:
        argv = ("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap=true")
        done = other_slurm.run(*argv, check=False)
        assert done.returncode != 0, options
        return done.stderr

    assert "or account/partition" in refused("--partition=theirs", "--account=lab")
    assert "QOSMaxCpuPerJobLimit" in refused("--qos=tiny", "--ntasks=4", "--account=lab")
    assert "time limit" in refused("--time=90", "--account=lab").lower()
    waits = other_slurm.submit("--partition=broken", "--account=lab", command="true")
    assert other_slurm.wait_for_job(waits, "PENDING")["Reason"] == "PartitionDown"
    job = other_slurm.submit("--account=lab", command="sleep 300")
    assert other_slurm.wait_for_job(job, "RUNNING")["TimeLimit"] == "00:20:00"


def test_an_ordinary_user_has_jobs_and_sees_no_others(other_slurm: SlurmCluster) -> None:
    other_slurm.submit("--account=lab", command="sleep 300")
    argv = ("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 300")
    job = other_slurm.run(*AS_USER, *argv).stdout.strip()
    seen = other_slurm.run(*AS_USER, "squeue", "--noheader", "--format=%A %u").stdout
    assert seen.split() == [job, other_site.USER]


# ------------------------------------------------------------------ trials


def whole_cores(files: TrialFiles) -> None:
    """Fails unless the job has what its steps take, each task whole cores."""
    plan = read_plan(files.plan)
    assert plan.job is not None
    for index, component in enumerate(plan.job.components):
        threads = 1 if component.partition == "big" else other_site.THREADED.threads
        assert component.threads_per_core == threads
        for phase in plan.phases:
            steps = [s for s in phase.steps if s.component == index]
            assert all(s.cpus_per_task % threads == 0 for s in steps), steps
            taken = sum(s.cpus_per_task * s.num_tasks for s in steps)
            assert taken <= component.cpus_per_node * component.nodes


def test_runs_with_their_defaults_complete_where_a_core_is_two_cpus(
    other_slurm: SlurmCluster, other_trials: SlurmTrials, tiny_policy: Path
) -> None:
    """Side by side, two batches each: else steps wait for each other. And two jobs on a lone node; and
    tasks that ask for half a core each. An asynchronous one: the next test."""
    sizes = ("task.train_size=32", "train_bs_n_seqs=16", "task.eval_size=8", "group_size=2")
    short = (*sizes, "gen.max_new_tokens=12", f"actor.path={tiny_policy}")
    beside = ("--layout", "split", "--partition", "big", "actor.parallel=d2t1p1")
    runs = [
        other_trials.launch(f"ppo-math{kind}", "a", *short, *(() if kind else beside))
        for kind in ("", "-detached", "-split")
    ]
    halves = ("scheduling.model_worker.cpu=1", "scheduling.master_worker.cpu=1")
    runs.append(other_trials.launch("ppo-math", "halves", *short, *halves))
    for files in runs:
        whole_cores(files)
        view = other_trials.wait(files, timeout_s=240)
        assert (view.state, view.step) == (State.COMPLETED, 2), explain(files, view)
        for job in view.job_ids:
            other_slurm.wait_for_job(int(job), "COMPLETED")
            assert not other_slurm.processes_of(int(job))
        assert not processes_of(files.root)
    assert [len(trial_view(files).job_ids) for files in runs] == [2, 1, 1, 1]
    beside_files = runs[0].attempt(1).exits.glob("*.json")
    ended = {json.loads(path.read_text())["worker"] for path in beside_files}
    assert ended == {"model_worker/0", "model_worker/1", "master_worker/0"}


def test_a_run_is_looked_at_entered_and_stopped_and_leaves_nothing(
    other_slurm: SlurmCluster, other_trials: SlurmTrials, tiny_policy: Path
) -> None:
    """With the CPUs that tasks have by default."""
    defaults = [word for word in LONG_PPO if not word.startswith("scheduling.")]
    words = (*defaults, f"actor.path={tiny_policy}", "schedule.max_staleness=2")
    files = other_trials.launch("ppo-math-async", "x", *words)
    whole_cores(files)
    view = other_trials.wait_for_step(files, 1, timeout_s=180)
    beside = other_trials.run("exec", "ppo-math-async/x", "rollout_worker/0", "--", "hostname")
    assert beside.returncode == 0, beside.stderr
    (host,) = {w.host for w in view.workers}
    assert beside.stdout.strip() == host == other_slurm.shape.hosts[host[5:7]]
    done = other_trials.run("stop", "ppo-math-async/x", "--grace", "5")
    assert done.returncode == 0, done.stderr
    assert trial_view(files).state is State.STOPPED
    for job in view.job_ids:
        assert not other_slurm.processes_of(int(job))
    assert not processes_of(files.root)


def test_a_site_file_from_what_slurm_says_counts_threads(
    other_slurm: SlurmCluster, other_trials: SlurmTrials, tiny_policy: Path
) -> None:
    written = other_trials.run("clusters", "init", "found", "--write")
    assert written.returncode == 0, written.stderr
    path = Path(written.stdout.strip())
    partitions = yaml.safe_load(path.read_text())["partitions"]
    threads = {name: partition["threads_per_core"] for name, partition in partitions.items()}
    assert threads["main"] == threads["gpu"] == threads["all"] == 2
    assert threads["big"] == 1
    words = (*small_ppo("scheduling.model_worker.cpu=3"), f"actor.path={tiny_policy}")
    plans = [
        other_trials.run("plan", "ppo-math", "--cluster", cluster, "--account", "lab", *words)
        for cluster in ("found", "lab")  # the second says nothing of threads: Slurm is asked
    ]
    for planned in plans:
        assert planned.returncode == 0, planned.stderr
        assert "6 CPUs (3 cores)" in planned.stdout, planned.stdout
    much = ("actor.parallel=d4t1p1", "critic.parallel=d4t1p1", "--nodelist", "t1")
    refused = other_trials.run("plan", "ppo-math", *words, *much)
    assert "of 2 CPUs" in refused.stderr, refused.stdout
