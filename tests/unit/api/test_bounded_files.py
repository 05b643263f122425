"""Files that a user names: read whole, or an error with a reason, never for ever."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path

import golden
import pytest

from realsys.api.basics import bounded_files
from realsys.api.basics.bounded_files import open_regular, parse_json, read_bounded_text
from realsys.api.errors import DataError
from realsys.data.sources.record_files import open_records

RECORD = b'{"prompt": "1 + 1 =", "answer": "2"}\n'


def test_a_text_is_read_to_its_last_byte_and_not_beyond_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("é" * 500_000, encoding="utf-8")
    assert read_bounded_text(path, max_bytes=1_000_000) == "é" * 500_000
    with golden.raises(OSError):
        read_bounded_text(path, max_bytes=999_999)
    path.write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        read_bounded_text(path)


@pytest.mark.parametrize("path", ["/dev/zero", "/"])
def test_devices_and_folders_are_refused(path: str) -> None:
    with pytest.raises(OSError):
        read_bounded_text(path)
    with pytest.raises(OSError):
        open_regular(path)


def test_a_pipe_is_read_while_its_writer_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(bounded_files, "PIPE_S", 60.0)
    late = threading.Timer(0.05, lambda: (os.write(writing, b"late"), os.close(writing)))
    late.start()
    assert read_bounded_text(f"/dev/fd/{reading}") == "late"
    late.join()
    os.close(reading)
    monkeypatch.setattr(bounded_files, "PIPE_S", 0.05)
    reading, writing = os.pipe()
    with golden.raises(OSError):
        read_bounded_text(f"/dev/fd/{reading}")
    os.close(reading)
    os.close(writing)
    os.mkfifo(tmp_path / "fifo")
    with golden.raises(OSError):
        open_regular(tmp_path / "fifo")


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", "1e400", "[" * 100_000, '"\\ud800"', '{"\\uDfff": 1}', "9" * 5000]
)
def test_json_that_python_would_read_as_something_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize("text", ["1e308", '"\\ud83d\\ude00"', '{"a": [1.5, null, true]}', "0"])
def test_other_json_is_what_it_was(text: str) -> None:
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize("packed", [False, True])
def test_a_line_over_the_limit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """Also in a small file that unpacks to gigabytes: it is read line by line."""
    monkeypatch.setattr(bounded_files, "MAX_LINE_BYTES", 100)
    path, text = tmp_path / "d.jsonl", RECORD * 2 + b"x" * 5000
    path.write_bytes(gzip.compress(text) if packed else text)
    with golden.raises(DataError):
        open_records(path)


@pytest.mark.parametrize("packed", [False, True])
def test_lines_have_their_numbers_and_the_mark_at_the_beginning_is_dropped(
    tmp_path: Path, packed: bool
) -> None:
    path, text = tmp_path / "d.jsonl", b"\xef\xbb\xbf" + RECORD + b"\r\n\n" + RECORD.rstrip(b"\n")
    path.write_bytes(gzip.compress(text) if packed else text)
    assert list(open_records(path)) == [{"prompt": "1 + 1 =", "answer": "2"}] * 2
    path.write_bytes(RECORD + b"\n" + b'{"prompt": \n')
    records = open_records(path)
    with pytest.raises(DataError) as refused:
        records[1]
    assert refused.value.where == f"{path}:3"
