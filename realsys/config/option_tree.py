"""The options of an experiment as a tree of types: every dotted name, its type, default and meaning.

For overrides.py (what may be written, the nearest name to a wrong one) and `realsys show --config`.
Pure; reads dataclass fields and the metadata that realsys.api.options puts beside them.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from realsys.api import registry
from realsys.api.basics.choice import KIND, Choice, is_choice, kinds_of
from realsys.api.plain import hints


@dataclass(frozen=True, kw_only=True)
class OptionRow:
    """One option as `show --config` prints it."""

    path: str
    type: str
    default: Any
    unit: str
    range: str
    meaning: str
    section: bool = False  # a group of options; its default is none, or the kind that is chosen


def members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type itself."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return typing.get_args(kind)
    return (kind,)


def nested(kind: Any) -> type | None:
    """The dataclass, or the choice, of a type ``X`` or ``X | None``; None for a plain value."""
    found = [k for k in members(kind) if is_choice(k) or dataclasses.is_dataclass(k)]
    return found[0] if len(found) == 1 and isinstance(found[0], type) else None


def possible(group: Any) -> list[type]:
    """The dataclasses that a group may be: one, or the kinds of a choice.

    Args:
        group: a type, or a group that is there: its kind comes first.
    """
    if isinstance(group, type):
        return list(kinds_of(group).values()) if is_choice(group) else [group]
    base = next((k for k in reversed(type(group).__mro__) if "choice" in vars(k)), None)
    return list(dict.fromkeys([type(group), *(kinds_of(base).values() if base else ())]))


def is_mapping(kind: Any) -> bool:
    """Whether values of the type are tables with free keys."""
    origin = typing.get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, Mapping)


def table_of(kind: Any) -> type | None:
    """The dataclass of the entries of a table such as ``Mapping[str, PartitionSpec]``; else None."""
    for member in members(kind):
        if is_mapping(member) and len(typing.get_args(member)) == 2:
            return nested(typing.get_args(member)[1])
    return None


def split_entry(entry: type, path: str) -> tuple[str, str]:
    """(name of the entry, what is below it) of a path within a table; a name may hold dots."""
    parts = path.split(".")
    known = {KIND if is_choice(entry) else ""}
    known |= {f.name for kind in possible(entry) for f in dataclasses.fields(kind)}
    ends = (i for i in range(1, len(parts)) if parts[i] in known)
    end = next(ends, 1)
    return ".".join(parts[:end]), ".".join(parts[end:])


def rows(options: Any, *, path: str = "") -> Iterator[OptionRow]:
    """Every option of a dataclass instance, nested, with its value there as the default.

    The values of a group come before the groups inside it.
    """
    groups = [f for f in dataclasses.fields(options) if _is_group(getattr(options, f.name))]
    for f in [*(f for f in dataclasses.fields(options) if f not in groups), *groups]:
        kind, value, name = hints(type(options))[f.name], getattr(options, f.name), path + f.name
        group, choice = f in groups, is_choice(type(value))
        yield OptionRow(
            path=name,
            type=type_text(kind),
            default=value.kind if choice else None if group else value,
            unit=f.metadata.get("unit", ""),
            range=" | ".join(registry.names(value.choice)) if choice else range_text(f.metadata),
            meaning=f.metadata.get("meaning", ""),
            section=group,
        )
        if group:
            yield from rows(value, path=f"{name}.")


def _is_group(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


Declared = tuple[str, type, "dataclasses.Field[Any]", Any]  # name, class that has it, field, type


def declared(options: Any, *, path: str = "", within: tuple[Any, ...] = ()) -> Iterator[Declared]:
    """Every field below a dataclass, groups included; of a choice, those of every kind.

    Args:
        options: the dataclass, or an instance, whose choices then are known to be what they are.
        within: choices that are not entered again, where a kind holds the choice itself.
    """
    for owner in possible(options):
        for f in dataclasses.fields(owner):
            kind, value = hints(owner)[f.name], getattr(options, f.name, None)
            yield path + f.name, owner, f, kind
            inner = value if _is_group(value) else nested(kind)
            if inner is not None and inner not in within:
                entered = (*within, inner) if is_choice(inner) else within
                yield from declared(inner, path=f"{path}{f.name}.", within=entered)


def paths(options: Any, *, path: str = "") -> list[str]:
    """Every dotted name below a dataclass, groups and all kinds of its choices included."""
    return list(dict.fromkeys(name for name, *_ in declared(options, path=path)))


def values(f: dataclasses.Field[Any], kind: Any) -> tuple[str, ...] | None:
    """All values of a field that has few, as a user types them; None: it is a group, and has none."""
    known: list[Any] = list(f.metadata.get("choices", ()))
    for one in members(kind):
        if is_choice(one):
            known += registry.names(one.choice)
        elif dataclasses.is_dataclass(one):
            return None
        elif one is bool:
            known += [True, False]
        elif typing.get_origin(one) is typing.Literal:
            known += typing.get_args(one)
        elif isinstance(one, type) and issubclass(one, enum.Enum):
            known += one
    known += [None] if known and type(None) in members(kind) else []
    return tuple(value_text(value) for value in known)


def value_at(options: Any, path: str) -> Any:
    """The value at a dotted path of a dataclass, also within a table; None if there is none."""
    head, _, rest = path.partition(".")
    if dataclasses.is_dataclass(options):
        value = getattr(options, head, None)
        return value_at(value, rest) if rest else value
    if isinstance(options, Mapping):
        if path in options:
            return options[path]
        return value_at(options.get(head), rest) if rest else None
    return None


def with_value(options: Any, path: str, value: Any) -> Any:
    """The dataclass with another value at a dotted path, also within a table. Raises ConfigError: its own
    checks refuse it.
    """
    head, _, rest = path.partition(".")
    if isinstance(options, Mapping):
        return {**options, head: with_value(options[head], rest, value) if rest else value}
    new = with_value(getattr(options, head), rest, value) if rest else value
    return dataclasses.replace(options, **{head: new})


def nearest(wrong: str, options: Any, *, path: str = "") -> str:
    """What the writer of an unknown dotted name probably meant, as a sentence.

    Args:
        options: as for ``declared``.
        path: of ``options`` itself, where it is an entry of a table.
    """
    known = paths(options, path=path)
    last = wrong.rpartition(".")[2]
    same = [p for p in known if p.rpartition(".")[2] == last]
    close = [] if path else difflib.get_close_matches(wrong, known, n=3, cutoff=0.75)
    ends = {p.rpartition(".")[2] for p in known}
    similar = difflib.get_close_matches(last, ends, n=2, cutoff=0.7)
    alike = [p for end in similar for p in known if p.rpartition(".")[2] == end]
    found = same or [*close, *alike]
    if "." in wrong or not same:  # a bare word that fits exactly keeps the order of the file
        found = sorted(found, key=lambda p: -_likeness(wrong, p))
    best = list(dict.fromkeys(found))[:3]
    if best:
        return "did you mean " + " or ".join(repr(p) for p in best) + "?"
    group = wrong.rpartition(".")[0] + "."
    if beside := [p.removeprefix(group) for p in known if p.startswith(group)]:
        return f"{group.rstrip('.')} has " + ", ".join(name for name in beside if "." not in name)
    return "see `realsys show --config EXPERIMENT`; top-level: " + ", ".join(
        p for p in known if "." not in p
    )


def meant_as_setting(option: str, names: Callable[[], Iterable[str]]) -> str:
    """How to write the unknown ``--option`` if it is a setting's name, or the end of one; else empty.

    Args:
        names: gives the dotted names of all settings.
    """
    wrong = option.lstrip("-").replace("-", "_")
    ending = [name for name in names() if name == wrong or name.endswith(f".{wrong}")]
    if not ending and "." not in wrong:
        return ""
    best = [f"{name}=VALUE" for name in ending[:3]] or ["NAME=VALUE"]
    return "settings have no dashes: write " + " or ".join(best)


def _likeness(wrong: str, path: str) -> float:
    return difflib.SequenceMatcher(None, wrong, path).ratio()


def type_text(kind: Any) -> str:
    """A type in a user's words: ``number``, ``text or none``, ``list of whole numbers``."""
    names = {
        int: "whole number",
        float: "number",
        str: "text",
        bool: "true or false",
        type(None): "none",
    }
    if kind in names:
        return names[kind]
    parts = [k for k in members(kind) if k is not type(None)]
    if len(members(kind)) > 1:
        ordered = [*parts, *([type(None)] if type(None) in members(kind) else [])]
        return " or ".join(type_text(k) for k in ordered)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    if is_mapping(kind):
        return "table"
    if (origin or kind) in (tuple, list, frozenset, set):
        many = {int: "whole numbers", float: "numbers", str: "texts"}
        return f"list of {many.get(args[0], 'values') if args else 'values'}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in kind)
    if is_choice(kind):
        return "one of " + ", ".join(registry.names(kind.choice))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return "group"
    return "any value"


def range_text(metadata: Mapping[str, Any]) -> str:
    """``0 … 1``, ``> 0``, ``constant | linear``."""
    if metadata.get("choices"):
        return " | ".join(map(str, metadata["choices"]))
    low, high = metadata.get("ge"), metadata.get("le")
    if low is not None and high is not None:
        return f"{low:g} … {high:g}"
    above, below = metadata.get("gt"), metadata.get("lt")
    bounds = (("≥", low), (">", above), ("≤", high), ("<", below))
    return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


def value_text(value: Any) -> str:
    """A default as a user would type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return str(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return value_text(_changed(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {value_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(value_text(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return str(value)


def _changed(options: Any) -> dict[str, Any]:
    """Returns the kind of an entry of a table, if it is a choice, and what differs from the defaults."""
    kind = {KIND: options.kind} if isinstance(options, Choice) else {}
    defaults = {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in dataclasses.fields(options)
    }
    given = {name: getattr(options, name) for name in defaults}
    return kind | {name: value for name, value in given.items() if value != defaults[name]}
