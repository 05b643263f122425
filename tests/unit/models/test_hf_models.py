"""Loading and saving tiny random models."""

import copy
import json
import logging

import golden
import pytest
import torch
from near import assert_near
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from realsys.api.errors import CheckpointError
from realsys.models.hf import (
    end_token_ids,
    load_causal_lm,
    load_critic,
    load_hf_config,
    load_tokenizer,
    save_hf,
)

IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])


def tiny_llama(*, tied=False):
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attention_dropout=0.5,
    )
    torch.manual_seed(1)
    return LlamaForCausalLM(config).eval()


def tiny_gpt2():
    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    ).eval()


@pytest.fixture(scope="module")
def tokenizer():
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 20)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture
def llama_dir(tmp_path, tokenizer):
    save_hf(tiny_llama(), tokenizer, tmp_path / "llama")
    return tmp_path / "llama"


def rewrite_weights(path, change):
    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize("make", [tiny_llama, lambda: tiny_llama(tied=True), tiny_gpt2])
def test_a_saved_model_gives_transformers_the_same_logits(make, tmp_path, tokenizer):
    module = make()
    with torch.no_grad():
        expected = module(IDS).logits
        save_hf(module, tokenizer, tmp_path / "m")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
        ours = load_causal_lm(tmp_path / "m")
        for loaded in (again, ours):
            weights = loaded.state_dict()
            assert all(torch.equal(weights[k], v) for k, v in module.state_dict().items())
            # Kernels round by where in memory the weights lie, hence the last bit.
            assert_near(loaded(IDS).logits, expected)


def test_a_gathered_state_dict_is_saved_instead_of_the_modules_weights(tmp_path, tokenizer):
    module = tiny_llama(tied=True)
    gathered = {k: v.detach().clone() * 2 for k, v in module.state_dict().items()}  # unties
    save_hf(module, tokenizer, tmp_path / "m", state_dict=gathered)
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert "lm_head.weight" not in stored
    loaded = load_causal_lm(tmp_path / "m")
    assert torch.equal(loaded.get_input_embeddings().weight, gathered["model.embed_tokens.weight"])


def test_saving_replaces_what_was_there_and_leaves_nothing_beside_it(llama_dir, tokenizer):
    (llama_dir / "stale.txt").write_text("from the last save")
    (llama_dir.parent / ".llama.partial").mkdir()  # of a save that was killed
    module = tiny_llama()
    with torch.no_grad():
        module.lm_head.weight.mul_(3)
    save_hf(module, tokenizer, llama_dir)
    assert [p.name for p in llama_dir.parent.iterdir()] == ["llama"]
    assert not (llama_dir / "stale.txt").exists()
    assert torch.equal(load_causal_lm(llama_dir).lm_head.weight, module.lm_head.weight)


def test_a_save_that_fails_leaves_the_old_directory(llama_dir, tokenizer):
    before = (llama_dir / "model.safetensors").read_bytes()

    class FullDisk:
        eos_token_id = 1

        def save_pretrained(self, path):
            raise OSError(28, "No space left on device")

    with golden.raises(OSError):
        save_hf(tiny_llama(), FullDisk(), llama_dir)
    assert (llama_dir / "model.safetensors").read_bytes() == before
    load_tokenizer(llama_dir)


def test_dtype_is_the_callers(llama_dir):
    assert {p.dtype for p in load_causal_lm(llama_dir, dtype="bfloat16").parameters()} == {
        torch.bfloat16
    }


def test_dropout_is_off_even_in_training_mode(llama_dir, tmp_path, tokenizer):
    save_hf(tiny_gpt2(), tokenizer, tmp_path / "gpt2")  # dropout 0.1 by default
    for module in (load_causal_lm(llama_dir), load_causal_lm(tmp_path / "gpt2")):
        expected = module.eval()(IDS).logits
        assert torch.equal(module.train()(IDS).logits, expected)


def test_missing_weights_are_an_error_that_names_them(llama_dir):
    lost = "model.layers.1.mlp.up_proj.weight"
    rewrite_weights(llama_dir, lambda w: {k: v for k, v in w.items() if k != lost})
    for load in (load_causal_lm, load_critic):
        with golden.raises(CheckpointError):
            load(llama_dir)


def test_weights_of_another_shape_are_an_error(llama_dir):
    rewrite_weights(llama_dir, lambda w: {k: v[:1].clone() for k, v in w.items()})
    with golden.raises(CheckpointError):
        load_causal_lm(llama_dir)


