"""Layout of the records in a file of dumped rollouts, read without torch.

A record is its length (8 bytes, little-endian), a msgpack header (SequenceMeta, keys, bytes of each, a
checksum) and the tensors' bytes, deflated. realsys/data/rollout_dump.py writes and reads whole datapoints.
"""

from __future__ import annotations

import os
import sys
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from realsys.api.data import SequenceMeta
from realsys.api.errors import DataError

SUFFIX = ".rollouts"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 64 * 1024 * 1024
_VERSIONS = "packed_versions"  # of each token the weights that sampled it; -1: none did


class DumpHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a record holds. ``num_bytes``: of each key's tensor as stored."""

    meta: SequenceMeta
    keys: tuple[str, ...]
    num_bytes: tuple[int, ...]
    crc32: int | None = None  # of the stored bytes; None in files of older versions
    is_deflated: bool = False


@dataclass(frozen=True, kw_only=True)
class DumpRecord:
    """One record's header and its place: the byte where it starts, and where its tensors do."""

    header: DumpHeader
    start: int
    data_start: int


@dataclass(frozen=True, kw_only=True)
class SampledVersions:
    """Versions of the weights that sampled a datapoint's tokens."""

    oldest: int
    newest: int
    num_tokens: int


def header_length(data: bytes) -> int:
    """Returns the header's length from a record's first bytes. Raises ValueError: it has none."""
    length = int.from_bytes(data, "little")
    if len(data) != LENGTH_BYTES or not 0 < length <= MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    return length


def decode_header(data: bytes) -> DumpHeader:
    """Decodes a header. Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(data, type=DumpHeader)


def dump_records(path: Path) -> Iterator[DumpRecord]:
    """Yields the whole records of a file, in order; an incomplete one ends it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 0
        while start < size:
            try:
                header = decode_header(file.read(header_length(file.read(LENGTH_BYTES))))
            except (msgspec.MsgspecError, ValueError):
                return  # incomplete: no complete record follows
            data_start = file.tell()
            end = data_start + sum(header.num_bytes)
            if end > size:
                return
            yield DumpRecord(header=header, start=start, data_start=data_start)
            start = file.seek(end, os.SEEK_SET)


def sampled_versions(path: Path, record: DumpRecord) -> SampledVersions | None:
    """Reads which weights sampled a record's tokens; None if it does not say.

    Raises:
        DataError: the file can't be read, or is damaged there.
    """
    header, start = record.header, record.data_start
    if _VERSIONS not in header.keys:
        return None
    place = header.keys.index(_VERSIONS)
    try:
        with path.open("rb") as file:
            file.seek(start + sum(header.num_bytes[:place]))
            stored = file.read(header.num_bytes[place])
        versions = array("q")
        versions.frombytes(zlib.decompress(stored) if header.is_deflated and stored else stored)
    except (OSError, ValueError, zlib.error) as error:
        raise DataError(
            f"versions of {header.meta.ids[0]} can't be read: {error}",
            where=f"{path}, byte {record.start}",
            fix="copy it again",
        ) from error
    if sys.byteorder == "big":
        versions.byteswap()
    found = set(versions) - {-1}
    if not found:
        return None
    num_tokens = len(versions) - versions.count(-1)
    return SampledVersions(oldest=min(found), newest=max(found), num_tokens=num_tokens)
