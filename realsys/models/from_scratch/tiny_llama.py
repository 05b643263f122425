"""Builds a small Llama with its own tokenizer, without downloads.

For `realsys launch ppo-math` and the tests. The result is an ordinary Hugging Face directory, so
that the rest of the system treats it like a real model. Weights are random; the experiment trains
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from realsys.api.errors import DataError
from realsys.models.hf import save_hf
from realsys.models.model_arguments import TinyLlamaOptions

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<pad>", "<bos>", "<eos>"  # ids 0, 1, 2
MAX_TOKENS = 256  # prompt + response
_INIT_STD = 0.08  # for narrow layers: with the usual 0.02, a width of 128 starts learning far later

# One digit, a word with the space before it, or a run of neither (" + ", "\n#### "). Digits stand
# alone so that the model can learn column arithmetic, and no merge crosses these borders: the
# tokens of prompt + answer are those of the prompt followed by those of the answer.
_PIECE = Regex(r"\p{N}| ?\p{L}+|[^\p{N}\p{L}]+")


def build_tiny_llama(
    save_dir: str | Path,
    *,
    seed: int,
    corpus: Iterable[str],
    **sizes: int,
) -> None:
    """Writes config, random float32 weights and a tokenizer to ``save_dir``.

    The same arguments give the same bytes. The global random state is not changed.

    Args:
        save_dir: made if missing; files of the same names are replaced.
        seed: of the weights.
        corpus: texts the tokenizer is trained on.
        sizes: those of TinyLlamaOptions. ``hidden_size`` is a multiple of ``num_heads``, and that of
            ``num_kv_heads``; ``vocab_size`` is of both model and tokenizer.
    Raises:
        DataError: the corpus has too few distinct words for ``vocab_size`` tokens.
    """
    shape = TinyLlamaOptions(**sizes).shape()
    tokenizer = train_tokenizer(corpus, vocab_size=shape.vocab_size)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=_INIT_STD,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    save_hf(model, tokenizer, save_dir)


def train_tokenizer(corpus: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE: any text round-trips unchanged, each digit is one token.

    It adds no special tokens by itself; padding is on the left, as generation needs it.

    Raises:
        DataError: the corpus has too few distinct words for ``vocab_size`` tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(_PIECE, behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    if (size := tokenizer.get_vocab_size()) != vocab_size:
        what = f"the corpus gives a vocabulary of {size} tokens, vocab_size={vocab_size}"
        raise DataError(
            what,
            where="vocab_size of the model made from scratch",
            fix=f"use sft.init.vocab_size={size} or less (of sft-math: init.vocab_size={size}), or a task "
            "with more different words",
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        padding_side="left",
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
