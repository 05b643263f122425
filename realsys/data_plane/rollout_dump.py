"""Datapoints in a file, one after another, to be trained on again bit for bit.

A rollout worker appends each datapoint that was kept; ``RolloutDump`` reads any of them by its id. A
record is its length (8 bytes, little-endian), a msgpack header (SequenceMeta, keys, bytes of each) and the
tensors' bytes. A process that dies may leave its last record torn: readers leave it out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from io import BufferedWriter
from pathlib import Path

import msgspec
import torch

from realsys.api.data import SequenceMeta
from realsys.api.errors import DataError, RealsysError
from realsys.data_plane.sequence_sample import SequenceSample
from realsys.data_plane.tensor_bytes import bytes_of, joined

SUFFIX = ".rollouts"
_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 64 * 1024 * 1024


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    meta: SequenceMeta
    keys: tuple[str, ...]
    num_bytes: tuple[int, ...]


class DumpWriter:
    """Appends datapoints to a file of its own. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BufferedWriter | None = None

    def append(self, sample: SequenceSample) -> None:
        """Writes ``sample``; on disk before this returns, but not synced.

        Raises:
            DataError: the disk refuses.
        """
        keys = tuple(sorted(sample.keys))
        tensors = [sample.data[key].detach().cpu().contiguous() for key in keys]
        header = msgspec.msgpack.encode(
            _Header(
                meta=sample.meta,
                keys=keys,
                num_bytes=tuple(x.numel() * x.element_size() for x in tensors),
            )
        )
        parts: list[bytes | memoryview] = [len(header).to_bytes(_LENGTH_BYTES, "little"), header]
        parts += [bytes_of(x) for x in tensors if x.numel()]
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab")
            for part in parts:
                self._file.write(part)
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"a rollout can't be written: {error}",
                where=str(self.path),
                fix="free space, or rollout.dump=false",
            ) from error

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> DumpWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class RolloutDump:
    """Datapoints of some dump files, by id. The newest of an id counts."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._place: dict[str, tuple[Path, int]] = {}
        for path in files:
            self._index(path)

    def __len__(self) -> int:
        return len(self._place)

    def read(self, ids: Sequence[str]) -> SequenceSample:
        """The datapoints ``ids``, in that order.

        Raises:
            DataError: one is not there, or its file is damaged.
        """
        return _gather([self._read(name) for name in ids])

    def _read(self, name: str) -> SequenceSample:
        if name not in self._place:
            raise DataError(
                f"datapoint {name!r} is in no dump",
                where="replay",
                fix="was the run started with rollout.dump=true, and are its files all there?",
            )
        path, offset = self._place[name]
        try:
            with path.open("rb") as file:
                file.seek(offset)
                header = _read_header(file.read(_header_length(file.read(_LENGTH_BYTES))))
                return _sample(header, file.read(sum(header.num_bytes)))
        except (OSError, msgspec.MsgspecError, ValueError, RealsysError) as error:
            raise DataError(
                f"datapoint {name!r} can't be read: {error}", where=str(path), fix="copy it again"
            ) from error

    def _index(self, path: Path) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            while (start := file.tell()) < size:
                try:
                    header = _read_header(file.read(_header_length(file.read(_LENGTH_BYTES))))
                except (msgspec.MsgspecError, ValueError):
                    return  # torn: nothing behind it is whole
                end = file.tell() + sum(header.num_bytes)
                if end > size:
                    return
                for name in header.meta.ids:
                    self._place[name] = (path, start)
                file.seek(end, os.SEEK_SET)


def _header_length(data: bytes) -> int:
    length = int.from_bytes(data, "little")
    if len(data) != _LENGTH_BYTES or not 0 < length <= MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    return length


def _read_header(data: bytes) -> _Header:
    return msgspec.msgpack.decode(data, type=_Header)


def _sample(header: _Header, data: bytes) -> SequenceSample:
    meta, start, tensors = header.meta, 0, dict[str, torch.Tensor]()
    for key, num_bytes in zip(header.keys, header.num_bytes, strict=True):
        dtype = getattr(torch, meta.dtypes[key])
        shape = (sum(meta.rows_per_id(key)), *meta.trailing_shapes[key])
        if start + num_bytes > len(data) or math.prod(shape) * dtype.itemsize != num_bytes:
            raise ValueError(f"{num_bytes} bytes of {key} for shape {shape}")
        tensors[key] = joined(dtype, shape, [data[start : start + num_bytes]])
        start += num_bytes
    return SequenceSample.from_meta(meta, tensors)


def _gather(samples: Sequence[SequenceSample]) -> SequenceSample:
    meta = SequenceMeta.gather([sample.meta for sample in samples])
    data = {key: torch.cat([sample.data[key] for sample in samples]) for key in meta.keys}
    return SequenceSample.from_meta(meta, data)