def test_half_written_weights_are_an_error(llama_dir):
    file = llama_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with golden.raises(CheckpointError):
        load_causal_lm(llama_dir)


def test_a_loaded_model_does_not_hang_on_its_file(llama_dir):
    module = load_causal_lm(llama_dir)
    expected = module(IDS).logits
    file = llama_dir / "model.safetensors"
    with file.open("r+b") as stream:  # overwritten in place, as by rsync --inplace
        stream.write(bytes(file.stat().st_size))
    assert torch.equal(module(IDS).logits, expected)


def test_unknown_weights_are_reported(llama_dir, caplog):
    rewrite_weights(llama_dir, lambda w: {**w, "model.extra.weight": torch.ones(2)})
    with caplog.at_level(logging.WARNING, logger="realsys"):
        load_causal_lm(llama_dir)
    assert "model.extra.weight" in caplog.text


def test_code_in_a_directory_is_not_run(llama_dir):
    config = json.loads((llama_dir / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig"}}
    (llama_dir / "config.json").write_text(json.dumps(config))
    (llama_dir / "mine.py").write_text("raise SystemExit('was run')")
    for load in (load_hf_config, load_causal_lm):
        with golden.raises(CheckpointError):
            load(llama_dir)


def test_a_critic_starts_at_zero_on_the_language_models_backbone(llama_dir, caplog):
    with caplog.at_level(logging.WARNING):
        critic = load_critic(llama_dir)
    assert caplog.text == ""
    assert torch.equal(critic(IDS).logits, torch.zeros(1, 6, 1))
    backbone = load_causal_lm(llama_dir).model
    assert_near(critic.model(IDS).last_hidden_state, backbone(IDS).last_hidden_state)


@pytest.mark.parametrize(
    ("make", "head"), [(tiny_llama, "score.weight"), (tiny_gpt2, "classifier.weight")]
)
def test_a_critic_comes_back_from_its_own_directory(make, head, tmp_path, tokenizer, caplog):
    save_hf(make(), tokenizer, tmp_path / "lm")
    critic = load_critic(tmp_path / "lm")
    with torch.no_grad():
        critic.get_parameter(head).fill_(0.5)
    save_hf(critic, tokenizer, tmp_path / "critic")
    again = load_critic(tmp_path / "critic", init_head="from_checkpoint")
    assert_near(again(IDS).logits, critic(IDS).logits)
    assert torch.equal(again.state_dict()[head], critic.state_dict()[head])
    assert again(IDS).logits.abs().sum() > 0
    fresh = load_critic(tmp_path / "critic", init_head="zero")
    assert fresh(IDS).logits.abs().sum() == 0
    golden.line(caplog.text, "init_head=zero")


def test_a_head_that_is_not_there_is_an_error(llama_dir):
    with golden.raises(CheckpointError):
        load_critic(llama_dir, init_head="from_checkpoint")


def test_tokenizer_pads_on_the_left_with_eos_if_it_has_no_pad(llama_dir):
    tokenizer = load_tokenizer(llama_dir)
    assert (tokenizer.pad_token_id, tokenizer.padding_side) == (1, "left")
    assert tokenizer("w3 w4")["input_ids"] == [3, 4]
    assert load_hf_config(llama_dir).model_type == "llama"


def test_a_saved_tokenizer_is_byte_for_byte_the_one_that_was_loaded(llama_dir, tmp_path):
    added = {
        "tokenizer_config.json": (
            b'{"tokenizer_class": "PreTrainedTokenizerFast",\r\n "eos_token": "<eos>"}'
        ),
        "special_tokens_map.json": b'{"eos_token":   "<eos>"}\n\n',
        "chat_template.jinja": b"{% for m in messages %}{{ m.content }}<eos>{% endfor %}",
        "additional_chat_templates/rag.jinja": b"{{ documents }}",
    }
    (llama_dir / "additional_chat_templates").mkdir()
    for name, content in added.items():
        (llama_dir / name).write_bytes(content)
    loaded = load_tokenizer(llama_dir)
    added["tokenizer.json"] = (llama_dir / "tokenizer.json").read_bytes()
    (llama_dir / "tokenizer.json").write_text("overwritten meanwhile")
    save_hf(tiny_llama(), loaded, tmp_path / "saved")
    of_model = {"config.json", "generation_config.json", "model.safetensors"}
    files = {f for f in (tmp_path / "saved").rglob("*") if f.is_file()}
    saved = {str(f.relative_to(tmp_path / "saved")): f for f in files}
    assert {n: f.read_bytes() for n, f in saved.items() if n not in of_model} == added
    assert load_tokenizer(tmp_path / "saved").pad_token_id == loaded.pad_token_id == 1


@pytest.mark.parametrize(
    ("own", "saved"), [(1, [1, 5]), ([1, 7], [1, 5, 7]), ([5, 1], [5, 1]), (None, [1, 5])]
)
def test_whoever_generates_with_a_saved_model_stops_where_its_turns_end(own, saved, tmp_path):
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 20)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    chats = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", additional_special_tokens=["w5"]
    )
    chats.chat_template = "{% for m in messages %}w2 {{ m.content }} w5 {% endfor %}w2 "
    module = tiny_llama()
    module.generation_config.eos_token_id = own
    save_hf(module, chats, tmp_path / "m")
    assert GenerationConfig.from_pretrained(tmp_path / "m").eos_token_id == saved
    assert end_token_ids(chats, module.generation_config) == sorted({*saved, 1})


