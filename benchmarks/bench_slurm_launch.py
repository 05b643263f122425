"""Measures the time that realsys adds to the start of a job on a real Slurm.

    python benchmarks/bench_slurm_launch.py [--rounds 5] [--cluster NAME]

Alternates: (a) `realsys launch ppo-math` until all workers have registered; (b) an sbatch of a script
whose srun starts as many Python processes that import torch, until the last has. Both from the
command's start. Goal: (a) - (b) under 5 s. Without --cluster it starts the four-node Slurm of
tests/slurm (root needed).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from launcher.trials.status import trial_view
from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.trial.records import TrialFiles

ROOT = Path(__file__).parent.parent
NODES, TASKS = 2, 4
DEADLINE_S = 120.0
SETTINGS = (
    "task.train_size=96",
    "task.eval_size=8",
    "train_bs_n_seqs=16",
    "gen.max_new_tokens=12",
    "exp_ctrl.total_train_epochs=1000",
    "scheduling.model_worker.cpu=1",
    f"actor.parallel=d{TASKS}t1p1",
    "scheduling.model_worker.mem=450000",  # two a node of 1,000,000 MiB
)


def wait_for(there: Path, *, count: int) -> None:
    """Until ``count`` files are in the folder."""
    deadline = time.monotonic() + DEADLINE_S
    while len(list(there.iterdir())) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{there} has {len(list(there.iterdir()))} of {count} files")
        time.sleep(0.02)


def plain_s(folder: Path) -> float:
    """Seconds until the same number of Pythons have imported torch under sbatch and srun."""
    marks = Path(tempfile.mkdtemp(dir=folder))
    code = f"import torch, os; open(f'{marks}/' + os.environ['SLURM_PROCID'], 'w').close()"
    script = folder / "plain.sh"
    script.write_text(
        f"#!/bin/bash\n#SBATCH -N{NODES} --ntasks-per-node={TASKS // NODES} --cpus-per-task=31 "
        f'--output=/dev/null\nsrun --cpu-bind=none {sys.executable} -c "{code}"\n'
    )
    began_s = time.monotonic()
    subprocess.run(["sbatch", str(script)], check=True, stdout=subprocess.DEVNULL)
    wait_for(marks, count=TASKS)
    return time.monotonic() - began_s


def realsys_s(model: Path, number: int) -> float:
    """Seconds until every worker has registered; the trial is stopped afterwards."""
    name = f"bench{os.getpid()}-{number}"
    began_s = time.monotonic()
    command = [sys.executable, "-m", "launcher.cli.entry", "launch", "ppo-math", "--trial", name]
    launching = subprocess.Popen(
        [*command, "--detach", f"actor.path={model}", *SETTINGS],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    folder = f"runs/*/ppo-math/{name}"
    while not (found := list(Path(os.environ["REALSYS_FILE_ROOT"]).glob(f"{folder}/attempts/*"))):
        _check(began_s)
    files = TrialFiles(found[0].parent.parent)
    while True:
        workers = trial_view(files).workers
        if workers and all(w.state != "not started" for w in workers):
            break
        _check(began_s)
    took_s = time.monotonic() - began_s
    launching.wait()
    stop = [sys.executable, "-m", "launcher.cli.entry", "stop", f"ppo-math/{name}", "--grace", "0"]
    subprocess.run(stop, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return took_s


def _check(began_s: float) -> None:
    if time.monotonic() - began_s > DEADLINE_S:
        raise TimeoutError(f"no worker registered in {DEADLINE_S:g} s")
    time.sleep(0.05)


@contextmanager
def test_cluster(folder: Path) -> Iterator[None]:
    """The Slurm of tests/slurm, and a site file for it."""
    sys.path.insert(0, str(ROOT / "tests" / "slurm"))
    from slurm_cluster import SlurmCluster

    with SlurmCluster(Path(tempfile.mkdtemp(prefix="bench-", dir=folder)) / "c") as cluster:
        os.environ["SLURM_CONF"] = cluster.environment["SLURM_CONF"]
        site = {
            "scheduler": "slurm",
            "file_root": str(folder / "root"),
            "partitions": {"main": {"nodes": 4, "cpus": 64, "memory_mib": 1_000_000}},
            "slurm": {"partition": "main", "time_limit": "10"},
        }
        (folder / "bench.yaml").write_text(yaml.safe_dump(site))
        os.environ["REALSYS_CLUSTER"] = str(folder / "bench.yaml")
        yield


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cluster", help="a site file or name; else a Slurm of its own")
    args = parser.parse_args()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        os.environ["REALSYS_FILE_ROOT"] = str(folder / "root")
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        problems = arithmetic_word_problems(num_problems=500, seed=0, split="train")
        build_tiny_llama(
            folder / "model",
            seed=0,
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            corpus=[p["prompt"] + p["answer"] for p in problems],
        )
        if args.cluster:
            os.environ["REALSYS_CLUSTER"] = args.cluster
            _measure(folder, args.rounds)
        else:
            with test_cluster(folder):
                _measure(folder, args.rounds)


def _measure(folder: Path, rounds: int) -> None:
    plain, ours = [], []
    for number in range(rounds + 1):
        plain.append(plain_s(folder))
        ours.append(realsys_s(folder / "model", number))
    a, b = statistics.median(ours[1:]), statistics.median(plain[1:])  # the first warms caches
    sys.stdout.write(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, medians of {rounds} rounds, "
        f"{TASKS} model workers and the master on {NODES} nodes\n\n| | s |\n|---|---|\n"
        f"| `realsys launch` to all workers registered | {a:.1f} |\n"
        f"| sbatch + srun of Pythons that import torch | {b:.1f} |\n| difference | {a - b:.1f} |\n"
    )


if __name__ == "__main__":
    main()
