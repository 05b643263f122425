"""Batch scripts and srun commands, compared whole with recorded ones (tests/unit/golden).

A changed script is looked at: run ``python tests/unit/launcher/slurm/test_slurm_script.py`` to write them
anew, and read the difference.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import golden
import pytest

from experiments.ppo_math import ppo_math
from launcher.job.entry_command import SUPERVISOR, entry_command
from launcher.job.job_allocation import JobRequest
from launcher.plan.resolve import resolve
from launcher.slurm.plan_lines import plan_lines
from launcher.slurm.script import (
    comment,
    render_script,
    sbatch_argv,
    submissions,
)
from realsys.api.cluster import ClusterSpec, ContainerSpec, PartitionSpec, SlurmSpec
from realsys.api.plan import LaunchPlan, StepPlan
from realsys.api.scheduling import WorkerType
from realsys.config.overrides import with_settings
from realsys.slurm.step_command import hosts, srun_argv, step_environment

GOLDEN = Path(__file__).parents[2] / "golden"
NOW = datetime(2026, 11, 21, 12, 0)
GPU = PartitionSpec(
    nodes=8, cpus=64, threads_per_core=1, memory_mib=1_000_000, gpus=8, gpu_type="h200"
)
CPU = PartitionSpec(nodes=8, cpus=32, threads_per_core=1, memory_mib=200_000)
SITE = ClusterSpec(
    name="site",
    scheduler="slurm",
    file_root="/shared/runs",
    name_resolve="file:///shared/runs/name_resolve",
    partitions={"gpu": GPU, "cpu": CPU},
    slurm=SlurmSpec(partition="gpu", account="lab", time_limit="2:00:00"),
)
PYXIS = replace(
    SITE,
    cpu_image="/images/cpu.sqsh",
    gpu_image="nvcr.io#nvidia/pytorch:25.05-py3",
    container=ContainerSpec(runtime="pyxis", mounts=("/data:/data:ro",), workdir="/work"),
)
APPTAINER = replace(
    PYXIS,
    gpu_image="/images/gpu.sif",
    cpu_image="/images/cpu.sif",
    container=ContainerSpec(runtime="apptainer", mounts=("/data:/data:ro",)),
)
MODULES = replace(
    SITE,
    modules=("cuda/12.9", "python"),
    venv="/shared/venvs/realsys",
    setup=("ulimit -n 65536", "export NCCL_IB_HCA=mlx5"),
    secrets=("WANDB_API_KEY",),
    slurm=replace(SITE.slurm, requeue=True, extra_sbatch={"mail_type": "FAIL"}),
)


def plan_of(
    cluster: ClusterSpec,
    *words: str,
    **request: object,
) -> LaunchPlan:
    """ppo-math on two GPUs of one node, with what is given."""
    settings = (
        "actor.path=/models/start",
        "actor.parallel=d2t1p1",
        "scheduling.model_worker.gpu=1",
        "train_bs_n_seqs=64",
    )
    last = {word.partition("=")[0]: word for word in (*settings, *words)}
    experiment = with_settings(ppo_math, words=tuple(last.values()))
    # The files of the experiment are not there: its own checks are another test's matter.
    unchecked = {"problems": lambda self: (), "remarks": lambda self, given: ()}
    experiment = type("Unchecked", (type(experiment),), unchecked)(
        **{name: getattr(experiment, name) for name in experiment.__dataclass_fields__}
    )
    return resolve(
        "ppo-math",
        experiment,
        cluster=cluster,
        trial_name="run1",
        user="ada",
        request=JobRequest(**request),  # type: ignore[arg-type]
        now=NOW,
        snapshot=True,
        revision="9fceb02d0ae5+",
    )


def text_of(plan: LaunchPlan) -> str:
    """Scripts and steps as `realsys plan` shows them, with a fixed interpreter."""
    shown = "\n".join(plan_lines(plan, "c0ffee"))
    return shown.replace(sys.executable, "/venv/bin/python") + "\n"


MASTER_ON_CPU = ("scheduling.master_worker.partition=cpu", "scheduling.master_worker.mem=4096")
CASES = {
    "single": lambda: plan_of(SITE),
    "modules_requeue": lambda: plan_of(MODULES, begin="tomorrow08:00", dependency="afterok:77"),
    "pyxis": lambda: plan_of(PYXIS),
    "apptainer": lambda: plan_of(APPTAINER),
    "het": lambda: plan_of(SITE, *MASTER_ON_CPU),
    "split": lambda: plan_of(SITE, *MASTER_ON_CPU, layout="split"),
    "shared_gpu": lambda: plan_of(SITE, "actor.parallel=d1t1p1", "scheduling.model_worker.gpu=0.5"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_submitted_is_as_recorded(case):
    assert text_of(CASES[case]()) == (GOLDEN / f"{case}.txt").read_text(encoding="utf-8")


def test_one_step_a_worker_type_whatever_the_number_of_tasks():
    plan = plan_of(SITE, "actor.parallel=d64t1p1", "train_bs_n_seqs=256")
    (phase,) = plan.phases
    assert [(s.worker_type, s.num_tasks) for s in phase.steps] == [
        (WorkerType.MODEL_WORKER, 64),
        (WorkerType.MASTER_WORKER, 1),
    ]


def test_a_large_job_has_a_small_script():
    big = replace(SITE, partitions={"gpu": replace(GPU, nodes=1000), "cpu": CPU})
    words = [
        "actor.parallel=d4999t1p1",
        "train_bs_n_seqs=19996",
        "task.train_size=40000",
        "scheduling.model_worker.cpu=7",
    ]
    plan = plan_of(big, *words)
    assert plan.job is not None
    assert plan.job.components[0].nodes == 625
    script = render_script(plan, attempt=1, command="true")
    assert len(script.encode()) < 2048


def test_no_environment_and_no_secret_stands_in_the_script(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-value")
    text = text_of(plan_of(MODULES))
    assert "secret-value" not in text
    assert "WANDB_API_KEY" not in text


@pytest.mark.parametrize("root", ["/a b/it's", '/quo"te', "/per%cent", "/new\nline", "/$HOME `id`"])
def test_odd_paths_are_quoted_for_the_shell_and_for_slurm(root):
    plan = plan_of(replace(SITE, file_root=root))
    folder = Path(plan.trial_dir) / "submitit"
    command = entry_command("/venv/bin/python", SUPERVISOR, Path(plan.trial_dir), "c0ffee")
    script = render_script(plan, attempt=1, command=command)
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert not any("new" in line or "it's" in line for line in options)  # paths are no options
    (last,) = [part for part in [shlex.split(script[script.index("exec ") :])] if part]
    assert last[-2:] == [plan.trial_dir, "c0ffee"]
    argv = sbatch_argv(folder, "x.sh")
    assert argv[1] == "--parsable"
    assert argv[4] == f"--chdir={folder}"
    assert argv[2] == f"--output={str(folder).replace('%', '%%')}/%j_0_log.out"


def test_the_comment_names_trial_attempt_and_revision():
    golden.check(comment(plan_of(SITE), 3))


def test_a_split_trial_is_several_jobs_and_every_other_one_is_one():
    split, het = CASES["split"]().job, CASES["het"]().job
    assert split is not None
    assert het is not None
    assert submissions(split) == [[0], [1]]
    assert submissions(het) == [[0, 1]]


def test_task_i_runs_on_line_i_of_the_host_file():
    step = StepPlan(
        worker_type=WorkerType.MODEL_WORKER,
        nodes=((2, 2), (1, 0), (1, 1)),
        cpus_per_task=1,
        memory_mib=1,
    )
    assert hosts(step, ["a", "b", "c", "d", "e"]) == ["a", "a", "b", "b", "d"]
    assert (step.num_nodes, step.num_tasks) == (3, 5)


def test_what_srun_would_take_as_options_of_the_step_is_not_passed_on():
    batch = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_CONF": "/c",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n3",
        "SLURM_NTASKS": "2",
        "SLURM_GPUS_PER_NODE": "4",
        "SLURM_CPUS_PER_TASK": "16",
        "SLURM_MEM_PER_NODE": "100",
        "SLURM_EXPORT_ENV": "NIL",
        "SRUN_CPUS_PER_TASK": "16",
        "SBATCH_X": "1",
    }
    kept = step_environment(batch)
    assert sorted(kept) == [
        "PATH",
        "SLURM_CONF",
        "SLURM_JOB_ID",
        "SLURM_JOB_NODELIST",
        "SLURM_JOB_NODELIST_HET_GROUP_1",
    ]


def test_slurms_own_gpu_binding_names_no_type():
    """With a type, 22.05 gives no GPU at all to nodes with two tasks of the step."""
    plan = plan_of(replace(SITE, slurm=replace(SITE.slurm, gpu_binding="per_task")))
    (phase,) = plan.phases
    step = phase.steps[0]
    argv = srun_argv(plan, phase, step, plan_hash="h", attempt=1, python="python")
    assert "--gpus-per-task=1" in argv
    assert not any(word.startswith("--gres") for word in argv)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, make in CASES.items():
        (GOLDEN / f"{name}.txt").write_text(text_of(make()), encoding="utf-8")