def test_the_mark_of_turns_is_saved_where_it_is_the_tokenizers_own_end(tmp_path, tokenizer):
    """Of a base model that begins with a chat tokenizer."""
    chats = copy.deepcopy(tokenizer)
    chats.chat_template = "{% for m in messages %}w2 {{ m.content }} <eos> {% endfor %}w2 "
    for own, saved in ((7, [1, 7]), (None, [1]), ([1], [1])):
        module = tiny_llama()
        module.generation_config.eos_token_id = own
        save_hf(module, chats, tmp_path / "m")
        assert GenerationConfig.from_pretrained(tmp_path / "m").eos_token_id == saved


def test_a_tokenizer_without_an_end_has_none():
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    endless = PreTrainedTokenizerFast(tokenizer_object=words)
    assert end_token_ids(endless, None) == []
    assert end_token_ids(endless, GenerationConfig(eos_token_id=3)) == [3]


def test_a_tokenizer_that_was_changed_is_saved_as_it_is(llama_dir, tmp_path):
    for change in (
        lambda t: t.add_tokens(["w99"]),
        lambda t: setattr(t, "chat_template", "{{ messages }}"),
    ):
        loaded = load_tokenizer(llama_dir)
        change(loaded)
        save_hf(tiny_llama(), loaded, tmp_path / "m")
        again = load_tokenizer(tmp_path / "m")
        assert (len(again), again.chat_template) == (len(loaded), loaded.chat_template)


def test_a_missing_tokenizer_is_an_error(llama_dir):
    (llama_dir / "tokenizer.json").unlink()
    with golden.raises(CheckpointError):
        load_tokenizer(llama_dir)
    load_causal_lm(llama_dir)  # weights alone will do


def _edit(**changes):
    def put(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return put


def _write(**texts):
    def put(folder):
        for name, text in texts.items():
            (folder / name.replace("__", ".")).write_text(text)

    return put


@pytest.mark.parametrize(
    ("spoil", "load"),
    [
        (_edit(model_type="nope"), load_hf_config),
        (_write(config__json="{}"), load_hf_config),
        (_edit(model_type="nope", auto_map={"AutoConfig": "configuration_x.X"}), load_hf_config),
        (_write(config__json="{"), load_hf_config),
        (_write(tokenizer__json="{"), load_tokenizer),
        (_write(tokenizer__json="{}"), load_tokenizer),
        (_write(tokenizer__model="x"), load_tokenizer),
        (_edit(hidden_act="nopeact"), load_causal_lm),
        (_edit(hidden_size=-4), load_causal_lm),
        (_edit(intermediate_size=32), load_causal_lm),
        (_edit(num_attention_heads=3), load_causal_lm),
    ],
)
def test_what_transformers_says_of_a_directory_is_told_in_one_line_of_ours(tmp_path, spoil, load):
    tiny_llama().save_pretrained(tmp_path)
    spoil(tmp_path)
    with golden.raises(CheckpointError) as refused:
        load(tmp_path)
    assert "\n" not in refused.value.what + refused.value.fix
    assert "http" not in refused.value.what
    assert "ignore_mismatched" not in refused.value.what
    assert refused.value.where == str(tmp_path)
