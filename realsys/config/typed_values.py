"""Text that a user wrote, on the command line or in YAML, as a value of a field's type.

For overrides.py. The type decides what the text means, so `path=1e5` stays text and `lr=1e-5` is a
number without quoting either. Pure; raises one ConfigError a value, with the text and the expected
type. YAML is read without guessing types (every scalar stays text) for the same reason.
"""

from __future__ import annotations

import enum
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from realsys.api.errors import ConfigError
from realsys.config.option_tree import is_mapping, members, type_text

MAX_NODES = 100_000  # of one file or word
_NONE = ("none", "null", "~")
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_WHOLE = re.compile(r"[-+]?[0-9][0-9_]*")
_MOST_DIGITS = 100  # int() refuses some thousands, and takes its time over fewer
_NUMBER = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class Text:
    """A scalar as it was written. ``quoted`` text is never none, a number or a flag."""

    text: str
    quoted: bool = False


Written = Text | list[Any] | dict[str, Any]  # lists and tables of Written


class _Misfit(Exception):
    """The text is no value of the type."""


def read(kind: Any, written: Written, *, path: str, origin: str) -> Any:
    """The value of type ``kind`` that was written for option ``path``.

    Raises:
        ConfigError: it is none; echoes what was written and says what is expected.
    """
    try:
        return _read(kind, written)
    except _Misfit as misfit:
        shown = written.text if isinstance(written, Text) else _plain(written)
        raise ConfigError(
            f"{path} is {shown!r}" + (f" ({misfit})" if str(misfit) else ""),
            where=f"{path}, {origin}",
            fix=f"use {_article(type_text(kind))}",
        ) from None


def parse_flow(text: str) -> Written:
    """``[1, 2]`` and ``{a: b}`` as lists and tables; other text as it is."""
    if text[:1] not in ("[", "{", '"', "'"):
        return Text(text)
    import yaml

    try:
        node = yaml.compose(text)
    except (yaml.YAMLError, RecursionError):
        return Text(text)
    return Text(text) if node is None else from_node(plain_tree(node, where="command line"))


def plain_tree(node: Any, *, where: str) -> Any:
    """A composed YAML node, if it is a tree whose keys are texts, and of a size that a person can mean.

    Raises:
        ConfigError: a key is a list or table, or an alias (``*name``) stands inside what it names, or
            aliases of aliases unfold to more than MAX_NODES.
    """
    count, todo = 0, [(node, frozenset[int]())]
    while todo:
        here, above = todo.pop()
        count, above = count + 1, above | {id(here)}
        below = list(here.value) if here.id == "sequence" else []
        for key, value in here.value if here.id == "mapping" else ():
            if key.id != "scalar":
                raise _no_settings("a name is a list or a table", key, where)
            below.append(value)
        if any(id(one) in above for one in below):
            raise _no_settings("a value holds itself, by an alias (*name)", here, where)
        if count > MAX_NODES:
            raise _no_settings(f"more than {MAX_NODES:,} values", here, where)
        todo += [(one, above) for one in below]
    return node


def _no_settings(what: str, node: Any, where: str) -> ConfigError:
    line = "" if where == "command line" else f":{node.start_mark.line + 1}"
    return ConfigError(f"no table of settings: {what}", where=where + line, fix="write NAME: VALUE")


def from_node(node: Any) -> Written:
    """A composed YAML node with every scalar as text."""
    if isinstance(node.value, str):
        return Text(node.value, quoted=node.style in ("'", '"', "|", ">"))
    if node.id == "sequence":
        return [from_node(item) for item in node.value]
    table: dict[str, Any] = {}
    for key, value in node.value:
        if key.value in table:
            raise ConfigError(
                f"{key.value} is given twice in one table",
                where=f"{key.value}, line {key.start_mark.line + 1}",
                fix="keep one of them",
            )
        if isinstance(key.value, str):
            table[key.value] = from_node(value)
    return table


