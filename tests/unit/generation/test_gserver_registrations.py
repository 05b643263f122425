"""Who is registered, and how the manager hears of changes."""

import threading
from dataclasses import replace

from realsys.generation.manager.registrations import Registrations, RegistrationWatch, registrations
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.memory_store import MemoryStore
from realsys.trial.records import WorkerRecord, dumps
from realsys.worker.live_scaling import Scaling

KEYS = TrialKeys(cluster="c", user="u", experiment="e", trial="t")


def register(
    store: MemoryStore, kind: str, index: int, *, pid: int = 1, token: str = "mine"
) -> None:
    record = WorkerRecord(
        worker=f"{kind}/{index}",
        host="n1",
        pid=pid,
        start=7,
        attempt=1,
        token=token,
        control=f"https://n1:{pid}",
    )
    store.add(KEYS.worker(kind, index), dumps(record), replace=True)


def test_those_of_this_attempt_are_listed():
    store = MemoryStore()
    register(store, "generation_server", 0)
    register(store, "generation_server", 1, token="an older attempt's")
    register(store, "generation_server", 12, pid=5)
    register(store, "rollout_worker", 0, pid=3)
    register(store, "model_worker", 0)
    found = registrations(store, KEYS, token="mine")
    assert {i: s.address.url for i, s in found.servers.items()} == {
        0: "https://n1:1",
        12: "https://n1:5",
    }
    assert found.rollout_workers == {"rollout_worker/0": "n1:3:7"}


def test_what_can_not_be_read_costs_the_others_nothing(caplog):
    store = MemoryStore()
    register(store, "generation_server", 0)
    store.add(KEYS.worker("generation_server", 1), b"\xff{")
    assert list(registrations(store, KEYS, token="mine").servers) == [0]
    assert "registration not readable" in caplog.text


def test_each_change_is_told_once_with_everything_there_is():
    store, told, came = MemoryStore(), [], threading.Semaphore(0)

    def on_change(found: Registrations) -> None:
        told.append({i: s.incarnation for i, s in found.servers.items()})
        came.release()

    with RegistrationWatch(store, KEYS, token="mine", on_change=on_change):
        assert came.acquire(timeout=60)
        register(store, "generation_server", 0)
        assert came.acquire(timeout=60)
        register(store, "generation_server", 0)  # the same again
        register(store, "generation_server", 0, pid=2)
        assert came.acquire(timeout=60)
        store.delete(KEYS.worker("generation_server", 0))
        assert came.acquire(timeout=60)
    assert told == [{}, {0: "n1:1:7"}, {0: "n1:2:7"}, {}]


def test_who_comes_and_goes_is_told_with_them():
    store, told, came = MemoryStore(), [], threading.Semaphore(0)

    def on_change(found: Registrations) -> None:
        told.append(found.scaling)
        came.release()

    mine = Scaling(attempt=1, token="mine", phase="main", drained={"generation_server/0": 5.0})
    with RegistrationWatch(store, KEYS, token="mine", phase="main", on_change=on_change):
        assert came.acquire(timeout=60)
        store.add(KEYS.scaling, dumps(replace(mine, token="theirs")), replace=True)
        store.add(KEYS.scaling, dumps(replace(mine, phase="prepare")), replace=True)
        store.add(KEYS.scaling, dumps(mine), replace=True)
        assert came.acquire(timeout=60)
    assert told == [None, mine]
