"""A run whose etcd is away for a while, looked at by a user: what it did meanwhile, and whether it shows.

For tests/etcd (seconds) and tests/by_hand/acceptance (twenty minutes); the caller says how long and how
patient. Its steps are slowed down by the reward rule, which changes no number.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from etcd_server import EtcdCluster
from history_check import check_history, read_history
from paced import Pace
from real_trials import Trials, explain, metrics_of, small_ppo, trained_ids, weights_of

from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

STEPS_AN_EPOCH = 12
_STEP_DONE = re.compile(r"^(\S+) INFO master_worker/0 (?:step=(\d+) )?.*?step done ", re.MULTILINE)


@dataclass
class Look:
    """What ``status --json`` said."""

    after_s: float  # since etcd went away
    state: str
    step: int | None
    notes: str


@dataclass
class Outcome:
    """What came of it."""

    steps: int
    step_s: float
    away_s: float
    patience_s: int
    step_when_it_went: int
    steps_done_meanwhile: int = 0
    longest_pause_s: float = (
        0.0  # between two steps of these, or before the first or after the last
    )
    looks: list[Look] = field(default_factory=list)
    attempts: int = 0
    same_metrics: bool = False
    same_order: bool = False
    same_weights: bool = False
    violations: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """What did not hold; empty when all did."""
        found = [f"status said {look}" for look in self.looks if not self._is_true(look)]
        # Who waits for the store does one step and no more.
        if self.longest_pause_s > 0.75 * self.away_s:
            found.append(f"it stood still for {self.longest_pause_s:.1f} of {self.away_s:g} s")
        found += [
            f"not the same {what}"
            for what in ("metrics", "order", "weights")
            if not getattr(self, f"same_{what}")
        ]
        return found + self.violations + ([] if self.attempts == 1 else ["more than one attempt"])

    def _is_true(self, look: Look) -> bool:
        """It runs; and the step told is one that it had done by then and not an older one than was told
        before, or it is said that the store does not answer."""
        if look.state != State.RUNNING:
            return False
        if not look.step:
            return "did not answer" in look.notes
        done = self.step_when_it_went + self.steps_done_meanwhile + 1
        return self.step_when_it_went - 1 <= look.step <= done

    def to_json(self) -> dict[str, object]:
        """For a committed result."""
        return {**asdict(self), "problems": self.problems}


def site(trials: Trials, url: str, patience_s: int) -> str:
    """A site file with this store."""
    path = trials.file_root.parent / "patient.yaml"
    path.write_text(
        f"name: lab\nscheduler: local\nfile_root: {trials.file_root}\nname_resolve: {url}\n"
        f"store_patience_seconds: {patience_s}\n"
    )
    return str(path)


def play(
    trials: Trials,
    policy: Path,
    etcd: EtcdCluster,
    *,
    step_s: float,
    away_s: float,
    patience_s: int,
    look_every_s: float,
) -> Outcome:
    """A calm run on files, then the same on an etcd that is killed, and comes back with its data."""
    needed = int(away_s / step_s) + STEPS_AN_EPOCH
    epochs = -(-needed // STEPS_AN_EPOCH) + 1
    words = [
        f"actor.path={policy}",
        *small_ppo(f"exp_ctrl.total_train_epochs={epochs}", "task.train_size=96"),
        "exp_ctrl.save_freq_steps=8",
    ]
    calm = trials.launch("ppo-math", "calm", *words)
    cluster = site(trials, "etcd://" + ",".join(etcd.endpoints), patience_s)
    pace = Pace(trials.file_root.parent, step_s)
    shaken = trials.launch("ppo-math", "shaken", "--cluster", cluster, *pace.words, *words)
    view = trials.wait(calm, timeout_s=600)
    assert view.state is State.COMPLETED, explain(calm, view)
    trials.wait_for_step(shaken, 3, timeout_s=300 + 10 * step_s)

    outcome = Outcome(epochs * STEPS_AN_EPOCH, step_s, away_s, patience_s, steps_of(shaken)[-1][0])
    began = time.time()
    etcd.kill()
    while (after_s := time.time() - began) < away_s:
        status = trials.status_json(shaken)["trial"]
        looked = Look(round(after_s, 1), status["state"], status.get("step"), _notes(status))
        outcome.looks.append(looked)
        time.sleep(max(0.0, min(look_every_s, away_s - (time.time() - began))))
    ended = time.time()
    etcd.restart()
    pace.set(min(step_s, 1.0))  # leases end, and are renewed, before the run does
    meanwhile = [at for _, at in steps_of(shaken) if began < at < ended]
    outcome.steps_done_meanwhile = len(meanwhile)
    outcome.longest_pause_s = max(b - a for a, b in pairwise([began, *meanwhile, ended]))
    view = trials.wait(shaken, timeout_s=300 + 4 * STEPS_AN_EPOCH * step_s)
    assert view.state is State.COMPLETED, explain(shaken, view)

    outcome.attempts = len(shaken.all_attempts())
    outcome.same_metrics = metrics_of(calm) == metrics_of(shaken)
    outcome.same_order = trained_ids(calm) == trained_ids(shaken)
    roles = ("actor", "critic")
    outcome.same_weights = all(weights_of(calm, r) == weights_of(shaken, r) for r in roles)
    outcome.violations = check_history(read_history(shaken.root))
    return outcome


def steps_of(files: TrialFiles) -> list[tuple[int, float]]:
    """Steps that the master says it has done, with the time."""
    text = files.attempt(1).log("master_worker/0").read_text()
    found = [datetime.fromisoformat(at).timestamp() for at, _ in _STEP_DONE.findall(text)]
    return list(enumerate(found, 1))


def _notes(status: dict[str, object]) -> str:
    return json.dumps(status.get("notes") or "")[:300]
