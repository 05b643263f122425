"""Names of data sets on a hub, and the files that a name means (pure).

    hf:OWNER/NAME[@REVISION][/FILES]

REVISION is a branch, tag or commit; without one it is main. FILES is a file, a folder or a pattern. The
shards of one file (``train-00000-of-00002.parquet`` and ``train-00001-of-00002.parquet``) are a set. A name
without a pattern must mean one set.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from realsys.api.basics.record_names import HUB_PREFIX, is_record_name
from realsys.api.errors import ConfigError
from realsys.planner.memory.memory_messages import size

MAX_LISTED = 12  # sets of files in a message
_WORD = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME = re.compile(
    rf"{HUB_PREFIX}(?P<repo>{_WORD}/{_WORD})"
    r"(@(?P<revision>refs/(?:convert|pr)/\w+|[^/@]+))?(/(?P<files>.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"-\d{5}(-of-\d{5})(-[0-9a-f]{8,})?(?=\.)")


@dataclass(frozen=True)
class HubName:
    """A data set, its revision, and a file, folder or pattern in it; empty: all of it."""

    repo: str
    revision: str
    files: str

    def __str__(self) -> str:
        return f"{HUB_PREFIX}{self.repo}@{self.revision}" + f"/{self.files}" * bool(self.files)

    @property
    def has_commit(self) -> bool:
        """Whether the revision is a commit, whose files never change."""
        return _COMMIT.fullmatch(self.revision) is not None


@dataclass(frozen=True)
class HubListing:
    """A commit of a data set: its hash, and the sizes of its files in bytes."""

    commit: str
    sizes: Mapping[str, int]


def parse_hub_name(text: str, *, where: str) -> HubName:
    """Parses ``hf:OWNER/NAME[@REVISION][/FILES]``. Raises ConfigError."""
    found = _NAME.fullmatch(text)
    files = (found["files"] or "").removesuffix("/") if found else ""
    if found is None or (files and not is_safe(files)) or "**" in files:
        raise ConfigError(
            f"{text!r} names no data set on a hub",
            where=where,
            fix="write hf:OWNER/NAME[@REVISION][/FILES], e.g. hf:openai/gsm8k/main or "
            "hf:openai/gsm8k@main/main/train-*.parquet; a local file of such a name: ./hf:…",
        )
    return HubName(found["repo"], found["revision"] or "main", files)


def is_safe(file: str) -> bool:
    """Whether the name keeps a file within the folder that it is put into."""
    return not {"", ".", ".."} & set(file.split("/")) and "\0" not in file


def pinned(name: HubName, listing: HubListing, split: str, *, where: str) -> HubName:
    """Returns the name with its commit, and with the file or pattern that it means.

    Args:
        split: preferred where the name means several sets of files; empty: none is.
        where: the setting.
    Raises:
        ConfigError: there are no such files, several sets of them, or files that are no records.
    """
    if unsafe := [file for file in listing.sizes if not is_safe(file)]:
        raise ConfigError(
            f"{name} has a file {unsafe[0]!r}, whose name leads out of the data set's folder",
            where=where,
            fix="use another data set, and tell its owner",
        )
    sets = _sets(file for file in listing.sizes if is_record_name(file.rpartition("/")[2]))
    files = name.files
    if files not in listing.sizes and not any(char in files for char in "*?["):
        files = _only_set(name, sets, listing, split, where)
    found = replace(name, revision=listing.commit, files=files)
    chosen = files_of(found, listing)
    records = {file for one in sets.values() for file in one}
    if others := [file for file in chosen if file not in records]:
        what = f"{others[0]} of {name} is no file of records"
    elif not chosen:
        what = f"{name} has no such files of records"
    else:
        return found
    there = f"name others; there are {_listed(sets, listing)}"
    fix = "it may have some at its revision refs/convert/parquet, or name another data set"
    raise ConfigError(what, where=where, fix=there if sets else fix)


def files_of(name: HubName, listing: HubListing) -> list[str]:
    """Lists the files that a name with a file or pattern means, in the order in which they are read."""
    if name.files in listing.sizes:
        return [name.files]
    return sorted(file for file in listing.sizes if _matches(file, name.files))


def amount(files: Sequence[str], listing: HubListing) -> str:
    """Renders ``2 files, 3.1 GiB``."""
    total = sum(listing.sizes[file] for file in files)
    return f"{len(files):,} file{'s' * (len(files) != 1)}, {size(total)}"


def _matches(file: str, pattern: str) -> bool:
    """Whether ``Path.glob(pattern)`` in the data set's folder would find the file."""
    parts, patterns = file.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _sets(files: Iterable[str]) -> dict[str, list[str]]:
    """Groups files by what names them: a file itself, or a pattern for all its shards."""
    groups: dict[str, list[str]] = {}
    for file in sorted(files):
        pattern = _SHARD.sub(lambda m: f"-?????{m[1]}" + "-*" * bool(m[2]), glob.escape(file))
        groups.setdefault(pattern, []).append(file)
    return {found[0] if len(found) == 1 else name: found for name, found in groups.items()}


def _only_set(
    name: HubName, sets: Mapping[str, list[str]], listing: HubListing, split: str, where: str
) -> str:
    """Returns what names the only set of files in a folder, or there the only one of the split."""
    folder = f"{name.files}/" if name.files else ""
    inside = [one for one, (first, *_) in sets.items() if first.startswith(folder)]
    of_split = re.compile(rf"(?<![a-z]){split}[^/]*")
    found = [one for one in inside if split and of_split.search(one.rpartition("/")[2])] or inside
    if len(found) == 1:
        return found[0]
    if not found:
        return name.files
    raise ConfigError(
        f"{name} could mean {_listed({one: sets[one] for one in found}, listing)}",
        where=where,
        fix=f"name one, e.g. {replace(name, files=found[0])}, or several by a pattern",
    )


def _listed(sets: Mapping[str, Sequence[str]], listing: HubListing) -> str:
    texts = [f"{one} ({amount(files, listing)})" for one, files in sets.items()]
    more = f" and {len(texts) - MAX_LISTED:,} more" if len(texts) > MAX_LISTED else ""
    return ", ".join(texts[:MAX_LISTED]) + more
