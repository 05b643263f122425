"""Texts that the tokenizer of a model made from scratch is trained on: those of its task.

A tokenizer of other texts would spell a task's words byte by byte, and a small model would learn it far
more slowly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from realsys.api import registry
from realsys.api.model import DatasetAbstraction
from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.data.sources.dataset_arguments import MathSFTArguments
from realsys.data.sources.math_questions import records_of
from realsys.data.sources.record_shape import prompt_texts, question_of

_NUM_RECORDS = 2000  # enough for a vocabulary of a few hundred tokens
_NUM_FILLING = 200
_SEED = 0  # the tokenizer must not depend on the run's seed


def arithmetic_texts() -> list[str]:
    """Makes the texts of the built-in arithmetic questions."""
    problems = arithmetic_word_problems(num_problems=_NUM_RECORDS, seed=_SEED, split="train")
    return [problem["prompt"] + problem["answer"] for problem in problems]


def texts_of(data: DatasetAbstraction) -> list[str]:
    """Reads prompts and answers of the first records of a data set ``math_sft``, or of a mixture's sources.

    Some arithmetic is added: a few words that come again and again don't fill a vocabulary.

    Raises:
        DataError: a record can't be read, or made.
    """
    sources = data.args.get("sources", {"": data.args})
    texts = [text for args in sources.values() for text in _texts(args, data.args["split"])]
    return texts + arithmetic_texts()[:_NUM_FILLING]


def _texts(args: Mapping[str, Any], split: str) -> Iterator[str]:
    given = {**registry.read_arguments("dataset", "math_sft", args), "split": split}
    if given.get("task") is not None:
        given["task"] = {**given["task"], "train_size": _NUM_RECORDS}
    names = {field.name for field in dataclasses.fields(MathSFTArguments)}
    read = MathSFTArguments(**{name: given[name] for name in names & given.keys()})
    records = records_of(read, _SEED)
    for index in range(min(len(records), _NUM_RECORDS)):
        where = records.where(index)
        question = question_of(records[index], read.columns, where, needs_answer=False)
        yield "".join(prompt_texts(question.prompt))
        yield question.answer or ""
