"""Measures a trial's load on a shared file system, and the load of watching it on slurmctld.

    python benchmarks/bench_file_calls.py files [--on local slurm] [--store folder nfs etcd]
                                                [--trial at-rest at-rest-2 at-work async]
    python benchmarks/bench_file_calls.py slurm

``files``: calls per second and new files per minute under the trial's file root. By default for a master
and a model worker at rest (one call that takes an hour) and at two steps per second
(tests/support/cost_plugin.py); ``at-rest-2`` has two model workers, ``async`` is ppo-math-async at rest,
with a server, its manager and a rollout worker, which can be restarted singly. By kind of process, then one
table for all. The store ``nfs`` is a folder that appears to be on NFS, with each process on a separate
host. Trials on Slurm are skipped without sbatch. ``slurm``: sdiag's count of remote procedure calls for a
running trial, for ten `realsys status` of it, and for a minute of `realsys watch`. It starts its own Slurm:
root, make slurm-packages.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "etcd"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "slurm"))

from etcd_server import EtcdCluster
from file_calls import CountedTrials, Counts, FileCalls, since
from real_trials import SMALL_PPO, Trials, make_policy, name_of, wait_until
from slurm_cluster import SlurmCluster
from slurm_trials import SlurmTrials

from launcher.trials.trial_view import TrialView
from realsys.trial.records import TrialFiles

ROOT = Path(__file__).parent.parent
SETTLED_S = 22.0  # without a change, until pauses have grown to their longest
AT_REST = ("costs.actor_gen=3600",)
TRIALS = ("at-rest", "at-rest-2", "at-work", "async")
TWO_A_SECOND = (
    "costs.actor_gen=0.25",
    "costs.rew_inf=0.01",
    "costs.ref_inf=0.03",
    "costs.critic_inf=0.03",
    "costs.actor_train=0.05",
    "costs.critic_train=0.05",
)
SETTINGS = (
    *("--import", str(ROOT / "tests" / "support" / "cost_plugin.py")),
    "task.train_size=96000",
    "train_bs_n_seqs=8",
    "group_size=2",
    "exp_ctrl.eval_freq_steps=none",
    "exp_ctrl.ckpt_freq_steps=none",
    "exp_ctrl.ckpt_freq_secs=none",
    "scheduling.model_worker.cpu=1",
)
KINDS = {  # what is in a process's command line: what it is
    "srun ": "sruns",
    "realsys.heartbeat.heartbeat_process": "heartbeats",
    "realsys.worker.srun_task": "parents of workers",
    "master_worker": "master",
    "realsys.worker.main": "other workers",
    "realsys.supervisor": "supervisor",
    "submitit": "supervisor",
}
STATUSES, WATCH_S = 10, 60.0


def say(line: str = "") -> None:
    """A line of the answer, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def trials_on(
    stack: ExitStack, folder: Path, scheduler: str, store: str
) -> tuple[Trials, FileCalls, tuple[str, ...]]:
    """Trials that count under a file root of their own; the third: what a launch says of the site."""
    here = CountedTrials(folder, as_nfs=store == "nfs")
    root, calls = here.file_root, here.calls
    url = stack.enter_context(EtcdCluster(folder / "etcd")).url if store == "etcd" else None
    if scheduler == "slurm":
        cluster = stack.enter_context(SlurmCluster(folder / "c"))
        on_slurm = SlurmTrials(root, cluster)
        on_slurm.write_spec(setup=calls.setup, **({"name_resolve": url} if url else {}))
        return on_slurm, calls, ()
    spec = folder / "lab.yaml"
    where = f"name_resolve: {url}\n" if url else ""
    spec.write_text(f"name: lab\nscheduler: local\nfile_root: {root}\n{where}")
    return here, calls, ("--cluster", str(spec))


