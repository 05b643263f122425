"""Reads what a user wrote, `a.b=value` words and YAML files, as settings: name, text, place.

For overrides.py and clusters.py, which give the text its meaning. Refuses what can't be read at all,
and names that are given twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.typed_values import Written, from_node, parse_flow
from realsys.api.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """One value that a user wrote for a dotted name, and where."""

    path: str
    written: Written
    origin: str  # `command line`, or file:line


def read_words(words: Sequence[str], problems: list[ConfigError]) -> Iterator[Setting]:
    """Settings of `a.b=value` words."""
    seen: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.strip()
        if not equals or not re.fullmatch(r"\w+(\.[^.\s=]+)*", name):
            problems.append(
                ConfigError(
                    f"{word!r} is not a setting" + ("" if equals else ": it has no '='"),
                    where="command line",
                    fix=f"write NAME=VALUE, e.g. {name or 'seed'}=1"
                    if not equals
                    else "write NAME=VALUE with a dotted name, e.g. actor.optimizer.lr=1e-5",
                )
            )
            continue
        if seen.get(name, text) != text:
            problems.append(
                ConfigError(
                    f"{name} is given twice: {seen[name]!r} and {text!r}",
                    where=f"{name}, command line",
                    fix="keep one of them",
                )
            )
            continue
        seen[name] = text
        yield Setting(name, parse_flow(text), f"command line {word!r}")


def read_yaml(path: Path, problems: list[ConfigError]) -> Iterator[Setting]:
    """Settings of a YAML file, nested or dotted, each with its line.

    Raises:
        ConfigError: no such file, not readable, or not YAML (with the line).
    """
    import yaml

    try:
        node: Any = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(
            f"the file can't be read: {error.strerror}", where=str(path), fix="check the path"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(
            f"not YAML: {reason}",
            where=f"{path}:{mark.line + 1}" if mark else str(path),
            fix="repair that line; strings with ': ' or '#' need quotes",
        ) from error
    if node is None:
        return
    if node.id != "mapping":
        raise ConfigError(
            "the file is no table of settings", where=str(path), fix="write NAME: VALUE lines"
        )
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.value in seen:
            problems.append(
                ConfigError(
                    f"{key.value} is given twice, in lines {seen[key.value]} and {line}",
                    where=f"{path}:{line}",
                    fix="keep one of them",
                )
            )
        seen[str(key.value)] = line
        yield from _yaml_settings(str(key.value), value, path)


def _yaml_settings(name: str, node: Any, path: Path) -> Iterator[Setting]:
    """One setting a leaf, so that each has its own line; empty tables and lists are leaves."""
    if node.id == "mapping" and node.value:
        for key, value in node.value:
            yield from _yaml_settings(f"{name}.{key.value}", value, path)
    else:
        yield Setting(name, from_node(node), f"{path}:{node.start_mark.line + 1}")
