"""Layouts on the real Slurm, and what was asked for asked back from it.

A job for each group (split) that completes is in test_slurm_other_site.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_trials import LONG_PPO, SMALL_PPO, explain
from slurm_cluster import SlurmCluster
from slurm_trials import SlurmTrials

from launcher.trials.status import trial_view
from realsys.api.plan import read_plan
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

SHORT = (*SMALL_PPO, "exp_ctrl.benchmark_steps=2")
TWO = "actor.parallel=d2t1p1"


@pytest.fixture
def completed(slurm_trials: SlurmTrials, tiny_policy: Path) -> Callable[..., TrialFiles]:
    """Runs two steps to the end."""

    def run(name: str, *words: str) -> TrialFiles:
        path = f"actor.path={tiny_policy}"
        files = slurm_trials.launch("ppo-math", name, *SHORT, path, *words)
        view = slurm_trials.wait(files, timeout_s=180)
        assert view.state is State.COMPLETED, explain(files, view)
        return files

    return run


def workers(files: TrialFiles) -> dict[str, Any]:
    """How each worker ended: host and return code."""
    return {
        record["worker"]: record
        for path in files.attempt(1).exits.glob("*.json")
        for record in [json.loads(path.read_text())]
    }


def devices(files: TrialFiles, worker: str) -> str:
    """CUDA_VISIBLE_DEVICES as the reward function of the test has printed it."""
    text = files.attempt(1).log(worker).read_text()
    found = re.findall(r"devices of (\S+) = (\S*)", text)
    assert found, text
    return str(found[0][1])


SPY = """
import os
from realsys.api.registry import register_reward

print("devices of", os.environ.get("SLURM_PROCID"), "=", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)

def fixed(*args, **kwargs):
    return 1.0

register_reward("spy", fixed)
"""


def spy(folder: Path) -> tuple[str, ...]:
    """Words of a launch whose workers print their devices."""
    file = folder / "spy.py"
    file.write_text(SPY)
    return ("--import", str(file), "task.reward=spy")


def test_a_part_of_one_node_and_nothing_more_is_asked_for_and_each_task_sees_its_own_gpu(
    slurm: SlurmCluster, completed: Callable[..., TrialFiles], tmp_path: Path
) -> None:
    resources = ("scheduling.model_worker.gpu=1", "scheduling.model_worker.mem=5000")
    files = completed("part", TWO, *resources, *spy(tmp_path))
    (job_id,) = trial_view(files).job_ids
    job = slurm.show_job(job_id)
    # 2 × 1 CPU and the master's own; 2 × 5,000 MiB, the master's 2,048, the supervisor's 512; two GPUs
    assert job["NumNodes"] == "1"
    assert job["TRES"].startswith("cpu=3,mem=12560M,node=1")
    assert job["TresPerNode"] == "gres:gpu:h200:2"
    assert {w["host"] for w in workers(files).values()} == {job["NodeList"]}
    assert [devices(files, f"model_worker/{i}") for i in range(2)] == ["0", "1"]
    assert devices(files, "master_worker/0") == ""  # a CPU task on a GPU node


def test_slurms_own_binding_where_nodes_are_excluded(
    completed: Callable[..., TrialFiles], slurm_trials: SlurmTrials, tmp_path: Path
) -> None:
    slurm_trials.write_spec(slurm={"gpu_binding": "per_task"})
    words = ("scheduling.model_worker.gpu=1", "--exclude", "n[1-3]")
    files = completed("bound", TWO, *words, *spy(tmp_path))
    assert [devices(files, f"model_worker/{i}") for i in range(2)] == ["0", "1"]
    assert {w["host"] for w in workers(files).values()} == {"n4"}


def test_groups_that_want_different_nodes_become_one_heterogeneous_job(
    slurm: SlurmCluster, completed: Callable[..., TrialFiles]
) -> None:
    files = completed(
        "het",
        TWO,
        "scheduling.master_worker.nodelist=n3",
        "scheduling.model_worker.constraint=n1|n2",
        "scheduling.model_worker.mem=600000",
    )
    plan = read_plan(files.plan)
    assert plan.job is not None
    assert plan.job.layout == "het"
    hosts = {name: record["host"] for name, record in workers(files).items()}
    assert hosts["master_worker/0"] == "n3"
    assert {hosts["model_worker/0"], hosts["model_worker/1"]} == {"n1", "n2"}


def test_a_job_of_a_split_trial_that_never_starts_releases_the_others(
    slurm: SlurmCluster, slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    slurm_trials.write_spec(slurm={"rendezvous_seconds": 8})
    blocker = slurm.submit("--nodelist=n4", "--exclusive", command="sleep 300")
    slurm.wait_for_job(blocker, "RUNNING")
    words = [*LONG_PPO, f"actor.path={tiny_policy}", "--layout", "split"]
    files = slurm_trials.launch("ppo-math", "r", *words, TWO, "scheduling.model_worker.nodelist=n4")
    view = slurm_trials.wait(files, timeout_s=180)
    assert view.state is State.FAILED
    assert view.job_ids[1] in view.reason
    assert "model_worker" in view.reason
    for job_id in view.job_ids:
        slurm.wait_for_job(int(job_id), "COMPLETED", "FAILED", "CANCELLED", timeout_s=60)


def test_options_reach_slurm_as_they_were_meant(
    slurm: SlurmCluster, slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    words = [*LONG_PPO, f"actor.path={tiny_policy}", "actor.parallel=d2t1p1"]
    options = (
        *("--nodelist", "n[2-3]", "--exclude", "n4", "--constraint", "n2|n3", "--time", "1:00:00"),
        *("--begin", "2099-01-01T10:00", "--deadline", "2099-01-02", "--qos", "spot"),
        *("--requeue", "scheduling.model_worker.mem=600000"),
    )
    files = slurm_trials.launch("ppo-math", "o", *words, *options)
    (job_id,) = trial_view(files).job_ids
    job = slurm.show_job(job_id)
    expected = {
        "JobName": "ppo-math-o",
        "Partition": "main",
        "NumNodes": "2-2",  # while it waits
        "ReqNodeList": "n[2-3]",
        "ExcNodeList": "n4",
        "Features": "n2|n3",
        "TimeLimit": "01:00:00",
        "EligibleTime": "2099-01-01T10:00:00",
        "Deadline": "2099-01-02T00:00:00",
        "QOS": "spot",
        "Requeue": "1",
    }
    assert {name: job.get(name) for name in expected} == expected
    assert job["Comment"].startswith("realsys ppo-math/o")
