"""Models built without memory and filled from their files: bit for bit what from_pretrained gives."""

import json
import logging

import golden
import pytest
import torch
from near import assert_near
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensor_spy import TensorSpy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from realsys.api.errors import CheckpointError, InternalError
from realsys.api.model import FinetuneSpec, Model, ModelName
from realsys.api.options import LoRAOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.hf.lora import add_adapters
from realsys.backends.inference import InferenceBackend
from realsys.models import hf
from realsys.models.hf import (
    StreamedWeights,
    empty_model,
    load_causal_lm,
    load_critic,
    readable_skeleton,
    save_hf,
)
from realsys.models.hf_directory import check_hf_directory
from realsys.models.source import HFSource
from realsys.models.weight_files import WeightFiles
from realsys.models.weight_writer import WeightSpec, plan_files, write_weights

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
MADE = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "qwen2 tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "qwen2 yarn": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, rope_parameters=YARN)),
    "gemma3 tied": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8)),
    "gpt2 tied": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2, n_positions=64, eos_token_id=2)
    ),
}
DIRECT = tuple(MADE)
MADE["mixtral"] = lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, make in MADE.items():
        make().save_pretrained(root / name)
    return root


def everything(module):
    """All numbers of a module, by name: weights, and what is not saved with them."""
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def must_be_equal(ours, theirs):
    mine, other = everything(ours), everything(theirs)
    assert mine.keys() == other.keys()
    for name, x in other.items():
        assert mine[name].dtype == x.dtype, name
        assert torch.equal(mine[name], x), name
    assert not ours.training
    assert settings(ours) == settings(theirs)


def settings(module):
    """Of its config, but for what we turn off and for what was written when it was saved."""
    found, written = module.config.to_dict(), ("_name_or_path", "architectures")
    return {k: v for k, v in found.items() if "drop" not in k and k not in written}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MADE)
def test_what_is_loaded_is_what_from_pretrained_gives(folders, name, dtype):
    path = folders / name
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    ours = load_causal_lm(path, dtype=dtype)
    must_be_equal(ours, theirs)
    assert ours.config.name_or_path == str(path)
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert len(set(map(id, ours.parameters()))) == len(set(map(id, theirs.parameters())))
    ids = torch.tensor([[3, 4, 5, 6]])
    assert_near(ours(ids).logits, theirs(ids).logits)
    assert (readable_skeleton(path, critic=False, dtype=dtype) is not None) == (name in DIRECT)


@pytest.mark.parametrize("name", ["llama", "qwen2 tied", "gpt2 tied"])
def test_a_critic_too(folders, name, tmp_path):
    theirs = AutoModelForTokenClassification.from_pretrained(folders / name, num_labels=1)
    theirs.save_pretrained(tmp_path / "critic")
    must_be_equal(load_critic(tmp_path / "critic", init_head="from_checkpoint"), theirs)
    head = theirs.score if hasattr(theirs, "score") else theirs.classifier
    with torch.no_grad():
        head.weight.zero_(), head.bias.zero_()
    must_be_equal(load_critic(folders / name), theirs)
    must_be_equal(load_critic(tmp_path / "critic"), theirs)


def test_ends_of_an_answer_come_along(folders):
    ends = GenerationConfig(eos_token_id=[2, 7])
    made = load_causal_lm(folders / "llama")
    made.generation_config = ends
    save_hf(made, None, folders / "two ends")
    assert load_causal_lm(folders / "two ends").generation_config.eos_token_id == [2, 7]


def test_an_empty_model_draws_nothing_and_has_its_frequencies(folders):
    before = torch.random.get_rng_state()
    made = empty_model(folders / "llama3", dtype="bfloat16")
    assert torch.equal(torch.random.get_rng_state(), before)
    theirs = AutoModelForCausalLM.from_pretrained(folders / "llama3", dtype=torch.bfloat16)
    for name, buffer in theirs.named_buffers():
        assert torch.equal(made.get_buffer(name), buffer)
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}


def test_loading_holds_the_model_once(folders):
    path, sizes = folders / "llama", [4 * len(x.ravel()) for x in load_file(
        folders / "llama" / "model.safetensors").values()]  # fmt: skip
    with TensorSpy() as spy:
        module = load_causal_lm(path)
        spy.look(module.parameters())
    assert spy.largest_bytes == max(sizes)
    assert sum(sizes) <= spy.most_bytes <= sum(sizes) + max(sizes)


def rewritten(folders, name, folder, change):
    (folder / "m").mkdir()
    for file in (folders / name).iterdir():
        if file.suffix == ".json":
            (folder / "m" / file.name).write_text(file.read_text())
    weights = change(load_file(folders / name / "model.safetensors"))
    save_file(weights, folder / "m" / "model.safetensors", metadata={"format": "pt"})
    return folder / "m"


