"""Small models with random weights, one of each architecture, and a tokenizer for all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

VOCAB_SIZE = 64
_SPECIAL = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DEPTH = {"num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA_LIKE = {
    **_DEPTH,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_HEAD = {"head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
_RECURRENT = ("generate",)
_MAMBA_LAYERS = ("generate", "lora")


@dataclass(frozen=True)
class Architecture:
    """How a small model of an architecture is made, and what is refused of it.

    Attributes:
        config: name of its class of transformers.
        sizes: beside those of a Llama, or (``own``) instead of them.
        refused: of which columns the plan says why not (architecture_checks.py).
    """

    config: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    own: bool = False
    refused: Collection[str] = ()


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaConfig"),
    "qwen2": Architecture("Qwen2Config"),
    "qwen3": Architecture("Qwen3Config", _HEAD),
    "smollm3": Architecture("SmolLM3Config"),
    "mistral": Architecture("MistralConfig", {"sliding_window": 8}),
    "ministral": Architecture("MinistralConfig", {**_HEAD, "sliding_window": 8}),
    "gemma": Architecture("GemmaConfig", _HEAD),
    "gemma2": Architecture("Gemma2Config", {**_HEAD, "sliding_window": 8}),
    "gemma3_text": Architecture("Gemma3TextConfig", {**_HEAD, "sliding_window": 8}),
    "phi": Architecture("PhiConfig"),
    "phi3": Architecture("Phi3Config"),
    "gpt2": Architecture(
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
        own=True,
        refused=("lora",),
    ),
    "gpt_neo": Architecture(
        "GPTNeoConfig",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "max_position_embeddings": 128,
        },
        own=True,
    ),
    "gptj": Architecture(
        "GPTJConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4},
        own=True,
    ),
    "gpt_neox": Architecture("GPTNeoXConfig"),
    "gpt_bigcode": Architecture(
        "GPTBigCodeConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
        own=True,
    ),
    "gpt_oss": Architecture(
        "GptOssConfig",
        {**_HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "opt": Architecture("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": Architecture("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, own=True),
    "mpt": Architecture(
        "MptConfig", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}, own=True
    ),
    "falcon": Architecture("FalconConfig", {**_DEPTH, "hidden_size": 32}, own=True),
    "stablelm": Architecture("StableLmConfig"),
    "olmo": Architecture("OlmoConfig"),
    "olmo2": Architecture("Olmo2Config"),
    "olmo3": Architecture("Olmo3Config", {"sliding_window": 8}),
    "granite": Architecture("GraniteConfig"),
    "starcoder2": Architecture("Starcoder2Config", {"sliding_window": None}),
    "cohere": Architecture("CohereConfig", {"logit_scale": 1.0}),
    "cohere2": Architecture("Cohere2Config", {"sliding_window": 8, "logit_scale": 1.0}),
    "glm": Architecture("GlmConfig", _HEAD),
    "glm4": Architecture("Glm4Config", _HEAD),
    "exaone4": Architecture("Exaone4Config", {"sliding_window": 8}),
    "nemotron": Architecture("NemotronConfig"),
    "helium": Architecture("HeliumConfig", _HEAD),
    "seed_oss": Architecture("SeedOssConfig", _HEAD),
    "ernie4_5": Architecture("Ernie4_5Config", _HEAD),
    "hunyuan_v1_dense": Architecture("HunYuanDenseV1Config", _HEAD),
    "arcee": Architecture("ArceeConfig"),
    "apertus": Architecture("ApertusConfig"),
    "modernbert-decoder": Architecture("ModernBertDecoderConfig", {"local_attention": 8}),
    "mixtral": Architecture("MixtralConfig", {"num_local_experts": 4}),
    "qwen2_moe": Architecture(
        "Qwen2MoeConfig",
        {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_moe": Architecture("Qwen3MoeConfig", {**_HEAD, **_EXPERTS, "num_experts": 4}),
    "olmoe": Architecture("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": Architecture(
        "GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3Config",
        {
            **_EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
    "mamba": Architecture(
        "MambaConfig",
        {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
        own=True,
        refused=_MAMBA_LAYERS,
    ),
    "mamba2": Architecture(
        "Mamba2Config",
        {
            "hidden_size": 32,
            "state_size": 8,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
        own=True,
        refused=_MAMBA_LAYERS,
    ),
    "falcon_h1": Architecture(
        "FalconH1Config",
        {**_MAMBA, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1},
        refused=_MAMBA_LAYERS,
    ),
    "jamba": Architecture(
        "JambaConfig",
        {
            **_MAMBA,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        refused=_MAMBA_LAYERS,
    ),
    "bamba": Architecture(
        "BambaConfig",
        {
            **_MAMBA,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
        },
        refused=_MAMBA_LAYERS,
    ),
    "zamba2": Architecture(
        "Zamba2Config",
        {
            **_MAMBA,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_ngroups": 1,
            "layers_block_type": ["mamba", "hybrid"],
            "chunk_size": 8,
        },
        refused=_MAMBA_LAYERS,
    ),
    "lfm2": Architecture(
        "Lfm2Config", {"layer_types": ["conv", "full_attention"]}, refused=_RECURRENT
    ),
    "qwen3_next": Architecture(
        "Qwen3NextConfig",
        {
            **_HEAD,
            **_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        refused=_RECURRENT,
    ),
    "recurrent_gemma": Architecture(
        "RecurrentGemmaConfig",
        {"lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3},
        refused=_RECURRENT,
    ),
    "rwkv": Architecture(
        "RwkvConfig", {"hidden_size": 32, "num_hidden_layers": 2}, own=True, refused=_RECURRENT
    ),
}


# What differs from one that is not here in sizes, norms and activations alone: checked by hand, by
# tests/by_hand/acceptance/architectures.py.
ALIKE = frozenset(
    "smollm3 ministral gemma gemma2 phi stablelm olmo olmo2 granite starcoder2 cohere glm exaone4 nemotron"
    " helium seed_oss ernie4_5 hunyuan_v1_dense arcee apertus gptj gpt_neox olmoe qwen3_moe bamba".split()
)


def make_model(name: str, folder: Path) -> Any:
    """Writes a small model of an architecture with its tokenizer, and returns its module."""
    how = ARCHITECTURES[name]
    sizes = {**({} if how.own else _LLAMA_LIKE), **how.sizes}
    config = getattr(transformers, how.config)(**_SPECIAL, **sizes)
    torch.manual_seed(1)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # or all tokens are about as probable
        for weight in module.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.15)
            else:
                weight.add_(torch.randn(weight.shape) * 0.1)
    module.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return module


def make_tokenizer() -> Any:
    """A word for each token."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, VOCAB_SIZE)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
