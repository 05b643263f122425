"""Checks the files that the math experiments read, before anything is submitted. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.parts.backend_args import backend_problems
from realsys.api import registry
from realsys.api.errors import CheckpointError, ConfigError, DataError, RealsysError
from realsys.api.options import MathDatasetOptions, ModelOptions
from realsys.config.bounded_files import parse_json, read_bounded_text

MAX_SAMPLED_QUESTIONS = (
    1000  # questions of a file whose tokens a plan counts; workers count the others
)
TOY_PARAMS = 10_000_000  # the defaults suit models up to this size, such as the built-in one


def dataset_args(options: MathDatasetOptions) -> dict[str, Any]:
    """Builds the arguments of the registered math data sets, equal for training and held-out splits."""
    return {
        "path": absolute(options.path),
        "eval_path": absolute(options.eval_path),
        "train_size": options.train_size,
        "eval_size": options.eval_size,
        "max_prompt_len": options.max_prompt_len,
        "slip_share": options.slip_share,
    }


def absolute(path: str | None) -> str | None:
    """Returns the absolute path, valid in every worker's working directory."""
    return None if path is None else str(Path(path).expanduser().resolve())


def model_problems(
    options: ModelOptions, where: str, *, critic: bool = False, generates: bool = False
) -> Iterator[ConfigError]:
    """Yields an unknown backend, unsupported settings, and a directory without a complete usable model."""
    if problem := registry.check("backend", options.backend, where=f"{where}.backend"):
        yield problem
    yield from backend_problems(options, where)
    if options.path is not None:
        from realsys.models.hf_directory import check_hf_directory

        problems = list(_as_problem(check_hf_directory, options.path, f"{where}.path"))
        yield from problems
        if not problems:
            yield from _directory_problems(
                options, Path(options.path).expanduser(), where, critic=critic, generates=generates
            )


def _directory_problems(
    options: ModelOptions, path: Path, where: str, *, critic: bool, generates: bool
) -> Iterator[ConfigError]:
    """Yields faults of a complete model directory, or of its backend with it; one kind of fault at a
    time.
    """
    from realsys.models.consistency import backend_faults, consistency_faults, lora_fault
    from realsys.models.hf_directory import check_hf_directory
    from realsys.models.prompt_lengths import prompt_lengths, tokenizer_faults

    found = list(consistency_faults(path, critic=critic))
    found = found or list(backend_faults(path, backend=options.backend, generates=generates))
    found += tokenizer_faults(path, rows=check_hf_directory(path).vocab_size)
    if not found:
        try:
            prompt_lengths(path, ["1 + 1 = ?"])  # its chat template, tried on any question
        except CheckpointError as error:
            found.append(error)
    for fault in found:
        yield ConfigError(fault.what, where=f"{where}.path, {fault.where}", fix=fault.fix)
    if options.lora.rank and (missing := lora_fault(path, options.lora.target_modules)):
        yield ConfigError(missing.what, where=f"{where}.{missing.where}, {path}", fix=missing.fix)


def position_problems(path: str | None, *, answers: int) -> Iterator[ConfigError]:
    """Yields answers so long that they leave no room for a prompt."""
    most = max_positions_of(path)
    if most and answers >= most:
        yield ConfigError(
            f"answers of {answers} tokens, but the model has {most} positions for prompt and answer",
            where=f"ppo.gen.max_new_tokens and {path}",
            fix="lower it, or use a model with more positions (max_position_embeddings in config.json)",
        )


def position_remarks(path: str | None, *, prompt: int, answers: int) -> Iterator[str]:
    """Warns of prompts that leave less room than an answer may take."""
    most = max_positions_of(path)
    if answers < most < prompt + answers:
        yield (
            f"a prompt of dataset.max_prompt_len={prompt} and an answer of ppo.gen.max_new_tokens="
            f"{answers} tokens are more than the {most} positions of the model in {path}: a prompt of "
            f"over {most - answers} tokens would end the run"
        )


def max_positions_of(path: str | None) -> int:
    """Returns the model's number of positions; 0 if absent or unreadable, which other checks report."""
    try:
        config = parse_json(read_bounded_text(Path(path or "", "config.json").expanduser()))
        return int(config.get("max_position_embeddings") or 0)
    except (OSError, ValueError, TypeError, AttributeError):
        return 0