@pytest.mark.parametrize("factor", [1, 2])
def test_a_tied_head_that_is_stored_is_tied_only_if_it_is_the_embedding(folders, tmp_path, factor):
    twice = rewritten(
        folders,
        "qwen2 tied",
        tmp_path,
        lambda w: {**w, "lm_head.weight": w["model.embed_tokens.weight"] * factor},
    )
    ours = load_causal_lm(twice)
    must_be_equal(ours, AutoModelForCausalLM.from_pretrained(twice))
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == (factor == 1)


def test_a_tied_embedding_may_be_stored_as_the_head(folders, tmp_path):
    other = rewritten(
        folders,
        "qwen2 tied",
        tmp_path,
        lambda w: {
            n.replace("model.embed_tokens", "lm_head"): x for n, x in w.items() if "lm_" not in n
        },
    )
    must_be_equal(load_causal_lm(other), AutoModelForCausalLM.from_pretrained(other))


def test_files_without_the_models_prefix_are_for_transformers(folders, tmp_path, caplog):
    bare = rewritten(
        folders,
        "llama",
        tmp_path,
        lambda w: {n.removeprefix("model."): x for n, x in w.items()},
    )
    with caplog.at_level(logging.INFO, logger="realsys"):
        must_be_equal(load_causal_lm(bare), AutoModelForCausalLM.from_pretrained(bare))
    golden.check(caplog.text)


