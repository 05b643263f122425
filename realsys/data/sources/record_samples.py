"""Reads some of a user's records, in bounded time, for a plan. No torch.

A small data set is opened whole. Of a large one, runs of neighbouring records are read: from its beginning,
its end, and even places between. Compressed and CSV files, in which a place can't be found, give runs from
their beginnings.
"""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from realsys.api.basics.bounded_files import bounded_lines, open_regular
from realsys.api.errors import DataError
from realsys.data.sources.record_files import is_csv, open_records, record_paths
from realsys.data.sources.record_parts import PartOfRecords, RecordSource
from realsys.data.sources.text_records import column_names, csv_record, csv_rows, json_record

WHOLE_BYTES = 32 << 20  # a data set of this size is read whole,
WHOLE_PACKED_BYTES = 4 << 20  # a compressed one of this,
WHOLE_ROWS = 20_000  # and one in Parquet or Arrow of so many rows
RUNS, RUN_RECORDS = 8, 125
SAMPLING_S = 5.0  # then no further run is begun
_MAGIC_OF_ROWS = (b"PAR1", b"ARRO")
_MEASURED_BYTES = 4 << 20  # unpacked, to see how well a file is packed
_GROWTH_BYTES = 32 << 10  # read at each of several places, to see how lines grow
_TAIL_BYTES = 256 << 10  # before a file's end, where its last run begins


@dataclass(frozen=True)
class RecordSample:
    """Some records of a data set, or all.

    Attributes:
        records: those that can be read.
        total: number of records in all; about, unless ``is_exact``.
        is_whole: ``records`` are all.
        is_spread: they are from everywhere, not only from the beginning of files.
    """

    records: RecordSource
    total: int
    is_exact: bool
    is_whole: bool
    is_spread: bool = True


def sample_records(path: str | Path) -> RecordSample:
    """Opens a small data set, or reads some records of a large one.

    Raises:
        DataError: nothing is there, or a record that was read is no record.
        ConfigError: a package that reads such files is missing.
    """
    files = record_paths(path)
    try:
        starts = [_start(file) for file in files[:1]]
        sizes = [file.stat().st_size for file in files]
    except OSError as error:
        raise DataError(
            f"the data set can't be read: {error}",
            where=str(error.filename or path),
            fix="give a readable JSONL, CSV or Parquet file, or a folder of them",
        ) from error
    if starts[0][:4] in _MAGIC_OF_ROWS or files[0].suffix == ".arrow":
        return _sample_of_rows(open_records(path))
    packed = starts[0][:2] == b"\x1f\x8b"
    if sum(sizes) <= (WHOLE_PACKED_BYTES if packed else WHOLE_BYTES):
        records = open_records(path)
        return RecordSample(records, len(records), is_exact=True, is_whole=True)
    return _sample_of_texts(files, sizes)


def _start(file: Path) -> bytes:
    with open_regular(file) as opened:
        return opened.read(4)


