"""What the kernel's counts prove of a SIGKILL."""

from __future__ import annotations

from pathlib import Path

import pytest

from realsys.worker.oom_evidence import OomCounts, oom_evidence, read_oom_counts


def counts(cgroup: int | None = None, machine: int | None = None, limit: str = "") -> OomCounts:
    return OomCounts(cgroup=cgroup, machine=machine, limit=limit)


@pytest.mark.parametrize(
    ("before", "after", "evidence"),
    [
        (counts(0, 5), counts(0, 5), ""),
        (counts(), counts(), ""),
        (counts(None, 5), counts(3, 5), ""),  # nobody knows how many there were before
        (
            counts(0, 5, str(60 << 30)),
            counts(1, 6, str(60 << 30)),
            "its cgroup's memory limit of 60.0 GiB ran out (oom_kill 0 → 1)",
        ),
        (
            counts(2, 5, "max"),
            counts(3, 6, "max"),
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
    assert read_oom_counts(tmp_path) == counts(1, 4, "1073741824")


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
    assert read_oom_counts(tmp_path) == counts(2, 4, "2147483648")


def test_a_kernel_that_says_nothing(tmp_path):
    assert read_oom_counts(tmp_path) == counts()


def test_this_kernel():
    counted = "\noom_kill " in Path("/proc/vmstat").read_text()
    assert (read_oom_counts().machine is not None) == counted
