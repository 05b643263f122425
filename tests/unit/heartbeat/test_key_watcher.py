"""What a worker hears of the keys that it watches: that all of them are gone, and that one came back."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from realsys.generation.server import build
from realsys.heartbeat.heartbeat_messages import Init, ToWorker, WatchedProcess
from realsys.heartbeat.key_watcher import KeyWatcher
from realsys.heartbeat.worker_keys import WorkerKeys
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.memory_store import MemoryStore
from realsys.trial.records import AttemptFiles, write_record

KEYS = TrialKeys(cluster="site", user="anna", experiment="ppo-math", trial="run1")
MASTER, OTHER = KEYS.worker("master_worker", 0), KEYS.worker("model_worker", 0)


@pytest.fixture
def heard() -> queue.Queue[ToWorker]:
    return queue.Queue()


@pytest.fixture
def store(heard: queue.Queue[ToWorker]) -> Iterator[MemoryStore]:
    """With both keys, which a worker watches."""
    store = MemoryStore()
    for key in (MASTER, OTHER):
        store.add(key, b"x")
    begin = Init(
        worker_type="generation_server",
        index=0,
        pid=1,
        attempt=1,
        token="ours",
        store_url="memory://",
        attempt_dir="",
        keys=KEYS,
    )
    watcher = KeyWatcher(WorkerKeys(store, begin), watch_keys=[MASTER, OTHER], on_message=heard.put)
    watcher.start()
    yield store
    watcher.stop()


def test_it_is_told_when_all_of_them_are_gone_and_when_one_is_back(
    store: MemoryStore, heard: queue.Queue[ToWorker]
) -> None:
    store.delete(OTHER)
    store.delete(MASTER)
    assert heard.get(timeout=60) == WatchedProcess(present=False)
    store.add(OTHER, b"y")
    assert heard.get(timeout=60) == WatchedProcess(present=True)
    assert heard.empty()


def test_a_server_looks_for_the_end_of_the_phase_when_its_master_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not twice a second for as long as the run lasts."""
    files, looks = AttemptFiles(tmp_path / "0001"), []
    runner = SimpleNamespace(
        attempt_files=files, phase=SimpleNamespace(name="main"), is_alone=False
    )
    real: Callable[[Path], bool] = build.is_there
    monkeypatch.setattr(build, "is_there", lambda path: looks.append(path) or real(path))
    monkeypatch.setattr(build, "_POLL_S", 0.001)

    async def run() -> None:
        waits = asyncio.create_task(build._phase_done(runner))
        await asyncio.sleep(0.1)
        assert looks == []
        runner.is_alone = True  # of whoever left without the marker
        while len(looks) < 2:
            await asyncio.sleep(0.001)
        assert not waits.done()
        write_record(files.done("main"), {"token": "ours"})
        await asyncio.wait_for(waits, 60)

    asyncio.run(run())
