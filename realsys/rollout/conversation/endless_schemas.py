"""Finds JSON schemas whose references lead back to themselves: no value of them has an end (pure)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

_OF_OBJECTS, _OF_LISTS = ("object",), ("array",)


def is_endless(schema: Mapping[str, Any]) -> bool:
    """Returns whether every value of a schema holds another one of it, and so on.

    >>> is_endless({"$ref": "#"})
    True
    >>> is_endless({"anyOf": [{"$ref": "#"}, {"type": "null"}]})
    False
    """
    ended, waiting, seen = set[str](), dict[str, set[str]](), {"#"}
    left, again = deque(["#"]), set[str]()
    while left:
        name = left.pop()
        again.discard(name)
        asked = set[str]()
        if name in ended or not _has_end(_at(schema, name), asked, ended):
            for ref in asked:
                waiting.setdefault(ref, set()).add(name)
            left += asked - seen
            seen |= asked
            continue
        ended.add(name)
        for one in waiting.pop(name, set()) - again:  # behind all that it may wait for, too
            again.add(one)
            left.appendleft(one)
    return "#" not in ended


def _at(schema: Mapping[str, Any], ref: str) -> Any:
    """Returns what a reference names; None: nothing of this schema, which its reader tells."""
    place: Any = schema
    for step in unquote(ref.removeprefix("#")).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping):
            place = place.get(key)
        elif isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        else:
            return None
    return place


def _has_end(schema: Any, asked: set[str], ended: set[str]) -> bool:
    """Returns whether a value of a schema has an end, as far as is known.

    Args:
        asked: takes the references for which that is not known. ended: those for which it is.
    """
    if not isinstance(schema, Mapping) or schema.keys() & {"const", "enum"}:
        return True
    ref = schema.get("$ref")
    if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")) and ref not in ended:
        asked.add(ref)
        return False
    if not _all_have_ends(_schemas(schema, "allOf"), asked, ended):
        return False
    for key in ("anyOf", "oneOf"):
        ways = [_has_end(one, asked, ended) for one in _schemas(schema, key)]
        if ways and not any(ways):
            return False
    kinds = schema.get("type")
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds) if isinstance(kinds, list) else ()
    if kinds == _OF_OBJECTS:
        return _object_has_end(schema, asked, ended)
    return kinds != _OF_LISTS or _list_has_end(schema, asked, ended)


def _object_has_end(schema: Mapping[str, Any], asked: set[str], ended: set[str]) -> bool:
    names, others = schema.get("required"), schema.get("additionalProperties")
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    needed = names if isinstance(names, list) else []
    return _all_have_ends(
        [known.get(n, others) for n in needed if isinstance(n, str)], asked, ended
    )


def _list_has_end(schema: Mapping[str, Any], asked: set[str], ended: set[str]) -> bool:
    least, first = schema.get("minItems"), _schemas(schema, "prefixItems")
    if not isinstance(least, int) or least < 1:
        return True
    more = [schema.get("items")] if least > len(first) else []
    return _all_have_ends([*first[:least], *more], asked, ended)


def _all_have_ends(schemas: Sequence[Any], asked: set[str], ended: set[str]) -> bool:
    found = [_has_end(one, asked, ended) for one in schemas]  # each asks for what it waits for
    return all(found)


def _schemas(schema: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else ()