def _read(kind: Any, written: Written) -> Any:
    options = members(kind)
    if type(None) in options and _is_none(written):
        return None
    kinds = [k for k in options if k is not type(None)]
    for i, one in enumerate(kinds):
        try:
            return _read_one(one, written)
        except _Misfit:
            if i == len(kinds) - 1:
                raise
    raise _Misfit


def _is_none(written: Written) -> bool:
    if not isinstance(written, Text) or written.quoted:
        return False
    return written.text.lower() in (*_NONE, "")


def _read_one(kind: Any, written: Written) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is object:
        return _guess(written)
    if is_mapping(kind):
        return _read_mapping(args, written)
    if (origin or kind) in (tuple, list, frozenset, set):
        return _read_list(origin or kind, args, written)
    if not isinstance(written, Text):
        raise _Misfit("a single value is needed here")
    if origin is typing.Literal:
        return _choice({str(a): a for a in args}, written.text)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _choice({str(member.value): member for member in kind}, written.text)
    readers = {str: _text, bool: _flag, int: _whole, float: _number}
    if kind not in readers:
        raise _Misfit("this option can't be set from text")
    return readers[kind](written)


def _text(written: Text) -> str:
    text = written.text
    if not written.quoted and len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        inner = parse_flow(text)
        return inner.text if isinstance(inner, Text) else text
    return text


def _flag(written: Text) -> bool:
    word = written.text.lower()
    if written.quoted or word not in (*_TRUE, *_FALSE):
        raise _Misfit
    return word in _TRUE


def _whole(written: Text) -> int:
    if _WHOLE.fullmatch(written.text):
        digits = written.text.replace("_", "")
        number = int(digits) if len(digits) <= _MOST_DIGITS else math.inf
    else:
        number = _number(written)  # 1e4 is a whole number too
        if not number.is_integer():
            raise _Misfit("not whole")
    if abs(number) >= 2**63:
        raise _Misfit("too large")
    return int(number)


def _number(written: Text) -> float:
    if not _NUMBER.fullmatch(written.text):
        finite = written.text.lstrip("+-.").lower() not in ("nan", "inf", "infinity")
        raise _Misfit("" if finite else "not finite")
    number = float(written.text.replace("_", ""))
    if not math.isfinite(number):
        raise _Misfit("too large")
    return number


def _choice(known: Mapping[str, Any], text: str) -> Any:
    if text not in known:
        raise _Misfit
    return known[text]


def _read_list(container: Any, args: tuple[Any, ...], written: Written) -> Any:
    if isinstance(written, Text):  # 1,2,3
        written = [Text(part.strip()) for part in written.text.split(",") if part.strip()]
    if not isinstance(written, list):
        raise _Misfit("a list is needed here")
    if container is tuple and args and args[-1] is not Ellipsis:
        if len(args) != len(written):
            raise _Misfit(f"{len(args)} values are needed")
        return tuple(_read(k, w) for k, w in zip(args, written, strict=True))
    return container(_read(args[0] if args else Any, item) for item in written)


def _read_mapping(args: tuple[Any, ...], written: Written) -> dict[Any, Any]:
    if not isinstance(written, dict):
        raise _Misfit("a table is needed here, e.g. {name: value}")
    key_kind, value_kind = args or (str, Any)
    return {_read(key_kind, Text(k)): _read(value_kind, v) for k, v in written.items()}


def _guess(written: Written) -> Any:
    """A value of no declared type: YAML's reading, with 1e-5 as a number."""
    if isinstance(written, list):
        return [_guess(item) for item in written]
    if isinstance(written, dict):
        return {key: _guess(value) for key, value in written.items()}
    if written.quoted:
        return written.text
    if _is_none(written):
        return None
    for reader in (_flag, _whole if _WHOLE.fullmatch(written.text) else _number):
        try:
            return reader(written)
        except _Misfit:
            continue
    return written.text


def _plain(written: Written) -> Any:
    if isinstance(written, Text):
        return written.text
    if isinstance(written, list):
        return [_plain(item) for item in written]
    return {key: _plain(value) for key, value in written.items()}


def _article(words: str) -> str:
    if words.split(" ", 1)[0] in ("text", "true", "one", "any"):
        return words
    return f"a {words}"
