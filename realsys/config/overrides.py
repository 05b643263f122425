"""Settings from a YAML file and from `a.b=value` words, put onto an experiment's frozen dataclass.

For launch and plan, and for cluster specs. All mistakes are found at once: unknown names (with the
nearest one anywhere in the tree), wrong types, values out of range, names given twice, and what a
dataclass's own checks refuse. Words on the command line win over the file. settings.py reads both,
typed_values.py gives text its value.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from realsys.api import registry
from realsys.api.basics.choice import KIND, is_choice, kind_named
from realsys.api.errors import ConfigError, UnknownName, collected, raise_all
from realsys.api.options import range_problems
from realsys.api.plain import hints
from realsys.config.option_tree import (
    is_mapping,
    nearest,
    nested,
    possible,
    split_entry,
    table_of,
)
from realsys.config.settings import (
    UserSetting,
    place_of,
    read_words,
    read_yaml,
    spelled_twice,
    unfolded,
)
from realsys.config.typed_values import Text, read, shown

MAX_SETTINGS = 10_000  # of one launch or site
# Names that are settings elsewhere, AReaL's among them, and how to give them here
_NO_SETTINGS = {
    "trial_name": "name the trial by the option --trial NAME (in Python: trial=…)",
    "experiment_name": "the experiment is the first word behind launch; a trial has --trial NAME",
}
_UNKNOWN = object()  # instead of a choice whose kind there is not


@dataclass
class Applied:
    """Options with the settings on them, and everything that is wrong with the settings.

    ``options`` keep their former value where a setting was wrong; ``origins`` tell where the
    others were written: a choice's is that of its ``….kind``.
    """

    options: Any
    problems: list[ConfigError] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    settings: list[UserSetting] = field(default_factory=list)  # one for each value


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
    if (count := sum(1 for setting in settings for _ in unfolded(setting))) > MAX_SETTINGS:
        what, where = f"{count:,} settings", settings[0].origin
        fix = f"give at most {MAX_SETTINGS:,}"
        applied.problems.append(ConfigError(what, where=where, fix=fix))
        return applied
    given = [_Given(setting.path, setting) for setting in settings]
    applied.options = _Overrides(applied, options).group(options, given)
    out_of_range = list(range_problems(applied.options))
    if refused := {p.where for p in out_of_range} & set(applied.origins):
        rest = [setting for setting in applied.settings if setting.path not in refused]
        applied.options = apply_overrides(options, rest).options
    for problem in out_of_range:
        origin = applied.origins.get(problem.where)
        where = f"{problem.where}, {origin}" if origin else problem.where
        applied.problems.append(ConfigError(problem.what, where=where, fix=problem.fix))
    return applied


@dataclass(frozen=True)
class _Given:
    """A setting on its way down the tree, and what of its name is still below."""

    rest: str
    setting: UserSetting

    @property
    def text(self) -> str | None:
        """What was written, where it is one word."""
        written = self.setting.written
        return written.text if isinstance(written, Text) else None

    @property
    def of_words(self) -> bool:
        """Whether it is of the command line, which wins over the file."""
        return not place_of(self.setting.origin)

    @property
    def is_none(self) -> bool:
        """Whether it removes what may be absent."""
        return not self.rest and (self.text or "").lower() in ("none", "null")

    def members(self) -> list[_Given]:
        """One setting for each member in a table for a group; another setting as it is."""
        written, path, origin = self.setting.written, self.setting.path, self.setting.origin
        if self.rest or not isinstance(written, dict) or not written:
            return [self]
        return [_Given(n, UserSetting(f"{path}.{n}", w, origin)) for n, w in written.items()]


class _Overrides:
    """Puts settings onto a tree of options.

    Args:
        top: the tree, or the type of a table's entry, where the nearest name to a wrong one is looked up.
        path: of ``top``.
    """

    def __init__(self, applied: Applied, top: Any, path: str = "") -> None:
        self._applied, self._top, self._path = applied, top, path
        self._problems = applied.problems

    def group(self, options: Any, given: Iterable[_Given], path: str = "") -> Any:
        """The group of options at ``path`` (with a dot behind) with the settings below it."""
        types, below = hints(type(options)), dict[str, list[_Given]]()
        names = {f.name for f in dataclasses.fields(options)}
        for one in given:
            head, _, rest = one.rest.partition(".")
            if head in names:
                below.setdefault(head, []).append(_Given(rest, one.setting))
            else:
                self._problems.append(self._unknown(options, head, one.setting, path))
        before, own = len(self._problems), list[ConfigError]()
        changed = {
            name: self._value(types[name], getattr(options, name), ones, path + name)
            for name, ones in below.items()
        }
        with collected(own):
            return dataclasses.replace(options, **changed) if changed else options
        if len(self._problems) == before:
            # With a member refused already, checks between members would speak of a mixture.
            self._problems += [_located(p, path, self._applied.origins, changed) for p in own]
        return options

    def _value(self, kind: Any, value: Any, given: list[_Given], path: str) -> Any:
        """The value of a field of type ``kind`` at ``path`` with the settings for it and below it."""
        group, entry = nested(kind), table_of(kind)
        if group or entry:
            given = [member for one in given for member in one.members()]
        if group:
            return self._nested(group, value, given, path, optional=group is not kind)
        whole = [one for one in given if not entry or not one.rest]
        value = self._plain(kind, value, whole, path) if whole else value
        if not entry or len(whole) == len(given):
            return value
        entries, found = dict[str, list[_Given]](), dict(value)
        for one in given:
            if one.rest:
                name, rest = split_entry(entry, one.rest)
                entries.setdefault(name, []).append(_Given(rest, one.setting))
        for name, ones in entries.items():
            here = f"{path}.{name}"
            value = _Overrides(self._applied, entry, f"{here}.")._entry(
                entry, found.get(name), ones, here
            )
            found |= {} if value is None else {name: value}
        return found

    def _entry(self, entry: type, value: Any, given: list[_Given], path: str) -> Any:
        """An entry of a table of groups; an empty one has all defaults. None: it can't be made."""
        bare = [one for one in given if not one.rest and one.setting.written in ({}, Text(""))]
        if is_choice(entry) or not bare:
            return self._value(entry, value, given, path)
        self._record(*(one.setting for one in bare))
        value = defaults_of(entry) if value is None else value
        return self._value(entry, value, [one for one in given if one not in bare], path)

    def _nested(
        self, group: Any, former: Any, given: list[_Given], path: str, *, optional: bool
    ) -> Any:
        """A group or a choice: first whether there is one and of which kind, then its members."""
        choice, value, before = is_choice(group), former, len(self._applied.settings)
        kinds, members, named = list[_Given](), list[_Given](), list[UserSetting]()
        for one in given:
            absent = optional and one.is_none
            if not absent and not (choice and one.rest in ("", KIND)):
                members.append(one)
                continue
            kinds.append(one)
            named.append(replace(one.setting, path=path if absent else f"{path}.{KIND}"))
            value = None if absent else self._chosen(group, former, one, path)
        if kinds:
            absent, of_file = value is None, [one.text for one in kinds if not one.of_words]
            twice = [*spelled_twice([*named, *(one.setting for one in members if absent)])]
            self._problems += twice
            if twice or value is _UNKNOWN:
                return former
            self._record(*named)
            if kinds[-1].of_words and (absent or of_file[-1:] not in ([], [kinds[-1].text])):
                members = [one for one in members if one.of_words]  # the file's were for another
        if choice and value is None:
            fix = f"add {_alternatives(path, registry.names(group.choice))}, or leave it out"
            for setting in (one.setting for one in members):
                where = f"{setting.path}, {setting.origin}"
                self._problems.append(ConfigError(f"{path} is none", where=where, fix=fix))
            return None
        wrong = [one.setting.origin for one in members if not one.rest]
        self._problems += [_not_a_value(path, group, origin) for origin in wrong]
        if len(wrong) == len(members):
            return value
        value = defaults_of(group) if value is None else value
        value = self.group(value, [one for one in members if one.rest], f"{path}.")
        return value if len(self._applied.settings) > before else former

    def _chosen(self, choice: Any, former: Any, one: _Given, path: str) -> Any:
        """What a choice becomes by a setting that names its kind."""
        where = f"{path}, {one.setting.origin}"
        with collected(self._problems):
            if one.text is None:
                what = f"{path} is {shown(one.setting.written)} (a single value is needed here)"
                fix = f"use {_alternatives(path, registry.names(choice.choice))}"
                raise ConfigError(what, where=where, fix=fix)
            kind = kind_named(choice, one.text, where=where)
            return former if type(former) is kind else defaults_of(kind)
        return _UNKNOWN

    def _plain(self, kind: Any, value: Any, given: list[_Given], path: str) -> Any:
        """A single value, or a table of plain ones, of which each setting may give one."""
        if not is_mapping(kind):
            for one in given:
                if one.rest:
                    self._problems.append(_single(path, one.rest, one.setting))
            given = [one for one in given if not one.rest]
        self._problems += spelled_twice([one.setting for one in given])
        for one in given:
            # A key may have dots, where the table is none of anything or of tables.
            nests = any(inner is Any or is_mapping(inner) for inner in typing.get_args(kind))
            keys = one.rest.split(".") if nests else [one.rest]
            written = one.setting.written
            for key in reversed(keys if one.rest else ()):
                written = {key: written}
            with collected(self._problems):
                new = read(kind, written, path=one.setting.path, origin=one.setting.origin)
                value = _merged(value or {}, new) if one.rest else new
                self._record(one.setting)
        return value

    def _record(self, *settings: UserSetting) -> None:
        self._applied.settings += settings
        self._applied.origins |= {setting.path: setting.origin for setting in settings}

    def _unknown(self, group: Any, name: str, setting: UserSetting, path: str) -> ConfigError:
        if is_choice(type(group)) and name == KIND:
            return _single(path + KIND, setting.path.removeprefix(f"{path}{KIND}."), setting)
        kinds: list[Any] = possible(group) if is_choice(type(group)) else []
        having = [k.kind for k in kinds if name in {f.name for f in dataclasses.fields(k)}]
        if having:
            what = f"{group.choice} {group.kind} has no {name}"
            fix = f"add {_alternatives(path.rstrip('.'), having)}, or leave it out"
            return UnknownName(what, where=f"{setting.path}, {setting.origin}", fix=fix)
        fix = _NO_SETTINGS.get(setting.path) or nearest(setting.path, self._top, path=self._path)
        for choice, kind in _choices(group) if not path else ():  # schedule=async for mode=async
            if setting.written == Text(kind):
                fix = f"did you mean {choice}={kind}?"
        return UnknownName(f"no option called {setting.path!r}", where=setting.origin, fix=fix)


