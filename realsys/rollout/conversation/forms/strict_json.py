"""JSON of calls: strictly valid text in, compact text out, every refusal a ValueError.

NaN, infinities and a key that stands twice in an object are refused: JSON has none of the former, and which
value of the latter was meant is nobody's to choose.
"""

from __future__ import annotations

import json
from collections import Counter
from math import isinf
from typing import Any, NoReturn

from realsys.rollout.conversation.forms.parsed_answer import ParsedCall


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"not valid JSON: {name}")


def _finite(digits: str) -> float:
    if isinf(number := float(digits)):
        raise ValueError(f"the number {digits[:20]} is too large")
    return number


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:  # Python's limit of digits
        raise ValueError(f"the number {digits[:20]}… is too long") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:40]!r} stands there twice")
    return made


_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant,
    parse_float=_finite,
    parse_int=_integer,
    object_pairs_hook=_object,
)
_WHITE = " \t\r\n"


def read_json_at(text: str, start: int) -> tuple[Any, int]:
    """Reads the JSON value that begins exactly at ``start``; returns it and where it ends.

    Raises:
        ValueError: there is none; also if it is nested too deeply for Python's parser.
    """
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("not valid JSON: nested too deeply") from error


def read_json(text: str) -> Any:
    """Reads text that is one JSON value with nothing but white space around it.

    Raises:
        ValueError: it is not.
    """
    text = text.strip(_WHITE)
    value, end = read_json_at(text, 0)
    if end < len(text):
        raise ValueError(f"extra text behind the value at character {end}")
    return value


def compact_json(value: Any) -> str:
    """Returns JSON text without spaces. Letters stay letters, except lone surrogates: UTF-8 has none.

    Raises:
        ValueError: the value is nested too deeply for Python's writer.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return text if _is_utf8(text) else json.dumps(value, separators=(",", ":"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def call_of(name: object, arguments: object) -> ParsedCall:
    """Makes the call of a name and arguments that were read.

    Raises:
        ValueError: the name is no text or empty; the arguments are no object.
    """
    if not isinstance(name, str) or not name.strip() or not _is_utf8(name):
        raise ValueError("its name is not a text")
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are not a JSON object")
    return ParsedCall(name=name, arguments=compact_json(arguments))


def call_of_object(value: object, *keys: str) -> ParsedCall:
    """Makes the call of a JSON object that has ``name`` and its arguments under one of ``keys``.

    Raises:
        ValueError: it is no such object.
    """
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    if "name" not in value:
        raise ValueError("it has no 'name'")
    key = next((key for key in keys if key in value), "")
    if not key:
        raise ValueError(f"it has no '{keys[0]}'")
    return call_of(value["name"], value[key])


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