def start_problems(
    actor: ModelOptions, sft: ModelOptions, dataset: MathDatasetOptions
) -> Iterator[ConfigError]:
    """Yields the user's own questions combined with the built-in starting policy."""
    if actor.path is None and dataset.path is not None and sft.path is None:
        yield ConfigError(
            "the built-in starting policy knows only arithmetic",
            where="dataset.path without actor.path",
            fix="give actor.path=<Hugging Face directory> (or sft.model.path= and "
            "sft.dataset.path= to fine-tune one first)",
        )


def dataset_problems(
    options: MathDatasetOptions, *, tokenizer_dir: str | None
) -> Iterator[ConfigError]:
    """Yields unreadable or incomplete files, too few questions, and questions over the limit."""
    for name in ("path", "eval_path"):
        path = getattr(options, name)
        if path is None:
            continue
        try:
            records = _records(path)
        except DataError as error:
            yield ConfigError(error.what, where=f"dataset.{name}, {error.where}", fix=error.fix)
            continue
        needed = options.train_bs_n_seqs if name == "path" else options.eval_size
        spare = options.eval_size if name == "path" and options.eval_path is None else 0
        if len(records) - spare < needed:
            yield ConfigError(
                f"{len(records)} questions are too few: {needed} per batch"
                + (f" and {spare} held out" if spare else ""),
                where=f"dataset.{name}, {path}",
                fix="lower dataset.train_bs_n_seqs or dataset.eval_size, or give more questions",
            )
        if tokenizer_dir is not None:
            yield from _length_problems(records, path, tokenizer_dir, options.max_prompt_len)


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
            where=f"dataset.max_prompt_len and {path}",
            fix=f"raise dataset.max_prompt_len to {longest}, or drop these questions",
        )


def sampled_remarks(options: MathDatasetOptions, tokenizer_dir: str | None) -> Iterator[str]:
    """Reports how many questions of large files a plan has counted the tokens of."""
    paths = () if tokenizer_dir is None else (options.path, options.eval_path)
    for path in dict.fromkeys(paths):
        records = [] if path is None else _records(path)
        if len(records) > MAX_SAMPLED_QUESTIONS:
            num_sampled = len(sample_of([len(r["prompt"]) for r in records]))
            yield (
                f"{num_sampled:,} of {len(records):,} questions of {path} were counted in tokens, the "
                "longest texts among them; a worker counts the others before step 1"
            )


def toy_remarks(
    path: str | None, values: Mapping[str, Any], given: Collection[str]
) -> Iterator[str]:
    """Warns of defaults that suit the built-in model but apply to a real one.

    Args:
        path: the user's model; None: the built-in one.
        values: the settings concerned, by name.
    """
    if path is None:
        return
    from realsys.models.hf_directory import check_hf_directory

    params = check_hf_directory(Path(path).expanduser(), need_tokenizer=False).num_params
    unset = [f"{name}={value}" for name, value in values.items() if name not in given]
    if params > TOY_PARAMS and unset:
        yield (
            f"the model in {path} has {params:,} parameters, but these defaults were chosen for the "
            f"built-in toy: {' '.join(unset)}. Set each of them, even to the same value"
        )


def sample_of(lengths: Sequence[int]) -> list[int]:
    """Selects positions of at most ``MAX_SAMPLED_QUESTIONS`` texts: the longest, and an even spread."""
    if len(lengths) <= MAX_SAMPLED_QUESTIONS:
        return list(range(len(lengths)))
    half = MAX_SAMPLED_QUESTIONS // 2
    longest = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)[:half]
    spread = [i * len(lengths) // half for i in range(half)]
    return sorted({*longest, *spread})


def _as_problem(check: Any, path: str, where: str) -> Iterator[ConfigError]:
    try:
        check(Path(path).expanduser())
    except RealsysError as error:
        yield ConfigError(error.what, where=f"{where}, {error.where}", fix=error.fix)
    except OSError as error:
        yield ConfigError(
            f"it can't be read: {error.strerror or error}",
            where=f"{where}, {error.filename or path}",
            fix="make it readable for this user, or give another directory",
        )
