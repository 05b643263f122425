"""Where a model that a user names is computed, where the user does not say."""

from __future__ import annotations

import torch

from realsys.api.errors import ConfigError


def model_place(device: str | None, dtype: str | None) -> tuple[str, str]:
    """Returns device and dtype: a GPU with bfloat16 if torch finds one, else the CPU with float32.

    Raises:
        ConfigError: the device is a GPU, and torch finds none.
    """
    sees_gpu = torch.cuda.is_available()
    device = device or ("cuda" if sees_gpu else "cpu")
    on_gpu = device.startswith("cuda")
    if on_gpu and not sees_gpu:
        raise ConfigError("torch finds no GPU", where="--device", fix="leave it out, or use cpu")
    return device, dtype or ("bfloat16" if on_gpu else "float32")
