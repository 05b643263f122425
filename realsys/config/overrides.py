"""Settings from a YAML file and from `a.b=value` words, put onto an experiment's frozen dataclass.

For launch and plan, and for cluster specs. All mistakes are found at once: unknown names (with the
nearest one anywhere in the tree), wrong types, values out of range, names given twice, and what a
dataclass's own checks refuse. Words on the command line win over the file. settings.py reads both,
typed_values.py gives text its value.
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

MAX_SETTINGS = 10_000  # of one launch or site
_WHOLE, _KEYS = (
    object(),
    object(),
)  # in a tree's node: the value of the name itself; keys of its table


@dataclass
class Applied:
    """Options with the settings on them, and everything that is wrong with the settings.

    ``options`` keep their former value where a setting was wrong; ``origins`` tell where the
    others were written.
    """

    options: Any
    problems: list[ConfigError] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Leaf:
    """A value for one field, or for a key of a table: its place in the options, and its field's type."""

    keys: tuple[str, ...]  # names down to the field
    inside: tuple[str, ...]  # keys below the field, where it is a table of plain values
    kind: Any
    setting: UserSetting

    def value(self) -> Any:
        """Raises ConfigError: what was written is no such value."""
        written = self.setting.written
        if dataclasses.is_dataclass(self.kind) or nested(self.kind):
            return None
        for key in reversed(self.inside):
            written = {key: written}
        return read(self.kind, written, path=self.setting.path, origin=self.setting.origin)


def apply_settings(kind: type, *, words: Sequence[str] = (), config: Path | None = None) -> Applied:
    """A ``kind`` with its defaults, the file's settings and then the words' on it.

    Raises:
        ConfigError: the file can't be read as YAML, or ``kind`` has options without a default.
    """
    problems: list[ConfigError] = []
    settings = read_settings(words, config, problems)
    applied = apply_overrides(defaults_of(kind), settings)
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
    kind, applied = type(options), Applied(options)
    near, problems = partial(nearest, kind=kind), applied.problems
    leaves = [x for s in settings for x in _in_group(kind, s.path, s, (), problems, near)]
    if len(leaves) > MAX_SETTINGS:
        what, where = f"{len(leaves):,} settings", leaves[0].setting.origin
        problems.append(ConfigError(what, where=where, fix=f"give at most {MAX_SETTINGS:,}"))
        return applied
    twice = list(spelled_twice([leaf.setting for leaf in leaves]))
    wrong = {p.where.partition(",")[0].rpartition(".")[0] for p in (*problems, *twice)}
    problems += twice
    tree: dict[Any, Any] = {}
    for leaf in leaves:
        path, before = leaf.setting.path, len(problems)
        with collected(problems):
            _plant(tree, leaf, leaf.value())
            applied.origins[path] = leaf.setting.origin
        if len(problems) > before:
            wrong.add(path.rpartition(".")[0])
    applied.options = _put(options, tree, "", applied, wrong)
    out_of_range = list(range_problems(applied.options))
    if refused := {p.where for p in out_of_range} & set(applied.origins):
        rest = [leaf.setting for leaf in leaves if leaf.setting.path not in refused]
        applied.options = apply_overrides(options, rest).options
    for problem in out_of_range:
        origin = applied.origins.get(problem.where)
        where = f"{problem.where}, {origin}" if origin else problem.where
        problems.append(ConfigError(problem.what, where=where, fix=problem.fix))
    return applied


def _in_group(
    group: type,
    rest: str,
    setting: UserSetting,
    at: tuple[str, ...],
    problems: list[ConfigError],
    near: Callable[[str], str],
) -> Iterator[_Leaf]:
    """The leaves of a setting whose name goes on with ``rest`` below the group at ``at``."""
    head, _, rest = rest.partition(".")
    if head in {f.name for f in dataclasses.fields(group)}:
        yield from _in_field(hints(group)[head], rest, setting, (*at, head), problems, near)
    else:
        what = f"no option called {setting.path!r}"
        problems.append(UnknownName(what, where=setting.origin, fix=near(setting.path)))


