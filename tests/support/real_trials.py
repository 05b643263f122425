"""Real trials for the tests that start some: the command line, as a user types it, and what it leaves.

Under a file root of the test's own. Where the processes run is the tier's matter: on this machine
(tests/process) or on the nodes of a Slurm cluster (tests/slurm).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked

from launcher.trials.job_board import JobBoard
from launcher.trials.status import StatusReader
from launcher.trials.trial_view import TrialView
from realsys.observability.metrics import deterministic, read_metrics
from realsys.trial.liveness import processes_of
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

# A run of seconds: a tiny policy, six calls a step, a step of some 50 ms; long enough that a test
# which waits for a step has time to act before the last one.
SMALL_PPO = (
    "task.train_size=32",
    "task.eval_size=8",
    "train_bs_n_seqs=8",
    "group_size=2",
    "gen.max_new_tokens=12",
    "algorithm.ppo_n_minibatches=2",
    "exp_ctrl.total_train_epochs=2",
    "exp_ctrl.ckpt_freq_steps=3",
    "exp_ctrl.ckpt_freq_secs=none",
    "exp_ctrl.eval_freq_steps=4",
    "scheduling.model_worker.cpu=1",
)
SMALL_PPO_STEPS = 8
SLURM_AGE_S = 0.6  # of an answer of Slurm's that is looked at again: to ask costs more than to look


def small_ppo(*settings: str) -> tuple[str, ...]:
    """``SMALL_PPO`` with other values of settings that it has: ``name=value``."""
    values = dict(word.split("=", 1) for word in SMALL_PPO)
    others = dict(word.split("=", 1) for word in settings)
    assert others.keys() <= values.keys(), "SMALL_PPO does not say these: give them beside it"
    return tuple(f"{name}={value}" for name, value in {**values, **others}.items())


# The same for minutes, at a step a second: for tests that end it themselves.
LONG_PPO = (
    *small_ppo("exp_ctrl.total_train_epochs=1000"),
    *("--import", str(Path(__file__).with_name("unhurried_rule.py")), "task.reward=unhurried"),
)


def make_policy(
    folder: Path, *, num_layers: int = 2, num_heads: int = 2, num_kv_heads: int = 1, seed: int = 0
) -> Path:
    """A random policy of a few thousand weights with the demo's tokenizer, in ``folder``."""
    from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
    from realsys.models.from_scratch.tiny_llama import build_tiny_llama

    problems = arithmetic_word_problems(num_problems=500, seed=0, split="train")
    build_tiny_llama(
        folder,
        seed=seed,
        hidden_size=32,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        corpus=[p["prompt"] + p["answer"] for p in problems],
    )
    return folder


def files_under(folder: Path) -> Iterator[Path]:
    """All files, while others come and go with their folders: a run replaces its checkpoints."""
    for inner, _, names in os.walk(folder):
        yield from (Path(inner, name) for name in names)


