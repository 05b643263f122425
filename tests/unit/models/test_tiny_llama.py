"""The Llama made on the spot: any text round-trips, digits stand alone, equal seeds equal bytes."""

import hashlib

import golden
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from realsys.api.errors import DataError
from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.models.from_scratch.tiny_llama import build_tiny_llama, train_tokenizer


def texts():
    problems = arithmetic_word_problems(num_problems=2000, seed=0, split="train")
    return [p["prompt"] + p["answer"] for p in problems]


def file_hashes(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny_llama")
    build_tiny_llama(path, seed=1, corpus=texts())
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "text",
    ["Tom has 23 apples.\n", " two  spaces ", "naïve Ω 漢字 🙂\t\r\n", "\x00\x7f", "½ ٣ 10⁻³", ""],
)
def test_any_text_comes_back_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_each_digit_is_a_token_and_signs_keep_their_spaces(tokenizer):
    pieces = [tokenizer.decode([i]) for i in tokenizer("57 + 8 = 65\n#### 65")["input_ids"]]
    assert pieces == ["5", "7", " + ", "8", " = ", "6", "5", "\n#### ", "6", "5"]


def test_prompt_and_answer_tokens_join_to_those_of_the_whole(tokenizer):
    for p in arithmetic_word_problems(num_problems=200, seed=2, split="test"):
        whole = tokenizer(p["prompt"] + p["answer"])["input_ids"]
        assert whole == tokenizer(p["prompt"])["input_ids"] + tokenizer(p["answer"])["input_ids"]
        assert len(tokenizer(p["answer"])["input_ids"]) == 10
        assert len(tokenizer(p["prompt"])["input_ids"]) <= 24  # words are mostly one token


def test_special_tokens_are_the_same_in_tokenizer_and_model(folder, tokenizer):
    config = AutoModelForCausalLM.from_pretrained(folder).config
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert ids == (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert len(tokenizer) == config.vocab_size == 512
    assert tokenizer("7", add_special_tokens=True)["input_ids"] == tokenizer.encode("7")
    assert len(tokenizer.encode("7")) == 1  # none is put around a text
    assert tokenizer.padding_side == "left"


def test_the_parameters_are_those_counted_by_hand(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    attention = 128 * 128 + 2 * 128 * 64 + 128 * 128  # query, key and value of 2 of 4 heads, output
    mlp = 3 * 128 * 384
    layer = attention + mlp + 2 * 128  # two norms
    expected = 2 * 512 * 128 + 3 * layer + 128  # embeddings and head, last norm
    assert sum(p.numel() for p in model.parameters()) == expected == 721_792
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_weights_start_wide_enough_for_a_narrow_model(folder):
    weight = AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.up_proj.weight
    # 49 152 draws: the standard deviation is off by about 0.3 %
    assert weight.std().item() == pytest.approx(0.08, rel=0.02)


def test_another_seed_gives_other_weights_and_the_same_tokenizer(folder, tmp_path):
    build_tiny_llama(tmp_path, seed=2, corpus=texts())
    ours, other = file_hashes(folder), file_hashes(tmp_path)
    assert {name for name in ours if ours[name] != other[name]} == {"model.safetensors"}


def test_the_global_random_state_is_left_alone(tmp_path):
    state = torch.get_rng_state()
    build_tiny_llama(tmp_path, seed=9, corpus=texts(), hidden_size=32, num_layers=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_corpus_of_too_few_words_is_refused_with_both_numbers():
    # 3 special tokens, 256 bytes, and the merges of "aaaa": "aa" and "aaaa"
    with golden.raises(DataError):
        train_tokenizer(["aaaa"] * 5, vocab_size=512)