def _in_field(
    kind: Any,
    rest: str,
    setting: UserSetting,
    at: tuple[str, ...],
    problems: list[ConfigError],
    near: Callable[[str], str],
) -> Iterator[_Leaf]:
    """The same for a field: a table given for a group is one leaf a member."""
    written, entry = setting.written, table_of(kind)
    if entry and rest:
        name, rest = split_entry(entry, rest)
        kind, at, entry = entry, (*at, name), None
        near = partial(nearest, kind=kind, path=f"{'.'.join(at)}.")
        if not rest and written in ({}, Text("")):  # an entry with all defaults
            yield _Leaf(at, (), kind, setting)
            return
    members = written if isinstance(written, dict) and not rest else {}
    below = [(n, UserSetting(f"{setting.path}.{n}", w, setting.origin)) for n, w in members.items()]
    group = nested(kind)
    if group and rest:
        yield from _in_group(group, rest, setting, at, problems, near)
    elif group and below:
        for name, member in below:
            yield from _in_group(group, name, member, at, problems, near)
    elif group and not _resets_to_none(kind, written):
        problems.append(_not_a_value(".".join(at), group, setting.origin))
    elif entry and below:
        for name, member in below:
            yield from _in_field(kind, name, member, at, problems, near)
    elif rest and not is_mapping(kind):
        here = ".".join(at)
        what, fix = f"{here} is a single value, it has no {rest!r}", f"write {here}=VALUE"
        problems.append(UnknownName(what, where=setting.origin, fix=fix))
    else:  # a key may have dots, where the table is none of anything
        keys = rest.split(".") if Any in typing.get_args(kind) else [rest]
        yield _Leaf(at, tuple(keys) if rest else (), kind, setting)


def _not_a_value(here: str, group: type, origin: str) -> ConfigError:
    members = ", ".join(f"{here}.{f.name}" for f in dataclasses.fields(group)[:4])
    return ConfigError(
        f"{here} is a group of options, not a value",
        where=f"{here}, {origin}",
        fix=f"set its members: {members}, …",
    )


def _resets_to_none(kind: Any, written: Written) -> bool:
    """Whether ``none`` was written for a group that may be absent."""
    word = written.text.lower() if isinstance(written, Text) else ""
    return word in ("none", "null") and nested(kind) is not kind


def _plant(tree: dict[Any, Any], leaf: _Leaf, value: Any) -> None:
    """Puts a value into a tree of names; it replaces what an earlier setting gave for it or below it."""
    for key in leaf.keys:
        tree = tree.setdefault(key, {})
    if leaf.inside:
        tree.setdefault(_KEYS, []).append(value)
    else:
        tree.clear()
        tree[_WHOLE] = value


def _put(options: Any, tree: dict[Any, Any], path: str, applied: Applied, wrong: set[str]) -> Any:
    """``options`` with a tree of values on them, innermost first."""
    changed: dict[str, Any] = {}
    for head, node in tree.items():
        if head is _WHOLE:
            continue
        kind, value, here = hints(type(options))[head], getattr(options, head), f"{path}{head}."
        value = node.get(_WHOLE, value)
        below = {k: n for k, n in node.items() if isinstance(k, str)}
        inner, entry = nested(kind), table_of(kind)
        if below and inner:
            value = _put(inner() if value is None else value, below, here, applied, wrong)
        elif below and entry:
            value = dict(value)
            for name, members in below.items():
                old = value.get(name) or defaults_of(entry)
                value[name] = _put(old, members, f"{here}{name}.", applied, wrong)
        elif _KEYS in node:
            value = dict(value or {})
            for table in node[_KEYS]:
                _merge(value, table)
        changed[head] = value
    if not changed:
        return options
    own: list[ConfigError] = []
    with collected(own):
        return dataclasses.replace(options, **changed)
    if path.rstrip(".") not in wrong:
        # With a member refused already, checks between members would speak of a mixture.
        applied.problems += [_located(p, path, applied.origins, changed) for p in own]
    return options


def _merge(table: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Puts ``new`` on ``table``, tables within them alike."""
    for key, value in new.items():
        old = table.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            table[key] = dict(old)
            _merge(table[key], value)
        else:
            table[key] = value


def _located(
    problem: ConfigError, path: str, origins: dict[str, str], changed: dict[str, Any]
) -> ConfigError:
    """A dataclass's own complaint, with the settings that it is about."""
    group = path.rstrip(".") or "options"
    told = [origins[path + name] for name in changed if path + name in origins]
    where = f"{group} ({problem.where})" + (f", {'; '.join(told)}" if told else "")
    return ConfigError(problem.what, where=where, fix=problem.fix)
