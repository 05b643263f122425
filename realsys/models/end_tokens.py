"""Token ids that end an answer, for engines that hold the model and for clients of servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from realsys.models.hf import load_hf_config


def end_token_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """Returns the tokenizer's end token and those of the generation config, ascending.

    Args:
        generation_config: a transformers ``GenerationConfig``, or None.
    """
    own = getattr(generation_config, "eos_token_id", None)
    several = own if isinstance(own, list | tuple) else [own]
    return sorted({int(i) for i in (tokenizer.eos_token_id, *several) if i is not None})


def load_generation_config(path: str | Path) -> Any:
    """Loads the generation config that a model from the directory ``path`` would have."""
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:  # no such file: transformers derives them from the model's config
        return GenerationConfig.from_model_config(load_hf_config(path))
