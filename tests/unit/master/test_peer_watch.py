"""Which ends of workers the master is told of at once: those of its own attempt that are no success."""

import queue
import threading

from realsys.master.graph import peer_watch
from realsys.master.graph.peer_watch import PeerWatch
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.memory_store import MemoryStore
from realsys.trial.records import WorkerRecord, WorkerStatus, dumps

KEYS = TrialKeys(cluster="here", user="anna", experiment="ppo-math", trial="run1")


def record(worker, token="ours"):
    return dumps(WorkerRecord(worker=worker, host="here", pid=1, start=1, attempt=1, token=token))


def test_ends_are_told_with_their_reason(monkeypatch):
    monkeypatch.setattr(peer_watch, "POLL_S", 0.001)
    clock_s, told = [0.0], queue.Queue()
    store = MemoryStore(clock=lambda: clock_s[0])
    statuses = {
        "done": WorkerStatus(state="done", reason="all steps"),
        "failed": WorkerStatus(state="failed", reason="out of memory"),
        "quiet": WorkerStatus(state="running"),
    }
    for worker, status in statuses.items():
        store.add(f"{KEYS.worker_statuses}/{worker}", dumps(status))
    before = store.revision()
    watch = PeerWatch(
        store, KEYS, token="ours", from_revision=before, on_ended=lambda *end: told.put(end)
    )
    for worker in ("done", "failed", "quiet", "damaged", "others", "unknown"):
        value = record(worker, "theirs" if worker == "others" else "ours")
        store.add(f"{KEYS.workers}/{worker}", b"{" if worker == "damaged" else value)
    store.add(f"{KEYS.workers}/empty", b"")
    store.add(f"{KEYS.workers}/expired", record("expired"), lease=store.grant(5.0))
    clock_s[0] = 60.0
    with store.watch(KEYS.workers) as supervisor:
        assert [event.key for event in supervisor.poll(60)] == [f"{KEYS.workers}/expired"]
    store.delete(f"{KEYS.workers}/failed")  # before it is looked at, but after its revision
    with watch as entered:
        assert entered is watch
        for worker in ("done", "quiet", "empty", "damaged", "others", "unknown"):
            store.delete(f"{KEYS.workers}/{worker}")
        assert [told.get(timeout=60) for _ in range(3)] == [
            ("failed", "out of memory"),
            ("quiet", "its process has ended"),
            ("unknown", "its process has ended"),
        ]
    assert told.empty()
    assert not any(thread.name == "peer-watch" for thread in threading.enumerate())
