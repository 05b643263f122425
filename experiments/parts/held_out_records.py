"""Keeps held-out questions out of what is trained on, in every phase of a launch. No torch.

Records of one file are parted by their place: the last ``eval_size`` are held out, so two tasks that
read one file agree if both hold out so many. A file is known by its path, or by its bytes where a copy of
it lies elsewhere. What is made instead of read is parted by what it asks (experiments/task.py).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.api.basics.record_names import is_hub_name
from realsys.api.errors import ConfigError, DataError
from realsys.api.experiment import ChosenSetting

_PLAN = "plan.json"
_WHOLE_BYTES = 64 << 20  # larger files are compared by pieces of their whole length
_PIECE_BYTES, _NUM_PIECES = 1 << 20, 64


@dataclass(frozen=True, kw_only=True)
class ReadQuestions:
    """Where a task's records come from, and which of them are held out.

    Attributes:
        setting: name of the task, e.g. ``sft.task`` or ``task.sources.sums``.
        path: what is trained on, without what is held out.
        eval_path: what is held out; None: the last ``eval_size`` of ``path``.
        files: what ``path`` and ``eval_path`` mean, as real paths or names on a hub.
        keep: filters, by which the places of records differ.
    """

    setting: str
    path: str
    eval_path: str | None
    eval_size: int
    files: frozenset[str]
    eval_files: frozenset[str]
    keep: tuple[str, ...] = ()

    @property
    def held_out_files(self) -> frozenset[str]:
        """The files that held-out records are in."""
        return self.files if self.eval_path is None else self.eval_files

    def parts_as(self, other: ReadQuestions) -> bool:
        """Whether both part the same records in the same way, but for how many are held out."""
        parted = self.eval_path is None and other.eval_path is None
        return parted and self.keep == other.keep and same_files(self.files, other.files)


def held_out_problems_of(
    evaluated: Iterable[ReadQuestions], trained: Iterable[ReadQuestions]
) -> Iterator[ConfigError]:
    """Yields, for each task that is trained on, the first that holds out some of its records."""
    asked = [one for one in evaluated if one.eval_size]
    for one in trained:
        found = (_problem(held, one) for held in asked)
        if (problem := next((p for p in found if p is not None), None)) is not None:
            yield problem


def sizes_to_hold_out(
    evaluated: Iterable[ReadQuestions],
    trained: Iterable[ReadQuestions],
    chosen: Collection[ChosenSetting],
    given: Collection[str],
) -> Iterator[ChosenSetting]:
    """Yields the ``eval_size`` of each task that is trained on before, where the user gives none and the
    run holds out the last records of the same file.

    Args:
        chosen: settings that are chosen besides, which may be other sizes.
        given: paths of the settings that the user set.
    """
    sizes = {one.path: int(one.value) for one in chosen if one.path.endswith(".eval_size")}
    asked = list(evaluated)
    for one in trained:
        path = f"{one.setting}.eval_size"
        if path in given:
            continue
        parted = [held for held in asked if one.parts_as(held)]
        wanted = [sizes.get(f"{held.setting}.eval_size", held.eval_size) for held in parted]
        if wanted and max(wanted) != sizes.get(path, one.eval_size):
            why = f"as {parted[wanted.index(max(wanted))].setting}, which reads the same records"
            yield ChosenSetting(path=path, value=max(wanted), why=why)


def trained_before(
    evaluated: Iterable[ReadQuestions], model: str | None, *, setting: str
) -> Iterator[str]:
    """Warns that the trial which saved a model trained it on records that are held out now.

    Only that trial's plan is read, not those of the models that it began from.
    """
    trial = _trial_of(model)
    trained = [] if trial is None else list(_trained_by(trial, setting))
    for problem in held_out_problems_of(evaluated, trained):
        yield (
            f"{model} was trained by {trial} on records that are held out here ({problem.where}): their "
            "accuracy is of questions that it knows. Hold out others, or fine-tune with the same "
            "task.eval_size"
        )


def _trial_of(model: str | None) -> Path | None:
    """The folder of the trial, or of its phase, that saved a model; None: it is nobody's."""
    if model is None or is_hub_name(model):
        return None
    saved = Path(_real(model))
    folders = saved.parents
    if len(folders) < 3 or folders[1].name != "checkpoints":
        return None
    return folders[2] if (folders[2] / _PLAN).is_file() else None


def _trained_by(trial: Path, setting: str) -> Iterator[ReadQuestions]:
    """What a trial's plan says that its phases read to train on."""
    try:
        plan = json.loads((trial / _PLAN).read_bytes())
        sources = list(_datasets([phase["config"] for phase in plan["phases"]]))
    except (OSError, ValueError, LookupError, TypeError):
        return  # a plan of another version
    for args in {json.dumps(one, sort_keys=True): one for one in sources}.values():
        eval_path = args.get("eval_path")
        yield ReadQuestions(
            setting=setting,
            path=args["path"],
            eval_path=eval_path,
            eval_size=int(args.get("eval_size", 0)),
            files=files_of(args["path"]),
            eval_files=files_of(eval_path),
            keep=tuple(args.get("keep", ())),
        )


