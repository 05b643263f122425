"""Folders of a job's own etcd: those of killed supervisors are removed, those in use are not."""

from __future__ import annotations

import fcntl
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest

from realsys.api.errors import ClusterError
from realsys.name_resolve.memory import MemoryStore
from realsys.supervisor import job_store
from realsys.supervisor.job_store import NEW_S, PREFIX, RESTARTS, JobStore, _remove_left_over


def folder(place: Path, name: str, *, age_s: float = NEW_S + 1) -> Path:
    made = place / f"{PREFIX}{name}"
    made.mkdir()
    (made / "data").write_text("x")
    os.utime(made, (time.time() - age_s,) * 2)
    return made


def test_only_what_nobody_holds_any_more_is_removed(tmp_path: Path) -> None:
    left, held, new = (
        folder(tmp_path, "left"),
        folder(tmp_path, "held"),
        folder(tmp_path, "new", age_s=1),
    )
    other = tmp_path / "other"
    other.mkdir()
    link = tmp_path / f"{PREFIX}link"
    link.symlink_to(other)
    fd = os.open(held, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    _remove_left_over(tmp_path)
    os.close(fd)
    assert not left.exists()
    assert held.exists()
    assert new.exists()
    assert other.exists()


class BrokenServer:
    """An etcd that ends as soon as it is started."""

    def __init__(self) -> None:
        self.restarts = 0

    def poll(self) -> int:
        return 2

    def restart(self) -> None:
        self.restarts += 1

    def failure(self, what: str) -> ClusterError:
        return ClusterError(f"{what}; it said: disk full", where="etcd", fix="make room")


def test_a_server_that_can_not_come_up_is_started_a_few_times_with_pauses_that_double(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, started_s, server = 100.0, [], BrokenServer()
    monkeypatch.setattr(job_store.time, "monotonic", lambda: now_s)
    store = JobStore(MemoryStore(), server)  # type: ignore[arg-type]

    def supervise() -> None:  # 20 looks a second
        nonlocal now_s
        while now_s < 200.0:
            before = server.restarts
            store.look_after()
            started_s.extend([now_s] * (server.restarts - before))
            now_s += 0.05

    with pytest.raises(ClusterError, match=r"ended 6 times in 60 s, last with status 2; .*full"):
        supervise()
    assert server.restarts == RESTARTS
    pauses = [round(b - a) for a, b in pairwise(started_s)]
    assert pauses == [1, 2, 4, 8]
    assert now_s < 120.0


def test_a_server_that_ends_now_and_then_is_always_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, server = 100.0, BrokenServer()
    monkeypatch.setattr(job_store.time, "monotonic", lambda: now_s)
    store = JobStore(MemoryStore(), server)  # type: ignore[arg-type]
    for _ in range(20):
        store.look_after()
        now_s += 20.0
    assert server.restarts == 20
