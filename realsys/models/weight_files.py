"""Reads weights from the safetensors files of a Hugging Face directory, in whole or in part, one at
a time.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from realsys.api.errors import CheckpointError
from realsys.models.hf_directory import weight_files, weight_shapes

_COMPARED_AT_ONCE = 1 << 24  # numbers


class WeightFiles:
    """Weights of the directory ``path``, by their names in the files."""

    def __init__(self, path: str | Path) -> None:
        self.path = path

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """Maps each weight's name to its shape."""
        return weight_shapes(self.path)

    @cached_property
    def _files(self) -> dict[str, Path]:
        return weight_files(self.path)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def window(
        self,
        name: str,
        start: tuple[int, ...] | None = None,
        stop: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Returns a view of a weight or a part of it, as stored; to be copied, not kept.

        It is a view of the mapped file: rewriting the file would change or crash this process.

        Raises:
            CheckpointError: the file is missing or was replaced.
        """
        try:
            with safe_open(self._files[name], framework="pt") as file:
                part: Any = file.get_slice(name)
                if start is None or stop is None:
                    whole: Tensor = part[:] if part.get_shape() else file.get_tensor(name)
                    return whole
                window: Tensor = part[tuple(map(slice, start, stop))]
                return window
        except (SafetensorError, OSError) as error:  # since the directory was checked
            raise CheckpointError(
                f"{name} can't be read: {error}",
                where=str(self._files[name]),
                fix="copy the complete directory again, and don't change it while it is read",
            ) from error

    def are_equal(self, first: str, second: str) -> bool:
        """True if two weights are equal, number by number; never holds both whole in memory."""
        shape = self.shapes[first]
        if shape != self.shapes[second] or not shape:
            return shape == self.shapes[second] and torch.equal(
                self.window(first), self.window(second)
            )
        row = max(1, torch.Size(shape[1:]).numel())
        rows = max(1, _COMPARED_AT_ONCE // row)
        rest, last = (0,) * len(shape[1:]), tuple(shape[1:])
        return all(
            torch.equal(
                *(
                    self.window(n, (at, *rest), (min(at + rows, shape[0]), *last))
                    for n in (first, second)
                )
            )
            for at in range(0, shape[0], rows)
        )
