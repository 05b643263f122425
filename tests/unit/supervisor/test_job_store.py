"""Folders of a job's own etcd: those of killed supervisors are removed, those in use are not."""

from __future__ import annotations

import fcntl
import os
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from realsys.api.cluster import ClusterSpec
from realsys.supervisor.job_etcd.job_store import NEW_S, PREFIX, JobStore, _remove_left_over
from realsys.supervisor.job_etcd.private_etcd import PrivateEtcd


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


def test_it_may_open_as_many_files_as_the_supervisor_might(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm hands on the soft limit of the shell that submitted, 1,024: an older etcd takes no more than
    874 connections then."""
    limits: list[tuple[int, int]] = []

    def start(*args: object, **options: object) -> None:
        limits.append(resource.getrlimit(resource.RLIMIT_NOFILE))
        raise InterruptedError

    monkeypatch.setattr(PrivateEtcd, "start", start)
    monkeypatch.setattr("realsys.supervisor.job_etcd.job_store._local_place", lambda: tmp_path)
    plan = SimpleNamespace(name_resolve_url="etcd+job://", cluster=ClusterSpec())
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        with pytest.raises(InterruptedError):
            JobStore.open(plan, "")  # type: ignore[arg-type]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert limits == [(before[1], before[1])]


class Ends:
    """An etcd that ends; it lives for so long each time."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.lives_s, self.starts = clock, 0.0, [0.0]

    def poll(self) -> int | None:
        return 1 if self.clock[0] >= self.starts[-1] + self.lives_s else None

    def restart(self) -> None:
        self.starts.append(self.clock[0])

    def log_tail(self, num_lines: int) -> str:
        return "mvcc: no space left on device"


def test_an_etcd_that_ends_again_and_again_is_started_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [100.0]
    monkeypatch.setattr("realsys.supervisor.job_etcd.job_store.time.monotonic", lambda: clock[0])
    server = Ends(clock)
    opened = JobStore(None, server)  # type: ignore[arg-type]

    def run(seconds: float) -> list[float]:
        """Starts within the time, from its beginning."""
        began, before = clock[0], len(server.starts)
        while clock[0] < began + seconds:
            opened.look_after()
            clock[0] += 0.25
        return [at - began for at in server.starts[before:]]

    assert run(120.0) == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5, 61.5, 91.5]
    assert "no space left" in caplog.text
    server.lives_s = 600.0
    assert run(500.0) == [], "the one started last lives"
    assert len(run(200.0)) == 1
    assert opened._pause_s == 0.5