def measure(scheduler: str, store: str, what: str, seconds: float) -> tuple[float, float]:
    """Calls a second and new files a minute of one trial, told by kind of process."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trials, calls, site = trials_on(stack, folder, scheduler, store)
        if what == "async":
            policy = make_policy(folder / "policy")
            stay = f"{{version: 0, go: {folder}/go, slow_s: 3600}}"
            plugin = ("--import", str(ROOT / "tests" / "support" / "crawl_plugin.py"))
            words = (*plugin, "task.agent=crawl", f"task.agent_args={stay}", *SMALL_PPO)
            words = (*words, f"actor.path={policy}")
            files = trials.launch("ppo-math-async", "counted", *words, *site)
        else:
            words = (*(TWO_A_SECOND if what == "at-work" else AT_REST), *SETTINGS)
            if what == "at-rest-2":
                words = (*words, "actor.parallel=d2t1p1")
            files = trials.launch("cost-ppo", "counted", *words, *site)
        try:
            wait_until(files, _is_at_work, timeout_s=300, every_s=0.5)
            time.sleep(SETTLED_S)
            before, step, began_s = calls.by_process(), _steps(files), time.monotonic()
            time.sleep(seconds)
            took_s = time.monotonic() - began_s
            found = {
                f"{calls.program(pid)} {pid}": counts
                for pid, counts in since(before, calls.by_process()).items()
                if counts.calls
            }
            steps_a_s = (_steps(files) - step) / took_s
        finally:
            trials.run("stop", name_of(files), "--grace", "0")
            trials.end_all()
    say(f"\n{scheduler}, {store}, {what}: {steps_a_s:.2f} steps a second\n")
    say("| processes | | calls/s | files/min |\n|---|---|---|---|")
    by_kind: dict[str, list[Counts]] = defaultdict(list)
    for program, counts in found.items():
        kind = next((kind for word, kind in KINDS.items() if word in program), program[-40:])
        by_kind[kind].append(counts)
    for kind, several in by_kind.items():
        say(f"| {kind} | {len(several)} |{_a_time(sum(several, Counts()), took_s)}")
    of_all = sum(found.values(), Counts())
    say(f"| all | {len(found)} |{_a_time(of_all, took_s)}")
    return of_all.calls / took_s, 60 * of_all.new_files / took_s


def _a_time(counts: Counts, took_s: float) -> str:
    return f" {counts.calls / took_s:.1f} | {60 * counts.new_files / took_s:.0f} |"


def _is_at_work(view: TrialView) -> bool:
    """All are up, and the first call has begun or, of an asynchronous one, waits for rows."""
    up = all(worker.state in ("ready", "running") for worker in view.workers)
    begun = any(w.mfc.startswith("actor_gen") for w in view.workers)
    return up and (begun or any(w.worker.startswith("rollout_worker") for w in view.workers))


def _steps(files: TrialFiles) -> int:
    metrics = files.phase(files.root).metrics
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def measure_files(schedulers: list[str], stores: list[str], whats: list[str], s: float) -> None:
    """Each trial, one after the other."""
    if "slurm" in schedulers and shutil.which("sbatch") is None:
        say("no sbatch here: trials on Slurm are left out (make slurm-packages)")
        schedulers = [name for name in schedulers if name != "slurm"]
    table = [f"| on | store | {' | | '.join(whats)} | |\n|---|---|" + "---|---|" * len(whats)]
    table.append("| | | " + "calls/s | files/min | " * len(whats))
    for scheduler in schedulers:
        for store in stores:
            found = [measure(scheduler, store, what, s) for what in whats]
            numbers = "".join(f" {calls:.1f} | {files:.0f} |" for calls, files in found)
            table.append(f"| {scheduler} | {store} |{numbers}")
    say("\n" + "\n".join(table))


def measure_slurm() -> None:
    """What a trial that runs costs slurmctld, and what looking at it does."""
    with tempfile.TemporaryDirectory() as name, SlurmCluster(Path(name) / "c") as cluster:
        trials = SlurmTrials(Path(name) / "root", cluster)
        trials.file_root.mkdir()
        trials.write_spec()
        files = trials.launch("cost-ppo", "looked-at", *TWO_A_SECOND, *SETTINGS)
        wait_until(files, _is_at_work, timeout_s=300, every_s=1.0)
        before = _calls(cluster)
        time.sleep(WATCH_S)
        _tell(f"nobody looks, {WATCH_S:g} s", before, _calls(cluster))
        before = _calls(cluster)
        for _ in range(STATUSES):
            trials.status_json(files)
        _tell(f"{STATUSES} × realsys status", before, _calls(cluster))
        before = _calls(cluster)
        command = [sys.executable, "-m", "launcher.cli.entry", "watch", name_of(files)]
        watching = subprocess.Popen(
            command,
            env=trials.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(WATCH_S)
        watching.terminate()
        watching.wait()
        _tell(f"realsys watch, {WATCH_S:g} s", before, _calls(cluster))
        trials.run("stop", name_of(files), "--grace", "0")


def _calls(cluster: SlurmCluster) -> dict[str, int]:
    """sdiag's counts by type of message."""
    environment = {"PATH": "/usr/bin:/bin:/usr/sbin", **cluster.environment}
    said = subprocess.run(["sdiag"], env=environment, check=True, capture_output=True, text=True)
    by_type = said.stdout.partition("by message type")[2].partition("by user")[0]
    found = re.findall(r"^\s+(\w+)\s+\(\s*\d+\) count:(\d+)", by_type, re.MULTILINE)
    return {kind: int(number) for kind, number in found}


def _tell(what: str, before: dict[str, int], after: dict[str, int]) -> None:
    made = {kind: n - before.get(kind, 0) for kind, n in after.items()}
    asked = ", ".join(
        f"{kind} {n}" for kind, n in made.items() if n and kind.startswith("REQUEST_")
    )
    say(f"{what}: {asked or 'nothing'}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("files", "slurm"))
    of_files = ("local", "slurm"), ("folder", "nfs", "etcd")
    parser.add_argument("--on", nargs="+", choices=of_files[0], default=of_files[0])
    parser.add_argument("--store", nargs="+", choices=of_files[1], default=of_files[1])
    parser.add_argument("--trial", nargs="+", choices=TRIALS, default=("at-rest", "at-work"))
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    if args.what == "files":
        measure_files(list(args.on), list(args.store), list(args.trial), args.seconds)
    else:
        measure_slurm()


if __name__ == "__main__":
    main()
