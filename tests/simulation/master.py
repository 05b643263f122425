"""The master: where it goes on, its steps, its checkpoints, its end.

Files are as realsys/master/checkpoint/recover.py, publication.py and realsys/observability/metrics.py
handle them; between two of their system calls the master may stand still as long as it likes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from realsys.api.errors import StaleAttempt, StoreUnavailable
from realsys.name_resolve.fence import AttemptFence
from realsys.trial.lineage import Lineage
from realsys.trial.records import Resumed

from .remote import fence_check, insistently
from .trial import CHECKPOINT_EVERY, Checkpoint, Trial
from .worker import DONE, FAILED, FENCED, Worker, may_publish, publish
from .world import Exit, Receive, Rpc

PEERS_TIMEOUT_S = 60.0
RETRY_S = 0.5
HASH_S = 0.2  # reading a checkpoint


@dataclass(eq=False)
class Master:
    worker: Worker
    peers: Sequence[Worker]
    lineage: Lineage = field(default_factory=lambda: Lineage({}))
    waiting: list[tuple[str, int]] = field(
        default_factory=list
    )  # what to publish, and of which step
    fence: AttemptFence = field(init=False)

    def __post_init__(self) -> None:
        self.fence = self.worker.fence()

    @property
    def trial(self) -> Trial:
        return self.worker.trial

    @property
    def number(self) -> int:
        return self.worker.main.attempt

    def run(self) -> Generator[Any, Any, None]:
        trial, me = self.trial, self.worker.main
        while self.worker.told is None:
            yield 0.25
        yield from _wait_for(self.worker, self.peers)
        first = yield from self._resume()
        yield from self._take_over(first)
        for step in range(first + 1, trial.num_steps + 1):
            yield from _ask(self.worker, self.peers, "step", step)
            self._put("step", step)
            if step % CHECKPOINT_EVERY == 0 and step < trial.num_steps:
                self._put("checkpoint", step)
                self._put("save", step)
            yield from self._flush()
        self._put("done", trial.num_steps)
        while not (yield from self._flush()):
            yield RETRY_S
        trial.done.add(self.number)
        trial.look_at_checkpoints(me)
        for peer in self.peers:
            trial.world.post(me, peer.mailbox, ("exit", 0))
        raise Exit(DONE)

    # ---- where it goes on -------------------------------------------------------------------

    def _resume(self) -> Generator[Any, Any, int]:
        trial, me = self.trial, self.worker.main
        yield trial.point(me, "resume")
        found = yield from self._newest_whole()
        if trial.rules.says_first:
            yield from self._say(found)
        ours = yield from self._adopt(found)
        if not trial.rules.says_first:
            yield from self._say(found)
        yield trial.point(me, "load")
        if ours is None or found is None:
            return 0
        if ours not in trial.checkpoints:
            trial.world.say(f"{me.name}.{me.attempt} can't load {ours}: it is gone")
            raise Exit(FAILED)
        return found.step

    def _newest_whole(self) -> Generator[Any, Any, Checkpoint | None]:
        trial, me = self.trial, self.worker.main
        lineage = trial.rules.lineage(dict(trial.told))
        yield trial.point(me, "look")
        for found in sorted(trial.checkpoints, reverse=True):
            if lineage.counts(found.attempt, found.step):
                yield HASH_S
                if found in trial.checkpoints:
                    return found
        return None

    def _adopt(self, found: Checkpoint | None) -> Generator[Any, Any, Checkpoint | None]:
        trial, me = self.trial, self.worker.main
        yield trial.point(me, "adopt")
        if not found or not trial.rules.adopts or found not in trial.checkpoints:
            return found
        ours = self._folder(found.step)
        trial.checkpoints.add(ours)
        return ours

    def _say(self, found: Checkpoint | None) -> Generator[Any, Any, None]:
        trial, me = self.trial, self.worker.main
        step, of = found or (0, 0)
        if "resumed" in trial.rules.fenced:
            try:
                yield from insistently(
                    lambda: fence_check(self.fence, timeout_s=5.0),
                    trial.world,
                    me,
                    for_s=trial.rules.patience_s,
                )
            except StaleAttempt:
                raise Exit(FENCED) from None
            except StoreUnavailable:
                raise Exit(FAILED) from None
        yield trial.point(me, "resumed")
        record = Resumed(attempt=self.number, phase="main", step=step, of_attempt=of)
        trial.told[self.number] = record
        told = {n: r for n, r in trial.told.items() if n <= self.number}
        self.lineage = trial.rules.lineage(told)
        trial.note("resumed", me, step, of=of)
        trial.look_at_checkpoints(me)

    # ---- what waits to be shown: realsys/master/checkpoint/outbox.py -----------------------------------

    def _put(self, op: str, step: int) -> None:
        if op == "checkpoint":  # the newest is enough
            self.waiting = [(other, n) for other, n in self.waiting if other != op]
        self.waiting.append((op, step))

    def _flush(self) -> Generator[Any, Any, bool]:
        """In order, as far as it may be now; steps go on whatever comes of it."""
        while self.waiting:
            if not may_publish(self.worker):
                return False
            op, step = self.waiting[0]
            if op == "step":
                yield from self._record(step)
            elif not (yield from publish(self.worker, self.fence, op, step)):
                return False
            elif op == "checkpoint":
                yield from self._rename(step)
            self.waiting.pop(0)
        return True

    def _record(self, step: int) -> Generator[Any, Any, None]:
        trial, me = self.trial, self.worker.main
        yield trial.point(me, "step")
        trial.rows[self.number].append((self.number, step))
        trial.note("step", me, step)
        yield from self._point_to_ours()

    # ---- rows -------------------------------------------------------------------------------

    def _take_over(self, last_step: int) -> Generator[Any, Any, None]:
        trial, me = self.trial, self.worker.main
        yield trial.point(me, "take_over")
        former = [n for n in self.lineage.limits if n != self.number]
        sources = [n for n in former if n in trial.rows] if trial.rules.rows_of_lineage else []
        rows = trial.rows.get([*sources, trial.names_point_to][0], [])
        trial.rows[self.number] = [row for row in rows if row[1] <= last_step]
        yield from self._point_to_ours()

    def _point_to_ours(self) -> Generator[Any, Any, None]:
        trial, me = self.trial, self.worker.main
        while trial.names_point_to != (newest := self._whose_to_show()):
            yield trial.point(me, "point")
            trial.names_point_to = newest

    def _whose_to_show(self) -> int:
        return max(self.trial.rows) if self.trial.rules.names_only_go_on else self.number

    # ---- checkpoints ------------------------------------------------------------------------

    def _rename(self, step: int) -> Generator[Any, Any, None]:
        """It was accepted: now it gets its name, then what is no longer needed is removed."""
        trial, me, ours = self.trial, self.worker.main, self._folder(step)
        yield trial.point(me, "rename")
        if not trial.rules.folder_per_attempt:
            trial.checkpoints -= {c for c in trial.checkpoints if c.step == step}
        trial.checkpoints.add(ours)
        trial.stored.append(ours)
        old = self._no_longer_needed()
        yield trial.point(me, "prune")
        trial.checkpoints -= old
        trial.look_at_checkpoints(me)

    def _no_longer_needed(self) -> set[Checkpoint]:
        rules, found = self.trial.rules, sorted(self.trial.checkpoints)
        ours = [c for c in found if rules.prunes_newer or c.attempt <= self.number]
        counting = [c for c in ours if self.lineage.counts(c.attempt, c.step)]
        return set(ours) - set(counting[-rules.keep :])

    def _folder(self, step: int) -> Checkpoint:
        return Checkpoint(step, self.number)


def _wait_for(worker: Worker, peers: Sequence[Worker]) -> Generator[Any, Any, None]:
    world = worker.trial.world
    values, workers = {peer.value for peer in peers}, worker.keys.workers
    deadline = world.clock(worker.main) + PEERS_TIMEOUT_S
    while True:
        try:
            entries = yield Rpc(lambda store: store.get_subtree(workers), 5.0)
        except StoreUnavailable:
            entries = []
        if values <= {entry.value for entry in entries}:
            return
        if world.clock(worker.main) > deadline:
            raise Exit(FAILED)
        yield 0.5


def _ask(
    worker: Worker, peers: Sequence[Worker], verb: str, step: int
) -> Generator[Any, Any, None]:
    """Sends a request to all and waits for their replies; who never replies is found by others."""
    world, missing = worker.trial.world, {peer.name for peer in peers}
    for peer in peers:
        world.post(worker.main, peer.mailbox, (verb, step))
    while missing:
        letter = yield Receive(worker.mailbox, 10.0)
        if letter is not None and letter[1:] == (verb, step):
            missing.discard(letter[0])
