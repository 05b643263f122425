"""Weights written into safetensors files of bounded size, one after the other as they come.

Nobody has to hold them together: what goes where is planned from names, shapes and types alone, and each
weight is written to its place when it is there. Files and index are those that transformers reads; a model
that fits one file gives the bytes that safetensors itself would write.
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
_NAMES = {  # in the format's own order: larger types come last here, and first in a file
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32",
    torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
_ORDER = {dtype: i for i, dtype in enumerate(_NAMES)}


@dataclass(frozen=True)
class Kind:
    """What is known of a weight before it is there."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> Kind:
        """Of a weight, or of the whole of a cut one."""
        return Kind(tuple(x.shape), x.dtype)

    @property
    def num_bytes(self) -> int:
        """Of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedFile:
    """A file, and where in it each of its weights begins."""

    name: str
    header: bytes
    starts: Mapping[str, int]


def planned_files(
    kinds: Mapping[str, Kind], *, max_bytes: int = MAX_FILE_BYTES
) -> list[PlannedFile]:
    """Files for weights that come in this order, none larger than ``max_bytes`` of them but for one weight.

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
        return [_planned(WEIGHTS, groups[0], kinds)]
    stem, ending = WEIGHTS.split(".")
    return [
        _planned(f"{stem}-{i:05d}-of-{len(groups):05d}.{ending}", names, kinds)
        for i, names in enumerate(groups, start=1)
    ]


def _planned(file: str, names: Sequence[str], kinds: Mapping[str, Kind]) -> PlannedFile:
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, at = {}, 0
    for name in sorted(names, key=lambda n: (-_ORDER[kinds[n].dtype], n)):
        kind, offsets[name] = kinds[name], at
        at += kind.num_bytes
        content[name] = {
            "dtype": _NAMES[kind.dtype],
            "shape": list(kind.shape),
            "data_offsets": [offsets[name], at],
        }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return PlannedFile(file, header, {n: len(header) + start for n, start in offsets.items()})


def write_weights(
    folder: Path,
    kinds: Mapping[str, Kind],
    weights: Iterable[tuple[str, Tensor]],
    *,
    max_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes ``weights``, each in the type that ``kinds`` names, and the index if there are several files.

    Every file is on disk (fsync) when its last weight is. At most one weight is held here.
    """
    files = planned_files(kinds, max_bytes=max_bytes)
    file_of = {name: file for file in files for name in file.starts}
    missing = {file.name: set(file.starts) for file in files}
    with ExitStack() as stack:
        streams: dict[str, BinaryIO] = {}
        for name, weight in weights:
            file, kind = file_of[name], kinds[name]
            if tuple(weight.shape) != kind.shape:
                raise _unlike_plan(f"{name} has shape {tuple(weight.shape)}, not {kind.shape}")
            if file.name not in streams:
                streams[file.name] = stack.enter_context((folder / file.name).open("wb"))
                streams[file.name].write(file.header)
            stream = streams[file.name]
            stream.seek(file.starts[name])
            flat = weight.detach().to("cpu", kind.dtype).contiguous().reshape(-1)
            stream.write(flat.view(torch.uint8).numpy().data)
            del weight, flat  # before the next one comes
            missing[file.name].discard(name)
            if not missing[file.name]:
                stream.flush()
                os.fsync(stream.fileno())
                stream.close()
    if left := sorted(name for names in missing.values() for name in names):
        raise _unlike_plan(f"{len(left)} weights never came, e.g. {left[0]}")
    if len(files) > 1:
        sizes = {
            "total_parameters": sum(math.prod(kind.shape) for kind in kinds.values()),
            "total_size": sum(kind.num_bytes for kind in kinds.values()),
        }
        index = {"metadata": sizes, "weight_map": {n: file_of[n].name for n in kinds}}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / WEIGHTS_INDEX).write_text(text, encoding="utf-8")


def can_write(kinds: Mapping[str, Kind]) -> bool:
    """Whether the files can hold weights of these types."""
    return all(kind.dtype in _NAMES for kind in kinds.values())


def _unlike_plan(what: str) -> InternalError:
    return InternalError(what, where="write_weights")
