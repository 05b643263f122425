"""The master: where it goes on, its steps, its checkpoints, its end."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from realsys.api.errors import StoreUnavailable
from realsys.name_resolve.fence import AttemptFence

from .trial import CHECKPOINT_EVERY, Trial
from .worker import DONE, FAILED, Worker, may_publish, publish
from .world import Exit, Receive, Rpc

PEERS_TIMEOUT_S = 60.0


def master(worker: Worker, peers: Sequence[Worker]) -> Generator[Any, Any, None]:
    trial, world, me, fence = worker.trial, worker.trial.world, worker.main, worker.fence()
    while worker.told is None:
        yield 0.25
    yield from _wait_for(worker, peers)
    resumed = yield from _resumed(worker)
    yield trial.point(me, "resume")
    first = max((step for _, step in _alive(trial, resumed)), default=0)
    yield from publish(worker, fence, "resumed", first)
    resumed[me.attempt] = first
    if trial.rules.truncates_metrics:
        yield trial.point(me, "truncate")
        trial.metrics[:] = [(a, s) for a, s in trial.metrics if s <= first]
    for step in range(first + 1, trial.num_steps + 1):
        yield from _ask(worker, peers, "step", step)
        yield from may_publish(worker)
        yield trial.point(me, "step")
        trial.metrics.append((me.attempt, step))
        trial.note("step", me, step)
        if step % CHECKPOINT_EVERY == 0:
            yield from _checkpoint(worker, fence, step, resumed)
            yield from _ask(worker, peers[:1], "save", step)
    yield from publish(worker, fence, "done", trial.num_steps)
    trial.done.add(me.attempt)
    trial.look_at_checkpoints(me)
    for peer in peers:
        world.post(me, peer.mailbox, ("exit", 0))
    raise Exit(DONE)


def _checkpoint(
    worker: Worker, fence: AttemptFence, step: int, resumed: Mapping[int, int]
) -> Generator[Any, Any, None]:
    """As realsys/master/recover.py commits: accepted first, then renamed, then the oldest removed. From
    the acceptance on the process may stand still as long as it likes."""
    trial, me = worker.trial, worker.main
    yield from publish(worker, fence, "checkpoint", step)
    yield trial.point(me, "rename")
    if trial.rules.folder_per_attempt:
        trial.checkpoints.append((me.attempt, step))
    elif step > resumed[me.attempt] or step not in [s for _, s in trial.checkpoints]:
        trial.checkpoints[:] = [c for c in trial.checkpoints if c[1] != step] + [(me.attempt, step)]
    trial.stored.append((me.attempt, step))
    found = trial.checkpoints if trial.rules.prunes_by_step else _alive(trial, trial.resumed())
    oldest_first = sorted(found, key=lambda checkpoint: checkpoint[::-1])
    yield trial.point(me, "prune")
    for old in oldest_first[: -trial.rules.keep]:
        if old in trial.checkpoints:
            trial.checkpoints.remove(old)
    trial.look_at_checkpoints(me)


def _alive(trial: Trial, resumed: Mapping[int, int]) -> list[tuple[int, int]]:
    """The checkpoints that are not of a dead branch."""
    is_dead = trial.rules.is_dead
    return [(number, s) for number, s in trial.checkpoints if not is_dead(number, s, resumed)]


def _wait_for(worker: Worker, peers: Sequence[Worker]) -> Generator[Any, Any, None]:
    trial, world = worker.trial, worker.trial.world
    values, workers = {peer.value for peer in peers}, trial.keys.workers
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


def _resumed(worker: Worker) -> Generator[Any, Any, dict[int, int]]:
    """attempt → the step that it goes on after."""
    prefix = f"{worker.trial.keys.root}/resumed"
    while True:
        try:
            entries = yield Rpc(lambda store: store.get_subtree(prefix), 5.0)
        except StoreUnavailable:
            yield 0.5
            continue
        return {int(entry.key.rpartition("/")[2]): int(entry.value) for entry in entries}


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
