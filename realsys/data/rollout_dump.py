"""Files of datapoints, appended one by one, to be trained on again bit for bit.

A rollout worker appends each datapoint that was kept; ``RolloutDump`` reads any of them by its id. The
layout is realsys/trial/dump_records.py's: about 6 bytes a token. A process that dies may leave an
incomplete last record, which readers skip. A write that fails leaves nothing behind.
"""

from __future__ import annotations

import logging
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

import msgspec
import torch

from realsys.api.data import SequenceMeta
from realsys.api.errors import DataError, RealsysError
from realsys.data.sequence_sample import SequenceSample
from realsys.data.tensor_bytes import bytes_of, tensor_from_frames
from realsys.trial.dump_records import (
    LENGTH_BYTES,
    DumpHeader,
    decode_header,
    dump_records,
    header_length,
)

logger = logging.getLogger(__name__)


class DumpWriter:
    """Appends datapoints to a new file. Use as a context manager.

    Args:
        room: maximum number of bytes to write; None: no limit. Later datapoints are not written.
    """

    def __init__(self, path: Path, *, room: int | None = None) -> None:
        self.path = path
        self._room = room
        self._file: FileIO | None = None
        self._is_full = False

    def append(self, sample: SequenceSample) -> bool:
        """Writes ``sample`` before returning, without syncing it. Returns False if the size limit
        is reached.

        Raises:
            DataError: the write failed. Nothing of the sample is left in the file.
        """
        record = _record(sample)
        if self._is_full or (self._room is not None and len(record) > self._room):
            if not self._is_full:
                logger.warning(
                    "dump full, later rollouts not kept path=%s fix=raise schedule.dump_limit_gib",
                    self.path,
                )
            self._is_full = True  # also for smaller ones, so that the dump ends at one point
            return False
        start: int | None = None
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab", buffering=0)
            start = os.fstat(self._file.fileno()).st_size
            rest = memoryview(record)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._truncate(start)
            raise DataError(
                f"a rollout can't be written: {error}",
                where=str(self.path),
                fix="free space, or schedule.dump=false",
            ) from error
        if self._room is not None:
            self._room -= len(record)
        return True

    def _truncate(self, start: int | None) -> None:
        """Truncates a partial record: completed with the next record's bytes it would look valid."""
        if self._file is None or start is None:
            return
        with suppress(OSError):
            os.ftruncate(self._file.fileno(), start)
            return
        self.close()  # no record after it could be found: continue in another file
        self._file, self.path = None, self.path.with_stem(self.path.stem + "-b")

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> DumpWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _record(sample: SequenceSample) -> bytes:
    keys = tuple(sorted(sample.keys))
    tensors = [sample.data[key].detach().cpu().contiguous() for key in keys]
    # Versions and masks are runs, tokens and log-probs have zeros: the fastest level compresses that.
    kept = [zlib.compress(bytes_of(x), 1) if x.numel() else b"" for x in tensors]
    crc32 = 0
    for part in kept:
        crc32 = zlib.crc32(part, crc32)
    header = msgspec.msgpack.encode(
        DumpHeader(
            meta=sample.meta,
            keys=keys,
            num_bytes=tuple(map(len, kept)),
            crc32=crc32,
            is_deflated=True,
        )
    )
    return b"".join([len(header).to_bytes(LENGTH_BYTES, "little"), header, *kept])


class RolloutDump:
    """Datapoints of several dump files, by id. The newest record of an id is used."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._place: dict[str, tuple[Path, int]] = {}
        for path in files:
            self._index(path)

    def __len__(self) -> int:
        return len(self._place)

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of all datapoints, file by file, in the order in which they were written first."""
        return tuple(self._place)

    def read(self, ids: Sequence[str]) -> SequenceSample:
        """Reads the datapoints ``ids``, in that order.

        Raises:
            DataError: a datapoint is missing, or its file is damaged.
        """
        return _gather([self._read(name) for name in ids])

    def _read(self, name: str) -> SequenceSample:
        if name not in self._place:
            raise DataError(
                f"datapoint {name!r} is not in the dump",
                where="replay",
                fix="was the run started with schedule.dump=true, are its files all there, and was "
                "schedule.dump_limit_gib large enough?",
            )
        path, offset = self._place[name]
        try:
            with path.open("rb") as file:
                file.seek(offset)
                header = decode_header(file.read(header_length(file.read(LENGTH_BYTES))))
                return _sample(header, file.read(sum(header.num_bytes)))
        except (OSError, msgspec.MsgspecError, ValueError, zlib.error, RealsysError) as error:
            raise DataError(
                f"datapoint {name!r} can't be read: {error}", where=str(path), fix="copy it again"
            ) from error

    def _index(self, path: Path) -> None:
        for record in dump_records(path):
            for name in record.header.meta.ids:
                self._place[name] = (path, record.start)


def _sample(header: DumpHeader, data: bytes) -> SequenceSample:
    meta, start, tensors = header.meta, 0, dict[str, torch.Tensor]()
    if header.crc32 is not None and zlib.crc32(data) != header.crc32:
        raise ValueError("the checksum does not match")
    for key, num_bytes in zip(header.keys, header.num_bytes, strict=True):
        dtype = getattr(torch, meta.dtypes[key])
        shape = (sum(meta.rows_per_id(key)), *meta.trailing_shapes[key])
        kept = data[start : start + num_bytes]
        found = zlib.decompress(kept) if header.is_deflated and kept else kept
        if math.prod(shape) * dtype.itemsize != len(found):
            raise ValueError(f"{len(found)} bytes of {key} for shape {shape}")
        tensors[key] = tensor_from_frames(dtype, shape, [found])
        start += num_bytes
    return SequenceSample.from_meta(meta, tensors)


def _gather(samples: Sequence[SequenceSample]) -> SequenceSample:
    meta = SequenceMeta.gather([sample.meta for sample in samples])
    data = {key: torch.cat([sample.data[key] for sample in samples]) for key in meta.keys}
    return SequenceSample.from_meta(meta, data)