def _sample_of_rows(records: RecordSource) -> RecordSample:
    total = len(records)
    if total <= WHOLE_ROWS:
        return RecordSample(records, total, is_exact=True, is_whole=True)
    first = [run * (total - RUN_RECORDS) // (RUNS - 1) for run in range(RUNS)]
    numbers = [start + i for start in first for i in range(RUN_RECORDS)]
    return RecordSample(PartOfRecords(records, numbers), total, is_exact=True, is_whole=False)


@dataclass(frozen=True)
class _ReadRecords:
    """Records that were read, each with its place."""

    found: Sequence[tuple[str, dict[str, Any]]]

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.found[index][1]

    def where(self, index: int) -> str:
        """Returns file and line, or file and byte."""
        return self.found[index][0]


def _sample_of_texts(files: Sequence[Path], sizes: Sequence[int]) -> RecordSample:
    found: dict[str, dict[str, Any]] = {}
    num_bytes, until_s, total = 0.0, time.monotonic() + SAMPLING_S, sum(sizes)
    places = list(dict.fromkeys(_places(files, sizes)))
    for file, start in places:
        if found and time.monotonic() > until_s:
            break
        with _named(file):
            for size, where, record in islice(_run(file, start), RUNS * RUN_RECORDS // len(places)):
                num_bytes += size if where not in found else 0
                found[where] = record
    if not found:
        raise DataError("the data set is empty", where=str(files[0]), fix="add records to it")
    about = max(len(found), int(total * len(found) / max(num_bytes, 1)))
    return RecordSample(
        _ReadRecords(list(found.items())),
        about,
        is_exact=False,
        is_whole=False,
        is_spread=any(start for _, start in places) or len(places) > 2,
    )


def _places(files: Sequence[Path], sizes: Sequence[int]) -> Iterator[tuple[Path, int]]:
    """Yields a file and a byte for each run, spread over all bytes."""
    total = sum(sizes)
    for run in range(RUNS):
        left = max(run * total // (RUNS - 1) - 1, 0)
        for file, size in zip(files, sizes, strict=True):
            if left < size:
                can_seek = not is_csv(file) and _start(file)[:2] != b"\x1f\x8b"
                yield file, min(left, max(size - _TAIL_BYTES, 0)) if can_seek else 0
                break
            left -= size


def _run(file: Path, start: int) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """Yields bytes (in the file as it is stored), place and content of records from a byte on."""
    with open_regular(file) as raw:
        if _start(file)[:2] == b"\x1f\x8b":
            share = _packed_share(file)
            for size, where, record in _parsed(file, gzip.GzipFile(fileobj=raw), 0):
                yield size * share, where, record
            return
        if is_csv(file):
            share = _line_growth(file)
            for size, where, record in _parsed(file, raw, 0):
                yield size * share, where, record
            return
        if start:
            raw.seek(start - 1)
            start += len(raw.readline()) - 1  # to the next beginning of a line
        yield from _parsed(file, raw, start)


def _line_growth(file: Path) -> float:
    """Returns the mean length of a file's lines over that of its first lines."""
    with open_regular(file) as opened:
        first = opened.read(_GROWTH_BYTES)
        size = opened.seek(0, 2)
        pieces = [first]
        for run in range(1, RUNS):
            opened.seek(max(size - _GROWTH_BYTES, 0) * run // (RUNS - 1))
            pieces.append(opened.read(_GROWTH_BYTES))
    per_byte = [piece.count(b"\n") / max(len(piece), 1) for piece in pieces]
    return per_byte[0] * len(per_byte) / max(sum(per_byte), 1e-9)


def _packed_share(file: Path) -> float:
    """Returns stored bytes over unpacked ones, of the beginning of a compressed file."""
    with open_regular(file) as raw:
        unpacked = len(gzip.GzipFile(fileobj=raw).read(_MEASURED_BYTES))
        return min(raw.tell() / max(unpacked, 1), 1.0)


def _parsed(file: Path, opened: Any, start: int) -> Iterator[tuple[int, str, dict[str, Any]]]:
    lines = (line + b"\n" for line in bounded_lines(opened, file))
    if is_csv(file):
        yield from _parsed_csv(file, lines)
        return
    at = start
    for number, line in enumerate(lines, 1):
        text = line.removeprefix(b"\xef\xbb\xbf") if at == 0 else line
        where = f"{file}:{number}" if start == 0 else f"{file}, byte {at + 1:,}"
        at += len(line)
        if text.strip():
            yield len(line), where, json_record(text, where)


def _parsed_csv(file: Path, lines: Iterator[bytes]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    columns: list[str] = []
    before = 0
    for at, line, row in csv_rows(lines, file):
        where = f"{file}:{line}"
        if not columns:
            columns = column_names(row, file)
        elif row:
            # The row before ended here: sizes are one row late, which an estimate can bear
            yield max(at - before, 1), where, csv_record(columns, row, where)
            before = at


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Turns what reading a file may raise into a DataError with its name."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"the data set can't be read: {error}",
            where=str(file),
            fix="give a readable JSONL or CSV file in UTF-8, plain or gzip-compressed",
        ) from error
