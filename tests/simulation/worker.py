"""A worker as two processes: the heartbeat that holds its lease, and the main process that works.

The heartbeat uses LeaseValidity and AttemptFence as realsys/heartbeat/heartbeat_process.py does. Main
receives its lease status through a pipe: a stopped heartbeat sends nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from realsys.api.errors import LeaseLost, StaleAttempt, StoreUnavailable
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.lease_validity import RENEWALS_PER_TTL, LeaseStatus, LeaseValidity
from realsys.name_resolve.memory_store import MemoryStore
from realsys.name_resolve.store import Lease, Put
from realsys.trial.records import AttemptRecord

from .remote import fenced_write
from .trial import Trial
from .world import Exit, Mailbox, Process, Receive, Rpc

FENCED, FAILED, DONE = 77, 1, 0
CALL_TIMEOUT_S = 2.0  # of a renewal: two that are lost must not suspend anybody
RETRY_S = 0.5
REGISTER_TIMEOUT_S = 60.0


@dataclass(eq=False)
class Worker:
    trial: Trial
    name: str
    key: str
    main: Process
    heart: Process
    record: AttemptRecord
    keys: TrialKeys
    told: LeaseStatus | None = None  # what main has heard last; None before it is registered
    mailbox: Mailbox = None  # type: ignore[assignment]

    def fence(self) -> AttemptFence:
        return AttemptFence(None, self.keys, self.record)  # type: ignore[arg-type]

    @property
    def value(self) -> bytes:
        return f"{self.record.token} {self.name} {self.main.node.name}".encode()


def start_worker(trial: Trial, name: str, record: AttemptRecord, node: Any) -> Worker:
    who = (record.number, record.token, node)
    main = trial.world.start(Process(name, *who))
    heart = trial.world.start(Process(f"heartbeat {name}", *who))
    trial.jobs[-1] += [main, heart]
    kind, _, index = name.partition("/")
    keys = trial.keys_of(main)
    worker = Worker(trial, name, keys.worker(kind, int(index)), main, heart, record, keys)
    worker.mailbox = Mailbox(main)
    trial.world.spawn(heart, heartbeat(worker))
    # Main hears the end of its heartbeat at once: it can't prove any more that it lives.
    heart.on_end.append(lambda: trial.world.spawn(main, _end(FENCED)))
    return worker


def _end(code: int) -> Generator[Any, Any, None]:
    yield 0.001
    raise Exit(code)


def heartbeat(worker: Worker) -> Generator[Any, Any, None]:
    me, world = worker.heart, worker.trial.world
    fence = worker.fence()
    try:
        judge, lease = yield from _register(worker, fence)
    except (StaleAttempt, StoreUnavailable):
        world.end(worker.main, FENCED)
        raise Exit(FENCED) from None
    failing = False
    while worker.main.alive:
        worker.told = judge.lease_status(world.clock(me))
        if worker.told is LeaseStatus.EXPIRED:
            world.say(f"{worker.name}.{me.attempt} is over: {judge.reason}")
            world.spawn(worker.main, _end(FENCED))
            yield 2.0
            world.end(worker.main, -9)  # it stands still
            raise Exit(FENCED)
        pause_s = RETRY_S if failing else judge.ttl_s / RENEWALS_PER_TTL
        yield min(pause_s, judge.next_change_s(world.clock(me)) + 0.001)
        if not worker.main.alive:
            break
        failing, lease = yield from _renew(worker, fence, judge, lease)
    yield from _leave(worker, fence)


def _register(
    worker: Worker, fence: AttemptFence
) -> Generator[Any, Any, tuple[LeaseValidity, Lease]]:
    world, me, rules = worker.trial.world, worker.heart, worker.trial.rules
    deadline = world.clock(me) + REGISTER_TIMEOUT_S
    while True:
        sent = world.clock(me)
        try:
            lease = yield from _take(worker, fence)
        except (StoreUnavailable, LeaseLost):
            if world.clock(me) > deadline:
                raise StoreUnavailable("never answered", where="", fix="") from None
            yield RETRY_S
            continue
        return rules.judge(lease.ttl_s, granted_s=sent), lease


def _take(worker: Worker, fence: AttemptFence) -> Generator[Any, Any, Lease]:
    """A new lease, and the key under it if the attempt is still ours and not ended: WorkerKeys.take."""
    trial = worker.trial
    ttl_s = trial.rules.ttl_s
    lease = yield Rpc(lambda store: store.grant(ttl_s), CALL_TIMEOUT_S)
    put = Put(worker.key, worker.value, lease)

    def accepted() -> None:
        trial.note("registered", worker.main)

    if "take" in trial.rules.fenced:
        yield from fenced_write(fence, [put], timeout_s=CALL_TIMEOUT_S, accepted=accepted)
    else:
        yield Rpc(lambda store: store.transaction([], puts=[put]), CALL_TIMEOUT_S)
        accepted()
    return lease


def _renew(
    worker: Worker, fence: AttemptFence, judge: LeaseValidity, lease: Lease
) -> Generator[Any, Any, tuple[bool, Lease]]:
    """One renewal, and a look at the attempt key (the real one is told of its changes). A lease that has
    ended is taken anew."""
    me, attempt_key = worker.heart, worker.keys.attempt
    sent = worker.trial.world.clock(me)

    def call(store: MemoryStore) -> int | None:
        store.end_dead([lease.id], at_once=True)
        if lease.id not in store.current().leases:
            return None
        store.renew(lease.id)
        return store.get(attempt_key).revision

    timeout_s = max(0.05, min(CALL_TIMEOUT_S, judge.next_change_s(sent)))
    try:
        revision = yield Rpc(call, timeout_s)
        if revision is None:
            yield worker.trial.point(me, "gone")
            lease = yield from _take(worker, fence)
            judge.replaced(lease.ttl_s, granted_s=sent)
            return False, lease
    except (StoreUnavailable, LeaseLost):
        return True, lease
    except StaleAttempt as error:
        judge.end(error.what)
        return False, lease
    judge.renewed(sent)
    if "take" in worker.trial.rules.fenced and revision != fence._revision:
        judge.end("another attempt has taken over, or ours was ended")
    return False, lease


def _leave(worker: Worker, fence: AttemptFence) -> Generator[Any, Any, None]:
    """Main has ended: its key goes, if it is still ours."""
    trial, me = worker.trial, worker.heart
    yield trial.point(me, "leave")
    try:
        if "leave" in trial.rules.fenced:
            yield from fenced_write(fence, [], [worker.key], timeout_s=CALL_TIMEOUT_S)
        else:
            yield Rpc(lambda store: store.delete(worker.key, missing_ok=True), CALL_TIMEOUT_S)
    except (StaleAttempt, StoreUnavailable):
        pass
    raise Exit(DONE)


# ---- what the main processes of all workers do --------------------------------------------------


def may_publish(worker: Worker) -> bool:
    """Not while suspended. The heartbeat ends us if that lasts."""
    return worker.told is LeaseStatus.VALID or not worker.trial.rules.waits_while_suspended


def publish(worker: Worker, fence: AttemptFence, op: str, step: int) -> Generator[Any, Any, bool]:
    """A fenced publication, tried once: False when the store does not answer."""
    trial, world, me = worker.trial, worker.trial.world, worker.main
    yield trial.point(me, op)
    noted: list[None] = []
    # Who sees no other attempt in its store may be believed if it asked before the other one began.
    began = {"began": world.now} if trial.has_own_stores else {}

    def accepted() -> None:
        if not noted:
            trial.note(op, me, step, **began)
        noted.append(None)

    if trial.rules.looks_at_folders and max(trial.folders) > me.attempt:
        trial.note("refused", me, step)
        raise Exit(FENCED)
    yield trial.point(me, f"{op} allowed")
    put = Put(f"{worker.keys.root}/{op}", str(step).encode())
    try:
        if op in trial.rules.fenced:
            yield from fenced_write(fence, [put], timeout_s=5.0, accepted=accepted)
        else:
            yield Rpc(lambda store: store.add(put.key, put.value, replace=True), 5.0)
            accepted()
    except StaleAttempt:
        trial.note("refused", me, step)
        raise Exit(FENCED) from None
    except StoreUnavailable:
        return False
    return True


def model_worker(worker: Worker, master: Worker) -> Generator[Any, Any, None]:
    world, me = worker.trial.world, worker.main
    while worker.told is None:
        yield 0.25
    while True:
        letter = yield Receive(worker.mailbox, 10.0)
        if letter is None:
            continue
        verb, step = letter
        if verb == "exit":
            raise Exit(DONE)
        yield world.random.uniform(1.0, 4.0)
        world.post(me, master.mailbox, (worker.name, verb, step))
