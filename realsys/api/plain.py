"""Dataclasses to plain JSON values and back, exactly.

For what is written to disk and read by workers (the launch plan, the trial record). Enums become
their value, tuples become lists, a choice carries its ``"kind"``, and where a field may hold one of
several other dataclasses the value carries ``"type"``. ``from_plain`` refuses unknown fields and
wrong types with the path to the value. User configuration goes through realsys/config/overrides.py
instead, which reports all mistakes at once.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from realsys.api.basics.choice import KIND, is_choice, kind_named
from realsys.api.errors import ConfigError, did_you_mean

T = TypeVar("T")
_Seen = dict[tuple[int, int], Any] | None  # (kind, data), by identity → what was read
_SCALARS = (str, int, float, bool)
_AS_THEY_ARE = frozenset({*_SCALARS, type(None)})
_SEQUENCES = (list, tuple, frozenset, set)
# Types of the fields of a dataclass, resolved.
hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def to_plain(value: Any, *, seen: dict[int, Any] | None = None) -> Any:
    """``value`` as dicts, lists, strings, numbers, booleans and None.

    Args:
        seen: an empty dict: what stands in ``value`` several times is turned once, and is one object
            several times in the result, which must not be changed then. For thousands of workers
            that share their model's description.
    """
    kind: Any = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if (names := _names(kind)) is not None:
        if seen is not None and id(value) in seen:
            return seen[id(value)]
        plain = {
            name: part if type(part) in _AS_THEY_ARE else to_plain(part, seen=seen)
            for name, part in ((name, getattr(value, name)) for name in names)
        }
        if getattr(kind, "sparse", False):  # written without what is not set
            plain = {name: part for name, part in plain.items() if part not in (None, {})}
        plain = {**_tag(kind), **plain}
        if seen is not None:
            seen[id(value)] = plain
        return plain
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, _SCALARS):  # a subclass
        return value
    if isinstance(value, Mapping):
        return {str(to_plain(k)): to_plain(v, seen=seen) for k, v in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(to_plain(v, seen=seen) for v in value)
    if isinstance(value, list | tuple):
        return [to_plain(v, seen=seen) for v in value]
    raise ConfigError(
        f"a {type(value).__name__} can't be written to a plan",
        where=repr(value)[:80],
        fix="use strings, numbers, booleans, lists, dicts or dataclasses",
    )


def from_plain(kind: type[T], data: Any, *, where: str = "", seen: _Seen = None) -> T:
    """The value of type ``kind`` that ``to_plain`` turned into ``data``.

    Args:
        seen: an empty dict: what stands in ``data`` several times as one object is read once, and is
            one object several times in the result.
    Raises:
        ConfigError: naming the path of the value that does not fit.
    """
    return typing.cast(T, _read(kind, data, where or getattr(kind, "__name__", str(kind)), seen))


@functools.cache
def _tag(kind: Any) -> dict[str, str]:
    """What tells a kind of a choice, or a member of a union of dataclasses, from the others."""
    if is_choice(kind):
        return {KIND: kind.kind}
    name = kind.__name__
    return {"type": name} if name in ("ParamReallocHook", "OffloadHook") else {}


@functools.cache
def _names(kind: type) -> tuple[str, ...] | None:
    """Returns the names of the fields; None for what is no dataclass."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(f.name for f in dataclasses.fields(kind))


def _read(kind: Any, data: Any, where: str, seen: _Seen) -> Any:
    if kind is type(data) and kind in _SCALARS:
        return data
    if seen is None or not isinstance(data, dict | list):
        return _read_new(kind, data, where, seen)
    at = id(kind), id(data)
    if at not in seen:
        seen[at] = _read_new(kind, data, where, seen)
    return seen[at]


