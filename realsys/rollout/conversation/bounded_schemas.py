"""Bounds in JSON schemas for what a small policy may write without an end (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Format of a text → most characters, where the schema names none. Of a time: nanoseconds, and a zone.
FORMAT_CHARS: Mapping[str, int] = MappingProxyType(
    {"date-time": 35, "time": 24, "duration": 64, "email": 254, "hostname": 253, "uri": 2048}
)
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType(
    {"type": "object", "properties": {}, "additionalProperties": False}
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_TABLES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames"),
    *("not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
)
# By these an object has properties that ``properties`` does not list
_OTHER_PROPERTIES = (
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "required"),
    *(
        "allOf",
        "anyOf",
        "oneOf",
        "$ref",
        "if",
        "minProperties",
        "dependentSchemas",
        "enum",
        "const",
    ),
)


def with_bounds(schema: Any) -> Any:
    """Returns a schema whose texts of a format without an end have a ``maxLength``; data in it, as
    ``const`` and ``enum``, stay as they are."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for key, inner in schema.items():
        if key in _TABLES and isinstance(inner, Mapping):
            made[key] = {name: with_bounds(one) for name, one in inner.items()}
        elif key in _LISTS and isinstance(inner, list | tuple):
            made[key] = [with_bounds(one) for one in inner]
        elif key in _SCHEMAS:
            made[key] = with_bounds(inner)
    kind = schema.get("format")
    most = FORMAT_CHARS.get(kind) if isinstance(kind, str) else None
    if most is not None and not schema.keys() & {"maxLength", "const", "enum"}:
        least = schema.get("minLength")
        made["maxLength"] = max(most, 2 * least) if isinstance(least, int) else most
    return made


def schema_of_arguments(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns the schema of a tool's arguments. A tool without parameters, or with an empty list of them,
    takes none.

    >>> schema_of_arguments(None) == schema_of_arguments({}) == dict(NO_ARGUMENTS)
    True
    >>> schema_of_arguments({"type": "object"})
    {'type': 'object'}
    """
    if not parameters:
        return dict(NO_ARGUMENTS)
    made = {"type": "object", **parameters}
    lists_none = "properties" in made and not made["properties"]
    if lists_none and not made.keys() & set(_OTHER_PROPERTIES):
        made["additionalProperties"] = False
    return made
