"""Logs of programs that write without end: what is left of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from realsys.runtime.child_processes import log_limit
from realsys.runtime.child_processes.log_limit import cut_log, limited_log

NOTE = b"\n[realsys: %d bytes left out here, as a log has at most 0 MiB]\n"


def cut(path: Path) -> int:
    """Cuts to 100 bytes, of which 60 are the beginning and 20 the end."""
    return cut_log(path, most_bytes=100, end_bytes=20)


def test_a_log_within_the_limit_stays_and_one_that_is_not_there_is_none(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert cut(log) == 0
    assert not log.exists()
    log.write_bytes(b"x" * 100)
    assert cut(log) == 0
    assert log.read_bytes() == b"x" * 100


def test_the_beginning_and_whole_lines_of_the_end_stay(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"first\n" * 10 + b"m" * 100 + b"mmm\nnext to last\nlast\n")
    # 60 bytes stay, and 18 of the end, whose other 2 of 20 are no whole line
    assert cut(log) == 104
    assert log.read_bytes() == b"first\n" * 10 + NOTE % 104 + b"next to last\nlast\n"


def test_an_end_that_is_one_line_is_cut_in_it(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 200)
    assert cut(log) == 120
    assert log.read_bytes() == b"x" * 60 + NOTE % 120 + b"x" * 20


def test_what_was_left_out_before_counts_and_is_noted_once(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 200)
    cut(log)
    with log.open("ab") as file:
        file.write(b"y" * 50)
    # 120 before; of 20 "x" and 50 "y" behind the line 20 stay
    assert cut(log) == 170
    assert log.read_bytes() == b"x" * 60 + NOTE % 170 + b"y" * 20


def test_a_program_goes_on_behind_what_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the file open to append."""
    log = tmp_path / "a.log"
    monkeypatch.setattr(log_limit, "LOOK_S", 0.01)
    monkeypatch.setattr(log_limit.cut_log, "__kwdefaults__", {"most_bytes": 100, "end_bytes": 20})

    async def run() -> None:
        with log.open("ab", buffering=0) as file:
            async with asyncio.timeout(60), limited_log(log):
                file.write(b"a" * 60 + b"b" * 100)
                while log.stat().st_size == 160:
                    await asyncio.sleep(0.01)
                file.write(b"c")
            file.write(b"d" * 200)
            async with limited_log(log):  # also what came between two looks
                pass

    asyncio.run(run())
    # 80 of the first 160, then 20 "b", "c" and 180 of 200 "d"
    assert log.read_bytes() == b"a" * 60 + NOTE % (80 + 20 + 1 + 180) + b"d" * 20
