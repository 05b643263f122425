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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from realsys.api import registry
from realsys.api.choice import KIND, is_choice, kind_named
from realsys.api.errors import ConfigError, UnknownName
from realsys.api.options import range_problems
from realsys.config.option_tree import (
    hints,
    is_mapping,
    nearest,
    nested,
    possible,
    split_entry,
    table_of,
)
from realsys.config.problems import collected, raise_all
from realsys.config.settings import (
    UserSetting,
    place_of,
    read_words,
    read_yaml,
    spelled_twice,
    unfolded,
)
from realsys.config.typed_values import Text, Written, read, shown

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


def apply_settings(kind: Any, *, words: Sequence[str] = (), config: Path | None = None) -> Applied:
    """A ``kind`` with its defaults, or an instance, with the file's settings and then the words' on it.

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


def defaults_of(kind: Any) -> Any:
    """What a class, or a function, makes without arguments; an instance as it is.

    Raises:
        ConfigError: an option has no default.
    """
    if dataclasses.is_dataclass(kind) and not isinstance(kind, type):
        return kind
    try:
        return kind()
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # raised inside of it
        raise ConfigError(
            f"{kind.__name__} can't be made without arguments: {error}",
            where=f"{kind.__module__}:{kind.__qualname__}",
            fix="give every option a default, e.g. = option(None, …)",
        ) from error


def with_settings(kind: Any, *, words: Sequence[str] = (), config: Path | None = None) -> Any:
    """The same, raising all problems as one ConfigErrors."""
    applied = apply_settings(kind, words=words, config=config)
    raise_all(applied.problems)
    return applied.options


def apply_overrides(options: Any, settings: Iterable[UserSetting]) -> Applied:
    """The settings on a dataclass instance; later ones win. Collects every problem."""
    settings, applied = list(settings), Applied(options)
    walk, problems = _Walk(settings, applied.problems), applied.problems
    near = partial(nearest, options=options)
    leaves = [x for s in settings for x in walk.group(options, s.path, s, (), near)]
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
    applied.options = _put(options, tree, "", applied, wrong, walk.chosen)
    out_of_range = list(range_problems(applied.options))
    if refused := {p.where for p in out_of_range} & set(applied.origins):
        rest = [leaf.setting for leaf in leaves if leaf.setting.path not in refused]
        applied.options = apply_overrides(options, rest).options
    for problem in out_of_range:
        origin = applied.origins.get(problem.where)
        where = f"{problem.where}, {origin}" if origin else problem.where
        problems.append(ConfigError(problem.what, where=where, fix=problem.fix))
    return applied


class _Walk:
    """Finds the field that each setting is for, in options whose choices are made as the settings say."""

    def __init__(self, settings: Iterable[UserSetting], problems: list[ConfigError]) -> None:
        self.problems = problems
        self.chosen: dict[
            str, Any
        ] = {}  # path of a choice → what it is now; None: absent or unknown
        # (on the command line?, name of a choice) → name of its kind; names of other things are not asked.
        self._named: dict[tuple[bool, str], str] = {}
        for one in (leaf for setting in settings for leaf in unfolded(setting)):
            if isinstance(one.written, Text):
                of_words, path = not place_of(one.origin), one.path.removesuffix(f".{KIND}")
                self._named[of_words, path] = one.written.text

    def group(
        self,
        group: Any,
        rest: str,
        setting: UserSetting,
        at: tuple[str, ...],
        near: Callable[[str], str],
    ) -> Iterator[_Leaf]:
        """The leaves of a setting whose name goes on with ``rest`` below the group at ``at``."""
        head, _, rest = rest.partition(".")
        if head in {f.name for f in dataclasses.fields(group)}:
            kind, value = hints(type(group))[head], getattr(group, head)
            yield from self._field(kind, value, rest, setting, (*at, head), near)
        elif others := _kinds_with(group, head):
            self.problems.append(
                UnknownName(
                    f"{group.choice} {group.kind} has no {head}",
                    where=f"{setting.path}, {setting.origin}",
                    fix=f"add {_alternatives('.'.join(at), others)}, or leave it out",
                )
            )
        else:
            what = f"no option called {setting.path!r}"
            self.problems.append(UnknownName(what, where=setting.origin, fix=near(setting.path)))

    def _field(
        self,
        kind: Any,
        value: Any,
        rest: str,
        setting: UserSetting,
        at: tuple[str, ...],
        near: Callable[[str], str],
    ) -> Iterator[_Leaf]:
        """The same for a field with its value: a table given for a group is one leaf a member."""
        written, entry = setting.written, table_of(kind)
        if entry and rest:
            name, rest = split_entry(entry, rest)
            kind, value, at, entry = entry, (value or {}).get(name), (*at, name), None
            near = partial(nearest, options=kind, path=f"{'.'.join(at)}.")
            if not rest and written in ({}, Text("")) and not is_choice(kind):  # all defaults
                yield _Leaf(at, (), kind, setting)
                return
        group, here = nested(kind), ".".join(at)
        if isinstance(written, dict) and written and not rest and (group or entry):
            for name, member in written.items():
                below = UserSetting(f"{setting.path}.{name}", member, setting.origin)
                yield from self._field(kind, value, name, below, at, near)
        elif group and not rest and _resets_to_none(kind, written):
            yield _Leaf(at, (), kind, setting)
        elif is_choice(group) and rest in ("", KIND):
            yield from self._name(kind, value, setting, at)
        elif is_choice(group) and not rest.startswith(f"{KIND}."):
            value = self._chosen(kind, value, here, setting)
            if value is not None:
                yield from self.group(value, rest, setting, at, near)
        elif group and rest and not is_choice(group):
            value = defaults_of(group) if value is None else value
            yield from self.group(value, rest, setting, at, near)
        elif group and not rest:
            self.problems.append(_not_a_value(here, group, setting.origin))
        elif rest and not is_mapping(kind):
            here += f".{KIND}" * is_choice(group)
            what = f"{here} is a single value, it has no {rest.removeprefix(f'{KIND}.')!r}"
            fix = f"write {here}=VALUE"
            self.problems.append(UnknownName(what, where=setting.origin, fix=fix))
        else:  # a key may have dots, where the table is none of anything
            keys = rest.split(".") if Any in typing.get_args(kind) else [rest]
            yield _Leaf(at, tuple(keys) if rest else (), kind, setting)

    def _name(
        self, kind: Any, value: Any, setting: UserSetting, at: tuple[str, ...]
    ) -> Iterator[_Leaf]:
        """The leaf of a setting that names a choice's kind, always as ``….kind``."""
        choice, here, written = typing.cast(Any, nested(kind)), ".".join(at), setting.written
        where = f"{here}, {setting.origin}"
        with collected(self.problems):
            if not isinstance(written, Text):
                what = f"{here} is {shown(written)} (a single value is needed here)"
                fix = "use " + _alternatives(here, registry.names(choice.choice))
                raise ConfigError(what, where=where, fix=fix)
            kind_named(choice, written.text, where=where)
            self._chosen(kind, value, here, setting)
            named = UserSetting(f"{here}.{KIND}", written, setting.origin)
            yield _Leaf((*at, KIND), (), str, named)

    def _chosen(self, kind: Any, value: Any, here: str, setting: UserSetting) -> Any:
        """What a choice is that is ``value`` by default; None: this setting is not for it."""
        choice, of_words = typing.cast(Any, nested(kind)), not place_of(setting.origin)
        own, file = self._named.get((of_words, here)), self._named.get((False, here))
        name = self._named.get((True, here), file)
        absent = value is None if name is None else _resets_to_none(kind, Text(name))
        if name != own and not of_words and (absent or own is not None):
            return None  # the command line names another than the file, whose members go with it
        if here not in self.chosen:
            self.chosen[here] = None if absent else value
            if not absent and name not in (None, value and value.kind):
                self.chosen[here] = None
                with suppress(UnknownName):  # told where it is named
                    found = kind_named(choice, str(name))
                    with collected(self.problems):
                        self.chosen[here] = defaults_of(found)
        if absent:
            fix = f"add {_alternatives(here, registry.names(choice.choice))}, or leave it out"
            what, where = f"{here} is none", f"{setting.path}, {setting.origin}"
            self.problems.append(ConfigError(what, where=where, fix=fix))
        return self.chosen[here]


