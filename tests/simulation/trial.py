"""The simulated trial: its shared folder, its history, its site (Slurm), and the rules it plays by.

The rules are the real ones. Each can be exchanged for a broken one, to see that the checks catch it
(test_simulation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.lease_validity import TTL_S, LeaseValidity
from realsys.supervisor.health.failure_detector import FailureDetector
from realsys.trial.lineage import Lineage
from realsys.trial.records import Resumed

from .world import Node, Process, World

NUM_NODES = 6
MAX_ATTEMPTS = 8
CHECKPOINT_EVERY = 3


FENCED = ("checkpoint", "save", "done", "resumed", "take", "clear", "leave")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What is played. The defaults are what realsys does."""

    detector: Callable[[], FailureDetector] = FailureDetector
    # A patience of two minutes: the default, half an hour, is longer than a schedule.
    judge: Callable[..., LeaseValidity] = partial(LeaseValidity, give_up_s=120.0)
    lineage: Callable[[Mapping[int, Resumed]], Lineage] = Lineage.of
    fenced: frozenset[str] = frozenset(FENCED)
    waits_while_suspended: bool = True
    ends_attempts: bool = True  # the supervisor's last word, in the store
    looks_at_folders: bool = True  # before a publication: which attempt is the newest
    folder_per_attempt: bool = True  # else a checkpoint's folder is named by its step alone
    prunes_newer: bool = False  # also what newer attempts wrote, by our own lineage
    adopts: bool = True  # the checkpoint that a resume goes on from
    says_first: bool = False  # from whose checkpoint it goes on, before it is adopted
    rows_of_lineage: bool = True  # are taken over, else those that the phase's names point to
    names_only_go_on: bool = True  # the phase's names are never pointed back to older rows
    keep: int = 2  # checkpoints
    ttl_s: float = TTL_S
    patience_s: float = 60.0  # of a supervisor with a store that is away at the start


class Checkpoint(NamedTuple):
    """A folder's name. They sort by it."""

    step: int
    attempt: int


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
    has_own_stores: bool = False  # each job an etcd of its own: they share the disk only
    # ---- on the shared disk
    folders: dict[int, str] = field(default_factory=dict)  # attempt → token of who claimed it
    told: dict[int, Resumed] = field(default_factory=dict)  # the attempts' own words
    rows: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # attempt → (writer, step)
    names_point_to: int = 0  # whose rows the phase's names show
    checkpoints: set[Checkpoint] = field(default_factory=set)
    # ---- for the checks
    stored: list[Checkpoint] = field(default_factory=list)  # that were accepted and renamed
    missing: list[str] = field(default_factory=list)  # accepted checkpoints that nobody could take
    done: set[int] = field(default_factory=set)  # attempts whose master says so, on shared disk
    jobs: list[list[Process]] = field(default_factory=list)  # the processes of each incarnation
    traps: dict[tuple[str, str, int], Callable[[Process], None]] = field(default_factory=dict)
    _passed: dict[tuple[str, str], int] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        chance = self.world.random
        for i in range(NUM_NODES):
            rate, offset_s = 1 + chance.uniform(-0.005, 0.005), chance.uniform(0, 1e5)
            self.nodes.append(Node(f"n{i}", rate, offset_s))

    def keys_of(self, process: Process) -> TrialKeys:
        """Its job's: other names stand for another store."""
        job = next(i for i, job in enumerate(self.jobs) if process in job)
        trial = f"t{job}" if self.has_own_stores else "t"
        return TrialKeys(cluster="c", user="u", experiment="e", trial=trial)

    def note(
        self, op: str, process: Process, step: int = 0, *, worker: str = "", **more: Any
    ) -> None:
        row = {"at": self.world.now, "op": op, "worker": worker or process.name, "step": step}
        row |= {"attempt": process.attempt, "token": process.token, **more}
        self.history.append(row)
        self.world.say(f"{process.name}.{process.attempt} {op} {worker} {step or ''} {more or ''}")

    def look_at_checkpoints(self, process: Process) -> None:
        """Would somebody who resumed now find the newest checkpoint that counts?"""
        lineage = Lineage.of(self.told)
        accepted = [c for c in self.stored if lineage.counts(c.attempt, c.step)]
        found = [c for c in self.checkpoints if lineage.counts(c.attempt, c.step)]
        newest = max((c.step for c in accepted), default=0)
        if newest > max((c.step for c in found), default=0):
            left = [f"{c.step}.{c.attempt}" for c in sorted(self.checkpoints)]
            self.missing.append(
                f"the checkpoint of step {newest} is gone at {self.world.now:.1f}, {process.name} of "
                f"attempt {process.attempt} was the last at the folder; left: {left}, "
                f"counts: {dict(lineage.limits)}"
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
        if job is not self.jobs[-1]:
            self.world.say("nobody asks: a newer incarnation of the job runs")
        elif supervisor.code == 0:
            self.verdict = self.verdict or "completed"
            self.world.say("trial completed")
        else:
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
