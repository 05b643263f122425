"""Settings from a YAML file and from `a.b=value` words, put onto an experiment's frozen dataclass.

For launch and plan, and for cluster specs. All mistakes are found at once: unknown names (with the
nearest one anywhere in the tree), wrong types, values out of range, and what a dataclass's own
checks refuse. Words on the command line win over the file. Reading both is settings.py's work.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from realsys.api.errors import ConfigError, UnknownName
from realsys.api.options import range_problems
from realsys.config.option_tree import hints, is_mapping, nearest, nested, split_entry, table_of
from realsys.config.problems import collected, raise_all
from realsys.config.settings import UserSetting, read_words, read_yaml, spelled_twice
from realsys.config.typed_values import Text, Written, read


@dataclass
class Applied:
    """Options with the settings on them, and everything that is wrong with the settings.

    ``options`` keep their former value where a setting was wrong; ``origins`` tell where the
    others were written.
    """

    options: Any
    problems: list[ConfigError] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)


def apply_settings(kind: type, *, words: Sequence[str] = (), config: Path | None = None) -> Applied:
    """A ``kind`` with its defaults, the file's settings and then the words' on it.

    Raises:
        ConfigError: the file can't be read as YAML, or ``kind`` has options without a default.
    """
    problems: list[ConfigError] = []
    settings = read_settings(words, config, problems)
    options = defaults_of(kind)
    applied = apply_overrides(options, settings)
    applied.problems[:0] = problems
    return applied


def read_settings(
    words: Sequence[str], config: Path | None, problems: list[ConfigError]
) -> list[UserSetting]:
    """The file's settings, then the words'. Raises ConfigError when the file can't be read."""
    settings = list(read_yaml(config, problems)) if config else []
    return [*settings, *read_words(words, problems)]


def defaults_of(kind: type) -> Any:
    """A ``kind`` with every option at its default. Raises ConfigError when one has none."""
    try:
        return kind()
    except TypeError as error:
        raise ConfigError(
            f"{kind.__name__} can't be made without arguments: {error}",
            where=f"{kind.__module__}:{kind.__qualname__}",
            fix="give every option a default, e.g. = option(None, …)",
        ) from error


def with_settings(kind: type, *, words: Sequence[str] = (), config: Path | None = None) -> Any:
    """The same, raising all problems as one ConfigErrors."""
    applied = apply_settings(kind, words=words, config=config)
    raise_all(applied.problems)
    return applied.options


def apply_overrides(options: Any, settings: Iterable[UserSetting]) -> Applied:
    """The settings on a dataclass instance; later ones win. Collects every problem."""
    kind = type(options)
    applied = Applied(options)
    leaves: dict[str, Any] = {}
    near = partial(nearest, kind=kind)
    written = [leaf for s in settings for leaf in _flatten(kind, s, "", applied.problems, near)]
    applied.problems.extend(spelled_twice(written))
    for leaf in written:
        with collected(applied.problems):
            leaves[leaf.path] = _value(kind, leaf)
            applied.origins[leaf.path] = leaf.origin
    bad = {p.where.partition(",")[0] for p in applied.problems}
    applied.options = _replaced(options, leaves, "", applied, bad)
    for problem in (*range_problems(applied.options), *_range_problems(applied.options)):
        origin = applied.origins.get(problem.where)
        where = f"{problem.where}, {origin}" if origin else problem.where
        applied.problems.append(ConfigError(problem.what, where=where, fix=problem.fix))
    return applied


def _flatten(
    kind: type,
    setting: UserSetting,
    done: str,
    problems: list[ConfigError],
    near: Callable[[str], str],
) -> Iterator[UserSetting]:
    """The setting itself if it names a value; one a member if it gives a table for a group."""
    head, _, rest = setting.path.removeprefix(done).partition(".")
    if head not in {f.name for f in dataclasses.fields(kind)}:
        what = f"no option called {setting.path!r}"
        problems.append(UnknownName(what, where=setting.origin, fix=near(setting.path)))
        return
    hint, here = hints(kind)[head], f"{done}{head}"
    inner, entry = nested(hint), table_of(hint)
    if rest and inner:
        yield from _flatten(inner, setting, f"{here}.", problems, near)
    elif rest and entry:
        yield from _entry_leaves(entry, setting, f"{here}.", problems)
    elif rest and not is_mapping(hint):
        problems.append(
            UnknownName(
                f"{here} is a single value, it has no {rest!r}",
                where=setting.origin,
                fix=f"write {here}=VALUE",
            )
        )
    elif (inner or entry) and isinstance(setting.written, dict) and setting.written:
        for name, written in setting.written.items():
            below = UserSetting(f"{here}.{name}", written, setting.origin)
            yield from _flatten(kind, below, done, problems, near)
    elif inner and not _resets_to_none(hint, setting.written):
        problems.append(_not_a_value(here, inner, setting.origin))
    else:
        yield setting


