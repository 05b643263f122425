"""What tensors a piece of code makes: the largest one, and the most bytes alive at once, in this process.

For tests of memory: ``with TensorSpy() as spy: …``, then ``spy.largest_bytes`` and ``spy.most_bytes``. Seen
is every storage that an operator of torch reads or writes; memory without numbers (``meta``) and windows
into mapped files are no memory. Operators of cut tensors (DTensor) are seen as those of their parts.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

_ALIGNMENT = 64  # of what torch allocates on a CPU; a mapped file's windows lie anywhere


class TensorSpy(TorchDispatchMode):
    """Counts while it is active.

    Attributes:
        largest_bytes: of the largest storage seen, and ``largest_where`` the lines that made it.
        most_bytes: of all storages that were alive together, those that were there before included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest_bytes, self.largest_where = 0, ""
        self.most_bytes, self.most_where = 0, ""
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}  # with its bytes
        self._at_most = 0  # bytes of these, some of which may be gone

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; the wrapper takes as long as an operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, torch.distributed.tensor.DTensor) for t in types):
            return NotImplemented  # seen again as operators of its parts
        result = func(*args, **(kwargs or {}))
        grows = func.namespace not in (
            "aten",
            "prims",
        )  # collectives; fsdp's, around which memory grows
        grows = grows or func.overloadpacket is torch.ops.aten.resize_
        self.look(_tensors((args, kwargs, result)), again=grows)
        return result

    def look(self, tensors: Any, *, again: bool = True) -> None:
        """Counts these too: what nobody has computed with yet."""
        new = [self._see(x) for x in tensors if isinstance(x, Tensor)]
        if again or (any(new) and self._at_most > self.most_bytes):
            self._count(again)

    def _see(self, x: Tensor) -> bool:
        """Whether it is memory that was not known."""
        if type(x) is not Tensor and is_traceable_wrapper_subclass(x):
            seen = [self._see(getattr(x, part)) for part in x.__tensor_flatten__()[0]]
            return any(seen)
        if x.is_meta:
            return False
        storage = x.untyped_storage()
        ref, before = self._alive.get(storage._cdata, (None, 0))
        if ref is not None and not _is_gone(ref):
            return False
        if storage.data_ptr() % _ALIGNMENT == 0 or not _is_mapped(storage.data_ptr()):
            size = storage.nbytes()
            self._alive[storage._cdata] = (StorageWeakRef(storage), size)
            self._at_most += size - before
            if size > self.largest_bytes:
                self.largest_bytes, self.largest_where = size, _lines()
            return True
        return False

    def _count(self, again: bool) -> None:
        """Forgets what is gone; ``again``: what is there may have another size."""
        alive = {}
        for key, (ref, size) in self._alive.items():
            now = _size(ref) if again else None if _is_gone(ref) else size
            if now is not None:
                alive[key] = (ref, now)
        self._alive = alive
        sizes = [size for _, size in self._alive.values()]
        self._at_most, largest = sum(sizes), max(sizes, default=0)
        if largest > self.largest_bytes:
            self.largest_bytes, self.largest_where = largest, _lines()
        if self._at_most > self.most_bytes:
            self.most_bytes, self.most_where = self._at_most, _lines()


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Those among an operator's arguments and results; quicker than torch's own walk."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _tensors(part)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _is_gone(ref: StorageWeakRef) -> bool:
    gone: bool = torch.UntypedStorage._expired(ref.cdata)
    return gone


def _size(ref: StorageWeakRef) -> int | None:
    """None: it is gone."""
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return None if storage is None else storage.nbytes()


def _is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, last = line.split(maxsplit=1)[0].partition("-")
        if int(first, 16) <= address < int(last, 16):
            return line.endswith(".safetensors")
    return False


def _lines() -> str:
    frames = traceback.extract_stack(sys._getframe(3), limit=12)
    return "\n".join(f"{f.filename}:{f.lineno} {f.line}" for f in frames)
