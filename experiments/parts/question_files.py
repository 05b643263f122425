"""Checks files of questions, before anything is submitted. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from realsys.api.errors import CheckpointError, ConfigError, DataError

MAX_SAMPLED_QUESTIONS = (
    1000  # questions of a file whose tokens a plan counts; workers count the others
)


def absolute(path: str | None) -> str | None:
    """Returns the absolute path, valid in every worker's working directory."""
    return None if path is None else str(Path(path).expanduser().resolve())


def dataset_problems(
    *,
    path: str | None,
    eval_path: str | None,
    eval_size: int,
    batch_size: int,
    max_prompt_len: int,
    tokenizer_dir: str | None,
) -> Iterator[ConfigError]:
    """Yields unreadable or incomplete files, too few questions, and questions over the limit."""
    for name, file in (("path", path), ("eval_path", eval_path)):
        if file is None:
            continue
        try:
            records = _records(file)
        except DataError as error:
            yield ConfigError(error.what, where=f"task.{name}, {error.where}", fix=error.fix)
            continue
        needed = batch_size if name == "path" else eval_size
        spare = eval_size if name == "path" and eval_path is None else 0
        if len(records) - spare < needed:
            yield ConfigError(
                f"{len(records)} questions are too few: {needed} per batch"
                + (f" and {spare} held out" if spare else ""),
                where=f"task.{name}, {file}",
                fix="lower train_bs_n_seqs or task.eval_size, or give more questions",
            )
        if tokenizer_dir is not None:
            yield from _length_problems(records, file, tokenizer_dir, max_prompt_len)


def _records(path: str) -> list[dict[str, str]]:
    from realsys.data.sources.qa_records import read_records

    return read_records(Path(path).expanduser())


def _length_problems(
    records: list[dict[str, str]], path: str, tokenizer_dir: str, limit: int
) -> Iterator[ConfigError]:
    """Yields the longest question over the limit, counted with the chat template."""
    from realsys.models.prompt_lengths import prompt_lengths

    chosen = sample_of([len(r["prompt"]) for r in records])
    try:
        root = Path(tokenizer_dir).expanduser()
        lengths = prompt_lengths(root, [records[i]["prompt"] for i in chosen])
    except CheckpointError:
        return  # reported by the check of the directory
    if not lengths:
        return
    longest, record = max(zip(lengths, chosen, strict=True), key=lambda pair: pair[0])
    if longest > limit:
        sampled = "" if len(chosen) == len(records) else f" sampled from {len(records)}"
        yield ConfigError(
            f"{sum(n > limit for n in lengths)} of {len(chosen)} questions{sampled} are longer than "
            f"{limit} tokens; record {record + 1} has {longest}",
            where=f"task.max_prompt_len and {path}",
            fix=f"raise task.max_prompt_len to {longest}, or drop these questions",
        )


def sampled_remarks(files: Sequence[str | None], tokenizer_dir: str | None) -> Iterator[str]:
    """Reports how many questions of large files a plan has counted the tokens of."""
    for path in dict.fromkeys(files if tokenizer_dir is not None else ()):
        records = [] if path is None else _records(path)
        if len(records) > MAX_SAMPLED_QUESTIONS:
            num_sampled = len(sample_of([len(r["prompt"]) for r in records]))
            yield (
                f"{num_sampled:,} of {len(records):,} questions of {path} were counted in tokens, the "
                "longest texts among them; a worker counts the others before step 1"
            )


def sample_of(lengths: Sequence[int]) -> list[int]:
    """Selects positions of at most ``MAX_SAMPLED_QUESTIONS`` texts: the longest, and an even spread."""
    if len(lengths) <= MAX_SAMPLED_QUESTIONS:
        return list(range(len(lengths)))
    half = MAX_SAMPLED_QUESTIONS // 2
    longest = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)[:half]
    spread = [i * len(lengths) // half for i in range(half)]
    return sorted({*longest, *spread})
