"""Logs of failed episodes: the newest ones' ends, whoever wrote them before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realsys.rollout.runners import kept_logs
from realsys.rollout.runners.kept_logs import END_BYTES, KeptLogs


def log(folder: Path, number: int, text: str = "why") -> Path:
    path = folder / f"0-{number}.log"
    path.write_text(text)
    os.utime(path, (number, number))
    return path


def numbers(folder: Path) -> list[int]:
    return sorted(int(path.stem[2:]) for path in folder.glob("*.log"))


def test_the_newest_logs_stay_also_of_a_worker_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_logs, "MOST_LOGS", 3)
    for number in (7, 5, 6):
        log(tmp_path, number)
    logs = KeptLogs(tmp_path)
    assert numbers(tmp_path) == [5, 6, 7]
    for number in (8, 9):
        logs.add(log(tmp_path, number))
    assert numbers(tmp_path) == [7, 8, 9]
    (tmp_path / "0-7.log").unlink()  # by somebody else
    logs.add(tmp_path / "0-99.log")  # that was never written
    logs.add(log(tmp_path, 10))
    assert numbers(tmp_path) == [9, 10]


@pytest.mark.parametrize("num_bytes", [END_BYTES, END_BYTES + 1, 3 * END_BYTES])
@pytest.mark.parametrize("line", ["x" * 99 + "\n", "x"], ids=["lines", "one line"])
def test_of_a_long_log_the_end_stays(tmp_path: Path, num_bytes: int, line: str) -> None:
    text = (line * num_bytes)[: num_bytes - 4] + "\nend"
    path = log(tmp_path, 1, text)
    KeptLogs(tmp_path).add(path)
    kept = path.read_text()
    assert len(kept) <= END_BYTES
    assert len(kept) > END_BYTES - 200  # a line, at most
    first, _, rest = kept.partition("\n")
    assert text.endswith(rest)
    assert (kept == text) == (num_bytes == END_BYTES)
    if kept != text:
        assert str(num_bytes - END_BYTES) in first
