"""The control plane alone, as `pip install realsys` leaves it on a login node: no torch, no checkout.

A wheel made from this tree, in a virtual environment of its own with its packages from an index; it plans,
launches and watches a trial on the Slurm of the tests, whose nodes compute in the Python of the tests: the
site file names that as ``venv``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from real_trials import SMALL_PPO, metrics_of
from slurm_trials import SlurmTrials

ROOT = Path(__file__).parents[2]
PACKAGES = ("realsys", "launcher", "experiments", "cluster_specs")
FILES = ("pyproject.toml", "README.md", "LICENSE", "THIRD_PARTY_NOTICES.md")


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The virtual environment that holds the wheel and nothing of [train]."""
    folder = tmp_path_factory.mktemp("slim")
    source, wheels = folder / "source", folder / "wheels"
    for name in PACKAGES:  # a copy: a build leaves folders behind
        leave_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=leave_out)
    for name in FILES:
        shutil.copy(ROOT / name, source)
    made = folder / "venv"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    call([sys.executable, "-m", "venv", "--without-pip", str(made)])
    here = ("--no-deps", "--no-build-isolation")  # torch brings a setuptools that is new enough
    call([*pip, "wheel", *here, "--wheel-dir", str(wheels), str(source)])
    (wheel,) = wheels.glob("realsys-*.whl")
    locked = folder / "locked.txt"
    locked.write_bytes(subprocess.check_output([ROOT / "locks" / "select", "realsys"]))
    lazily = ("--no-compile", "--no-deps")  # most of it is never imported; all of it is in the lock
    for what in (("-r", str(locked)), (str(wheel),)):
        call([*pip, "--python", str(made), "install", *lazily, *what])
    return made


def call(argv: Sequence[str]) -> None:
    """Runs a command; fails with what it printed."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_login_node_without_torch_plans_launches_and_watches(
    slim: Path, slurm_trials: SlurmTrials, tiny_policy: Path, tmp_path: Path
) -> None:
    """The nodes run the copied code of the wheel in their own Python, and leave a whole trial."""
    surroundings = {k: v for k, v in slurm_trials.environment.items() if k != "PYTHONPATH"}

    def realsys(*words: str, status: int = 0) -> str:
        done = subprocess.run(
            [str(slim / "bin/realsys"), *words],
            env={**surroundings, "PYTHONDONTWRITEBYTECODE": ""},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    asked = "import importlib.util as u; print(*map(u.find_spec, ('torch', 'numpy', 'matplotlib')))"
    there = subprocess.run([slim / "bin/python", "-c", asked], capture_output=True, text=True)
    assert there.stdout.split() == ["None"] * 3
    assert "launch" in realsys("--help")
    words = (*SMALL_PPO, "exp_ctrl.benchmark_steps=2", f"actor.path={tiny_policy}")

    # Without a Python for the nodes nothing is submitted; what to do is said.
    assert "workers" in realsys("plan", "ppo-math", *words)
    refused = realsys("launch", "ppo-math", "--detach", *words, status=4)
    assert "torch and transformers" in refused
    assert "pip install 'realsys[train]'" in refused
    assert "venv" in refused
    assert not list(slurm_trials.file_root.glob("runs/*/*/*"))

    slurm_trials.write_spec(venv=sys.prefix)
    planned = realsys("plan", "ppo-math", *words)
    assert f"{sys.prefix}/bin/python" in planned
    realsys("launch", "ppo-math", "--trial", "a", "--detach", *words)
    realsys("wait", "ppo-math/a")
    status = json.loads(realsys("status", "ppo-math/a", "--json"))["trial"]
    assert status["state"] == "completed"
    files = slurm_trials.files("ppo-math", "a")
    assert status["step"] == metrics_of(files)[-1]["step"] == 2
    assert (files.code / "realsys/worker/main.py").exists()
    assert "pip install 'realsys[report]'" in realsys(
        "graph", "ppo-math", "--out", "x.png", status=4
    )
    realsys("report", "ppo-math/a")
    assert "pip install &#x27;realsys[report]&#x27;" in (files.root / "report.html").read_text()
