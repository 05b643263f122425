"""Reads and checks folders of models, and warns of settings that do not suit them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.parts.backend_args import backend_problems
from experiments.parts.chosen_settings import SMALL_PARAMS, StartingModel
from realsys.api import registry
from realsys.api.basics.bounded_files import parse_json, read_bounded_text
from realsys.api.errors import CheckpointError, ConfigError, RealsysError
from realsys.api.options import ModelOptions


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
    from realsys.models.prompt_lengths import (
        check_conversations,
        prompt_lengths,
        tokenizer_faults,
    )

    found = list(consistency_faults(path, critic=critic))
    found = found or list(backend_faults(path, backend=options.backend, generates=generates))
    found += tokenizer_faults(path, rows=check_hf_directory(path).vocab_size)
    if not found:
        try:
            prompt_lengths(path, ["1 + 1 = ?"])  # its chat template, tried on any question
            check_conversations(path)
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
            where=f"gen.max_new_tokens and {path}",
            fix="lower it, or use a model with more positions (max_position_embeddings in config.json)",
        )


def position_remarks(
    path: str | None, *, prompt: int, answers: int, setting: str = "task.max_prompt_len"
) -> Iterator[str]:
    """Warns of prompts, as long as ``setting`` allows, that leave less room than an answer may take."""
    most = max_positions_of(path)
    if answers < most < prompt + answers:
        yield (
            f"a prompt of {setting}={prompt} and an answer of gen.max_new_tokens="
            f"{answers} tokens are more than the {most} positions of the model in {path}: a prompt of "
            f"over {most - answers} tokens would end the run"
        )


def turn_end_warnings(path: str | None) -> Iterator[str]:
    """Reports a model whose template ends turns otherwise than its tokenizer ends texts."""
    if path is None:
        return
    from realsys.models.prompt_lengths import turn_end

    with suppress(RealsysError, OSError):  # reported by other checks
        if (found := turn_end(Path(path).expanduser())) is not None and found[0] != found[1]:
            yield (
                f"the chat template of {path} ends a turn with {found[0]}, the tokenizer a text with "
                f"{found[1]}: answers are trained up to the first, and sampling stops at either"
            )


def max_positions_of(path: str | None) -> int:
    """Returns the model's number of positions; 0 if absent or unreadable, which other checks report."""
    try:
        config = parse_json(read_bounded_text(Path(path or "", "config.json").expanduser()))
        return int(config.get("max_position_embeddings") or 0)
    except (OSError, ValueError, TypeError, AttributeError):
        return 0


def reader_problems(
    reader: str,
    path: str,
    actor_path: str,
    *,
    where: str,
    longest: int,
    fix: str = "use a model of the same family",
    tokenizer_must_be_known: bool = True,
) -> Iterator[ConfigError]:
    """Yields that a complete model's directory can't read the policy's answers.

    Args:
        reader: what it is, e.g. "the teacher". where: its role.
        longest: tokens of the longest prompt and answer together.
        tokenizer_must_be_known: a directory without a tokenizer that can be compared is refused.
    """
    same = _same_tokens(path, actor_path)
    if same is False or (same is None and tokenizer_must_be_known):
        yield ConfigError(
            f"{reader} has another tokenizer than the policy, whose tokens it reads",
            where=f"{where}.path={path} and actor.path={actor_path}",
            fix=fix,
        )
    if 0 < (most := max_positions_of(path)) < longest:
        yield ConfigError(
            f"{reader} has {most} positions, prompt and answer may have {longest} tokens",
            where=f"{where}.path, task.max_prompt_len and gen.max_new_tokens",
            fix="lower these two, or use a model with more positions",
        )


def _same_tokens(first: str, other: str) -> bool | None:
    """Whether both tokenizers have the same vocabulary, merges and added tokens; None: unknown."""
    try:
        return _tokens(first) == _tokens(other)
    except (OSError, ValueError, KeyError, TypeError, RealsysError):
        return None


def _tokens(path: str) -> tuple[Any, Any]:
    text = read_bounded_text(Path(path, "tokenizer.json").expanduser())
    read = parse_json(text)
    added = {token["content"]: token["id"] for token in read.get("added_tokens") or ()}
    return read["model"], added


def starting_model(path: str | None) -> StartingModel | None:
    """Returns what settings are chosen by; None: the defaults suit the model, or it can't be read, which
    other checks report.
    """
    if path is None:
        return None
    from realsys.models.hf_directory import check_hf_directory
    from realsys.models.prompt_lengths import chat_template

    root = Path(path).expanduser()
    try:
        params = check_hf_directory(root, need_tokenizer=False).num_params
        chats = chat_template(root) is not None
    except (RealsysError, OSError):
        return None
    if params <= SMALL_PARAMS:
        return None
    return StartingModel(params=params, positions=max_positions_of(path), chats=chats)


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
