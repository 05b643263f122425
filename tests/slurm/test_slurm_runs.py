"""A trial on a real Slurm, end to end: the same numbers as on one machine, and as planned."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import stat
from pathlib import Path

import pytest
from real_trials import (
    LONG_PPO,
    SMALL_PPO,
    Trials,
    metrics_of,
    trained_ids,
    weights_of,
)
from slurm_trials import SlurmTrials
from told import row

from launcher.trials.status import trial_view
from realsys.api.plan import read_plan
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

SECRET = secrets.token_hex(16)  # not in any file of the checkout, which is copied


def option(script: str, name: str) -> str | None:
    """The value of an sbatch option in a script."""
    found = re.search(rf"^#SBATCH --{name}(?:=(.*))?$", script, re.MULTILINE)
    return None if found is None else (found[1] or "")


def script_of(files: TrialFiles) -> str:
    """What was submitted."""
    (path,) = files.submitit.glob("*_submission.sh")
    return path.read_text()


def test_ppo_on_two_nodes_with_two_tasks_each_is_bit_for_bit_the_local_run(
    slurm_trials: SlurmTrials, tiny_policy: Path, tmp_path: Path
) -> None:
    """With dataset, seed and topology equal; planned and submitted text compared byte for byte."""
    steps = 5  # a checkpoint after three, an evaluation after four
    words = (
        *SMALL_PPO,
        f"exp_ctrl.benchmark_steps={steps}",
        f"actor.path={tiny_policy}",
        "actor.parallel=d4t1p1",
        "scheduling.model_worker.mem=450000",  # two a node of 1,000,000 MiB
    )
    planned = slurm_trials.run("plan", "ppo-math", "--trial", "a", *words)
    assert planned.returncode == 0, planned.stderr
    files = slurm_trials.launch("ppo-math", "a", *words)
    view = slurm_trials.wait(files)
    row("it completes").check(view)
    assert view.step == steps

    plan = read_plan(files.plan)
    assert plan.job is not None
    (step,) = [s for s in plan.phases[-1].steps if s.worker_type == "model_worker"]
    assert (step.num_nodes, step.num_tasks) == (2, 4)
    exits = {p.stem: json.loads(p.read_text()) for p in files.attempt(1).exits.glob("*.json")}
    nodes = [exits[f"model_worker-{i}"]["host"] for i in range(4)]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]

    assert script_of(files) in planned.stdout  # what `plan` showed is what sbatch got,
    for line in files.attempt(1).steps.read_text().splitlines():  # and what srun got
        argv = json.loads(line)["argv"]
        shown = [x for x in planned.stdout.splitlines() if f"--job-name={argv_name(argv)}" in x]
        assert any(shlex.split(x) == argv for x in shown), argv

    local = Trials(tmp_path / "local")
    same = local.launch("ppo-math", "a", *words)
    local.wait(same)
    assert metrics_of(files) == metrics_of(same)
    assert trained_ids(files) == trained_ids(same)
    for role in ("actor", "critic"):
        assert weights_of(files, role) == weights_of(same, role)


def argv_name(argv: list[str]) -> str:
    (name,) = [word.partition("=")[2] for word in argv if word.startswith("--job-name=")]
    return name


def test_the_preparing_phase_runs_in_the_same_job(slurm_trials: SlurmTrials) -> None:
    """ppo-math without a policy: fine-tuning first, PPO after it, one job, steps of both phases."""
    words = ["sft.exp_ctrl.total_train_epochs=1", "sft.exp_ctrl.benchmark_steps=3"]
    files = slurm_trials.launch("ppo-math", "two", *SMALL_PPO, "exp_ctrl.benchmark_steps=2", *words)
    view = slurm_trials.wait(files, timeout_s=180)
    assert view.state is State.COMPLETED, view.reason
    steps = [json.loads(line) for line in files.attempt(1).steps.read_text().splitlines()]
    assert [(s["phase"], s["step"]) for s in steps] == [
        ("sft", "model_worker"),
        ("sft", "master_worker"),
        ("main", "model_worker"),
        ("main", "master_worker"),
    ]
    assert len(view.job_ids) == 1


def test_a_weird_path_goes_through_everything(slurm_trials: SlurmTrials, tiny_policy: Path) -> None:
    slurm_trials.file_root /= 'it\'s a "root" 100%/new\nline; echo $HOME #'
    slurm_trials.write_spec()
    words = [*SMALL_PPO, f"actor.path={tiny_policy}", "exp_ctrl.benchmark_steps=2"]
    files = slurm_trials.launch("ppo-math", "odd", *words)
    assert slurm_trials.wait(files).state is State.COMPLETED
    logs = slurm_trials.run("logs", "ppo-math/odd", "master_worker")
    assert "step done" in logs.stdout


def test_secrets_and_environment_reach_workers_and_stand_nowhere_else(
    slurm_trials: SlurmTrials, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    monkeypatch.setenv("UNRELATED", "not-for-jobs")
    monkeypatch.setenv("SBATCH_PARTITION", "small")  # sbatch would prefer it to the script
    slurm_trials.write_spec(secrets=["MY_TOKEN"], env_vars={"SITE_SAYS": "hello world"})
    words = [*LONG_PPO, f"actor.path={tiny_policy}"]
    files = slurm_trials.launch("ppo-math", "s", *words)
    view = slurm_trials.wait_for_step(files, 1)
    row("it runs").check(view)
    (pid,) = [w.pid for w in view.workers if w.worker == "model_worker/0"]
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert f"MY_TOKEN={SECRET}".encode() in environ
    assert b"SITE_SAYS=hello world" in environ
    assert not any(entry.startswith(b"UNRELATED=") for entry in environ)
    assert slurm_trials.cluster.show_job(view.job_ids[0])["Partition"] == "main"
    assert stat.S_IMODE(files.task_environment.stat().st_mode) == 0o600
    slurm_trials.run("stop", "ppo-math/s", "--grace", "5")
    holders = [
        str(path.relative_to(files.root))
        for path in files.root.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    assert holders == ["secrets/task.env"]


def test_a_queued_trial_runs_the_code_as_it_was_launched(
    slurm_trials: SlurmTrials, tiny_policy: Path, tmp_path: Path
) -> None:
    """An --import file is edited while the job waits: the run does not see it."""
    mine = tmp_path / "mine.py"
    mine.write_text(REWARD.format(value=1.0))
    words = [
        *SMALL_PPO,
        f"actor.path={tiny_policy}",
        "task.reward=fixed",
        "exp_ctrl.benchmark_steps=1",
    ]
    files = slurm_trials.launch(
        "ppo-math", "snap", "--import", str(mine), "--begin", "now+4", *words
    )
    mine.write_text(REWARD.format(value=0.0))
    view = slurm_trials.wait(files)
    assert view.state is State.COMPLETED, view.reason
    samples = [
        json.loads(line) for line in files.phase(files.root).samples.read_text().splitlines()
    ]
    assert {sample["correct"] for sample in samples} == {True}


REWARD = """
from realsys.api.registry import register_reward

def fixed(*args, **kwargs):
    return {value}

register_reward("fixed", fixed)
"""


def test_status_lists_all_trials_with_one_query(
    slurm_trials: SlurmTrials, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*SMALL_PPO, f"actor.path={tiny_policy}", "--begin", "now+1hour"]
    for name in ("x", "y"):
        slurm_trials.launch("ppo-math", name, *words)
    calls = tmp_path / "calls"
    counted = tmp_path / "bin"
    counted.mkdir()
    real = slurm_trials.cluster.run("sh", "-c", "command -v squeue").stdout.strip()
    (counted / "squeue").write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {real} "$@"\n')
    (counted / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{counted}:{os.environ['PATH']}")
    listed = slurm_trials.run("status")
    assert listed.stdout.count("queued") == 2
    assert calls.read_text().count("--noheader") == 1, calls.read_text()
    row("it may not begin yet").check(trial_view(slurm_trials.files("ppo-math", "x")))
