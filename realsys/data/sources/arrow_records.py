"""Records of Parquet files, Arrow files and folders of ``datasets.save_to_disk``, by number. No torch.

They need pyarrow (``pip install 'realsys[data]'``), which is imported when such a file is opened. A
Parquet file is read by row groups, of which a few are kept: files that are shuffled should have small ones.
An Arrow file is mapped into memory, which the system pages in and out. Both come from strangers: what a row
group and a row unpack to is bounded, whatever their packed size.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from realsys.api.basics.bounded_files import MAX_LINE_BYTES, parse_json, read_bounded_text
from realsys.api.errors import DataError, did_you_mean
from realsys.config.extras import missing_packages
from realsys.data.sources.record_parts import locate
from realsys.data.sources.record_shape import plain_record

logger = logging.getLogger(__name__)

MAX_GROUP_BYTES = 512 << 20  # of one row group, unpacked
KEPT_BYTES = 128 << 20  # of row groups; the newest is kept in any case
VALUE_BYTES = 8  # of a row, at least, for each value in a list
_BATCH_ROWS = 64 << 10
_BATCH_BYTES = 64 << 20
# Of texts: they stay dictionaries in memory where the file has them so.
_TEXT_KINDS = frozenset({"STRING", "JSON", "ENUM", "NONE"})
_PREFIXED = "DELTA_BYTE_ARRAY"  # each value names how much of the one before it repeats


class UnreadableColumn(ValueError):
    """A column's type can't be measured, so it is not read."""


class ParquetRows:
    """Rows of one Parquet file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _opened_parquet(path) as file:
            self._metadata = found = file.metadata
        groups = [found.row_group(i) for i in range(found.num_row_groups)]
        self._ends = list(accumulate(group.num_rows for group in groups))
        self._bytes = [int(group.total_byte_size) for group in groups]
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._dictionaries = _dictionary_columns(found)
        if max(self._bytes, default=0) > MAX_GROUP_BYTES:
            raise DataError(
                f"a row group has {max(self._bytes) >> 20:,} MiB unpacked, and one is read as a whole; the "
                f"limit is {MAX_GROUP_BYTES >> 20:,}",
                where=str(path),
                fix="write it again with smaller ones: pyarrow.parquet.write_table(…, row_group_size=1000)",
            )

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        group, row = locate(self._ends, index)
        return _record(self._table(group).slice(row, 1), self.where(index), self.path)

    def where(self, index: int) -> str:
        """Returns the file and the number of a row, from 1."""
        return f"{self.path}, row {index + 1}"

    def _table(self, group: int) -> Any:
        if group not in self._kept:
            with _opened_parquet(self.path, self._metadata, self._dictionaries) as file:
                self._kept[group] = table = self._read(file, group)
            # What it takes up here: a footer may say less, and a value that repeats is packed once.
            self._bytes[group] = int(table.get_total_buffer_size())
            if self._bytes[group] > MAX_GROUP_BYTES + _BATCH_BYTES:
                del self._kept[group]
                raise self._too_large(group)
            while len(self._kept) > 1 and sum(self._bytes[g] for g in self._kept) > KEPT_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(group)
        return self._kept[group]

    def _read(self, file: Any, group: int) -> Any:
        """Reads a row group in batches, so that it can be left when it is larger than it says."""
        import pyarrow

        before = pyarrow.total_allocated_bytes()
        rows = _batch_rows(self._metadata.row_group(group))
        batches = []
        for batch in file.iter_batches(batch_size=rows, row_groups=[group]):
            batches.append(batch)
            if pyarrow.total_allocated_bytes() - before > MAX_GROUP_BYTES + _BATCH_BYTES:
                raise self._too_large(group)
        return pyarrow.Table.from_batches(batches)

    def _too_large(self, group: int) -> DataError:
        return DataError(
            f"row group {group} unpacks to more than {MAX_GROUP_BYTES >> 20:,} MiB",
            where=str(self.path),
            fix="don't use this file, or ask its maker: few bytes of it stand for many",
        )


