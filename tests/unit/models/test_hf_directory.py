"""Directories are made by hand here: no torch, no transformers."""

import json
import math
import subprocess
import sys

import golden
import pytest

from realsys.api.errors import CheckpointError
from realsys.models.hf_directory import check_hf_directory

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}
SHAPES = {"model.embed_tokens.weight": [10, 4], "model.norm.weight": [4]}


def write_safetensors(file, shapes):
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


@pytest.fixture
def model_dir(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    write_safetensors(tmp_path / "model.safetensors", SHAPES)
    return tmp_path


@pytest.fixture
def sharded_dir(model_dir):
    (model_dir / "model.safetensors").unlink()
    shards = {name: f"model-{i:05}-of-00002.safetensors" for i, name in enumerate(SHAPES, 1)}
    for name, shard in shards.items():
        write_safetensors(model_dir / shard, {name: SHAPES[name]})
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return model_dir


def refusal(path, **options):
    with pytest.raises(CheckpointError) as caught:
        check_hf_directory(path, **options)
    return caught.value


def test_facts_of_a_whole_directory(model_dir):
    facts = check_hf_directory(model_dir)
    assert (facts.architecture, facts.model_type) == ("LlamaForCausalLM", "llama")
    assert (facts.vocab_size, facts.hidden_size, facts.num_layers) == (10, 4, 1)
    assert (facts.num_heads, facts.num_kv_heads, facts.max_positions) == (2, 1, 64)
    assert facts.tied_embeddings
    assert facts.num_params == 44  # 10 · 4 + 4
    assert facts.tensors == set(SHAPES)


def test_shards_add_up(sharded_dir):
    assert check_hf_directory(sharded_dir).num_params == 44


def test_gpt2_spells_its_sizes_otherwise(model_dir):
    config = {"model_type": "gpt2", "vocab_size": 10, "n_embd": 4, "n_layer": 3, "n_head": 2}
    (model_dir / "config.json").write_text(json.dumps({**config, "n_positions": 16}))
    facts = check_hf_directory(model_dir)
    assert (facts.hidden_size, facts.num_layers, facts.num_heads) == (4, 3, 2)
    assert (facts.num_kv_heads, facts.max_positions, facts.tied_embeddings) == (2, 16, True)


def test_half_written_weights_are_refused_with_both_sizes(model_dir):
    file = model_dir / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    error = refusal(model_dir)
    assert error.where == str(file)
    assert f"expected {len(whole)} bytes, found {len(whole) - 10}" in error.what
    file.write_bytes(whole[:20])  # within the header
    assert "half-written" in refusal(model_dir).what
    file.write_bytes(b"")
    assert "found 0" in refusal(model_dir).what
    file.write_bytes(whole + b"more")
    golden.check(refusal(model_dir))


def test_a_header_that_is_no_json_is_refused(model_dir):
    for text in (b"not json", b"[]", b'{"a": {"shape": [2]}}'):
        (model_dir / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
        golden.check(refusal(model_dir))


def test_a_lost_or_torn_shard_is_named(sharded_dir):
    shard = sharded_dir / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert refusal(sharded_dir).where == str(shard)
    write_safetensors(shard, {"other.weight": [4]})
    assert "model.norm.weight" in refusal(sharded_dir).what
    shard.unlink()
    assert f"{shard.name} is missing" in refusal(sharded_dir).what


def test_pickled_weights_are_refused_with_a_way_out(model_dir):
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    error = refusal(model_dir)
    assert "pytorch_model.bin" in error.what
    assert "save_pretrained" in error.fix


def test_what_is_missing_is_named(model_dir):
    (model_dir / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(model_dir).what
    check_hf_directory(model_dir, need_tokenizer=False)
    (model_dir / "vocab.json").write_text("{}")
    assert "no tokenizer" in refusal(model_dir).what  # merges.txt is still missing
    (model_dir / "merges.txt").write_text("")
    check_hf_directory(model_dir)
    (model_dir / "model.safetensors").unlink()
    assert "no weights" in refusal(model_dir).what
    (model_dir / "config.json").write_text('{"vocab_size": ')
    golden.check(refusal(model_dir))
    (model_dir / "config.json").unlink()
    assert "config.json is missing" in refusal(model_dir).what
    assert "no directory" in refusal(model_dir / "absent").what


def test_checks_without_torch():
    probe = "import realsys.models.hf_directory, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0
