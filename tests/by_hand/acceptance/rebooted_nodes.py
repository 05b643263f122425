"""Does a run over two nodes go on by itself when one of them reboots? By hand; a quarter of an hour.

    python tests/by_hand/acceptance/rebooted_nodes.py  writes results/rebooted_nodes.json beside this file

On the Slurm of the tests, with ``--requeue``. At a moment drawn at random the second node of the run is
rebooted: slurmd and every process there are killed at once, the peers' connections are reset, and the
node is back after some seconds. Each run must begin its next attempt in the same job,
name the node and leave it out, and end with the numbers of a run that nothing disturbed, bit for bit.
Needs root and the packages of `make slurm-packages`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [
    str(HERE.parents[2]),
    *(str(HERE.parents[1] / part) for part in ("support", "slurm")),
]

from by_hand import HandCheck  # noqa: E402
from paced import Pace  # noqa: E402
from real_trials import (  # noqa: E402
    SMALL_PPO_STEPS,
    explain,
    make_policy,
    metrics_of,
    small_ppo,
    trained_ids,
    wait_until,
    weights_of,
)
from slurm_cluster import SlurmCluster  # noqa: E402
from slurm_trials import SlurmTrials  # noqa: E402

from launcher.trials.trial_view import TrialView  # noqa: E402
from realsys.slurm.hostlist import expand  # noqa: E402
from realsys.slurm.lost_nodes import lost_nodes  # noqa: E402
from realsys.trial.records import AttemptRecord, ExitMarker, TrialFiles, read_record  # noqa: E402
from realsys.trial.trial_state import State  # noqa: E402

REBOOTS, STEP_S = 10, 0.2
STEPS = 2 * SMALL_PPO_STEPS
LAST_STEP = STEPS - 6  # with a pace that leaves it time to be disturbed
EARLY = 0.2  # share of the reboots that do not wait for a step
MOST_S = 300.0
SLURMD_TIMEOUT_S = 60  # 300 at most sites: Slurm itself notices late
# Many small updates, so that a good part of a step is spent in collectives
UPDATES = "algorithm.ppo_n_minibatches=4"
TWO_NODES = ("actor.parallel=d2t1p1", "scheduling.model_worker.mem=600000")


@dataclass
class Reboot:
    """One run: what was done to it, and what it did."""

    after_step: int
    then_s: float
    back_after_s: float
    step: int = 0
    doing: str = ""
    node: str = ""
    named: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(
        default_factory=list
    )  # by all workers that failed, the first failure first
    left_out: str = ""
    attempts: int = 0
    judged_in_s: float = 0.0
    runs_again_in_s: float = 0.0
    equal: dict[str, bool] = field(default_factory=dict)
    problem: str = ""

    @property
    def is_well(self) -> bool:
        """Whether it went on by itself, without the node and with equal numbers."""
        return (
            not self.problem
            and list(self.named) == [self.node]
            and self.left_out == self.node
            and self.attempts == 2
            and bool(self.equal)
            and all(self.equal.values())
        )


def drawn(rng: random.Random) -> Reboot:
    """The moment of a reboot."""
    early = rng.random() < EARLY
    step = 0 if early else rng.randint(1, LAST_STEP)
    then_s = rng.uniform(0.0, 6.0 if early else 0.8)
    return Reboot(step, round(then_s, 2), round(rng.uniform(2.0, 30.0), 1))


def outcome(files: TrialFiles) -> dict[str, object]:
    """What must be equal."""
    return {
        "ids": trained_ids(files),
        "metrics": metrics_of(files),
        "weights": weights_of(files, "actor"),
    }


def rebooted(
    trials: SlurmTrials, files: TrialFiles, pace: Pace, run: Reboot, whole: dict[str, object]
) -> None:
    """Reboots a node under the trial and follows it to its end; fills ``run``."""
    cluster = trials.cluster
    wait_until(files, lambda v: bool(v.workers), timeout_s=MOST_S)
    if run.after_step:
        trials.wait_for_step(files, run.after_step, timeout_s=MOST_S)
    time.sleep(run.then_s)
    view = wait_until(files, lambda v: True, timeout_s=MOST_S)
    job = str(view.job_ids[0])
    held = cluster.show_job(job)
    (run.node,) = set(expand(held["NodeList"])) - {held["BatchHost"]}
    run.step = view.step or 0
    run.doing = "; ".join(f"{w.worker} {w.state} {w.mfc}".strip() for w in view.workers)
    cluster.kill_node(run.node)
    killed_s = time.time()
    down = [run.node]

    def is_back(view: TrialView) -> bool:
        # Here, not in a thread: a daemon dies with the thread that started it
        if down and time.time() - killed_s > run.back_after_s:
            cluster.start_slurmd(down.pop(), wait=False)
        return not down

    wait_until(
        files,
        lambda v: is_back(v) and (files.attempt(1).exit.exists() or v.attempt == 2),
        timeout_s=MOST_S,
    )
    marker = read_record(ExitMarker, files.attempt(1).exit)
    record = read_record(AttemptRecord, files.attempt(1).record)
    assert record is not None
    assert marker is not None, "Slurm requeued the job before the supervisor's verdict"
    run.judged_in_s = round(marker.ended_at - killed_s, 1)
    run.named = lost_nodes(marker, record.nodes)
    failures = filter(None, (marker.first_failure, *marker.other_failures))
    run.said = [f"{f.worker}: {f.why.partition(chr(10))[0]}" for f in failures]
    if not run.named:
        run.problem = f"no node is named: {marker.first_failure}"
        return
    again = wait_until(
        files, lambda v: v.attempt == 2 and v.state is State.RUNNING, timeout_s=MOST_S
    )
    run.runs_again_in_s = round(time.time() - killed_s, 1)
    run.left_out = cluster.show_job(job)["ExcNodeList"]
    if again.job_ids != view.job_ids or run.node in {w.host for w in again.workers}:
        run.problem = f"it runs in {again.job_ids} on {[w.host for w in again.workers]}"
        return
    pace.set(0.0)
    ended = trials.wait(files, timeout_s=MOST_S)
    run.attempts = len(files.all_attempts())
    if ended.state is not State.COMPLETED:
        run.problem = explain(files, ended)[:2000]
        return
    found = outcome(files)
    run.equal = {what: found[what] == whole[what] for what in whole}


def main() -> int:
    """Returns 0 where every run went on by itself."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="of the moments of the reboots")
    parser.add_argument("--reboots", type=int, default=REBOOTS)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further run after")
    options = parser.parse_args()
    until_s = time.monotonic() + 60 * options.minutes
    check, rng, runs = HandCheck(__file__), random.Random(options.seed), list[Reboot]()
    with tempfile.TemporaryDirectory(prefix="realsys-reboots-") as name:
        folder = Path(name)
        words = (
            *small_ppo(UPDATES, f"task.train_size={4 * STEPS}"),
            *TWO_NODES,
            f"actor.path={make_policy(folder / 'policy')}",
        )
        place = Path(tempfile.mkdtemp(prefix="slurm-", dir="/dev/shm"))
        patience = {"SlurmdTimeout": str(SLURMD_TIMEOUT_S)}
        with SlurmCluster(place, accounting=False, settings=patience) as cluster:
            os.environ["SLURM_CONF"] = cluster.environment["SLURM_CONF"]  # to look at them here
            trials = SlurmTrials(folder / "root", cluster)
            trials.write_spec()
            pace = Pace(folder, 0.0)
            try:
                undisturbed = trials.launch("ppo-math", "whole", *words, *pace.words)
                trials.wait(undisturbed, timeout_s=MOST_S)
                whole = outcome(undisturbed)
                for number in range(options.reboots):
                    cluster.clear()
                    if time.monotonic() > until_s:
                        break
                    run = drawn(rng)
                    runs.append(run)
                    pace.set(STEP_S)
                    files = trials.launch(
                        "ppo-math", f"r{number}", *words, *pace.words, "--requeue"
                    )
                    try:
                        rebooted(trials, files, pace, run, whole)
                    except AssertionError as error:
                        run.problem = str(error)[:2000]
                    sys.stdout.write(f"{number}: {'well' if run.is_well else 'NOT WELL'} {run}\n")
                    sys.stdout.flush()
            finally:
                cluster.clear()
                trials.end_all()
    well = sum(run.is_well for run in runs)
    problems = [
        f"reboot {number}: {run.problem or run}"
        for number, run in enumerate(runs)
        if not run.is_well
    ]
    if len(runs) < REBOOTS:
        problems.append(f"only {len(runs)} of {REBOOTS} reboots were tried")
    return check.write(
        f"one of two nodes of a run of {STEPS} steps is rebooted: {well} of {len(runs)} went on",
        problems,
        args=f"--seed {options.seed} --reboots {options.reboots} --minutes {options.minutes:g}",
        went_on=well,
        reboots=[asdict(run) for run in runs],
    )


if __name__ == "__main__":
    sys.exit(main())
