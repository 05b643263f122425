"""The simulated trial: its shared folder, its history, its site (Slurm), and the rules it plays by.

The rules are the real ones. Each can be exchanged for a broken one, to see that the checks catch it
(test_simulation.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from realsys.name_resolve.keys import TrialKeys
from realsys.name_resolve.lease_judge import TTL_S, LeaseJudge
from realsys.supervisor.failure_detector import FailureDetector

from .lineage import is_dead
from .world import Node, Process, World

NUM_NODES = 6
MAX_ATTEMPTS = 8
CHECKPOINT_EVERY = 3

logging.getLogger("realsys.name_resolve").setLevel(logging.CRITICAL)  # thousands of leases expire


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What is played. The defaults are what realsys does, or should do."""

    detector: Callable[[], FailureDetector] = FailureDetector
    judge: Callable[..., LeaseJudge] = LeaseJudge
    is_dead: Callable[[int, int, Mapping[int, int]], bool] = is_dead
    fenced: frozenset[str] = frozenset({"checkpoint", "save", "done", "resumed", "clear", "leave"})
    waits_while_suspended: bool = True
    asks_judge_again: bool = True  # when the new lease has been granted
    truncates_metrics: bool = False  # at a resume, in place, as truncate_jsonl does
    folder_per_attempt: bool = True  # else a checkpoint's folder is named by its step alone
    prunes_by_step: bool = False  # the newest are those of the highest step, dead or not
    keep: int = 2  # checkpoints
    ttl_s: float = TTL_S


@dataclass(eq=False)
class Trial:
    """One trial in one world. ``verdict`` is how it ended: "completed", or why not."""

    world: World
    rules: Rules
    num_steps: int
    num_workers: int  # model workers, beside one master
    num_nodes: int  # of a job
    verdict: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[tuple[int, int]] = field(default_factory=list)  # (attempt, step), on shared disk
    checkpoints: list[tuple[int, int]] = field(default_factory=list)
    stored: list[tuple[int, int]] = field(default_factory=list)  # checkpoints that were accepted
    missing: list[str] = field(default_factory=list)  # accepted checkpoints that nobody could take
    done: set[int] = field(default_factory=set)  # attempts whose master says so, on shared disk
    # Who took its key anew: worker, attempt, when, after how long a silence.
    silences: list[tuple[str, int, float, float]] = field(default_factory=list)
    jobs: list[list[Process]] = field(default_factory=list)  # the processes of each incarnation
    traps: dict[tuple[str, str, int], Callable[[Process], None]] = field(default_factory=dict)
    _passed: dict[tuple[str, str], int] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    keys: TrialKeys = field(
        default_factory=lambda: TrialKeys(cluster="c", user="u", experiment="e", trial="t")
    )

    def __post_init__(self) -> None:
        chance = self.world.random
        for i in range(NUM_NODES):
            rate, offset_s = 1 + chance.uniform(-0.005, 0.005), chance.uniform(0, 1e5)
            self.nodes.append(Node(f"n{i}", rate, offset_s))

    def note(self, op: str, process: Process, step: int = 0, *, worker: str = "") -> None:
        row = {"at": self.world.now, "op": op, "worker": worker or process.name, "step": step}
        self.history.append(row | {"attempt": process.attempt, "token": process.token})
        self.world.say(f"{process.name}.{process.attempt} {op} {worker} {step or ''}")

    def resumed(self) -> dict[int, int]:
        """attempt → the step that it went on after."""
        return {row["attempt"]: row["step"] for row in self.history if row["op"] == "resumed"}

    def look_at_checkpoints(self, process: Process) -> None:
        """Would somebody who resumed now find the newest checkpoint that counts?"""
        resumed = self.resumed()
        accepted = [c for c in self.stored if not is_dead(*c, resumed)]
        found = [c for c in self.checkpoints if not is_dead(*c, resumed)]
        newest = max((step for _, step in accepted), default=0)
        if newest > max((step for _, step in found), default=0):
            who = f"{process.name} of attempt {process.attempt}"
            self.missing.append(
                f"the checkpoint of step {newest} is gone at {self.world.now:.1f}, {who} was the last "
                f"at the folder; left: {sorted(self.checkpoints)}, resumed: {resumed}"
            )

    def point(self, process: Process, name: str) -> float:
        """A place in the code between a check and what it allows. A trap may lie there."""
        where = (process.name.partition("/")[0], name)
        count = self._passed[where] = self._passed.get(where, 0) + 1
        if (trap := self.traps.get((*where, count))) is not None:
            trap(process)
        return 0.001

    # ---- the site ---------------------------------------------------------------------------

    def submit(self, supervise: Callable[[Trial, Process], Any]) -> None:
        """A job begins, on nodes that Slurm believes in; its first process is a supervisor."""
        if self.verdict:
            return
        if len(self.jobs) >= MAX_ATTEMPTS:
            self.verdict = f"failed: {MAX_ATTEMPTS} attempts"
            self.world.say(self.verdict)
            return
        now = self.world.now
        healthy = [n for n in self.nodes if not n.down and n.isolated_until <= now]
        supervisor = Process("supervisor", 0, "", (healthy or self.nodes)[0])
        self.jobs.append([supervisor])
        self.world.start(supervisor)
        supervisor.on_end.append(lambda: self._supervisor_ended(supervisor, supervise))
        self.world.spawn(supervisor, supervise(self, supervisor))

    def requeue(self, supervise: Callable[[Trial, Process], Any], *, kills: bool) -> None:
        """Slurm believes a node dead and begins the job anew; what it can't reach lives on."""
        if self.jobs and kills:
            self.kill_reachable(self.jobs[-1])
        self.world.say(f"requeued, former processes {'killed' if kills else 'left alive'}")
        self.submit(supervise)

    def _supervisor_ended(self, supervisor: Process, supervise: Callable[..., Any]) -> None:
        job = next(job for job in self.jobs if job[0] is supervisor)
        chance = self.world.random
        if supervisor.code == 0:
            self.verdict = self.verdict or "completed"
            self.world.say("trial completed")
        elif job is self.jobs[-1]:  # else a newer one runs already
            delay_s = (
                chance.uniform(2.0, 8.0) if supervisor.code == 1 else chance.uniform(5.0, 25.0)
            )
            self.world.after(delay_s, self._begin_after, job, supervise)
        self.world.after(chance.uniform(1.0, 15.0), self._clean_up, job)

    def _begin_after(self, job: list[Process], supervise: Callable[..., Any]) -> None:
        if job is self.jobs[-1]:
            self.submit(supervise)

    def _clean_up(self, job: list[Process]) -> None:
        """Slurm ends what is left of a job that is over, once it reaches the node."""
        if left := self.kill_reachable(job):
            nodes = [p.node.isolated_until for p in left]
            delay_s = max(nodes) - self.world.now + self.world.random.uniform(15.0, 40.0)
            self.world.after(delay_s, self._clean_up, job)

    def kill_reachable(self, job: list[Process]) -> list[Process]:
        """Kills; returns who could not be reached."""
        left = []
        for process in job:
            if not process.alive:
                continue
            if process.node.isolated_until > self.world.now:
                left.append(process)
            else:
                self.world.end(process, -9)
        return left
