"""Builds the part of a model that one process computes: its pipeline stage, split over the tensor axis.

A Megatron ``GPTModel`` that computes the same as the Hugging Face module of its shape. Its weights are
uninitialised (megatron_weights.py fills them) and no random state is changed.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from realsys.algorithms.predictions import Predictions
from realsys.api.errors import ConfigError
from realsys.api.model import ProcessTopology
from realsys.backends.kernels.grouped_heads import keys_for
from realsys.models.consistency import MEGATRON_ROPE_TYPES
from realsys.models.shape import ModelShape

# Scalings that change frequencies once, for all lengths and without an attention factor.


def transformer_config(
    shape: ModelShape,
    hf_config: Any,
    topo: ProcessTopology,
    *,
    dtype: torch.dtype,
    device: str,
    recompute: bool = False,
    sequence_parallel: bool = False,
) -> TransformerConfig:
    """Makes Megatron's configuration for ``shape``.

    Args:
        recompute: recompute activations inside a layer in the backward pass.
    Raises:
        ConfigError: the Hugging Face config needs a feature that these layers don't support.
    """
    _check(hf_config)
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    recomputation: dict[str, Any] = {**full, "recompute_num_layers": 1} if recompute else {}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=topo.tensor,
        pipeline_model_parallel_size=topo.pipeline,
        sequence_parallel=sequence_parallel,
        variable_seq_lengths=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=not device.startswith("cuda"),
        calculate_per_token_loss=True,  # losses are already scaled: gradients are summed, never averaged
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        cuda_graph_scope=[],  # as the deprecated default, without its warning
        moe_token_dispatcher_type="alltoall",  # required by variable lengths, even without experts
        **recomputation,
    )


def make_stage(
    shape: ModelShape,
    hf_config: Any,
    topo: ProcessTopology,
    config: TransformerConfig,
    *,
    stage: int,
) -> GPTModel:
    """Builds stage ``stage`` of the model for the active groups, on the current device."""
    last = topo.pipeline - 1
    with warnings.catch_warnings():  # its layers don't pass the width that its MLP needs
        warnings.filterwarnings("ignore", "MLP requires ffn_hidden_size", DeprecationWarning)
        module = _Stage(
            config=config,
            transformer_layer_spec=_layer_spec(shape, on_cpu=config.use_cpu_initialization),
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.max_positions or hf_config.max_position_embeddings,
            pre_process=stage == 0,
            post_process=stage == last,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=shape.tied_embeddings,
        )
    if stage == 0 and getattr(hf_config, "pad_token_id", None) is not None:
        _freeze_padding(module.embedding.word_embeddings, hf_config.pad_token_id)
    frequencies = LlamaRotaryEmbedding(hf_config).inv_freq
    module.rotary_pos_emb.inv_freq = frequencies.clone().to(module.rotary_pos_emb.inv_freq.device)
    for parameter in module.parameters():  # torch's own norms are made in float32
        parameter.data = parameter.data.to(config.params_dtype)
    if config.sequence_parallel and stage == last:  # until there, see _postprocess
        module.output_layer.sequence_parallel = False
        module.output_layer.allreduce_dgrad = True
    if shape.critic and stage == last:
        norm = module.decoder.final_layernorm.weight
        module.output_layer = ValueHead(shape.hidden_size, config, norm)
    return module


def has_transformer_engine(device: str) -> bool:
    """True if layers come from Transformer Engine: faster, with norms fused into linear layers."""
    return bool(specs.HAVE_TE) and device.startswith("cuda")


def _freeze_padding(embedding: Any, pad_token_id: int) -> None:
    """Applies Hugging Face's ``padding_idx``: looking up that token gives its embedding no gradient.

    A policy may sample that token, so this affects more than padding.
    """

    def without_gradient(_: Any, inputs: tuple[Tensor, ...], found: Tensor) -> Tensor:
        is_padding = inputs[0] == pad_token_id
        if found.shape[:2] != is_padding.shape:  # sequence parallel: this rank's tokens first
            group = embedding.tp_group
            is_padding = is_padding.t().chunk(group.size())[group.rank()]
        return torch.where(is_padding[..., None], found.detach(), found)

    embedding.register_forward_hook(without_gradient)


class ValueHead(nn.Module):
    """Head with one output per token, equal on all tensor ranks; called like Megatron's output layer."""

    def __init__(self, hidden_size: int, config: TransformerConfig, like: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.new_zeros(1, hidden_size))
        self.bias = nn.Parameter(like.new_zeros(1))
        self.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_TBD: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Returns values ``[T, B, 1]`` and no bias to add."""
        if self.sequence_parallel:  # each tensor rank sees all tokens: no sum needed after it
            hidden_TBD = gather_from_sequence_parallel_region(
                hidden_TBD, tensor_parallel_output_grad=False
            )
        return F.linear(hidden_TBD, self.weight, self.bias), None


class CausalAttention(nn.Module):
    """Causal attention by torch's fused kernel."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns ``[T, B, heads · head_dim]``; query is ``[T, B, heads, head_dim]``, key and value
        have fewer heads.
        """
        length, batch = query.shape[:2]
        q_BHTD, k_BHTD, v_BHTD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        k_BHTD, v_BHTD, shared = keys_for(q_BHTD, k_BHTD, v_BHTD)
        output = F.scaled_dot_product_attention(
            q_BHTD,
            k_BHTD,
            v_BHTD,
            is_causal=True,
            scale=self.scale,
            enable_gqa=shared,
        )
        return output.permute(2, 0, 1, 3).reshape(length, batch, -1)


class _Stage(GPTModel):  # type: ignore[misc]
    """A ``GPTModel`` whose stages are filled separately, tied embeddings included."""

    def _is_in_embd_group(self) -> bool:
        """Prevents copying the first stage's embedding to the last while the stage is built."""
        return False

    def _postprocess(self, hidden_states: Tensor, **rest: Any) -> Tensor:
        """On the last stage of a policy returns its last layer's states ``[B, T, H]``, for
        ``predictions``.
        """
        if not self.post_process or isinstance(self.output_layer, ValueHead):
            output: Tensor = super()._postprocess(hidden_states=hidden_states, **rest)
            return output
        # Each tensor rank sees all tokens: the head sums after it
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        return hidden_states.transpose(0, 1).contiguous()

    def predictions(self, states_NH: Tensor) -> Predictions:
        """Computes predictions on a policy's last stage; all its tensor ranks request the same."""

        def head(states: Tensor) -> Tensor:
            shared = self.share_embeddings_and_output_weights
            weight = self.shared_embedding_or_output_weight() if shared else None
            logits, _ = self.output_layer(
                states[:, None], weight=weight, runtime_gather_output=True
            )
            whole: Tensor = logits[:, 0]
            return whole

        return Predictions(states_NH, head, vocab_size=self.vocab_size)


def _layer_spec(shape: ModelShape, *, on_cpu: bool) -> Any:
    if has_transformer_engine("cpu" if on_cpu else "cuda"):
        return specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm)
    spec = specs.get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    return spec


def _check(hf_config: Any) -> None:
    rope = getattr(hf_config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    problems = {
        f"rope_type={rope_type!r}": rope_type not in MEGATRON_ROPE_TYPES,
        f"hidden_act={hf_config.hidden_act!r}": hf_config.hidden_act != "silu",
        "use_sliding_window=true": bool(getattr(hf_config, "use_sliding_window", False)),
    }
    if found := [text for text, is_so in problems.items() if is_so]:
        raise ConfigError(
            f"the model's config has {', '.join(found)}, which the megatron backend does not support",
            where="config.json of the model",
            fix="use backend=fsdp, which runs the Hugging Face module itself",
        )
