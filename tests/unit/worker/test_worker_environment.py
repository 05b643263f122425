"""What a worker's environment holds, and that secrets travel by a 0600 file only."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import golden
import pytest

from realsys.api.cluster import ClusterSpec
from realsys.api.errors import TrialError
from realsys.api.plan import LaunchPlan
from realsys.trial.records import TrialFiles
from realsys.worker.environment import (
    read_exports,
    task_environment,
    worker_environment,
    write_exports,
)

WEIRD = {
    "PLAIN": "x",
    "SPACES": "a b  c",
    "QUOTES": 'it\'s "so"',
    "LINES": "one\ntwo\n",
    "DOLLAR": "$HOME `id` \\ #",
    "EQUALS": "a=b=c",
    "EMPTY": "",
    "UNICODE": "größer ≤",
}


def plan(root: Path, **cluster: object) -> LaunchPlan:
    return LaunchPlan(
        experiment_name="e",
        trial_name="t",
        user="u",
        trial_dir=str(root),
        cluster=ClusterSpec(file_root=str(root), **cluster),  # type: ignore[arg-type]
        phases=(),
    )


def test_what_is_written_is_read_back_and_a_shell_reads_the_same(tmp_path):
    path = tmp_path / "folder with 'quote'" / "task.env"
    path.parent.mkdir()
    write_exports(path, WEIRD)
    assert read_exports(path) == WEIRD
    script = f'. "$1"; for n in {" ".join(WEIRD)}; do printf "%s\\0" "${{!n}}"; done'
    shell = subprocess.run(
        ["bash", "-c", script, "bash", str(path)], capture_output=True, text=True, check=True
    )
    assert shell.stdout.split("\0")[:-1] == list(WEIRD.values())


def test_the_file_is_its_owners_alone(tmp_path):
    path = tmp_path / "task.env"
    path.touch(mode=0o644)
    path.unlink()
    write_exports(path, {"SECRET": "s"})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_file_means_nothing_and_a_damaged_one_is_told(tmp_path):
    assert read_exports(tmp_path / "none") == {}
    (tmp_path / "torn").write_text("export A='x")
    with golden.raises(TrialError):
        read_exports(tmp_path / "torn")


def test_defaults_give_way_to_the_user_and_the_site_wins(tmp_path):
    made = worker_environment(
        plan(tmp_path, env_vars={"NCCL_DEBUG": "WARN"}),
        {"GOMP_SPINCOUNT": "7", "NCCL_DEBUG": "INFO"},
        "master_worker",
    )
    assert made["GOMP_SPINCOUNT"] == "7"
    assert made["NCCL_DEBUG"] == "WARN"
    assert made["HF_HUB_OFFLINE"] == "1"
    assert made["REALSYS_TRIAL_DIR"] == str(tmp_path)


@pytest.mark.parametrize("worker_type", ["model_worker", "generation_server", "evaluator"])
def test_those_who_compute_keep_memory_in_large_pages(tmp_path, worker_type):
    made = worker_environment(plan(tmp_path), {"MALLOC_TRIM_THRESHOLD_": "0"}, worker_type)
    assert made["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert made["MALLOC_MMAP_THRESHOLD_"] == str(32 * 1024**2)
    assert made["MALLOC_TRIM_THRESHOLD_"] == "0"  # the user's own
    assert "GLIBC_TUNABLES" not in worker_environment(plan(tmp_path), {}, "rollout_worker")


@pytest.mark.parametrize(
    ("vendor", "mode"), [("GenuineIntel", "AUTO,STRICT"), ("AuthenticAMD", None)]
)
def test_on_intel_sums_do_not_depend_on_company(tmp_path, monkeypatch, vendor, mode):
    found = f"processor: 0\nvendor_id: {vendor}\n\nprocessor: 1\nvendor_id: {vendor}\n"
    read = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, **how: found if str(path) == "/proc/cpuinfo" else read(path, **how),
    )
    made = worker_environment(plan(tmp_path), {}, "model_worker")
    assert made.get("MKL_CBWR") == mode
    assert worker_environment(plan(tmp_path), {}, "rollout_worker").get("MKL_CBWR") is None
    if mode:
        own = worker_environment(plan(tmp_path), {"MKL_CBWR": "AVX2"}, "model_worker")
        assert own["MKL_CBWR"] == "AVX2"


def test_a_task_gets_the_files_variables_over_those_of_its_image(tmp_path):
    files = TrialFiles(tmp_path)
    files.secrets.mkdir()
    write_exports(files.task_environment, {"WANDB_API_KEY": "secret", "HF_HOME": "/mine"})
    made = task_environment(
        plan(tmp_path), {"HF_HOME": "/image", "PATH": "/image/bin"}, "master_worker"
    )
    assert made["WANDB_API_KEY"] == "secret"
    assert made["HF_HOME"] == "/mine"
    assert made["PATH"] == "/image/bin"
