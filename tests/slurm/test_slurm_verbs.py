"""Sweeps, site files, the doctor and a shell beside a worker, on the real Slurm."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

import yaml
from real_trials import LONG_PPO, SMALL_PPO
from slurm_cluster import SlurmCluster
from slurm_trials import SlurmTrials

from launcher.trials.status import trial_view
from realsys.trial.trial_state import State


def test_a_sweep_is_one_array_and_one_table(
    slurm: SlurmCluster, slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    words = [*SMALL_PPO, "exp_ctrl.benchmark_steps=1", f"actor.path={tiny_policy}"]
    sweep = ["algorithm.loss.eps_clip=0.1,0.2", "seed=1"]
    done = slurm_trials.run("launch", "ppo-math", "--sweep", "--trial", "s", *words, *sweep)
    assert done.returncode == 0, done.stderr
    trials = [slurm_trials.files("ppo-math", f"s-{i}") for i in range(2)]
    jobs = [trial_view(files).job_ids[0] for files in trials]
    (array,) = {job.partition("_")[0] for job in jobs}
    assert jobs == [f"{array}_{i}" for i in range(2)]
    for files in trials:
        assert slurm_trials.wait(files, timeout_s=180).state is State.COMPLETED
    table = slurm_trials.run("status", "ppo-math/s")
    assert table.returncode == 0, table.stderr
    assert table.stdout.count("completed") == 2
    assert "0.2" in table.stdout


def test_a_site_file_is_written_from_what_slurm_says_and_can_be_launched_on(
    slurm: SlurmCluster, slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    written = slurm_trials.run("clusters", "init", "found", "--write")
    assert written.returncode == 0, written.stderr
    spec = yaml.safe_load(Path(written.stdout.strip()).read_text())
    assert spec["scheduler"] == "slurm"
    main = spec["partitions"]["main"]
    assert (main["nodes"], main["cpus"], main["gpus"], main["gpu_type"]) == (4, 64, 8, "h200")
    assert main["nodelist"] == "n[1-4]"
    again = slurm_trials.run("clusters", "init", "found", "--write")
    assert again.returncode != 0  # never overwritten
    words = [*SMALL_PPO, f"actor.path={tiny_policy}"]
    assert slurm_trials.run("plan", "ppo-math", "--cluster", "found", *words).returncode == 0


def test_the_doctor_looks_at_a_compute_node(slurm_trials: SlurmTrials) -> None:
    done = slurm_trials.run("doctor", "--json", timeout_s=120)
    findings = {f["name"]: f for f in json.loads(done.stdout)["findings"]}
    assert all(f["fix"] for f in findings.values() if f["ok"] is not True)
    words = " ".join(f["what"] for f in findings.values())
    assert "22.05" in words
    broken = [name for name, f in findings.items() if f["ok"] is False]
    assert broken == [], done.stdout


def test_the_doctor_names_a_partition_that_slurm_does_not_have(slurm_trials: SlurmTrials) -> None:
    node = {"cpus": 64, "memory_mib": 1000}
    slurm_trials.write_spec(partitions={"gone": node}, slurm={"partition": "gone"})
    done = slurm_trials.run("doctor", "--json", timeout_s=120)
    assert done.returncode == 1
    findings = json.loads(done.stdout)["findings"]
    assert any(f["ok"] is False and "gone" in f["what"] for f in findings), done.stdout


def test_a_command_beside_a_worker_and_logs_since_a_moment(
    slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    words = [*LONG_PPO, f"actor.path={tiny_policy}", "--nodelist", "n2"]
    files = slurm_trials.launch("ppo-math", "l", *words)
    slurm_trials.wait_for_step(files, 2)
    beside = slurm_trials.run("exec", "ppo-math/l", "model_worker/0", "--", "hostname")
    assert beside.stdout.strip() == "n2", beside.stderr
    unknown = slurm_trials.run("exec", "ppo-math/l", "model_worker/7", "--", "hostname")
    assert "model_worker/7 is not registered" in unknown.stderr
    time.sleep(1.0)  # stamps have whole seconds
    moment = datetime.now().isoformat(timespec="seconds")
    seen = trial_view(files).step or 0
    slurm_trials.wait_for_step(files, seen + 2)
    everything = slurm_trials.run("logs", "ppo-math/l").stdout
    recent = slurm_trials.run("logs", "ppo-math/l", "--since", moment).stdout
    assert "srun-model_worker " in everything
    assert "phase started" in everything
    assert "phase started" not in recent
    assert "step done" in recent
    told = slurm_trials.run("logs", "ppo-math/l", "--first-error")
    assert "log of ppo-math/l" in told.stderr
