"""The supervisor: takes an attempt, starts workers, looks who is there, ends the attempt.

It plays FailureDetector; take_attempt's store part is a compare-and-set as in
realsys/supervisor/attempt.py.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from realsys.api.errors import KeyNotFound, StaleAttempt, StoreUnavailable
from realsys.api.trial import AttemptRecord, dumps, loads
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.memory import MemoryStore
from realsys.name_resolve.store import Compare, Put

from .master import master
from .remote import fenced_write, remotely
from .trial import Trial
from .worker import DONE, Worker, model_worker, start_worker
from .world import Exit, Process, Rpc

LOOK_EVERY_S = 1.0
CALL_TIMEOUT_S = 5.0
TAKE_TIMEOUT_S = 120.0
FAILED, SUPERSEDED = 1, 77


def supervise(trial: Trial, me: Process) -> Generator[Any, Any, None]:
    job = next(job for job in trial.jobs if job[0] is me)
    record = yield from _take_attempt(trial, me)
    fence = AttemptFence(None, trial.keys, record)  # type: ignore[arg-type]
    yield trial.point(me, "taken")
    yield from _forget_older(trial, fence)
    if job is not trial.jobs[-1]:
        raise Exit(SUPERSEDED)  # Slurm has begun the job anew: it gives this one no nodes
    workers = _start_workers(trial, me, record)
    code = yield from _watch(trial, me, workers, fence)
    trial.kill_reachable(job[1:])
    raise Exit(code)


def _take_attempt(trial: Trial, me: Process) -> Generator[Any, Any, AttemptRecord]:
    world, key = trial.world, trial.keys.attempt
    token = f"{world.random.getrandbits(64):016x}"
    deadline = world.clock(me) + TAKE_TIMEOUT_S
    made: list[AttemptRecord] = []

    def take(store: Any) -> AttemptRecord | None:
        try:
            entry = store.get(key)
        except KeyNotFound:
            compare, number = Compare.absent(key), 1
        else:
            newest = loads(AttemptRecord, entry.value, where=key)
            if newest.token == token:
                return newest  # taken: the answer was lost
            compare, number = Compare.at_revision(key, entry.revision), newest.number + 1
        record = AttemptRecord(
            number=number,
            token=token,
            host=me.node.name,
            supervisor_pid=1,
            supervisor_start=1,
            started_at=0.0,
        )
        made[:] = [record]
        return record if store.transaction([compare], puts=[Put(key, dumps(record))]) else None

    def accepted() -> None:
        me.attempt, me.token = made[0].number, token
        trial.note("took_attempt", me)

    while True:
        try:
            record = yield from remotely(take, timeout_s=CALL_TIMEOUT_S, accepted=accepted)
            if record is not None:
                me.attempt, me.token = record.number, token
                return record
            raise Exit(FAILED)  # somebody else was faster: TrialIsLive
        except StoreUnavailable:
            if world.clock(me) > deadline:
                raise Exit(FAILED) from None
            yield 0.5


def _forget_older(trial: Trial, fence: AttemptFence) -> Generator[Any, Any, None]:
    """Removes what older attempts left: their workers' keys."""
    prefix = trial.keys.workers
    while True:
        try:
            if "clear" in trial.rules.fenced:
                keys = yield Rpc(lambda store: store.find_subtree(prefix), CALL_TIMEOUT_S)
                yield from fenced_write(fence, [], keys, timeout_s=CALL_TIMEOUT_S)
            else:
                yield Rpc(lambda store: store.clear_subtree(prefix), CALL_TIMEOUT_S)
            return
        except StoreUnavailable:
            yield 0.5
        except StaleAttempt:
            raise Exit(SUPERSEDED) from None


def _start_workers(trial: Trial, me: Process, record: AttemptRecord) -> list[Worker]:
    now = trial.world.now
    healthy = [
        n for n in trial.nodes if not n.down and n.isolated_until <= now and n is not me.node
    ]
    nodes = [me.node, *healthy, *trial.nodes][: trial.num_nodes]
    names = [f"model_worker/{i}" for i in range(trial.num_workers)]
    first = start_worker(trial, "master_worker/0", record, nodes[0])
    peers = [
        start_worker(trial, name, record, nodes[(i + 1) % len(nodes)])
        for i, name in enumerate(names)
    ]
    trial.world.spawn(first.main, master(first, peers))
    for peer in peers:
        trial.world.spawn(peer.main, model_worker(peer, first))
    return [first, *peers]


def _watch(
    trial: Trial, me: Process, workers: list[Worker], fence: AttemptFence
) -> Generator[Any, Any, int]:
    world, keys, token = trial.world, trial.keys, me.token.encode()
    detector, running = trial.rules.detector(), {worker.name: worker for worker in workers}

    def look(store: MemoryStore) -> tuple[int, dict[str, str], dict[str, str]]:
        present, leases = {}, {}
        for entry in store.get_subtree(keys.workers):
            mark, name, host = entry.value.split()
            if mark == token:
                present[name.decode()], leases[name.decode()] = host.decode(), entry.lease_id or ""
        return store.get(keys.attempt).revision, present, leases

    while True:
        asked = world.clock(me)
        try:
            revision, present, leases = yield Rpc(look, CALL_TIMEOUT_S)
        except StoreUnavailable:
            present, leases = None, None
        else:
            if revision != fence._revision and fence._revision:
                return SUPERSEDED
        verdict = detector.look(present, now_s=asked, leases=leases)
        if verdict.frozen and world.tracing is not None:
            world.say(f"supervisor.{me.attempt} decides nothing: {verdict.frozen}")
        for worker in list(running.values()):
            main = worker.main
            if main.alive or main.node.down or main.node.isolated_until > world.now:
                continue  # srun knows nothing
            trial.note("exited", me, worker=worker.name)
            del running[worker.name]
            if main.code != DONE:
                return FAILED
            detector.forget(worker.name)
            if worker is workers[0]:
                return DONE
        if me.attempt in trial.done:
            return DONE
        lost = [name for name in verdict.lost if name in running]
        for name in lost:
            trial.note("lost", me, worker=name)
        if lost:
            return FAILED
        yield LOOK_EVERY_S
