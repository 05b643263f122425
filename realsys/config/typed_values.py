"""Text that a user wrote, on the command line or in YAML, as a value of a field's type.

For overrides.py. The type decides what the text means, so `path=1e5` stays text and `lr=1e-5` is a
number without quoting either; pydantic then validates the whole value strictly. YAML is read without
guessing types (every scalar stays text) for the same reason. Pure; raises one ConfigError a value.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import re
import typing
from dataclasses import dataclass
from typing import Any

from realsys.api.errors import ConfigError
from realsys.config.option_tree import is_mapping, members, type_text

MAX_NODES = 100_000  # of one file or word
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_WHOLE = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_NAME = re.compile(r"[-+]?0[0-9_]*[0-9]")  # whole, but no one writes a number so
_MOST_DIGITS = 100  # int() refuses some thousands, and takes its time over fewer
_NUMBER = re.compile(r"[-+]?([0-9]+(_[0-9]+)*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTAINERS = (tuple, list, frozenset, set)
_SHOWN_CHARS = 200  # of a wrong value


@dataclass(frozen=True)
class Text:
    """A scalar as it was written. ``quoted`` text is never none, a number or a flag."""

    text: str
    quoted: bool = False


Written = Text | list[Any] | dict[str, Any]  # lists and tables of Written


def read(kind: Any, written: Written, *, path: str, origin: str) -> Any:
    """The value of type ``kind`` that was written for option ``path``.

    Raises:
        ConfigError: it is none; echoes what was written and says what is expected.
    """
    try:
        value = _to_builtins(kind, written)
        if _is_scalar_of(kind, value):
            return value
        text = json.dumps(value)
    except RecursionError:
        reason = "values within values without end"
    else:
        from pydantic import ValidationError

        try:
            return _adapter(kind).validate_json(text)
        except ValidationError as error:
            *_, last = error.errors(include_url=False)
            reason = _reason(last["type"], last["input"], kind)
    raise ConfigError(
        f"{path} is {shown(written)}" + (f" ({reason})" if reason else ""),
        where=f"{path}, {origin}",
        fix=f"use {_article(type_text(kind))}",
    )


def _is_scalar_of(kind: Any, value: Any) -> bool:
    """Whether a value is a finite scalar of the type itself: pydantic, slow to import, need not see it."""
    if type(value) not in members(kind):
        return False
    if isinstance(value, str):
        return not _SURROGATE.search(value)
    return value is None or (isinstance(value, bool | int | float) and math.isfinite(value))


@functools.cache
def _adapter(kind: Any) -> Any:
    """Validates JSON strictly: true is no number, 1 no flag; 1 is a float, a list a tuple."""
    from pydantic import ConfigDict, TypeAdapter

    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    return TypeAdapter(kind, config=config)


def _reason(error: str, value: Any, kind: Any) -> str:
    """What is wrong, where the type's name alone does not say it."""
    if isinstance(value, str) and value.lstrip("+-.").lower() in ("nan", "inf", "infinity"):
        return "not finite"
    if isinstance(value, float):
        return "not whole" if math.isfinite(value) else "too large"
    if isinstance(value, list | dict) and error in (
        "string_type",
        "int_type",
        "float_type",
        "bool_type",
    ):
        return "a single value is needed here"
    if error in ("missing", "too_long"):
        return f"{len(typing.get_args(kind))} values are needed"
    return {
        "tuple_type": "a list is needed here",
        "list_type": "a list is needed here",
        "frozen_set_type": "a list is needed here",
        "set_type": "a list is needed here",
        "dict_type": "a table is needed here, e.g. {name: value}",
        "json_invalid": "not Unicode text",
        "is_instance_of": "this option can't be set from text",
    }.get(error, "")


def _to_builtins(kind: Any, written: Written) -> Any:
    """What was written as JSON values: text becomes what the type, or one of a union's, takes it for."""
    kinds = [k for k in members(kind) if k is not type(None)]
    if isinstance(written, Text) and kinds[:1] in ([Any], [object]):
        return _guess(written)
    if isinstance(written, Text):
        if len(kinds) < len(members(kind)) and _is_none(written):
            return None
        found = (_scalar(one, written) for one in kinds)
        return next((value for value in found if value is not None), written.text)
    for one in kinds:
        args = typing.get_args(one)
        if isinstance(written, list) and (typing.get_origin(one) or one) in _CONTAINERS:
            fixed = (typing.get_origin(one) or one) is tuple and ... not in args
            each = (
                args if fixed and len(args) == len(written) else (args or (Any,))[:1] * len(written)
            )
            return [_to_builtins(k, w) for k, w in zip(each, written, strict=True)]
        if isinstance(written, dict) and is_mapping(one):
            return {k: _to_builtins((args or (str, Any))[1], w) for k, w in written.items()}
    if isinstance(written, list):
        return [_to_builtins(Any, item) for item in written]
    return {key: _to_builtins(Any, value) for key, value in written.items()}


def _scalar(kind: Any, written: Text) -> Any:
    """The text as a value for ``kind`` to judge; None: it is none such, in any spelling."""
    text = written.text
    if kind is str:
        return _unquoted(written)
    if kind is bool:
        return None if written.quoted else _WORDS.get(text.lower())
    if kind in (int, float):
        return _number(text, kind)
    if (typing.get_origin(kind) or kind) in _CONTAINERS:  # 1,2,3
        parts = [Text(part.strip()) for part in text.split(",") if part.strip()]
        return _to_builtins(kind, parts)
    known = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        known = tuple(member.value for member in kind)
    return next((value for value in known if str(value) == text), None)


def _number(text: str, kind: Any) -> float | int | None:
    """1e4 is a whole number too; what no machine holds is infinite."""
    if _WHOLE.fullmatch(text) and kind is int:
        digits = text.replace("_", "")
        whole = int(digits) if len(digits) <= _MOST_DIGITS else 2**63
        return whole if abs(whole) < 2**63 else math.inf
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text.replace("_", ""))
    if number == 0 and re.search("[1-9]", re.split("[eE]", text)[0]):
        return None  # too small to be told from 0
    if kind is float or not number.is_integer():
        return number
    return int(number) if abs(number) < 2**63 else math.inf


def _guess(written: Text) -> Any:
    """A value of no declared type: YAML's reading, with 1e-5 as a number. 007 is a name and stays text."""
    if _NAME.fullmatch(written.text):
        return written.text
    if written.quoted or _is_none(written):
        return written.text if written.quoted else None
    word = _WORDS.get(written.text.lower())
    number = _number(written.text, int if _WHOLE.fullmatch(written.text) else float)
    finite = number if number is not None and math.isfinite(number) else None
    return next((v for v in (word, finite) if v is not None), written.text)


def _is_none(written: Text) -> bool:
    return not written.quoted and written.text.lower() in ("none", "null", "~", "")


def _unquoted(written: Text) -> str:
    text = written.text
    if not written.quoted and len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        inner = parse_flow(text)
        return inner.text if isinstance(inner, Text) else text
    return text


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
        if "\0" in node.value:
            where = f"line {node.start_mark.line + 1}"
            raise ConfigError("a text holds a NUL character", where=where, fix="leave it out")
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


def shown(written: Written) -> str:
    """What was written, for a message."""
    text = repr(_plain(written))
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


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
