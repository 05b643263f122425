"""The master: where it goes on, its steps, its checkpoints, its end."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from realsys.api.errors import StoreUnavailable

from .trial import CHECKPOINT_EVERY
from .worker import DONE, FAILED, Worker, may_publish, publish
from .world import Exit, Receive, Rpc

PEERS_TIMEOUT_S = 60.0


def master(worker: Worker, peers: Sequence[Worker]) -> Generator[Any, Any, None]:
    trial, world, me, fence = worker.trial, worker.trial.world, worker.main, worker.fence()
    while worker.told is None:
        yield 0.25
    yield from _wait_for(worker, peers)
    first = yield from _newest_checkpoint(worker)
    yield from publish(worker, fence, "resumed", first)
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
            yield from may_publish(worker)
            yield trial.point(me, "rename")
            trial.checkpoints.append((me.attempt, step))
            yield trial.point(me, "renamed")
            yield from publish(worker, fence, "checkpoint", step)
            yield from _ask(worker, peers[:1], "save", step)
    yield from publish(worker, fence, "done", trial.num_steps)
    trial.done.add(me.attempt)
    for peer in peers:
        world.post(me, peer.mailbox, ("exit", 0))
    raise Exit(DONE)


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


def _newest_checkpoint(worker: Worker) -> Generator[Any, Any, int]:
    """The step of the newest checkpoint that is not of a dead branch; 0 without one."""
    trial, prefix = worker.trial, f"{worker.trial.keys.root}/resumed"
    while True:
        try:
            entries = yield Rpc(lambda store: store.get_subtree(prefix), 5.0)
            break
        except StoreUnavailable:
            yield 0.5
    resumed = {int(entry.key.rpartition("/")[2]): int(entry.value) for entry in entries}
    yield trial.point(worker.main, "resume")
    is_dead = trial.rules.is_dead
    alive = [step for number, step in trial.checkpoints if not is_dead(number, step, resumed)]
    return max(alive, default=0)


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