def _entry_leaves(
    entry: type, setting: UserSetting, table: str, problems: list[ConfigError]
) -> Iterator[UserSetting]:
    """The same for a path into a table of groups; ``name:`` with nothing behind is all defaults."""
    name, rest = split_entry(entry, setting.path.removeprefix(table))
    here, written = f"{table}{name}", setting.written
    near = partial(nearest, kind=entry, path=f"{here}.")
    if rest:
        yield from _flatten(entry, setting, f"{here}.", problems, near)
    elif isinstance(written, dict) and written:
        for member, text in written.items():
            below = UserSetting(f"{here}.{member}", text, setting.origin)
            yield from _flatten(entry, below, f"{here}.", problems, near)
    elif written in ({}, Text("")):
        yield setting
    else:
        problems.append(_not_a_value(here, entry, setting.origin))


def _not_a_value(here: str, group: type, origin: str) -> ConfigError:
    members = ", ".join(f"{here}.{f.name}" for f in dataclasses.fields(group)[:4])
    return ConfigError(
        f"{here} is a group of options, not a value",
        where=f"{here}, {origin}",
        fix=f"set its members: {members}, …",
    )


def _resets_to_none(hint: Any, written: Written) -> bool:
    """Whether ``none`` was written for a group that may be absent."""
    word = written.text.lower() if isinstance(written, Text) else ""
    return word in ("none", "null") and nested(hint) is not hint


def _value(kind: type, leaf: UserSetting, done: str = "") -> Any:
    """The typed value of a leaf; an entry of a table becomes (name, value)."""
    head, _, rest = leaf.path.removeprefix(done).partition(".")
    hint = hints(kind)[head]
    inner, entry = nested(hint), table_of(hint)
    if rest and inner:
        return _value(inner, leaf, f"{done}{head}.")
    if rest and entry:
        name, below = split_entry(entry, rest)
        return _value(entry, leaf, f"{done}{head}.{name}.") if below else None
    if inner:
        return None
    written: Written = leaf.written
    for part in reversed(_keys(hint, rest)):
        written = {part: written}
    return read(hint, written, path=leaf.path, origin=leaf.origin)


def _keys(hint: Any, rest: str) -> list[str]:
    """A path behind a mapping as keys: one, that may have dots, or a table within a table of anything."""
    if not rest:
        return []
    return rest.split(".") if Any in typing.get_args(hint) else [rest]


def _merged(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """``new`` put on ``base``, tables within them alike."""
    found = dict(base)
    for key, value in new.items():
        old = found.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            found[key] = _merged(old, value)
        else:
            found[key] = value
    return found


def _replaced(
    options: Any, leaves: dict[str, Any], path: str, applied: Applied, bad: set[str]
) -> Any:
    """``options`` with the values below ``path`` replaced, innermost first."""
    changed: dict[str, Any] = {}
    for f in dataclasses.fields(options):
        name, hint = f"{path}{f.name}", hints(type(options))[f.name]
        value, inner = getattr(options, f.name), nested(hint)
        below = {p: v for p, v in leaves.items() if p.startswith(f"{name}.")}
        if name in leaves:
            changed[f.name] = value = leaves[name]
        if below and inner:
            base = inner() if value is None else value
            changed[f.name] = _replaced(base, leaves, f"{name}.", applied, bad)
        elif below and (entry := table_of(hint)):
            changed[f.name] = _entries(entry, value, below, f"{name}.", applied, bad)
        elif below:
            for table in below.values():
                value = _merged(value or {}, table)
            changed[f.name] = value
    if not changed:
        return options
    own: list[ConfigError] = []
    with collected(own):
        return dataclasses.replace(options, **changed)
    if not any(b.startswith(path) and "." not in b.removeprefix(path) for b in bad):
        # With a member refused already, checks between members would speak of a mixture.
        applied.problems.extend(_located(p, path, applied.origins, changed) for p in own)
    return options


def _entries(
    entry: type, table: Any, leaves: dict[str, Any], path: str, applied: Applied, bad: set[str]
) -> dict[str, Any]:
    """A table of groups with what was written for some of them; new ones begin at the defaults."""
    found = dict(table)
    for name in dict.fromkeys(split_entry(entry, p.removeprefix(path))[0] for p in leaves):
        here = f"{path}{name}."
        below = {p: v for p, v in leaves.items() if p.startswith(here)}
        found[name] = _replaced(found.get(name) or defaults_of(entry), below, here, applied, bad)
    return found


def _range_problems(options: Any, *, path: str = "") -> Iterator[ConfigError]:
    """What is out of range inside tables of groups, nested."""
    for f in dataclasses.fields(options):
        value, hint = getattr(options, f.name), hints(type(options))[f.name]
        if dataclasses.is_dataclass(value):
            yield from _range_problems(value, path=f"{path}{f.name}.")
        elif table_of(hint):
            for name, entry in value.items():
                yield from range_problems(entry, path=f"{path}{f.name}.{name}.")


def _located(
    problem: ConfigError, path: str, origins: dict[str, str], changed: dict[str, Any]
) -> ConfigError:
    """A dataclass's own complaint, with the settings that it is about."""
    group = path.rstrip(".") or "options"
    told = [origins[path + name] for name in changed if path + name in origins]
    where = f"{group} ({problem.where})" + (f", {'; '.join(told)}" if told else "")
    return ConfigError(problem.what, where=where, fix=problem.fix)
