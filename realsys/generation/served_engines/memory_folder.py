"""A Hugging Face weight folder in host memory, for SGLang and vLLM, which load folders.

The folder holds one link, to an anonymous file (memfd_create(2)) of this process: engines map it and copy
from it with their own loaders, so no engine code is patched and no tensor is sent or unpickled. The
memory is gone with this process and those that have it mapped, however they end. The kernel lets processes
of the same user open it, and it is sealed: its contents can't be changed or shortened.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from realsys.api.errors import ClusterError, DataError, InternalError
from realsys.models.hf_directory import WEIGHTS, check_hf_directory, weight_shapes
from realsys.runtime.linux import (
    F_ADD_SEALS,
    F_SEAL_GROW,
    F_SEAL_SEAL,
    F_SEAL_SHRINK,
    F_SEAL_WRITE,
    MFD_ALLOW_SEALING,
    MFD_CLOEXEC,
    memfd_create,
)

MEMORY_NAME = "realsys-weights"  # of the anonymous files, in /proc
_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ALIGNMENT = 64
_WRITE_BYTES = 64 << 20  # per call, between which other threads can run
_PROBE_S = 60.0  # allows for an interpreter on a slow file system
_PROBE = "import sys; sys.exit(0 if open(sys.argv[1], 'rb').read(1) else 1)"
_SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL


class TensorExtent(StrEnum):
    """Location of the weights' bytes for an engine."""

    MEMORY = "memory"
    DISK = "disk"  # the node's own folder for temporary files


class _HasShape(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...


class MemoryFolder:
    """Weights as a folder that exists until ``close``.

    Args:
        weights: Hugging Face name → whole tensor on the CPU.
        place: DISK writes an ordinary file, where engines can't open this process's memory.
    Raises:
        ClusterError: no room for them.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], *, place: TensorExtent = TensorExtent.MEMORY
    ) -> None:
        header, order = safetensors_header(weights)
        self.num_bytes = sum(weights[name].nbytes for name in order)
        # Small enough for any temporary file system; only this user can enter it.
        self._folder = tempfile.TemporaryDirectory(prefix="realsys-weights-")
        self.path = self._folder.name
        file = Path(self.path) / WEIGHTS
        self._fd = -1
        try:
            if place is TensorExtent.MEMORY:
                self._fd = memfd_create(MEMORY_NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING)
                file.symlink_to(f"/proc/{os.getpid()}/fd/{self._fd}")
            else:
                self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.fchmod(self._fd, 0o400)
            _write(self._fd, header)
            for name in order:
                _write(self._fd, _bytes_of(weights[name]))
            if place is TensorExtent.MEMORY:
                fcntl.fcntl(self._fd, F_ADD_SEALS, _SEALS)
        except OSError as error:
            self.close()
            raise ClusterError(
                f"{self.num_bytes} bytes of weights can't be put into {place.value}: {error}",
                where=self.path,
                fix="give the servers more memory (scheduling.generation_server.mem), or use "
                "schedule.weights_through=disk",
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Removes the folder; an engine that has the memory mapped keeps it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._folder.cleanup()


def safetensors_header(weights: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """Builds the header of a safetensors file, and the order of the tensors' bytes after it.

    Wide numbers come first, so that all are aligned; else the order of ``weights``, which is that of the
    layers: loaders hold back what they can't place yet.
    """
    order = sorted(weights, key=lambda name: -weights[name].element_size())
    said: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        x = weights[name]
        if (dtype := _DTYPES.get(str(x.dtype).removeprefix("torch."))) is None:
            raise InternalError(
                f"{name} has dtype {x.dtype}", where="served_engines/memory_folder.py"
            )
        said[name] = {
            "dtype": dtype,
            "shape": list(x.shape),
            "data_offsets": [end, end + x.nbytes],
        }
        end += x.nbytes
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, order


def check_weights(found: Mapping[str, _HasShape], model_path: str, *, where: str) -> None:
    """Checks that ``found`` is the complete model in ``model_path``: engines silently load what fits.

    Raises:
        DataError: a weight is missing, unknown, or has another shape; names them.
    """
    expected = weight_shapes(model_path)
    facts = check_hf_directory(model_path, need_tokenizer=False)
    free = {"lm_head.weight"} if facts.tied_embeddings else set()
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys() - free)]
    problems += [f"{name} is unknown" for name in sorted(found.keys() - expected.keys() - free)]
    problems += [
        f"{name} has shape {list(found[name].shape)}, the model's is {shape}"
        for name, shape in sorted(expected.items())
        if name in found and list(found[name].shape) != shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise DataError(
            "the weights do not fit the model: " + "; ".join(problems[:3]) + more,
            where=where,
            fix=f"give weights of the model in {model_path}",
        )


def place_for(readable: Callable[[TensorExtent], bool]) -> TensorExtent | None:
    """Chooses memory if the engine can read it, else its node's disk; None if neither (pure)."""
    return next((place for place in TensorExtent if readable(place)), None)


def readable_by(python: str, place: TensorExtent) -> bool:
    """True if a process of the engine's interpreter can read weights in ``place``."""
    try:
        folder = MemoryFolder({"probe": torch.zeros(1)}, place=place)
    except ClusterError:
        return False
    try:
        argv = [python, "-I", "-S", "-c", _PROBE, str(Path(folder.path) / WEIGHTS)]
        # Closed descriptors: it must find the memory by its path, as the engine will.
        done = subprocess.run(argv, timeout=_PROBE_S, capture_output=True, check=False)
        return done.returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        folder.close()


def _bytes_of(x: Tensor) -> memoryview:
    flat = x.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def _write(fd: int, data: bytes | memoryview) -> None:
    """Writes without the interpreter's lock, so that the front keeps serving."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left[:_WRITE_BYTES]) :]
