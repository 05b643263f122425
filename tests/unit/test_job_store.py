"""Folders of a job's own etcd: those of killed supervisors are removed, those in use are not."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from realsys.supervisor.job_store import NEW_S, PREFIX, _remove_left_over


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
