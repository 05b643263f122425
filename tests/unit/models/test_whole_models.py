"""A model whose parts do not belong together, or that ours can't run, is refused from its headers alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest
from test_hf_directory import write_safetensors

from experiments.asynchronous import Async
from experiments.parts.model_files import model_problems
from experiments.ppo_math import ppo_math
from realsys.api.errors import CheckpointError, ConfigError
from realsys.api.options import LoRAOptions, ModelOptions
from realsys.models.consistency import (
    check_consistency,
    consistency_faults,
    recurrent_part,
    rope_type,
)
from realsys.models.hf_directory import check_hf_directory
from realsys.models.shape import shape_of

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}
TOKENIZER = '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
K = "model.layers.1.self_attn.k_proj.weight"
Shapes = dict[str, list[int]]


def shapes(config: dict[str, Any] = CONFIG) -> Shapes:
    return {w.name: list(w.shape) for w in shape_of(config).weights()}


def write(folder: Path, config: dict[str, Any], weights: Shapes) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(TOKENIZER)
    write_safetensors(folder / "model.safetensors", weights)
    return folder


def without(name: str) -> Shapes:
    return {n: s for n, s in shapes().items() if n != name}


def test_a_whole_model_has_no_faults(tmp_path):
    path = write(tmp_path, CONFIG, shapes())
    assert list(consistency_faults(path)) == list(consistency_faults(path, critic=True)) == []
    assert not list(model_problems(ModelOptions(path=str(path)), "actor", generates=True))


def test_a_body_without_a_head_and_a_head_nobody_needs_are_whole(tmp_path):
    bare = {n.removeprefix("model."): s for n, s in shapes().items()}
    assert list(consistency_faults(write(tmp_path, CONFIG, bare))) == []
    with_head = {**shapes(), "score.weight": [1, 8], "lm_head.weight": [10, 8]}
    assert list(consistency_faults(write(tmp_path, CONFIG, with_head), critic=True)) == []


MORE = {n.replace("layers.1", "layers.2"): s for n, s in shapes().items()}


@pytest.mark.parametrize(
    ("config", "weights", "told"),
    [
        ({}, without(K), f"1 weights are missing: {K}"),
        ({}, {**shapes(), K: [8, 8]}, f"{K} has shape [8, 8], config.json implies [4, 8]"),
        ({"vocab_size": 12}, shapes(), "has shape [10, 8], config.json implies [12, 8]"),
        ({"num_hidden_layers": 3}, shapes(), "config.json says 3 layers, the weights have 2"),
        ({}, {**shapes(), **MORE}, "config.json says 2 layers, the weights have 3"),
        ({"tie_word_embeddings": False}, shapes(), "1 weights are missing: lm_head.weight"),
        ({"hidden_size": None}, shapes(), "config.json has a missing or invalid size"),
        (
            {"num_attention_heads": 0, "num_key_value_heads": 0},
            shapes(),
            "config.json has a missing or invalid size",
        ),
        (
            {"model_type": "gpt2"},
            {"wte.weight": [9, 8]},
            "has shape [9, 8], config.json implies [10, 8]",
        ),
        ({"model_type": "nosuch", "auto_map": {}}, {}, "has no model_type 'nosuch'"),
        (
            {"model_type": "nosuch", "auto_map": {"a": "b"}},
            {},
            "needs its own code, which realsys never runs",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, {}, "an encoder-decoder (t5)"),
        ({"architectures": ["BertForMaskedLM"]}, {}, "is not a causal language model"),
        ({"quantization_config": {"quant_method": "gptq"}}, {}, "its weights are quantized (gptq)"),
    ],
)
def test_parts_that_do_not_belong_together_are_named(tmp_path, config, weights, told):
    path = write(tmp_path, {**CONFIG, **config}, weights)
    first = next(consistency_faults(path))
    assert told in first.what
    assert first.where == str(path / "config.json")
    with pytest.raises(CheckpointError) as caught:  # what a worker does
        check_consistency(path)
    assert caught.value.what == first.what


@pytest.mark.parametrize("value", ["many", [1], {"a": 1}])
def test_a_size_that_is_no_number_is_a_fault_of_the_file(tmp_path, value):
    with golden.raises(CheckpointError):
        check_hf_directory(write(tmp_path, {**CONFIG, "num_hidden_layers": value}, shapes()))


def problems(path: Path, generates: bool = True, **options: Any) -> list[str]:
    found = model_problems(ModelOptions(path=str(path), **options), "actor", generates=generates)
    return [p.what for p in found]


def test_rope_is_refused_where_the_backend_has_no_such_kind(tmp_path):
    yarn = {**CONFIG, "rope_scaling": {"type": "yarn", "factor": 2.0}}
    path = write(tmp_path, yarn, shapes())
    assert problems(path) == []
    golden.check(problems(path, backend="megatron"))
    path = write(tmp_path, {**CONFIG, "rope_parameters": {"rope_type": "yarm"}}, shapes())
    golden.check(problems(path))
    assert rope_type({"rope_scaling": {"type": "su"}}) == "longrope"
    assert rope_type({"rope_scaling": None}) == "default"


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"model_type": "mamba", "state_size": 16}, "recurrent layers"),
        ({"model_type": "rwkv"}, "recurrent layers"),
        ({"layer_types": ["conv", "full_attention"]}, "layers of kind conv"),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "layers of kind linear_attention",
        ),
        ({"model_type": "jamba", "mamba_d_state": 16}, "recurrent layers"),
        ({"model_type": "minimax", "layer_types": ["linear_attention"]}, None),
        ({"layer_types": ["sliding_attention", "full_attention"]}, None),
        ({"layer_types": None}, None),
    ],
)
def test_models_with_a_state_that_is_no_cache_do_not_generate(tmp_path, config, part):
    assert recurrent_part(config) == part
    path = write(tmp_path, {**CONFIG, "layer_types": config.get("layer_types")}, shapes())
    if config.get("layer_types") and part:
        assert f"llama has {part}" in problems(path)[0]
    assert problems(path, generates=False) == []  # a reference only reads


def test_adapters_are_for_layers_that_are_there(tmp_path):
    path = write(tmp_path, CONFIG, shapes())
    assert problems(path, lora=LoRAOptions(rank=4)) == []
    some = LoRAOptions(rank=4, target_modules=("q_proj", "c_attn"))
    golden.check(problems(path, lora=some))


def test_the_launcher_needs_no_torch_for_it(tmp_path):
    path = write(tmp_path, CONFIG, without(K))
    code = (
        "import sys\nfrom experiments.parts.model_files import model_problems\n"
        "from realsys.api.options import ModelOptions\n"
        f"print(len(list(model_problems(ModelOptions(path={str(path)!r}), 'actor'))))\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:2] == ["1", "[]"], done.stderr


MAMBA: dict[str, Any] = {**CONFIG, "model_type": "mamba", "mamba_d_state": 16}


def of_mamba(found: Iterator[ConfigError]) -> list[ConfigError]:
    return [problem for problem in found if "recurrent layers" in problem.what]


def test_a_recurrent_policy_is_refused_unless_servers_make_all_its_answers(tmp_path):
    path = write(tmp_path, MAMBA, shapes())
    run = ppo_math()
    run = replace(run, actor=replace(run.actor, path=str(path)))
    (problem,) = of_mamba(run.problems())
    golden.check(problem)
    assert str(path) in problem.where
    assert "schedule.server_backend=sglang" in problem.fix
    assert of_mamba(replace(run, schedule=Async()).problems())
    served = replace(run, schedule=Async(server_backend="sglang"))
    assert of_mamba(served.problems()), "our engine makes the answers of evaluations"
    served = replace(served, task=replace(served.task, eval_size=0))
    assert not of_mamba(served.problems())
    assert of_mamba(replace(served, auto_eval=True).problems())


def test_adapters_are_refused_where_they_would_be_read_past(tmp_path):
    lora = LoRAOptions(rank=2, target_modules=("all-linear",))
    path = write(tmp_path, MAMBA, shapes())
    golden.check(problems(path, generates=False, lora=lora))
    path = write(tmp_path, CONFIG, shapes())
    assert problems(path, lora=lora) == []
