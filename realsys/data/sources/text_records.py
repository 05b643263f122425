"""Records of JSONL and CSV files by number, in bounded memory. No torch.

One scan notes where every few records begin, which takes some 16 bytes for each 64 records: a file of ten
million lines has an index of 4 MB. A record then is one read of at most a few hundred kilobytes, of which
the newest is kept, so that reading in order reads each byte once. Files are opened for each read and closed
again: a data set may have thousands of them.

JSONL is UTF-8 text, with or without a byte order mark. Only a newline ends a record: other separators of
Unicode (U+2028, U+0085) may stand inside a JSON string. In a CSV file a quoted cell may hold newlines; its
first line names the columns, and all values are texts.
"""

from __future__ import annotations

import csv
import os
import tempfile
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from realsys.api.basics.bounded_files import (
    MAX_LINE_BYTES,
    bounded_lines,
    open_regular,
    parse_json,
)
from realsys.api.errors import DataError
from realsys.runtime.progress import tick

BLOCK_RECORDS = 64  # records between two entries of the index,
BLOCK_BYTES = 256 << 10  # or as many bytes, whichever comes first
_BOM = b"\xef\xbb\xbf"
_TICK_EVERY = 10_000  # lines


class PlainBytes:
    """The bytes of a file, which must stay as it is while it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as file:
            self._seen = _identity(file)
            self.size = os.fstat(file.fileno()).st_size

    def lines(self) -> Iterator[bytes]:
        """Yields all lines with their ends. Raises OSError at one over MAX_LINE_BYTES."""
        with open_regular(self.path) as file:
            yield from _whole_lines(file, self.path)

    def read(self, start: int, end: int) -> bytes:
        """Reads bytes ``start`` … ``end``.

        Raises:
            DataError: the file was written since it was opened first.
        """
        with open_regular(self.path) as file:
            if _identity(file) != self._seen:
                raise DataError(
                    "the data set was changed while it is read",
                    where=str(self.path),
                    fix="put the file back as it was and resume the run; for other records "
                    "write a new file beside it, and launch a new trial",
                )
            return os.pread(file.fileno(), end - start, start)


class Spool:
    """A temporary file without a name, into which compressed files are unpacked one after another."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile(prefix="realsys-data-") as file:
            self.handle = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.handle)
        self.size = 0

    def append(self, data: bytes) -> None:
        """Writes all of ``data``. Raises OSError: the disk is full."""
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self.handle, rest, self.size)
            self.size += written
            rest = rest[written:]


@dataclass(frozen=True)
class SpooledBytes:
    """The unpacked bytes of a compressed file: a part of a spool."""

    path: Path
    spool: Spool
    start: int
    size: int

    def lines(self) -> Iterator[bytes]:
        """Yields all lines with their ends. Raises OSError at one over MAX_LINE_BYTES."""
        with open(os.dup(self.spool.handle), "rb") as file:
            file.seek(self.start)
            left = self.size
            for line in _whole_lines(file, self.path):
                if left <= 0:
                    return
                yield line[:left]
                left -= len(line)

    def read(self, start: int, end: int) -> bytes:
        """Reads bytes ``start`` … ``end``."""
        return os.pread(self.spool.handle, end - start, self.start + start)


def _identity(file: BinaryIO) -> tuple[int, ...]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _whole_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Lines with their ends; the last may have none."""
    for number, line in enumerate(bounded_lines(file, path)):
        if number % _TICK_EVERY == 0:
            tick()
        yield line + b"\n"


class TextRecords:
    """Base: an index of where records begin, and the reading of a block of them."""

    fix = "give a readable file in UTF-8"

    def __init__(self, source: PlainBytes | SpooledBytes) -> None:
        self._source = source
        self.path = source.path
        # Of each block: its first record, the byte and the line where it begins.
        self._first, self._byte, self._line = array("Q"), array("Q"), array("Q")
        self._size = 0
        self._newest: tuple[int, list[tuple[int, Any]]] = (-1, [])
        for start, line in self._starts():
            if (
                not self._first
                or self._size - self._first[-1] >= BLOCK_RECORDS
                or start - self._byte[-1] >= BLOCK_BYTES
            ):
                self._first.append(self._size)
                self._byte.append(start)
                self._line.append(line)
            self._size += 1

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        line, unit = self._unit(index)
        return self._parse(unit, f"{self.path}:{line}")

    def where(self, index: int) -> str:
        """Returns the file and line where a record begins."""
        return f"{self.path}:{self._unit(index)[0]}"

    def _unit(self, index: int) -> tuple[int, Any]:
        """Returns a record's line, and what of it is not parsed yet."""
        if not 0 <= index < self._size:
            raise IndexError(index)
        number, units = self._newest
        block = bisect_right(self._first, index) - 1
        if block != number:
            is_last = block + 1 == len(self._first)
            end = self._source.size if is_last else self._byte[block + 1]
            data = self._source.read(self._byte[block], end)
            units = list(self._units(data, self._line[block]))
            self._newest = block, units
        return units[index - self._first[block]]

    def _starts(self) -> Iterator[tuple[int, int]]:
        """Yields the byte and the line where each record begins."""
        raise NotImplementedError

    def _units(self, data: bytes, line: int) -> Iterator[tuple[int, Any]]:
        """Yields line and unit of each record of a block that begins on ``line``."""
        raise NotImplementedError

    def _parse(self, unit: Any, where: str) -> dict[str, Any]:
        raise NotImplementedError


