"""Reads from a model's folder which of its ids stand for no text: for engines that are other processes."""

from __future__ import annotations

import logging

from realsys.generation.engine.textless_ids import textless_ids
from realsys.models.hf_directory import check_hf_directory, has_tokenizer

logger = logging.getLogger(__name__)


def textless_of_folder(path: str) -> frozenset[int]:
    """Reads from a model's folder which of its ids stand for no text; none if no tokenizer can be read."""
    from realsys.models.hf import end_token_ids, load_generation_config, load_tokenizer

    facts = check_hf_directory(path, need_tokenizer=False)
    if not has_tokenizer(path):
        return frozenset()
    try:
        tokenizer = load_tokenizer(path)
        ends = end_token_ids(tokenizer, load_generation_config(path))
    except (
        Exception
    ) as error:  # transformers raises many; the engine that serves it needs no tokenizer
        logger.warning("no tokenizer: ids without a text are not known path=%s why=%s", path, error)
        return frozenset()
    return frozenset(textless_ids(tokenizer, vocabulary=facts.vocab_size, ends=ends))