class ArrowRows:
    """Rows of one Arrow file (stream or random-access format), as ``datasets`` writes them."""

    def __init__(self, path: Path) -> None:
        pyarrow = imported(path)
        self.path = path
        with _readable(path, pyarrow):
            from pyarrow import ipc

            mapped = pyarrow.memory_map(str(path))
            is_file = mapped.read(6) == b"ARROW1"
            mapped.seek(0)
            table = (ipc.open_file if is_file else ipc.open_stream)(mapped).read_all()
        self._batches = table.to_batches()
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch, row = locate(self._ends, index)
        return _record(self._batches[batch].slice(row, 1), self.where(index), self.path)

    def where(self, index: int) -> str:
        """Returns the file and the number of a row, from 1."""
        return f"{self.path}, row {index + 1}"


def imported(path: Path) -> Any:
    """Imports pyarrow. Raises ConfigError with the command that installs it."""
    for problem in missing_packages(["pyarrow"], where=str(path)):
        raise problem
    import pyarrow

    return pyarrow


def is_saved_dataset(folder: Path) -> bool:
    """True for a folder that ``save_to_disk`` of a data set, or of one with splits, wrote."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def files_of_saved_dataset(folder: Path) -> list[Path]:
    """Lists the Arrow files of a folder that ``save_to_disk`` wrote, in the order of their rows.

    Raises:
        DataError: it holds several splits, an unknown state, or rows in an order of their own.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits") or []
        raise DataError(
            f"the folder holds the splits {', '.join(map(str, splits))}",
            where=str(folder),
            fix=f"give one of them, e.g. {folder}/{splits[0] if splits else 'train'}",
        )
    state = _json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise DataError(
            "the rows are in an order that stands in files of indices",
            where=str(folder),
            fix="save it again: dataset.flatten_indices().save_to_disk(…)",
        )
    names = [file.get("filename") for file in state.get("_data_files") or []]
    found = [folder / str(name) for name in names if name and Path(str(name)).name == name]
    if not found or len(found) < len(names):
        known = [path.name for path in folder.glob("*.arrow")]
        raise DataError(
            f"state.json names the files {names!r:.200}",
            where=str(folder),
            fix=f"save the data set again; {did_you_mean('data.arrow', known)}",
        )
    return found


def _json(file: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_bounded_text(file))
    except (OSError, ValueError) as error:
        raise DataError(
            f"it can't be read: {error}", where=str(file), fix="save the data set again"
        ) from error
    return found if isinstance(found, dict) else {}


def _record(row: Any, where: str, path: Path) -> dict[str, Any]:
    """Makes a record of a table's one row, without columns that hold bytes, which nothing here reads.

    Raises:
        DataError: it is larger than a line of a JSONL file may be, or of types that are not read.
    """
    import pyarrow

    with _readable(path, pyarrow):
        row = row.select(_read_columns(row.schema, path))
        row.validate()
        try:
            arrays = (part for column in row.columns for part in _chunks(column))
            size = sum(unpacked_bytes(array) for array in arrays)
        except UnreadableColumn as error:
            raise DataError(str(error), where=where, fix="save it with plain columns") from error
    if size > MAX_LINE_BYTES:
        raise DataError(
            f"the row unpacks to {size:,} bytes; the limit is {MAX_LINE_BYTES:,}",
            where=where,
            fix="leave such rows out",
        )
    (found,) = row.to_pylist()
    return plain_record(found, where)


@lru_cache(maxsize=64)
def _read_columns(schema: Any, path: Path) -> list[str]:
    """Names the columns of a file that are read; tells once which are not."""
    left_out = [field.name for field in schema if _holds_bytes(field.type)]
    if left_out:
        logger.warning("columns left out, they hold bytes names=%s path=%s", left_out, path)
    return [name for name in schema.names if name not in left_out]


