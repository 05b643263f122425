"""Names and shapes of a model's weights, told from its config alone."""

import golden
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from realsys.api.errors import CheckpointError, ConfigError
from realsys.models.shape import read_shape, shape_of

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False, head_dim=8),
}


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_weights_are_those_of_the_hugging_face_module(family, critic):
    config = CONFIGS[family]
    auto = AutoModelForTokenClassification if critic else AutoModelForCausalLM
    config = type(config)(**{**config.to_dict(), **({"num_labels": 1} if critic else {})})
    with torch.device("meta"):
        module = auto.from_config(config)
    found = {w.name: w.shape for w in shape_of(config.to_dict(), critic=critic).weights()}
    assert found == {name: tuple(p.shape) for name, p in module.named_parameters()}


@pytest.mark.parametrize("name", ["attention_bias", "mlp_bias"])
def test_biases_that_no_layout_knows_are_refused(name):
    config = LlamaConfig(**SIZES, **{name: True})
    with golden.raises(ConfigError):
        shape_of(config.to_dict())


def test_another_family_is_refused_with_the_nearest_name():
    with golden.raises(ConfigError) as problem:
        shape_of({"model_type": "qwen4"})
    assert "qwen" in problem.value.fix


def test_a_size_that_is_missing_is_told_with_the_file(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with golden.raises(CheckpointError) as problem:
        read_shape(tmp_path)
    assert problem.value.where.endswith("config.json")
