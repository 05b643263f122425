"""The supervisor: takes an attempt, starts workers, looks who is there, ends the attempt.

It plays FailureDetector and AttemptFence. The steps of claim_attempt and end_attempt are those of
realsys/supervisor/attempt/attempt.py.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from realsys.api.errors import KeyNotFound, StaleAttempt, StoreUnavailable
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.memory_store import MemoryStore
from realsys.name_resolve.store import Compare, Put
from realsys.trial.records import AttemptRecord, dumps, loads

from .master import Master
from .remote import fenced_write, insistently, remotely
from .trial import Trial
from .worker import DONE, Worker, model_worker, start_worker
from .world import Exit, Process, Rpc

LOOK_EVERY_S = 1.0
CALL_TIMEOUT_S = 5.0
FAILED, SUPERSEDED = 1, 77


def supervise(trial: Trial, me: Process) -> Generator[Any, Any, None]:
    job = next(job for job in trial.jobs if job[0] is me)
    keys, for_s = trial.keys_of(me), trial.rules.patience_s
    try:
        record = yield from _take_attempt(trial, me, keys)
        fence = AttemptFence(None, keys, record)  # type: ignore[arg-type]
        yield trial.point(me, "taken")
        yield from insistently(
            lambda: _forget_older(trial, keys, fence), trial.world, me, for_s=for_s
        )
    except (StoreUnavailable, StaleAttempt):
        raise Exit(FAILED) from None
    if job is not trial.jobs[-1]:
        raise Exit(SUPERSEDED)  # Slurm has begun the job anew: it gives this one no nodes
    workers = _start_workers(trial, me, record)
    code = yield from _watch(trial, me, workers, keys)
    trial.kill_reachable(job[1:])
    yield from _end_attempt(trial, me, keys, record)
    raise Exit(code)


def _take_attempt(trial: Trial, me: Process, keys: TrialKeys) -> Generator[Any, Any, AttemptRecord]:
    world, key, for_s = trial.world, keys.attempt, trial.rules.patience_s
    token = f"{world.random.getrandbits(64):016x}"
    number = max(trial.folders, default=0) + 1
    yield trial.point(me, "listed")

    def ask(store: Any) -> tuple[Compare, int]:
        try:
            entry = store.get(key)
        except KeyNotFound:
            return Compare.absent(key), number
        newest = loads(AttemptRecord, entry.value, where=key)
        return Compare.at_revision(key, entry.revision), max(number, newest.number + 1)

    compare, number = yield from insistently(
        lambda: remotely(ask, timeout_s=CALL_TIMEOUT_S), world, me, for_s=for_s
    )
    yield trial.point(me, "claim")
    if number in trial.folders:
        raise Exit(FAILED)  # somebody else was faster: TrialIsLive
    trial.folders[number] = token
    me.attempt, me.token = number, token
    record = AttemptRecord(
        number=number,
        token=token,
        host=me.node.name,
        supervisor_pid=1,
        supervisor_start=1,
        started_at=0.0,
    )
    if trial.has_own_stores:  # the folder decides
        trial.note("took_attempt", me)
    yield trial.point(me, "claimed")
    yield from _put_attempt(trial, me, key, compare, record)
    return record


def _put_attempt(
    trial: Trial, me: Process, key: str, compare: Compare, record: AttemptRecord
) -> Generator[Any, Any, None]:
    """The compare-and-set; an answer that was lost is looked for, as etcd/transaction.py does."""
    ours = dumps(record)

    def put(store: Any) -> bool:
        if store.transaction([compare], puts=[Put(key, ours)]):
            return True
        try:
            return bool(store.get(key).value == ours)
        except KeyNotFound:
            return False

    def accepted() -> None:
        if not trial.has_own_stores:
            trial.note("took_attempt", me)

    taken = yield from insistently(
        lambda: remotely(put, timeout_s=CALL_TIMEOUT_S, accepted=accepted),
        trial.world,
        me,
        for_s=trial.rules.patience_s,
    )
    if not taken:
        del trial.folders[record.number]
        raise Exit(FAILED)


def _forget_older(trial: Trial, keys: TrialKeys, fence: AttemptFence) -> Generator[Any, Any, None]:
    """Deletes what older attempts left: their workers' keys."""
    prefix = keys.workers
    if "clear" not in trial.rules.fenced:
        yield Rpc(lambda store: store.clear_subtree(prefix), CALL_TIMEOUT_S)
    elif left := (yield Rpc(lambda store: store.find_subtree(prefix), CALL_TIMEOUT_S)):
        yield from fenced_write(fence, [], left, timeout_s=CALL_TIMEOUT_S)


def _end_attempt(
    trial: Trial, me: Process, keys: TrialKeys, record: AttemptRecord
) -> Generator[Any, Any, None]:
    """Whoever of it lives on somewhere must exit. Best effort."""
    ours, ended = dumps(record), dumps(replace(record, ended_at=1.0))
    yield trial.point(me, "end")

    def tell(store: MemoryStore) -> None:
        holds = Compare.holds(keys.attempt, ours)
        ends = trial.rules.ends_attempts
        if not ends or store.transaction([holds], puts=[Put(keys.attempt, ended)]):
            trial.note("ended", me)

    try:
        yield Rpc(tell, CALL_TIMEOUT_S)
    except StoreUnavailable:
        trial.world.say(f"the end of attempt {record.number} is not told")


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
    trial.world.spawn(first.main, Master(first, peers).run())
    for peer in peers:
        trial.world.spawn(peer.main, model_worker(peer, first))
    return [first, *peers]


def _watch(
    trial: Trial, me: Process, workers: list[Worker], keys: TrialKeys
) -> Generator[Any, Any, int]:
    world, token = trial.world, me.token.encode()
    detector, running = trial.rules.detector(), {worker.name: worker for worker in workers}

    def look(store: MemoryStore) -> tuple[dict[str, str], dict[str, str]]:
        present, leases = {}, {}
        for entry in store.get_subtree(keys.workers):
            mark, name, host = entry.value.split()
            if mark == token:
                present[name.decode()], leases[name.decode()] = host.decode(), entry.lease_id or ""
        return present, leases

    while True:
        try:
            present, leases = yield Rpc(look, CALL_TIMEOUT_S)
        except StoreUnavailable:
            present, leases = None, None
        verdict = detector.look(present, now_s=world.clock(me), leases=leases)
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
        lost = [name for name in verdict.lost if name in running]
        for name in lost:
            trial.note("lost", me, worker=name)
        if lost:
            return FAILED
        yield LOOK_EVERY_S