def _choices(group: Any) -> Iterator[tuple[str, str]]:
    """Names of a group's choices, each with the names of its kinds."""
    for f in dataclasses.fields(group):
        if is_choice(type(getattr(group, f.name))):
            choice = getattr(group, f.name).choice
            yield from ((f.name, kind) for kind in registry.names(choice))


def _alternatives(path: str, kinds: Sequence[str]) -> str:
    """``schedule=async or schedule=rollout``."""
    return " or ".join(f"{path}={kind}" for kind in kinds) or f"{path}=KIND"


def _single(path: str, below: str, setting: UserSetting) -> ConfigError:
    what = f"{path} is a single value, it has no {below!r}"
    return UnknownName(what, where=setting.origin, fix=f"write {path}=VALUE")


def _not_a_value(path: str, group: type, origin: str) -> ConfigError:
    members = ", ".join(f"{path}.{f.name}" for f in dataclasses.fields(group)[:4])
    return ConfigError(
        f"{path} is a group of options, not a value",
        where=f"{path}, {origin}",
        fix=f"set its members: {members}, …",
    )


def _merged(table: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """``new`` on top of ``table``, tables within them alike."""
    both = [k for k in new if isinstance(table.get(k), Mapping) and isinstance(new[k], Mapping)]
    return {**table, **new, **{key: _merged(table[key], new[key]) for key in both}}


def _located(
    problem: ConfigError, path: str, origins: dict[str, str], changed: dict[str, Any]
) -> ConfigError:
    """A dataclass's own complaint, with the settings that it is about."""
    group = path.rstrip(".") or "options"
    told = [origins[path + name] for name in changed if path + name in origins]
    where = f"{group} ({problem.where})" + (f", {'; '.join(told)}" if told else "")
    return ConfigError(problem.what, where=where, fix=problem.fix)
