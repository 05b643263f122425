"""Soak test on a real Slurm and etcd: no live worker may be declared lost under constant disturbance.

    python benchmarks/soak.py [--minutes 30] [--seed 1]

Four nodes of tests/slurm (root needed), PPO with a model worker on each of two, name resolution in an
etcd that is killed for 10 s at intervals; every 10 to 30 s one process of the trial (supervisor, task,
worker or heartbeat) is stopped for 5 s. Goal: the first attempt is still running at the end, with every
step written once. Prints the disturbances and exits with 1 if any worker was declared lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / part) for part in ("", "support", "slurm", "etcd")]

from etcd_server import EtcdCluster  # noqa: E402 - of the tests, whose folder is not a package
from history_check import check_history, read_history  # noqa: E402
from real_trials import LONG_PPO  # noqa: E402
from slurm_cluster import SlurmCluster  # noqa: E402
from slurm_trials import SlurmTrials  # noqa: E402

from launcher.trials.status import trial_view  # noqa: E402
from realsys.data.sources.arithmetic_problems import arithmetic_word_problems  # noqa: E402
from realsys.models.from_scratch.tiny_llama import build_tiny_llama  # noqa: E402
from realsys.trial.records import TrialFiles  # noqa: E402
from realsys.trial.trial_state import State  # noqa: E402

STOP_S, OUTAGE_S, OUTAGE_EVERY_S = 5.0, 10.0, 90.0
TWO_NODES = ("actor.parallel=d2t1p1", "scheduling.model_worker.mem=600000", "--time", "120")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def kind_of(pid: int) -> str:
    """Which of the trial's programs a process is."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return "gone"
    for name in ("heartbeat", "worker.task", "worker.main", "submitit", "srun"):
        if any(name in word for word in words):
            return name
    return Path(words[0]).name or "kernel"


def disturb(rng: random.Random, cluster: SlurmCluster, job_id: int, done: Counter[str]) -> None:
    """Stops one process of the job for a while."""
    pids = sorted(p for p in cluster.processes_of(job_id) if kind_of(p) in KINDS)
    pid = rng.choice(pids)
    done[f"SIGSTOP of {KINDS[kind_of(pid)]}, {STOP_S:g} s"] += 1
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOP_S)
        os.kill(pid, signal.SIGCONT)


KINDS = {
    "heartbeat": "a heartbeat process",
    "worker.task": "a task's parent",
    "worker.main": "a worker",
    "submitit": "the supervisor",
}


def soak(
    trials: SlurmTrials, etcd: EtcdCluster, files: TrialFiles, args: argparse.Namespace
) -> str:
    """Disturbs until the time is over; returns what went wrong, "" for nothing."""
    rng, done = random.Random(args.seed), Counter[str]()
    began_s, next_outage_s = time.monotonic(), OUTAGE_EVERY_S / 2
    job_id = int(trials.wait_for_step(files, 2).job_ids[0])
    while (at_s := time.monotonic() - began_s) < args.minutes * 60:
        if at_s > next_outage_s:
            etcd.kill()
            time.sleep(OUTAGE_S)
            etcd.restart()
            done[f"etcd killed, back after {OUTAGE_S:g} s"] += 1
            next_outage_s = at_s + OUTAGE_EVERY_S
        else:
            disturb(rng, trials.cluster, job_id, done)
        time.sleep(rng.uniform(10.0, 30.0))
        view = trial_view(files)
        say(f"{at_s:6.0f} s  {view.state}  step {view.step}  {dict(done)}")
        if view.state is not State.RUNNING or view.attempt != 1:
            return f"{view.state}, attempt {view.attempt}: {view.reason}"
    steps = trial_view(files).step
    trials.run("stop", "ppo-math/soak", "--grace", "60", timeout_s=120)
    wrong = check_history(read_history(files.root))
    say(f"\n| {args.minutes:g} minutes, seed {args.seed} | |\n|---|---|\n| steps | {steps:,} |")
    for what, count in sorted(done.items()):
        say(f"| {what} | {count} |")
    say(f"| violations in the history | {len(wrong)} |")
    return "; ".join(wrong)


def main() -> int:
    """Returns 0 when nobody was taken for dead."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        corpus = [
            p["prompt"] + p["answer"]
            for p in arithmetic_word_problems(num_problems=500, seed=0, split="train")
        ]
        build_tiny_llama(
            folder / "policy", seed=0, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
            corpus=corpus,
        )  # fmt: skip
        etcd = stack.enter_context(EtcdCluster(folder / "etcd"))
        cluster = stack.enter_context(SlurmCluster(folder / "slurm"))
        os.environ["SLURM_CONF"] = cluster.environment["SLURM_CONF"]
        trials = SlurmTrials(folder / "root", cluster)
        trials.write_spec(name_resolve=etcd.url, slurm={"time_limit": "120"})
        stack.callback(trials.end_all)
        stack.callback(cluster.clear)
        path = f"actor.path={folder / 'policy'}"
        files = trials.launch("ppo-math", "soak", path, *LONG_PPO, *TWO_NODES)
        wrong = soak(trials, etcd, files, args)
        if wrong:
            log = files.attempt(1).log("supervisor")
            sys.stderr.write(f"WRONG: {wrong}\n{log.read_text()[-3000:]}\n")
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