def _holds_bytes(kind: Any) -> bool:
    from pyarrow import types

    if types.is_nested(kind):
        return any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))
    if types.is_dictionary(kind):
        return _holds_bytes(kind.value_type)
    binary = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return any(is_so(kind) for is_so in binary)


def _chunks(column: Any) -> list[Any]:
    """Returns the arrays of a table's column, or of a record batch's."""
    return list(getattr(column, "chunks", [column]))


def unpacked_bytes(array: Any) -> int:
    """Returns the bytes of an Arrow array's values, a dictionary's value counted wherever it is named.

    A few bytes of a file can stand for any amount of them: a list of nulls has a length alone.

    Raises:
        UnreadableColumn: the array is of views, runs or unions, whose values can overlap.
    """
    from pyarrow import BaseExtensionType, types

    kind, least = array.type, VALUE_BYTES * len(array)
    if isinstance(kind, BaseExtensionType):
        return unpacked_bytes(array.storage)
    if types.is_dictionary(kind):
        return least + _sum(_lengths(array.dictionary).take(array.indices))
    if types.is_struct(kind):
        return least + sum(unpacked_bytes(part) for part in array.flatten())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return least + unpacked_bytes(array.flatten())
    if types.is_map(kind):
        first, last = array.offsets[0].as_py(), array.offsets[len(array)].as_py()
        parts = (array.keys.slice(first, last - first), array.items.slice(first, last - first))
        return least + sum(unpacked_bytes(part) for part in parts)
    if kind.num_fields or types.is_run_end_encoded(kind):
        raise UnreadableColumn(f"columns of type {kind} are not read")
    return least + _sum(_lengths(array))


def _lengths(array: Any) -> Any:
    """Returns the bytes of each value beyond VALUE_BYTES."""
    import pyarrow
    from pyarrow import compute, types

    kind = array.type
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if any(is_text(kind) for is_text in texts):
        return compute.binary_length(array)
    if types.is_string_view(kind) or types.is_binary_view(kind) or kind.num_fields:
        raise UnreadableColumn(f"columns of type {kind} are not read")
    return pyarrow.repeat(pyarrow.scalar(0, "int32"), len(array))  # numbers, dates, nulls


def _sum(lengths: Any) -> int:
    from pyarrow import compute

    return int(compute.sum(lengths).as_py() or 0)


def _dictionary_columns(metadata: Any) -> list[str]:
    """Lists the columns of texts that stay dictionaries: unpacked, one value may fill the memory."""
    columns = [metadata.schema.column(i) for i in range(metadata.num_columns)]
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    found = []
    for i, column in enumerate(columns):
        if column.physical_type != "BYTE_ARRAY" or column.logical_type.type not in _TEXT_KINDS:
            continue
        chunks = [group.column(i) for group in groups]
        if any(_PREFIXED in chunk.encodings for chunk in chunks):
            continue  # pyarrow can't
        if any(c.num_values * c.total_uncompressed_size > MAX_GROUP_BYTES for c in chunks):
            found.append(column.path)
    return found


def _batch_rows(group: Any) -> int:
    """Returns how many rows are read at once: so few that they fit, each with a column's largest value."""
    chunks = [group.column(i) for i in range(group.num_columns)]
    largest = [c.total_uncompressed_size for c in chunks if _PREFIXED in c.encodings]
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, *largest)) if largest else _BATCH_ROWS)


@contextmanager
def _opened_parquet(
    path: Path, metadata: Any = None, dictionaries: Sequence[str] = ()
) -> Iterator[Any]:
    """Opens a Parquet file for one read: a data set may have thousands. Its metadata are read once."""
    with _readable(path, imported(path)):
        from pyarrow import parquet

        with parquet.ParquetFile(
            path, metadata=metadata, read_dictionary=list(dictionaries)
        ) as file:
            yield file


@contextmanager
def _readable(path: Path, pyarrow: Any) -> Iterator[None]:
    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"the data set can't be read: {error}"[:500],
            where=str(path),
            fix="copy the file again, whole",
        ) from error
