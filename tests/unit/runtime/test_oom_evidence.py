"""What the kernel's counts prove of a SIGKILL."""

from __future__ import annotations

from pathlib import Path

import pytest

from realsys.runtime.oom_evidence import OomCounts, memory_fix, oom_evidence, read_oom_counts


def counts(
    cgroup: int | None = None, machine: int | None = None, limit: int | None = None
) -> OomCounts:
    return OomCounts(cgroup=cgroup, machine=machine, limit=limit)


@pytest.mark.parametrize(
    ("before", "after", "evidence"),
    [
        (counts(0, 5), counts(0, 5), ""),
        (counts(), counts(), ""),
        (counts(None, 5), counts(3, 5), ""),  # nobody knows how many there were before
        (
            counts(0, 5, 3460 << 20),
            counts(1, 6, 3460 << 20),
            "its cgroup's memory limit of 3460 MiB ran out (oom_kill 0 → 1)",
        ),
        (
            counts(2, 5),
            counts(3, 6),
            "its cgroup's memory limit ran out (oom_kill 2 → 3)",
        ),
        (counts(None, 5), counts(None, 7), "the node's memory ran out (oom_kill 5 → 7)"),
    ],
)
def test_the_evidence(before, after, evidence):
    assert oom_evidence(before, after) == evidence


def lay(root: Path, cgroup: str, files: dict[str, str]) -> None:
    files = {"proc/self/cgroup": cgroup, "proc/vmstat": "nr_free 1\noom_kill 4\n", **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_cgroups_of_version_2(tmp_path):
    folder = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0"
    lay(
        tmp_path,
        "0::/system.slice/slurmstepd.scope/job_7/step_0\n",
        {
            f"{folder}/memory.events": "low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\n",
            f"{folder}/memory.max": "1073741824\n",
        },
    )
    assert read_oom_counts(tmp_path) == counts(1, 4, 1073741824)


def test_cgroups_of_version_1(tmp_path):
    folder = "sys/fs/cgroup/memory/slurm/uid_0/job_7"
    lay(
        tmp_path,
        "9:cpuset:/\n4:memory:/slurm/uid_0/job_7\n1:name=systemd:/\n",
        {
            f"{folder}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            f"{folder}/memory.limit_in_bytes": "2147483648\n",
        },
    )
    assert read_oom_counts(tmp_path) == counts(2, 4, 2147483648)


# As `cat` shows them on a node with cgroup v1 and ConstrainRAMSpace: the task's own limit is "none".
UNLIMITED_V1 = "9223372036854771712\n"


def test_the_limit_of_a_leaf_without_one_is_its_jobs_in_version_1(tmp_path):
    job = "sys/fs/cgroup/memory/slurm_n1/uid_0/job_7"
    lay(
        tmp_path,
        "4:memory:/slurm_n1/uid_0/job_7/step_0/task_0\n",
        {
            f"{job}/step_0/task_0/memory.oom_control": "oom_kill_disable 0\noom_kill 1\n",
            f"{job}/step_0/task_0/memory.limit_in_bytes": UNLIMITED_V1,
            f"{job}/step_0/memory.limit_in_bytes": f"{4000 << 20}\n",
            f"{job}/memory.limit_in_bytes": f"{3460 << 20}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
        },
    )
    assert read_oom_counts(tmp_path) == counts(1, 4, 3460 << 20)


def test_the_limit_of_a_leaf_without_one_is_its_jobs_in_version_2(tmp_path):
    """Laid out as in Slurm's cgroup/v2 page. Not run on a real one: this machine has version 1."""
    job = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7"
    lay(
        tmp_path,
        "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
        {
            f"{job}/step_0/user/task_0/memory.events": "oom 1\noom_kill 1\noom_group_kill 0\n",
            f"{job}/step_0/user/task_0/memory.max": "max\n",
            f"{job}/step_0/user/memory.max": "max\n",
            f"{job}/step_0/memory.max": "max\n",
            f"{job}/memory.max": f"{3460 << 20}\n",
        },
    )
    assert read_oom_counts(tmp_path) == counts(1, 4, 3460 << 20)


def test_no_limit_at_all_is_no_number(tmp_path):
    leaf = "sys/fs/cgroup/memory/user"
    files = {f"{leaf}/memory.oom_control": "oom_kill 0\n"}
    lay(tmp_path, "4:memory:/user\n", {**files, f"{leaf}/memory.limit_in_bytes": UNLIMITED_V1})
    assert read_oom_counts(tmp_path) == counts(0, 4, None)


def test_what_to_do_names_the_setting_that_holds():
    limit = oom_evidence(counts(0, 0, 3460 << 20), counts(1, 1, 3460 << 20))
    told = memory_fix(f"srun: … ({limit})", "model_worker", on_slurm=True)
    assert "scheduling.model_worker.mem=" in told
    assert "scheduling" not in memory_fix(limit, "model_worker", on_slurm=False)
    machine = oom_evidence(counts(None, 0), counts(None, 1))
    assert "scheduling.rollout_worker.mem=" in memory_fix(machine, "rollout_worker", on_slurm=True)
    assert memory_fix("srun: Killed", "model_worker", on_slurm=True) == ""


def test_a_kernel_that_says_nothing(tmp_path):
    assert read_oom_counts(tmp_path) == counts()


def test_this_kernel():
    counted = "\noom_kill " in Path("/proc/vmstat").read_text()
    assert (read_oom_counts().machine is not None) == counted
