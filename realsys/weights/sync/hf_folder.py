"""Reads all weights of a Hugging Face directory to the CPU."""

from __future__ import annotations

from collections.abc import Mapping

from safetensors import SafetensorError, safe_open
from torch import Tensor

from realsys.api.errors import CheckpointError
from realsys.models.hf_directory import weight_files, weight_shapes


def read_folder(path: str) -> Mapping[str, Tensor]:
    """Reads name → whole tensor, in the dtype of the files. Tied weights appear once.

    Raises:
        CheckpointError: names a file that is missing, damaged or still being written.
    """
    weight_shapes(path)  # checks sizes against headers before anything large is read
    found = {}
    names_of: dict[str, list[str]] = {}
    for name, file in weight_files(path).items():
        names_of.setdefault(str(file), []).append(name)
    for file_name, names in names_of.items():
        try:
            with safe_open(file_name, framework="pt") as file:
                for name in names:
                    found[name] = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"weights can't be read: {error}",
                where=file_name,
                fix="write the complete directory and rename it before announcing it to servers",
            ) from error
    return found
