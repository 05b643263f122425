"""Registered model factories: make a ``Model`` from the name and arguments in an experiment.

Each takes its own arguments and the ``ModelContext``. It returns a source (source.py) or a whole module
in evaluation mode; the backend shards it and reads the parts that it needs. Modules of data-parallel
ranks are equal, since they are read from one directory or made from one seed.
"""

from __future__ import annotations

import tempfile
from typing import NotRequired, TypedDict, Unpack

from realsys.api.model import DatasetAbstraction, Model, ModelName, ParallelGroups, ProcessTopology
from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.models.from_scratch.tokenizer_corpus import arithmetic_texts, texts_of
from realsys.models.hf import load_tokenizer, token_skipped_by_scores
from realsys.models.model_arguments import HFModelArguments, TinyLlamaArguments
from realsys.models.source import HFSource


class ModelContext(TypedDict):
    """Place of the process that makes a model."""

    name: ModelName
    device: str
    topology: ProcessTopology
    rank: int
    groups: ParallelGroups
    base_seed: int
    filled: NotRequired[bool]


def hf_causal_lm(
    *, path: str, dtype: str = HFModelArguments.dtype, **context: Unpack[ModelContext]
) -> Model:
    """Makes the language model and tokenizer of the Hugging Face directory ``path``."""
    source = HFSource(path, critic=False, dtype=dtype, device=context["device"])
    return Model(module=source, tokenizer=load_tokenizer(path), dtype=dtype, **context)


def hf_critic(
    *, path: str, dtype: str = HFModelArguments.dtype, **context: Unpack[ModelContext]
) -> Model:
    """Makes a value model: the critic in ``path``, or a language model's body with a zero head."""
    source = HFSource(path, critic=True, dtype=dtype, device=context["device"])
    skips = token_skipped_by_scores(source.config())
    tokenizer = load_tokenizer(path)
    return Model(module=source, tokenizer=tokenizer, dtype=dtype, score_skips=skips, **context)


def tiny_llama(
    *,
    dtype: str = TinyLlamaArguments.dtype,
    seed: int = TinyLlamaArguments.seed,
    hidden_size: int = TinyLlamaArguments.hidden_size,
    num_layers: int = TinyLlamaArguments.num_layers,
    num_heads: int = TinyLlamaArguments.num_heads,
    num_kv_heads: int = TinyLlamaArguments.num_kv_heads,
    vocab_size: int = TinyLlamaArguments.vocab_size,
    corpus: DatasetAbstraction | None = None,
    **context: Unpack[ModelContext],
) -> Model:
    """Makes a small Llama with random weights from ``seed`` and a tokenizer trained on ``corpus``, or on
    arithmetic.
    """
    with tempfile.TemporaryDirectory(prefix="realsys_tiny_llama_") as folder:
        build_tiny_llama(
            folder,
            seed=seed,
            corpus=arithmetic_texts() if corpus is None else texts_of(corpus),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            vocab_size=vocab_size,
        )
        model = hf_causal_lm(path=folder, dtype=dtype, **context)
        model.module = model.module.load()  # the folder is about to be deleted
    # Otherwise the folder's random name would be written into every checkpoint of this model.
    model.tokenizer.name_or_path = model.module.config.name_or_path = "tiny_llama"
    return model


def tokenizer_only(*, path: str, **context: Unpack[ModelContext]) -> Model:
    """Makes a model without weights, for rules that score text: ``module`` is None."""
    return Model(module=None, tokenizer=load_tokenizer(path), dtype="float32", **context)
