"""Which weights sampled a record's tokens, read from files of dumped rollouts that are made here."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from realsys.api.errors import DataError
from realsys.trial.dump_records import (
    MAX_HEADER_BYTES,
    DumpHeader,
    DumpRecord,
    SampledVersions,
    decode_header,
    dump_records,
    header_length,
    sampled_versions,
)

META = {"ids": ["q1"]}


def record(versions: list[int] | bytes | None, **more: Any) -> tuple[bytes, bytes]:
    """A record: its header with the length before it, and its data, in which others' come first."""
    data = versions or b""
    if not isinstance(data, bytes):
        data = struct.pack(f"<{len(data)}q", *data)
    keys = ["prompt", *(["packed_versions"] if versions is not None else []), "last"]
    sizes = [5, *([len(data)] if versions is not None else []), 2]
    header = msgspec.msgpack.encode({"meta": META, "keys": keys, "num_bytes": sizes, **more})
    return struct.pack("<Q", len(header)) + header, b"12345" + data + b"89"


def test_the_versions_of_each_record(tmp_path: Path) -> None:
    deflated = zlib.compress(struct.pack("<3q", 9, -1, 7))
    made = [
        record([4, -1, 3, 4]), record(None), record([-1, -1]), record([]),
        record(deflated, is_deflated=True, crc32=7), record(b"", is_deflated=True), record([5]),
    ]  # fmt: skip
    path, start, expected = tmp_path / "a.rollouts", 0, list[tuple[int, int]]()
    for header, data in made:
        expected.append((start, start + len(header)))
        start += len(header) + len(data)
    path.write_bytes(b"".join(header + data for header, data in made))
    found = list(dump_records(path))
    assert [(one.start, one.data_start) for one in found] == expected
    assert (found[0].header.crc32, found[0].header.is_deflated) == (None, False)
    assert found[4].header == DumpHeader(
        meta=found[4].header.meta, keys=("prompt", "packed_versions", "last"),
        num_bytes=(5, len(deflated), 2), crc32=7, is_deflated=True,
    )  # fmt: skip
    first = SampledVersions(oldest=3, newest=4, num_tokens=3)
    assert [sampled_versions(path, one) for one in found] == [
        first, None, None, None, SampledVersions(oldest=7, newest=9, num_tokens=2), None,
        SampledVersions(oldest=5, newest=5, num_tokens=1),
    ]  # fmt: skip
    whole = path.read_bytes()
    for cut in (1, 2, 15, len(made[6][1]) + 1, len(b"".join(made[6])) - 3):
        path.write_bytes(whole[:-cut])
        assert list(dump_records(path)) == found[:6]


@pytest.mark.parametrize("what", ["cut", "damaged", "gone"])
def test_versions_that_cannot_be_read_are_told_with_their_place(tmp_path: Path, what: str) -> None:
    path = tmp_path / "a.rollouts"
    header, data = record(bytes(9) if what == "cut" else b"12345678", is_deflated=what == "damaged")
    path.write_bytes(header + data)
    (found,) = dump_records(path)
    if what == "gone":
        path.unlink()
    with pytest.raises(DataError) as refused:
        sampled_versions(
            path, DumpRecord(header=found.header, start=7, data_start=found.data_start)
        )
    assert refused.value.where == f"{path}, byte 7"


def test_a_header_has_a_length() -> None:
    assert header_length(struct.pack("<Q", MAX_HEADER_BYTES)) == 64 << 20
    for data in (b"", bytes(8), struct.pack("<Q", MAX_HEADER_BYTES + 1), b"\1" * 7):
        with pytest.raises(ValueError, match="header"):
            header_length(data)
    with pytest.raises(msgspec.MsgspecError):
        decode_header(b"\x80")
