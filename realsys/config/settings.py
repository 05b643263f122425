"""Reads what a user wrote, `a.b=value` words and YAML files, as settings: name, text, place.

For overrides.py and clusters.py, which give the text its meaning. Refuses what can't be read at all,
and finds names that are given twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.api.basics.bounded_files import MAX_SETTINGS_BYTES, read_bounded_text
from realsys.api.errors import ConfigError, collected
from realsys.config.typed_values import Text, Written, from_node, parse_flow, plain_tree

_PLAIN_LINE = re.compile(r"(?:#[ -~]*|([A-Za-z_]\w*): ([\w/~.][\w/~.-]*))?", re.ASCII)
_PLAIN_CHARS = 4096


@dataclass(frozen=True)
class UserSetting:
    """One value that a user wrote for a dotted name, and where."""

    path: str
    written: Written
    origin: str  # `command line`, or file:line


def read_words(words: Sequence[str], problems: list[ConfigError]) -> Iterator[UserSetting]:
    """Settings of `a.b=value` words."""
    for word in words:
        name, equals, text = word.partition("=")
        name = name.strip()
        if not equals or not re.fullmatch(r"\w+(\.[^.\s=]+)*", name):
            what = f"{word!r} is not a setting" + ("" if equals else ": it has no '='")
            example = "with a dotted name, e.g. actor.optimizer.lr=1e-5"
            example = example if equals else f"e.g. {name or 'seed'}=1"
            fix = f"write NAME=VALUE{' ' if equals else ', '}{example}"
            problems.append(ConfigError(what, where="command line", fix=fix))
            continue
        with collected(problems):
            yield UserSetting(name, parse_flow(text), f"command line {word!r}")


def read_yaml(path: Path, problems: list[ConfigError]) -> Iterator[UserSetting]:
    """Settings of a YAML file, nested or dotted, each with its line.

    Raises:
        ConfigError: no such file, not readable, or not YAML (with the line).
    """
    try:
        text = read_bounded_text(path, max_bytes=MAX_SETTINGS_BYTES)
    except OSError as error:
        raise ConfigError(
            f"the file can't be read: {error.strerror}", where=str(path), fix="check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise _not_yaml(error, path) from error
    if (settings := _plain_settings(text, path)) is not None:
        yield from settings
        return
    import yaml

    try:
        node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError as error:
        raise ConfigError(
            "the file is no table of settings: values within values without end",
            where=str(path),
            fix="write NAME: VALUE lines",
        ) from error
    except yaml.YAMLError as error:
        raise _not_yaml(error, path) from error
    if node is None:
        return
    if node.id != "mapping":
        raise ConfigError(
            "the file is no table of settings", where=str(path), fix="write NAME: VALUE lines"
        )
    plain_tree(node, where=str(path))
    for key, value in node.value:
        with collected(problems):
            yield from _yaml_settings(str(key.value), value, path)


def _not_yaml(error: Exception, path: Path) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or str(error).splitlines()[0]
    return ConfigError(
        f"not YAML: {reason}",
        where=f"{path}:{mark.line + 1}" if mark else str(path),
        fix="repair that line; strings with ': ' or '#' need quotes",
    )


def _plain_settings(text: str, path: Path) -> list[UserSetting] | None:
    """Settings of a short file of ``name: word`` lines and comments, as YAML would give them; else None.

    So is the site of most starts, and importing yaml takes longer than reading it.
    """
    lines = [_PLAIN_LINE.fullmatch(line) for line in text[:_PLAIN_CHARS].split("\n")]
    if len(text) >= _PLAIN_CHARS or not all(lines):
        return None
    pairs = [(number, line) for number, line in enumerate(lines, 1) if line and line[1]]
    return [UserSetting(line[1], Text(line[2]), f"{path}:{number}") for number, line in pairs]


def spelled_twice(settings: Iterable[UserSetting]) -> Iterator[ConfigError]:
    """What one place gives two values by different spellings, as ``a.b=1`` and ``a={b: 2}`` (pure).

    Names are whole ones, to the value; the file and the command line are two places: the latter wins.
    """
    groups: dict[tuple[str, str], UserSetting] = {}  # (place, name of a group) → a value inside
    values: dict[tuple[str, str], UserSetting] = {}
    for one in (leaf for setting in settings for leaf in unfolded(setting)):
        place, parts = place_of(one.origin), one.path.split(".")
        above = [(place, ".".join(parts[:i])) for i in range(1, len(parts))]
        same, own = values.get((place, one.path)), (place, one.path)
        clashes = [values[name] for name in above if name in values]
        clashes += [groups[own]] if own in groups else []
        clashes += [same] if same and same.written != one.written else []
        if clashes:
            yield ConfigError(
                f"{one.path} is given twice",
                where=f"{one.path}, {clashes[0].origin} and {one.origin}",
                fix="keep one of them",
            )
        values[own] = one
        groups.update(dict.fromkeys(above, one))


def unfolded(setting: UserSetting) -> Iterator[UserSetting]:
    """A table's members one by one; an empty one gives no value."""
    if not isinstance(setting.written, dict):
        yield setting
        return
    for name, written in setting.written.items():
        yield from unfolded(UserSetting(f"{setting.path}.{name}", written, setting.origin))


def place_of(origin: str) -> str:
    """The command line, options such as --partition included, or the file, which it wins over."""
    return "" if origin.startswith("command line") else origin.rpartition(":")[0]


def _yaml_settings(name: str, node: Any, path: Path) -> Iterator[UserSetting]:
    """One setting a leaf, so that each has its own line; empty tables and lists are leaves."""
    if node.id == "mapping" and node.value:
        for key, value in node.value:
            yield from _yaml_settings(f"{name}.{key.value}", value, path)
    else:
        yield UserSetting(name, from_node(node), f"{path}:{node.start_mark.line + 1}")