class JsonLines(TextRecords):
    """One JSON object a line; empty lines are no records."""

    def _starts(self) -> Iterator[tuple[int, int]]:
        start = 0
        for number, line in enumerate(self._source.lines(), 1):
            if (line.removeprefix(_BOM) if number == 1 else line).strip():
                yield start, number
            start += len(line)

    def _units(self, data: bytes, line: int) -> Iterator[tuple[int, bytes]]:
        for number, text in enumerate(data.split(b"\n"), line):
            unit = text.removeprefix(_BOM) if number == 1 else text
            if unit.strip():
                yield number, unit

    def _parse(self, unit: bytes, where: str) -> dict[str, Any]:
        return json_record(unit, where)


class CsvRows(TextRecords):
    """Rows under a line that names the columns; cells are separated by commas, in ``.tsv`` by tabs."""

    def __init__(self, source: PlainBytes | SpooledBytes) -> None:
        self.columns: list[str] = []
        csv.field_size_limit(MAX_LINE_BYTES)  # of the whole process; its default is 128 KiB
        super().__init__(source)

    def _starts(self) -> Iterator[tuple[int, int]]:
        for start, line, row in csv_rows(self._source.lines(), self.path):
            if not self.columns:
                self.columns = column_names(row, self.path)
            elif row:
                yield start, line

    def _units(self, data: bytes, line: int) -> Iterator[tuple[int, list[str]]]:
        lines = (piece + b"\n" for piece in data.removesuffix(b"\n").split(b"\n"))
        for _, first, row in csv_rows(lines, self.path):
            if row:
                yield line + first - 1, row

    def _parse(self, unit: list[str], where: str) -> dict[str, Any]:
        return csv_record(self.columns, unit, where)


_OF_LIST = "; of a list: jq -c '.[]' FILE > FILE.jsonl"


def json_record(line: bytes, where: str) -> dict[str, Any]:
    """Parses a line of JSONL. Raises DataError: it is no JSON object in UTF-8."""
    try:
        record = parse_json(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"the data set can't be read: {error}",
            where=where,
            fix="give a readable JSONL file in UTF-8, plain or gzip-compressed",
        ) from error
    except ValueError as error:
        whole = line.lstrip()[:1] == b"[" and where.endswith(":1")
        fix = "write one object a line" + _OF_LIST * whole
        raise DataError(f"not JSON: {error}", where=where, fix=fix) from error
    if not isinstance(record, dict):
        fix = "write one object a line" + _OF_LIST * (
            isinstance(record, list) and where.endswith(":1")
        )
        raise DataError(f"a {type(record).__name__}, not an object", where=where, fix=fix)
    return record


def csv_rows(lines: Iterator[bytes], path: Path) -> Iterator[tuple[int, int, list[str]]]:
    """Yields byte, line and cells of each row; lines and bytes are counted from the first of ``lines``.

    Raises:
        DataError: a quote that does not end, or text that is not UTF-8.
    """
    at = {"byte": 0, "line": 0, "begun": 0}

    def texts() -> Iterator[str]:
        for line in lines:
            text = (line.removeprefix(_BOM) if at["byte"] == 0 else line).decode()
            at["byte"] += len(line)
            at["line"] += 1
            if at["byte"] - at["begun"] > MAX_LINE_BYTES:
                raise csv.Error(f"a row is longer than {MAX_LINE_BYTES:,} bytes; is a quote open?")
            yield text

    first = 1
    reader = csv.reader(texts(), delimiter="\t" if ".tsv" in path.suffixes else ",", strict=True)
    try:
        for row in reader:
            yield at["begun"], first, row
            at["begun"], first = at["byte"], at["line"] + 1
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(
            f"the data set can't be read: {error}",
            where=f"{path}:{first}",
            fix="give a CSV file in UTF-8 whose first line names the columns",
        ) from error


def column_names(row: list[str], path: Path) -> list[str]:
    """Checks the first row. Raises DataError: a column has no name, or another's."""
    names = [name.strip() for name in row]
    if not all(names) or len(set(names)) < len(names):
        raise DataError(
            f"the first line names the columns {names!r:.200}",
            where=f"{path}:1",
            fix="give each column a name of its own",
        )
    return names


def csv_record(columns: list[str], row: list[str], where: str) -> dict[str, Any]:
    """Names the cells of a row. Raises DataError: it has more or fewer than there are columns."""
    if len(row) != len(columns):
        raise DataError(
            f"{len(row)} cells under {len(columns)} columns",
            where=where,
            fix='put a text with a comma or newline in quotes: "…"',
        )
    return dict(zip(columns, row, strict=True))
