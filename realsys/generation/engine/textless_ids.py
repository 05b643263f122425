"""Which ids of a model stand for no text: rows of its embedding that its tokenizer does not have (pure)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


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