def test_float32_weights_are_read_as_such_into_a_bfloat16_models_masters(folders):
    source = HFSource(str(folders / "llama"), critic=False, dtype="bfloat16", device="cpu")
    stored = load_file(folders / "llama" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    view = torch.empty(2, 32)
    source.read_into(view, name, (4, 0), (6, 32))
    assert torch.equal(view, stored[name][4:6])
    assert torch.equal(source.read(name, (4, 0), (6, 32)), stored[name][4:6].bfloat16())
    assert {p.dtype for p in source.skeleton("float32").parameters()} == {torch.float32}


# ---- saving ----------------------------------------------------------------------------------


def test_one_file_has_the_bytes_that_safetensors_writes(tmp_path):
    weights = {
        "b": torch.randn(3, 5),
        "a": torch.randn(7).bfloat16(),
        "é": torch.arange(3),
        "c": torch.tensor(2.5),
        "d": torch.randn(2, 2).double(),
        "empty": torch.empty(0, 4),
    }
    write_weights(tmp_path, {n: WeightSpec.of(x) for n, x in weights.items()}, weights.items())
    save_file(weights, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("name", MADE)
def test_a_directory_is_what_save_pretrained_writes(folders, name, tmp_path):
    module = load_causal_lm(folders / name)
    save_hf(module, None, tmp_path / "ours")
    module.save_pretrained(tmp_path / "theirs")
    folders = (tmp_path / "ours", tmp_path / "theirs")
    ours, theirs = ({f.name: f.read_bytes() for f in d.iterdir()} for d in folders)
    assert ours == theirs
    must_be_equal(load_causal_lm(tmp_path / "ours"), module)


def test_a_model_larger_than_a_file_is_written_in_several(folders, tmp_path, monkeypatch):
    module = load_causal_lm(folders / "qwen2 tied", dtype="bfloat16")
    monkeypatch.setattr(hf, "MAX_FILE_BYTES", 8000)
    save_hf(module, None, tmp_path / "m")
    files = sorted(f.name for f in (tmp_path / "m").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    numbers = sum(p.numel() for p in module.parameters())
    assert index["metadata"] == {"total_parameters": numbers, "total_size": 2 * numbers}
    for file in files:
        with safe_open(tmp_path / "m" / file, framework="pt") as opened:
            held = {n for n, f in index["weight_map"].items() if f == file}
            assert set(opened.keys()) == held
    check_hf_directory(tmp_path / "m", need_tokenizer=False)
    must_be_equal(load_causal_lm(tmp_path / "m", dtype="bfloat16"), module)
    must_be_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="bfloat16"), module)


def test_files_are_cut_between_weights():
    kind = WeightSpec((10,), torch.float32)
    files = plan_files(dict.fromkeys("abc", kind), max_bytes=80)
    assert [sorted(f.starts) for f in files] == [["a", "b"], ["c"]]
    files = plan_files({"a": WeightSpec((100,), torch.float32), "b": kind}, max_bytes=80)
    assert [sorted(f.starts) for f in files] == [["a"], ["b"]], "a weight is never cut"
    assert all((start - len(f.header)) % 4 == 0 for f in files for start in f.starts.values())


def test_a_weight_that_never_comes_is_an_error_and_leaves_the_old_directory(folders, tmp_path):
    module = load_causal_lm(folders / "llama")
    save_hf(module, None, tmp_path / "m")
    kinds = {n: WeightSpec.of(x) for n, x in module.named_parameters()}
    some = [(n, x * 2) for n, x in module.named_parameters()][:-1]
    with golden.raises(InternalError):
        save_hf(module, None, tmp_path / "m", weights=StreamedWeights(kinds, some))
    must_be_equal(load_causal_lm(tmp_path / "m"), module)


def test_saving_holds_one_weight_beside_the_model(folders, tmp_path):
    module = load_causal_lm(folders / "qwen3", dtype="bfloat16")
    kinds = {n: WeightSpec(tuple(x.shape), torch.float32) for n, x in module.named_parameters()}
    own = sum(x.nbytes for x in module.parameters())
    with TensorSpy() as spy:
        spy.look([*module.parameters(), *module.buffers()])
        before = spy.most_bytes
        save_hf(
            module, None, tmp_path / "m", weights=StreamedWeights(kinds, module.named_parameters())
        )
    assert own <= before < own + 1000
    assert spy.most_bytes <= before + max(kind.num_bytes for kind in kinds.values())
    assert torch.equal(load_causal_lm(tmp_path / "m").lm_head.weight, module.lm_head.weight.float())


def test_two_weights_are_compared_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("realsys.models.weight_files._COMPARED_AT_ONCE", 8)
    a = torch.randn(5, 4)
    b = a.clone()
    b[4, 3] += 1
    save_file(
        {"a": a, "same": a.clone(), "b": b, "c": a[:4].clone()}, tmp_path / "model.safetensors"
    )
    files = WeightFiles(tmp_path)
    assert [files.are_equal("a", n) for n in ("same", "b", "c")] == [True, False, False]


@pytest.mark.parametrize("damage", ["gone", "another"])
def test_a_file_that_changes_while_it_is_read_is_named(folders, tmp_path, damage):
    source = HFSource(
        str(rewritten(folders, "llama", tmp_path, dict)),
        critic=False,
        dtype="float32",
        device="cpu",
    )
    assert source.read("model.norm.weight", (0,), (2,)).shape == (2,)
    file = tmp_path / "m" / "model.safetensors"
    file.unlink()
    if damage == "another":
        save_file({"x": torch.zeros(2)}, file)
    with golden.raises(CheckpointError) as refused:
        source.read("model.norm.weight", (0,), (2,))
    assert refused.value.where == str(file)


# ---- engines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_of_a_skeleton_are_those_of_a_loaded_model(folders, dtype):
    options = LoRAOptions(rank=4, alpha=8.0)
    loaded = load_causal_lm(folders / "qwen3", dtype=dtype)
    bare, _ = readable_skeleton(folders / "qwen3", critic=False, dtype=dtype)
    for module in (loaded, bare):
        add_adapters(module, options, seed=3)
    theirs, ours = dict(loaded.named_parameters()), dict(bare.named_parameters())
    assert {n for n, x in ours.items() if x.is_meta} == {n for n in theirs if "lora_" not in n}
    for name, x in theirs.items():
        assert ours[name].dtype == x.dtype
        assert ours[name].requires_grad == x.requires_grad
        assert ours[name].is_meta or torch.equal(ours[name], x)
    assert any(x.abs().sum() for n, x in ours.items() if "lora_A" in n)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", [FSDPBackend, InferenceBackend])
@pytest.mark.parametrize("options", [{}, {"lora": LoRAOptions(rank=2)}], ids=["whole", "lora"])
@pytest.mark.parametrize("critic", [False, True])
def test_an_engine_holds_what_the_files_do(folders, tmp_path, backend, options, critic):
    path = folders / "qwen2 tied"
    if critic:
        made = load_critic(path)
        with torch.no_grad():
            made.score.weight.fill_(0.3)
        save_hf(made, None, path := tmp_path / "critic")
    model = Model(
        name=ModelName("m"),
        module=HFSource(str(path), critic=critic, dtype="bfloat16", device="cpu"),
        tokenizer=None,
        device="cpu",
        dtype="bfloat16",
    )
    spec = FinetuneSpec(total_train_epochs=1, dataset_size=10, train_batch_size=10)
    engine = backend(**options).initialize(model, spec).module
    stored = load_file(path / "model.safetensors")
    held = engine.held_weights()
    for name, x in stored.items():
        ((_, view),) = held[name]
        learns = backend is FSDPBackend and not options
        head = bool(options) and name.startswith("score.")
        assert view.dtype == (torch.float32 if learns or head else torch.bfloat16), name
        assert torch.equal(view, x.to(view.dtype)), name
    whole = dict(engine.whole_module().named_parameters())
    assert all(torch.equal(whole[n], x.bfloat16()) for n, x in stored.items())
    engine.save_to_hf(tokenizer=None, save_dir=str(tmp_path / "again"))
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == stored.keys()
    for name, x in again.items():  # what trains beside adapters stays float32
        head = bool(options) and name.startswith("score.")
        assert torch.equal(x, stored[name] if head else stored[name].bfloat16()), name
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"
