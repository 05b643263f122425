"""A policy with known answer lengths: 32 tokens of about equal probability, one of which ends an answer.

Untrained, with small weights: each next token has probability 1/32 independent of the context. An
answer's length is therefore geometric with a mean of 32 tokens, an eighth of the maximum if 256 tokens
are allowed. Any library can load it, and equal work needs no forced lengths.

As a plugin (``--import benchmarks/uniform_policy.py``) it registers the cheap reward ``digits``.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from realsys.api import registry

VOCABULARY = 32
MEAN_LENGTH = VOCABULARY
_CHARACTERS = "0123456789+= "
_SPECIAL = ("<pad>", "<bos>", "<unk>", "<eos>")


def make_policy(folder: Path, *, width: int = 128, layers: int = 4, heads: int = 4) -> Path:
    """A Llama with its tokenizer of single characters, in ``folder``."""
    words = (*_SPECIAL, *_CHARACTERS)
    words = (*words, *(f"<{i}>" for i in range(VOCABULARY - len(words))))
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=ids["<pad>"],
        bos_token_id=ids["<bos>"],
        eos_token_id=ids["<eos>"],
        initializer_range=0.02,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_questions(path: Path, count: int) -> Path:
    """JSONL of sums of two two-digit numbers: each is a prompt of six tokens."""
    draw = random.Random(0)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(count)]
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def grpo_words(
    policy: Path, questions: Path, *, batch: int, group: int, longest: int
) -> tuple[str, ...]:
    """Words of ``realsys launch grpo-math``: one pass over ``questions``, the policy stays as it is."""
    return (
        *("--import", __file__),
        f"actor.path={policy}",
        f"task.path={questions}",
        "task.eval_size=0",
        f"train_bs_n_seqs={batch}",
        f"group_size={group}",
        f"gen.max_new_tokens={longest}",
        "algorithm.ppo_n_minibatches=1",
        "algorithm.kl_ctl=0",
        "algorithm.entropy_coef=0",
        "task.reward=digits",
        "actor.optimizer.lr=1e-6",
        "exp_ctrl.total_train_epochs=1",
        "exp_ctrl.ckpt_freq_secs=none",
        "exp_ctrl.eval_freq_steps=none",
        "tensorboard=false",
    )


def digits(*, response: str, answer: str, **_: Any) -> float:
    """Right first characters count 1, each digit 0.01."""
    return float(response[:3].strip() == answer) + 0.01 * sum(c.isdigit() for c in response)


registry.register_reward("digits", digits, trusted=True)
