"""Is every episode counted once, whatever is killed while agents work? By hand; half an hour.

    python tests/by_hand/acceptance/agent_kills.py [--kills 200] [--seed 1]  writes results/agent_kills.json

An asynchronous run whose agents are programs behind the endpoint (``task.agent=command``). At random
moments one of these is killed by SIGKILL: an agent, the rollout worker with the endpoint, the manager, a
generation server, or all of the trial at once, after which it is resumed. Then ``realsys audit`` must be
clean, and each question trained once an epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SUPPORT = HERE.parents[1] / "support"
sys.path[:0] = [str(HERE.parents[2]), str(SUPPORT)]

from by_hand import HandCheck  # noqa: E402
from real_trials import (  # noqa: E402
    Trials,
    explain,
    kill_everything,
    make_policy,
    metrics_of,
    name_of,
    trained_ids,
    wait_until,
    worker_pid,
)

from realsys.trial.records import TrialFiles  # noqa: E402
from realsys.trial.trial_state import State  # noqa: E402

QUESTIONS, BATCH, STALENESS = 64, 4, 2
WORKERS = (
    "rollout_worker/0",
    "rollout_worker/1",
    "gserver_manager/0",
    "generation_server/0",
    "generation_server/1",
)
# A worker is started again five times an hour, so most of what is killed is agents; a resume begins anew.
SHARES = {"agent": 0.72, "worker": 0.22, "everything": 0.06}
MOST_OF_A_WORKER = 4  # in one attempt
BETWEEN_S = (0.5, 3.5)
SOON_S = 15.0


def settings(folder: Path, epochs: int) -> tuple[str, ...]:
    """The run."""
    return (
        f"actor.path={folder}/policy",
        "task.agent=command",
        f"task.agent_args.command={sys.executable} -S -E {SUPPORT}/patient_agent.py",
        f"task.train_size={QUESTIONS}",
        "task.eval_size=4",
        f"train_bs_n_seqs={BATCH}",
        "group_size=2",
        "gen.max_new_tokens=8",
        f"schedule.max_staleness={STALENESS}",
        "schedule.staleness_policy=window",
        "schedule.servers=2",
        "schedule.workers=2",
        "schedule.max_concurrent_rollouts=4",
        "schedule.rollout_request_timeout=60",
        f"exp_ctrl.total_train_epochs={epochs}",
        "exp_ctrl.ckpt_freq_steps=3",
        "exp_ctrl.ckpt_freq_secs=none",
        "exp_ctrl.eval_freq_steps=none",
        "scheduling.model_worker.cpu=1",
        "tensorboard=false",
    )


class Killer:
    """Kills something of a run, again and again."""

    def __init__(self, trials: Trials, files: TrialFiles, rng: random.Random) -> None:
        self.trials, self.files, self.rng = trials, files, rng
        self.done: Counter[str] = Counter()
        self._in_attempt: Counter[str] = Counter()

    def once(self) -> None:
        """Kills one thing, as soon as there is one of the kind that was drawn."""
        (kind,) = self.rng.choices(list(SHARES), list(SHARES.values()))
        kill = {"agent": self._agent, "worker": self._worker, "everything": self._everything}[kind]
        ends_s = time.monotonic() + SOON_S
        while not kill() and time.monotonic() < ends_s:
            time.sleep(0.1)

    def _agent(self) -> bool:
        pids = [p for p in _pids_of("patient_agent.py") if "child_guard" not in _command(p)]
        if not pids:
            return False
        return self._kill(self.rng.choice(pids), "agent")

    def _worker(self) -> bool:
        worker = self.rng.choice(WORKERS)
        view = wait_until(self.files, lambda v: True, timeout_s=30)
        if self._in_attempt[worker] >= MOST_OF_A_WORKER:
            return False
        try:
            pid = worker_pid(view, worker)
        except (KeyError, StopIteration, AssertionError, ValueError):
            return False
        self._in_attempt[worker] += 1
        return self._kill(pid, worker.partition("/")[0])

    def _everything(self) -> bool:
        kill_everything(self.files)
        wait_until(self.files, lambda v: v.state not in State.live(), timeout_s=60)
        self.trials.resume(self.files)
        self._in_attempt.clear()
        self.done["everything"] += 1
        return True

    def _kill(self, pid: int, kind: str) -> bool:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.done[kind] += 1
        return True


def _pids_of(word: str) -> list[int]:
    """Processes of this check's trial: others have no such word in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        if word in _command(int(folder.name)) and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def wrong_counts(files: TrialFiles, epochs: int) -> dict[str, int]:
    """Questions that were not trained once an epoch, and how often they were."""
    found = Counter(trained_ids(files))
    expected = {f"{epoch}-{index}" for epoch in range(epochs) for index in range(QUESTIONS)}
    return {
        id_: found[id_] for id_ in sorted({*found, *expected}) if found[id_] != (id_ in expected)
    }


def main() -> int:
    """Returns 0 where the audit is clean and every question was trained as often as it should."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of what is killed, and when")
    parser.add_argument("--epochs", type=int, default=16)
    given = parser.parse_args()
    check = HandCheck(__file__)
    with tempfile.TemporaryDirectory(prefix="realsys-kills-") as name:
        folder = Path(name)
        make_policy(folder / "policy")
        trials = Trials(folder / "root")
        try:
            found = run_of(trials, folder, given.kills, given.epochs, random.Random(given.seed))
        finally:
            trials.end_all()
    problems = [*found.pop("problems")]
    return check.write(
        f"agents behind the endpoint, killed {given.kills} times, with all that serves them",
        problems,
        **found,
    )


def run_of(
    trials: Trials, folder: Path, kills: int, epochs: int, rng: random.Random
) -> dict[str, Any]:
    """Makes the run; returns what was found."""
    files = trials.launch("grpo-math-async", "killed", *settings(folder, epochs))
    trials.wait_for_step(files, 1)
    killer = Killer(trials, files, rng)
    while killer.done.total() < kills:
        time.sleep(rng.uniform(*BETWEEN_S))
        view = wait_until(files, lambda v: True, timeout_s=30)
        if view.state is State.COMPLETED:
            break
        if view.state not in State.live():  # a worker was started too often
            trials.resume(files)
            continue
        killer.once()
        sys.stdout.write(f"{killer.done.total()} {dict(killer.done)} step {view.step}\n")
        sys.stdout.flush()
    view = trials.wait(files, timeout_s=3600)
    audit = trials.run("audit", name_of(files), "--json", timeout_s=600)
    report = json.loads(audit.stdout) if audit.stdout.strip() else {}
    wrong = wrong_counts(files, epochs)
    problems = []
    if view.state is not State.COMPLETED:
        problems.append(explain(files, view))
    if killer.done.total() < kills:
        problems.append(f"the run was over after {killer.done.total()} kills")
    if audit.returncode:
        problems.append(f"audit: {audit.stdout[-2000:]} {audit.stderr[-2000:]}")
    if wrong:
        problems.append(f"questions trained wrongly often: {wrong}")
    rows = metrics_of(files)
    return {
        "problems": problems,
        "kills": dict(killer.done),
        "attempts": len(files.all_attempts()),
        "steps": view.step,
        "trained": len(trained_ids(files)),
        "epochs": epochs,
        "staleness": {
            "bound": STALENESS,
            "largest": max(float(str(row.get("actor/staleness/max", 0))) for row in rows),
        },
        "audit": report,
    }


if __name__ == "__main__":
    sys.exit(main())