def _datasets(found: Any, split: str = "") -> Iterator[dict[str, Any]]:
    """Arguments of data sets of files to train on, wherever in a configuration."""
    if isinstance(found, list):
        for one in found:
            yield from _datasets(one, split)
    elif isinstance(found, dict):
        split = found.get("split", split)
        if isinstance(found.get("path"), str) and "max_prompt_len" in found and split == "train":
            yield found
        for one in found.values():
            yield from _datasets(one, split)


def _problem(held: ReadQuestions, trained: ReadQuestions) -> ConfigError | None:
    if held.parts_as(trained) and trained.eval_size >= held.eval_size:
        return None
    if not common_files(held.held_out_files, trained.files) or _are_apart(held, trained):
        return None
    where = " and ".join(dict.fromkeys((f"{trained.setting}.path", f"{held.setting}.eval_size")))
    if held.parts_as(trained):
        what = f"{trained.setting}.eval_size is {trained.eval_size}, and {held.setting}.eval_size"
        return ConfigError(
            f"{what} {held.eval_size} of the same records: held-out ones would be trained on",
            where=where.replace(".path", ".eval_size", 1),
            fix=f"leave {trained.setting}.eval_size out, or set it to {held.eval_size} or more",
        )
    if held.eval_path is not None:
        where = " and ".join((f"{trained.setting}.path", f"{held.setting}.eval_path"))
        fix = f"give {held.setting}.eval_path a file that nothing trains on, or set "
        fix += f"{held.setting}.eval_size=0"
    elif trained.eval_path is not None:
        fix = f"set {held.setting}.eval_path={trained.eval_path} too, or leave "
        fix += f"{trained.setting}.eval_path out"
    else:
        fix = f"give {held.setting}.eval_path a file of its own, or set {held.setting}.eval_size=0"
    return ConfigError(
        f"{trained.setting} trains on records that {held.setting} holds out", where=where, fix=fix
    )


def _are_apart(held: ReadQuestions, trained: ReadQuestions) -> bool:
    """Whether no record is in both, by where it stands; False where a plan can't read all."""
    held_out = held.path if held.eval_path is None else held.eval_path
    if held.keep == trained.keep or _real(held_out) != _real(trained.path):
        return False
    try:
        asked, learnt = _places(held, "test"), _places(trained, "train")
    except (ConfigError, DataError):  # reported by other checks
        return False
    return asked is not None and learnt is not None and not asked & learnt


def _places(questions: ReadQuestions, split: str) -> set[str] | None:
    """Where the records of a split stand; None if a plan reads only some of them."""
    from realsys.data.sources.chosen_records import chosen_records
    from realsys.data.sources.record_samples import sample_records

    path = questions.eval_path or questions.path if split == "test" else questions.path
    if is_hub_name(path):
        return None
    sample = sample_records(Path(_real(path)))
    if not sample.is_whole:
        return None
    kept = chosen_records(sample.records, keep=questions.keep, transform=(), name=path)
    size, apart = questions.eval_size, questions.eval_path is not None
    if split == "test":
        part = range(min(size, len(kept))) if apart else range(max(len(kept) - size, 0), len(kept))
    else:
        part = range(len(kept) if apart else max(len(kept) - size, 0))
    return {kept.where(index) for index in part}


# ---- files --------------------------------------------------------------------------------------


def files_of(path: str | None) -> frozenset[str]:
    """Returns the real paths of the files that a setting means, or its name on a hub without the revision;
    a path that can't be read stands for itself.
    """
    if path is None:
        return frozenset()
    if is_hub_name(path):
        name, _, rest = path.partition("@")
        return frozenset({f"{name}/{rest.partition('/')[2]}".rstrip("/")})
    from realsys.data.sources.record_files import record_paths

    with suppress(DataError, OSError):
        return frozenset(os.path.realpath(file) for file in record_paths(path))
    return frozenset({_real(path)})


def _real(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def same_files(one: frozenset[str], other: frozenset[str]) -> bool:
    """Whether both mean the same files, or copies of them."""
    if one == other:
        return True
    sizes = sorted(_size(file) or 0 for file in one)
    if not all(sizes) or sizes != sorted(_size(file) or 0 for file in other):
        return False
    contents = _contents(one)
    return None not in contents and contents == _contents(other)


def common_files(one: frozenset[str], other: frozenset[str]) -> bool:
    """Whether a file of one, or a copy of it, is among the other's."""
    if one & other:
        return True
    sizes = {size for file in one if (size := _size(file))}
    alike = [file for file in other if _size(file) in sizes]
    return bool(alike) and bool(_contents(one) & {_content(file) for file in alike} - {None})


def _contents(files: frozenset[str]) -> set[str | None]:
    return {_content(file) for file in files}


def _size(file: str) -> int | None:
    with suppress(OSError):
        return os.stat(file).st_size
    return None


def _content(file: str) -> str | None:
    """A digest of a file's bytes, of a large one of pieces of it; None: it is no file that can be read."""
    size = _size(file)
    if not size or not os.path.isfile(file):
        return None
    starts = range(0, size, _PIECE_BYTES)
    if size > _WHOLE_BYTES:
        starts = range(0, size, max(_PIECE_BYTES, (size - _PIECE_BYTES) // (_NUM_PIECES - 1)))
    digest = hashlib.sha256(str(size).encode())
    with suppress(OSError), open(file, "rb") as opened:
        for start in starts:
            opened.seek(start)
            digest.update(opened.read(_PIECE_BYTES))
        return digest.hexdigest()
    return None
