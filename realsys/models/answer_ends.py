"""Which tokens end an answer: asked by engines that hold the model, and by those that only ask servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from realsys.models.hf import load_hf_config


def end_token_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """The tokenizer's end token and those of the model's own generation settings, ascending.

    Args:
        generation_config: of transformers, or None.
    """
    own = getattr(generation_config, "eos_token_id", None)
    several = own if isinstance(own, list | tuple) else [own]
    return sorted({int(i) for i in (tokenizer.eos_token_id, *several) if i is not None})


def load_generation_config(path: str | Path) -> Any:
    """The generation settings that a model loaded from the directory ``path`` would have."""
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:  # no such file: transformers makes them from the model's own settings
        return GenerationConfig.from_model_config(load_hf_config(path))