@dataclass
class Trials:
    """Launches trials under a file root of the test's own; ends what is left of them."""

    file_root: Path

    @property
    def outside(self) -> dict[str, str]:
        """The environment that the tests run in, as far as commands get it."""
        return dict(os.environ)

    @property
    def environment(self) -> dict[str, str]:
        """Of every command: the test's file root, nothing of the user's."""
        return {
            **self.outside,
            **forked.environment(),
            "REALSYS_FILE_ROOT": str(self.file_root),
            "XDG_CONFIG_HOME": str(self.file_root / "config"),
            "XDG_STATE_HOME": str(self.file_root / "state"),
            "XDG_CACHE_HOME": str(self.file_root / "cache"),
            "COLUMNS": "200",
        }

    def run(self, *words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """The command line, as a user types it."""
        return subprocess.run(
            [sys.executable, "-m", "launcher.cli.entry", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def launch(self, experiment: str, name: str, *words: str) -> TrialFiles:
        """Starts a trial detached; fails with what the command said."""
        done = self.run("launch", experiment, "--trial", name, "--detach", *words)
        assert done.returncode == 0, done.stderr
        return self.files(experiment, name)

    def resume(self, files: TrialFiles) -> None:
        """Starts the next attempt, detached."""
        done = self.run("resume", name_of(files), "--detach")
        assert done.returncode == 0, done.stderr

    def files(self, experiment: str, name: str) -> TrialFiles:
        """The files of a trial."""
        (found,) = self.file_root.glob(f"runs/*/{experiment}/{name}")
        return TrialFiles(found)

    def status_json(self, files: TrialFiles) -> dict[str, Any]:
        """What ``status --json`` says."""
        done = self.run("status", name_of(files), "--json")
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def end_all(self) -> None:
        """Kills what is left on this machine of every trial."""
        for folder in self.file_root.glob("runs/*/*/*"):
            kill_everything(TrialFiles(folder))

    def wait(
        self, files: TrialFiles, *, timeout_s: float = 240, every_s: float = 0.15
    ) -> TrialView:
        """Until the trial is over and its processes are gone. It is looked at less often than for a step,
        which may pass: a look computes for milliseconds."""

        def is_over(view: TrialView) -> bool:
            return view.state not in State.live()

        return wait_until(files, is_over, timeout_s=timeout_s, every_s=every_s)

    def wait_for_step(self, files: TrialFiles, step: int, *, timeout_s: float = 240) -> TrialView:
        """Until the main phase has finished ``step`` steps; fails if it ends before."""

        def there(view: TrialView) -> bool:
            assert view.state in State.live(), explain(files, view)
            return view.phase == "main" and (view.step or 0) >= step

        return wait_until(files, there, timeout_s=timeout_s)


def wait_until(
    files: TrialFiles,
    condition: Callable[[TrialView], bool],
    *,
    timeout_s: float,
    every_s: float = 0.05,
) -> TrialView:
    """Looks as `realsys watch` does, with one reader; fails with the logs when the condition does not come
    true in time. Looking takes no more than a fifth of the time, however slow the machine."""
    deadline = time.monotonic() + timeout_s
    with closing(StatusReader(files, board=JobBoard(max_age_s=SLURM_AGE_S))) as reader:
        while True:
            began = time.monotonic()
            view = reader.view()
            if condition(view):
                return view
            assert time.monotonic() < deadline, explain(files, view)
            time.sleep(max(every_s, 4 * (time.monotonic() - began)))


def explain(files: TrialFiles, view: TrialView) -> str:
    """State and log tails, for a failing test."""
    logs = sorted(files.root.glob("latest/logs/*.log")) + sorted(files.submitit.glob("*_log.*"))
    tails = "\n".join(f"== {p.name}\n" + "\n".join(tail(p)) for p in logs)
    return f"{view.trial} is {view.state}: {view.reason}\n{tails}"


def tail(path: Path, lines: int = 25) -> list[str]:
    """The end of a text file."""
    return path.read_text(errors="replace").splitlines()[-lines:]


def name_of(files: TrialFiles) -> str:
    """``experiment/trial``."""
    return f"{files.root.parent.name}/{files.root.name}"


def metrics_of(files: TrialFiles) -> list[dict[str, object]]:
    """The metrics but for what a clock measured."""
    return [deterministic(row) for row in read_metrics(files.phase(files.root).metrics)]


def weights_of(files: TrialFiles, role: str) -> bytes:
    """The bytes of a role's saved weights."""
    folder = files.phase(files.root).checkpoints / role / "latest"
    return (folder / "model.safetensors").read_bytes()


def trained_ids(files: TrialFiles) -> list[str]:
    """Datapoints in the order in which they were trained."""
    lines = files.phase(files.root).ledger.read_text().splitlines()
    return [name for line in lines for name in json.loads(line)["ids"]]


def worker_pid(view: TrialView, worker: str) -> int:
    """Pid of a live worker."""
    (pid,) = [w.pid for w in view.workers if w.worker == worker]
    assert pid is not None
    return pid


def kill_everything(files: TrialFiles) -> None:
    """SIGKILL to every process of the trial, as a power cut would."""
    for process in processes_of(files.root):
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
