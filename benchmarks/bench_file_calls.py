"""What a trial asks of a shared file system, and what looking at it asks of slurmctld.

    python benchmarks/bench_file_calls.py files [--store folder|etcd] [--as-nfs] [--seconds 20]
    python benchmarks/bench_file_calls.py slurm            # a Slurm of its own; root, make slurm-packages

``files``: calls a second and new files a minute under the trial's file root, by process, of a trial of two
workers at rest (one call that takes an hour) and at two steps a second (tests/cost_plugin.py). ``slurm``:
sdiag's count of remote procedure calls for ten `realsys status`, and for a minute of `realsys watch`, of a
trial that runs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "etcd"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "slurm"))

from etcd_server import EtcdCluster
from file_calls import CountedTrials, since, total
from real_trials import name_of, wait_until
from slurm_cluster import SlurmCluster
from slurm_trials import SlurmTrials

from launcher.trial_view import TrialView
from realsys.api.trial import TrialFiles

ROOT = Path(__file__).parent.parent
SETTLED_S = 15.0
TWO_A_SECOND = (
    "costs.actor_gen=0.25",
    "costs.rew_inf=0.01",
    "costs.ref_inf=0.03",
    "costs.critic_inf=0.03",
    "costs.actor_train=0.05",
    "costs.critic_train=0.05",
)
SETTINGS = (
    "dataset.train_size=96000",
    "dataset.train_bs_n_seqs=8",
    "group_size=2",
    "exp_ctrl.eval_freq_steps=none",
    "exp_ctrl.ckpt_freq_steps=none",
    "exp_ctrl.ckpt_freq_secs=none",
    "cpus_per_model_worker=1",
)
ROLES = ("heartbeat", "master_worker", "model_worker", "submitit")
STATUSES, WATCH_S = 10, 60.0


def count_files(trials: CountedTrials, name: str, costs: tuple[str, ...], seconds: float) -> None:
    """Prints the table of one trial."""
    plugin = ("--import", str(ROOT / "tests" / "cost_plugin.py"))
    files = trials.launch("cost-ppo", name, *plugin, *costs, *SETTINGS)
    try:
        wait_until(files, _is_at_work, timeout_s=300, every_s=0.5)
        time.sleep(SETTLED_S)
        before, step, began_s = trials.calls.by_process(), _steps(files), time.monotonic()
        time.sleep(seconds)
        took_s = time.monotonic() - began_s
        found = since(before, trials.calls.by_process())
        steps_a_s = (_steps(files) - step) / took_s
    finally:
        trials.end_all()
    say = sys.stdout.write
    say(
        f"\n{name}: {steps_a_s:.2f} steps a second\n\n| process | calls/s | files/min |\n|---|---|---|\n"
    )
    for pid, counts in sorted(found.items(), key=lambda item: -item[1].calls):
        if counts.calls:
            program = trials.calls.program(pid)
            role = next((role for role in ROLES if role in program), program[-40:])
            role = "supervisor" if role == "submitit" else role
            say(
                f"| {role} | {counts.calls / took_s:.1f} | {60 * counts.new_files / took_s:.0f} |\n"
            )
    all_of_it = total(found)
    calls_s, files_min = all_of_it.calls / took_s, 60 * all_of_it.new_files / took_s
    say(f"| all | {calls_s:.1f} | {files_min:.0f} |\n")


def _is_at_work(view: TrialView) -> bool:
    return any(worker.mfc.startswith("actor_gen") for worker in view.workers)


def _steps(files: TrialFiles) -> int:
    metrics = files.phase(files.root).metrics
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def measure_files(store: str, *, as_nfs: bool, seconds: float) -> None:
    """Both trials, one after the other."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        site: tuple[str, ...] = ()
        if store == "etcd":
            url = stack.enter_context(EtcdCluster(folder / "etcd")).url
        for name, costs in (("at rest", ("costs.actor_gen=3600",)), ("at work", TWO_A_SECOND)):
            trials = CountedTrials(folder / name.replace(" ", "-"), as_nfs=as_nfs)
            if store == "etcd":
                spec = folder / f"{name}.yaml".replace(" ", "-")
                spec.write_text(
                    f"name: lab\nscheduler: local\nfile_root: {trials.file_root}\n"
                    f"name_resolve: {url}\n"
                )
                site = ("--cluster", str(spec))
            count_files(trials, name.replace(" ", "-"), (*costs, *site), seconds)


def measure_slurm() -> None:
    """What a trial that runs costs slurmctld, and what looking at it does."""
    with tempfile.TemporaryDirectory() as name, SlurmCluster(Path(name) / "c") as cluster:
        trials = SlurmTrials(Path(name) / "root", cluster)
        trials.file_root.mkdir()
        trials.write_spec()
        plugin = ("--import", str(ROOT / "tests" / "cost_plugin.py"))
        words = (*plugin, *TWO_A_SECOND, *SETTINGS)
        files = trials.launch("cost-ppo", "looked-at", *words)
        wait_until(files, _is_at_work, timeout_s=300, every_s=1.0)
        before = _calls(cluster)
        time.sleep(WATCH_S)
        _tell(f"nobody looks, {WATCH_S:g} s", before, _calls(cluster))
        before = _calls(cluster)
        for _ in range(STATUSES):
            trials.status_json(files)
        _tell(f"{STATUSES} × realsys status", before, _calls(cluster))
        before = _calls(cluster)
        command = [sys.executable, "-m", "launcher.entry", "watch", name_of(files)]
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
    sys.stdout.write(f"{what}: {asked or 'nothing'}\n")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("files", "slurm"))
    parser.add_argument("--store", choices=("folder", "etcd"), default="folder")
    parser.add_argument("--as-nfs", action="store_true", help="each process on a host of its own")
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    if args.what == "files":
        measure_files(args.store, as_nfs=args.as_nfs, seconds=args.seconds)
    else:
        measure_slurm()


if __name__ == "__main__":
    main()
