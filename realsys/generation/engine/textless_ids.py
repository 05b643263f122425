"""Which ids of a model stand for no text: rows of its embedding that its tokenizer does not have."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from realsys.models.hf_directory import check_hf_directory, has_tokenizer


def textless_ids(tokenizer: Any, *, vocabulary: int, ends: Collection[int]) -> list[int]:
    """Returns the ids that are never sampled: nobody could read them, ascending.

    Many models have more rows than their tokenizer has tokens, to a round number, and random ones at that.

    Args:
        tokenizer: one without a vocabulary knows of no texts: there are none then.
        vocabulary: rows of the embedding.
        ends: end an answer, whatever their text.
    """
    if not hasattr(tokenizer, "get_vocab"):
        return []
    known = {*tokenizer.get_vocab().values(), *ends}
    unknown = [i for i in range(vocabulary) if i not in known]
    size = len(tokenizer)
    # Some tokenizers' vocabulary leaves out tokens whose texts are parts of letters
    return [i for i in unknown if i >= size or tokenizer.convert_ids_to_tokens(i) is None]


def textless_of_folder(path: str) -> frozenset[int]:
    """Reads from a model's folder which of its ids stand for no text; none if it has no tokenizer."""
    from realsys.models.hf import end_token_ids, load_generation_config, load_tokenizer

    facts = check_hf_directory(path, need_tokenizer=False)
    if not has_tokenizer(path):
        return frozenset()
    tokenizer = load_tokenizer(path)
    ends = end_token_ids(tokenizer, load_generation_config(path))
    return frozenset(textless_ids(tokenizer, vocabulary=facts.vocab_size, ends=ends))