def _kinds_with(group: Any, name: str) -> list[str]:
    """The other kinds of a choice that have a setting of that name."""
    if not is_choice(type(group)):
        return []
    kinds: list[Any] = possible(group)
    return [k.kind for k in kinds if name in {f.name for f in dataclasses.fields(k)}]


def _alternatives(here: str, kinds: Sequence[str]) -> str:
    """``schedule=async or schedule=rollout``."""
    return " or ".join(f"{here}={kind}" for kind in kinds) or f"{here}=KIND"


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


def _put(
    options: Any,
    tree: dict[Any, Any],
    path: str,
    applied: Applied,
    wrong: set[str],
    chosen: Mapping[str, Any],
) -> Any:
    """``options`` with a tree of values on them, innermost first; each of ``chosen`` is what it says."""
    changed: dict[str, Any] = {}
    for head, node in tree.items():
        if head is _WHOLE or (head == KIND and is_choice(type(options))):
            continue
        kind, value, here = hints(type(options))[head], getattr(options, head), f"{path}{head}."
        value = node.get(_WHOLE, value)
        below = {k: n for k, n in node.items() if isinstance(k, str)}
        inner, entry = nested(kind), table_of(kind)
        if below and inner:
            old = _present(inner, value, path + head, chosen)
            value = old and _put(old, below, here, applied, wrong, chosen)
        elif below and entry:
            value = dict(value)
            for name, members in below.items():
                if old := _present(entry, value.get(name), here + name, chosen):
                    value[name] = _put(old, members, f"{here}{name}.", applied, wrong, chosen)
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


def _present(kind: type, value: Any, path: str, chosen: Mapping[str, Any]) -> Any:
    """A group on which settings are put; None only for a choice whose kind could not be made."""
    value = chosen.get(path, value)
    return defaults_of(kind) if value is None and not is_choice(kind) else value


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