def _read_new(kind: Any, data: Any, where: str, seen: _Seen) -> Any:
    if kind is Any or kind is object:
        return data
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _read_union(args, data, where, seen)
    if origin is typing.Literal:
        return data if data in args else _refuse(f"one of {list(args)}", data, where)
    if is_choice(kind):
        name = data.get(KIND) if isinstance(data, dict) else None
        if not isinstance(name, str):
            _refuse(f"a table with kind: the name of a {kind.choice}", data, where)
        kind = kind_named(kind, str(name), where=where)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, data, where, seen)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if data not in [member.value for member in kind]:
            _refuse(f"one of {[m.value for m in kind]}", data, where)
        return kind(data)
    container = origin or kind
    if isinstance(container, type) and issubclass(container, Mapping):
        return _read_mapping(args, data, where, seen)
    if container in _SEQUENCES or getattr(container, "__name__", "") == "Sequence":
        return _read_sequence(container, args, data, where, seen)
    return _read_scalar(kind, data, where)


def _read_union(args: tuple[Any, ...], data: Any, where: str, seen: _Seen) -> Any:
    if data is None:
        return None if type(None) in args else _refuse("a value", data, where)
    options = [a for a in args if a is not type(None)]
    variants = {
        a.__name__: a for a in options if isinstance(a, type) and dataclasses.is_dataclass(a)
    }
    if len(variants) > 1:
        tag = data.get("type") if isinstance(data, dict) else None
        if tag not in variants:
            _refuse(f"a table with type: one of {sorted(variants)}", data, where)
        return _read(variants[str(tag)], data, where, seen)
    errors = []
    for option in options:
        try:
            return _read(option, data, where, seen)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _read_dataclass(kind: Any, data: Any, where: str, seen: _Seen) -> Any:
    if not isinstance(data, dict):
        _refuse(f"a table of {kind.__name__}", data, where)
    data = {k: v for k, v in data.items() if k not in _tag(kind)}
    known = {f.name for f in dataclasses.fields(kind) if f.init}
    for name in data:
        if name not in known:
            raise ConfigError(
                f"unknown field {name!r}", where=where, fix=did_you_mean(str(name), known)
            )
    types = hints(kind)
    values = {name: _read(types[name], v, f"{where}.{name}", seen) for name, v in data.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(str(error), where=where, fix="give the missing fields") from None


def _read_mapping(args: tuple[Any, ...], data: Any, where: str, seen: _Seen) -> dict[Any, Any]:
    if not isinstance(data, dict):
        _refuse("a table", data, where)
    key_kind, value_kind = args if args else (Any, Any)

    def read_key(key: Any) -> Any:
        if key_kind is not int:
            return _read(key_kind, key, where, seen)
        try:
            return int(key)
        except ValueError:
            return _refuse("whole numbers as keys", key, where)

    return {read_key(k): _read(value_kind, v, f"{where}[{k!r}]", seen) for k, v in data.items()}


def _read_sequence(
    container: Any, args: tuple[Any, ...], data: Any, where: str, seen: _Seen
) -> Any:
    if not isinstance(data, list | tuple):
        _refuse("a list", data, where)
    if container is tuple and args and args[-1] is not Ellipsis:
        if len(args) != len(data):
            _refuse(f"a list of {len(args)}", data, where)
        return tuple(_read(k, v, f"{where}[{i}]", seen) for i, (k, v) in enumerate(zip(args, data)))  # noqa: B905
    item = args[0] if args else Any
    items = [_read(item, v, f"{where}[{i}]", seen) for i, v in enumerate(data)]
    return (
        items
        if container is list
        else (frozenset(items) if container in (set, frozenset) else tuple(items))
    )


def _read_scalar(kind: Any, data: Any, where: str) -> Any:
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        return float(data)
    if kind is int and isinstance(data, bool):
        _refuse("a whole number", data, where)
    if isinstance(kind, type) and isinstance(data, kind):
        return data
    return _refuse(f"a {getattr(kind, '__name__', kind)}", data, where)


def _refuse(expected: str, data: Any, where: str) -> Any:
    raise ConfigError(
        f"expected {expected}, found {type(data).__name__} {str(data)[:60]!r}",
        where=where,
        fix="correct the value",
    )
