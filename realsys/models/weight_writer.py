"""Writes weights into safetensors files of bounded size, one after the other as they are produced.

They never exist all at once: offsets are planned from names, shapes and dtypes alone, and each weight is
written to its place when produced. Files and index are those that transformers reads; a model that fits in
one file gives the bytes that safetensors itself would write.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from realsys.api.errors import InternalError
from realsys.models.hf_directory import WEIGHTS, WEIGHTS_INDEX

MAX_FILE_BYTES = 5_000_000_000
DTYPE_NAMES = {  # in the format's own order: larger dtypes come last here, and first in a file
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32",
    torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
_ORDER = {dtype: i for i, dtype in enumerate(DTYPE_NAMES)}


@dataclass(frozen=True)
class WeightSpec:
    """Shape and dtype of a weight, known before the weight exists."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> WeightSpec:
        """Returns the spec of a weight, or of the full weight of a sharded one."""
        return WeightSpec(tuple(x.shape), x.dtype)

    @property
    def num_bytes(self) -> int:
        """Size of the weight's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedFile:
    """A file, and the offset of each of its weights."""

    name: str
    header: bytes
    starts: Mapping[str, int]


def plan_files(
    kinds: Mapping[str, WeightSpec], *, max_bytes: int = MAX_FILE_BYTES
) -> list[PlannedFile]:
    """Plans files for weights in this order, each with at most ``max_bytes`` of them or a single weight.

    (pure)
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name, kind in kinds.items():
        if groups[-1] and size + kind.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += kind.num_bytes
    if len(groups) == 1:
        return [_plan_file(WEIGHTS, groups[0], kinds)]
    stem, ending = WEIGHTS.split(".")
    return [
        _plan_file(f"{stem}-{i:05d}-of-{len(groups):05d}.{ending}", names, kinds)
        for i, names in enumerate(groups, start=1)
    ]


def _plan_file(file: str, names: Sequence[str], kinds: Mapping[str, WeightSpec]) -> PlannedFile:
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, at = {}, 0
    for name in sorted(names, key=lambda n: (-_ORDER[kinds[n].dtype], n)):
        kind, offsets[name] = kinds[name], at
        at += kind.num_bytes
        content[name] = {
            "dtype": DTYPE_NAMES[kind.dtype],
            "shape": list(kind.shape),
            "data_offsets": [offsets[name], at],
        }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return PlannedFile(file, header, {n: len(header) + start for n, start in offsets.items()})


def write_weights(
    folder: Path,
    kinds: Mapping[str, WeightSpec],
    weights: Iterable[tuple[str, Tensor]],
    *,
    max_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes ``weights`` in the dtypes of ``kinds``, and the index if there are several files.

    Each file is synced to disk after its last weight. At most one weight is held at a time.
    """
    files = plan_files(kinds, max_bytes=max_bytes)
    file_of = {name: file for file in files for name in file.starts}
    missing = {file.name: set(file.starts) for file in files}
    with ExitStack() as stack:
        streams: dict[str, BinaryIO] = {}
        for name, weight in weights:
            file, kind = file_of[name], kinds[name]
            if tuple(weight.shape) != kind.shape:
                raise _plan_mismatch(f"{name} has shape {tuple(weight.shape)}, not {kind.shape}")
            if file.name not in streams:
                streams[file.name] = stack.enter_context((folder / file.name).open("wb"))
                streams[file.name].write(file.header)
            stream = streams[file.name]
            stream.seek(file.starts[name])
            flat = weight.detach().to("cpu", kind.dtype).contiguous().reshape(-1)
            stream.write(flat.view(torch.uint8).numpy().data)
            del weight, flat  # before the next one is produced
            missing[file.name].discard(name)
            if not missing[file.name]:
                stream.flush()
                os.fsync(stream.fileno())
                stream.close()
    if left := sorted(name for names in missing.values() for name in names):
        raise _plan_mismatch(f"{len(left)} weights never came, e.g. {left[0]}")
    if len(files) > 1:
        sizes = {
            "total_parameters": sum(math.prod(kind.shape) for kind in kinds.values()),
            "total_size": sum(kind.num_bytes for kind in kinds.values()),
        }
        index = {"metadata": sizes, "weight_map": {n: file_of[n].name for n in kinds}}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / WEIGHTS_INDEX).write_text(text, encoding="utf-8")


def can_write(kinds: Mapping[str, WeightSpec]) -> bool:
    """True if the files can hold weights of these dtypes."""
    return all(kind.dtype in DTYPE_NAMES for kind in kinds.values())


def _plan_mismatch(what: str) -> InternalError:
    return InternalError(what, where="write_weights")
