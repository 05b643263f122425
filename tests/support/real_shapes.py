"""Folders of models of real sizes that take no room: whole headers over files with holes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realsys.models.shape import shape_of

Config = Mapping[str, Any]

_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "eos_token_id": 1,
}
# Of Qwen2.5-0.5B, Qwen2.5-7B and Qwen2.5-32B, and of Llama-3.3-70B, by their config.json.
HALF_A_BILLION: Config = {
    **_QWEN,
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
SEVEN_BILLION: Config = {
    **_QWEN,
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
THIRTY_TWO_BILLION: Config = {
    **_QWEN,
    "vocab_size": 152064,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
SEVENTY_BILLION: Config = {
    **_QWEN,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_TOKENIZER = '{"model": {"type": "WordLevel", "vocab": {"a": 0, "<eos>": 1}, "unk_token": "a"}}'


def model_folder(folder: Path, config: Config) -> Path:
    """A Hugging Face directory that a plan takes for the real one: bfloat16, all weights 0."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(_TOKENIZER)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in shape_of(dict(config)).weights():
        begin, end = end, end + 2 * weight.numel
        shape = list(weight.shape)
        header[weight.name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder
