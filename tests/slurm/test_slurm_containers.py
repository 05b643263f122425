"""Images, mounts and their environment through the real srun, with a stand-in for pyxis."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from real_trials import LONG_PPO, SMALL_PPO, explain
from slurm_trials import SlurmTrials

from launcher.trials.status import trial_view
from realsys.trial.trial_state import State


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An unpacked image: empty folders into which the fixture's plug-in mounts this machine."""
    root = tmp_path / "image"
    for name in ("bin", "lib", "lib64", "usr", "etc", "root", "tmp", "dev", "proc", "sys", "opt"):
        (root / name).mkdir(parents=True)
    return root


def mounts(*more: str) -> list[str]:
    """This machine's programs, this checkout and the interpreter, inside at their own places."""
    prefixes = {sys.prefix, sys.base_prefix, str(Path(__file__).parents[2])}
    places = ["/bin", "/lib", "/lib64", "/usr", "/etc", *sorted(prefixes)]
    kept = [p for p in places if os.path.isdir(p) and not p.startswith("/usr/")]
    return [*(f"{place}:{place}:ro" for place in kept), *more]


def test_workers_run_inside_their_image_and_see_their_mounts(
    slurm_trials: SlurmTrials, tiny_policy: Path, image: Path, tmp_path: Path
) -> None:
    data = tmp_path / "shared data"
    data.mkdir()
    slurm_trials.write_spec(
        cpu_image=str(image),
        gpu_image=str(image),
        container={
            "runtime": "pyxis",
            "mounts": mounts(f"{tiny_policy}:{tiny_policy}:ro"),
            "python": sys.executable,
            "writable": True,  # torch wants a temporary folder
        },
    )
    words = [*SMALL_PPO, "exp_ctrl.benchmark_steps=2", f"actor.path={tiny_policy}", "--no-snapshot"]
    files = slurm_trials.launch("ppo-math", "c", *words)
    view = slurm_trials.wait(files, timeout_s=120)
    assert view.state is State.COMPLETED, explain(files, view)
    steps = [json.loads(line)["argv"] for line in files.attempt(1).steps.read_text().splitlines()]
    for argv in steps:
        assert f"--container-image={image}" in argv
        assert any(word.startswith("--container-mounts=") for word in argv)
    (script,) = files.submitit.glob("*_submission.sh")
    assert "container" not in script.read_text()  # it would put the batch script into the image


def test_an_image_that_is_not_there_is_told_before_anything(
    slurm_trials: SlurmTrials, tiny_policy: Path
) -> None:
    slurm_trials.write_spec(cpu_image="/nowhere/x.sqsh", container={"runtime": "pyxis"})
    words = ["ppo-math", *SMALL_PPO, f"actor.path={tiny_policy}"]
    assert slurm_trials.run("plan", *words).returncode == 0  # which may be made on a laptop
    done = slurm_trials.run("launch", *words)
    assert done.returncode == 4
    assert "the image /nowhere/x.sqsh" in done.stderr
    assert not list(slurm_trials.file_root.glob("runs/*/*/*"))


def test_a_worker_in_an_image_knows_it(
    slurm_trials: SlurmTrials, tiny_policy: Path, image: Path
) -> None:
    slurm_trials.write_spec(
        cpu_image=str(image),
        container={
            "runtime": "pyxis",
            "mounts": mounts(f"{tiny_policy}:{tiny_policy}:ro"),
            "python": sys.executable,
            "writable": True,  # torch wants a temporary folder
        },
        env_vars={"SITE_SAYS": "inside too"},
    )
    words = [*LONG_PPO, f"actor.path={tiny_policy}", "--no-snapshot"]
    files = slurm_trials.launch("ppo-math", "c", *words)
    view = slurm_trials.wait_for_step(files, 1)
    (pid,) = [w.pid for w in view.workers if w.worker == "model_worker/0"]
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert f"REALSYS_TEST_CONTAINER_IMAGE={image}".encode() in environ
    assert b"SITE_SAYS=inside too" in environ
    inside = slurm_trials.run(
        "exec", "ppo-math/c", "model_worker/0", "--", "ls", "-d", "/opt", "/home"
    )
    assert "/opt" in inside.stdout
    assert "cannot access '/home'" in inside.stderr
    assert slurm_trials.run("stop", "ppo-math/c").returncode == 0
    assert trial_view(files).state is State.STOPPED
