"""Values of arguments that a family writes as bare text: the tool's schema tells numbers from texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realsys.rollout.conversation.forms.strict_json import read_json

# How templates spell these without JSON: as Python does.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def properties_of(schema: object) -> Mapping[str, Any]:
    """Returns the schemas of a tool's parameters. Clients write them, so that they may be anything."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def read_value(value: str, schema: object) -> Any:
    """Reads a value as its schema says; without schema as JSON if it is, otherwise as text."""
    types = _types(schema)
    if types == {"string"}:
        return value
    if types and value in _PYTHON_WORDS and types & {"boolean", "null"}:
        return _PYTHON_WORDS[value]
    try:
        read = read_json(value)
    except ValueError:
        return value
    # Where texts are allowed, what looks like JSON is one unless its own type is allowed as well.
    return value if "string" in types and not _json_types(read) & types else read


def _types(schema: object) -> set[str]:
    """Returns the JSON types that a schema names, in ``type`` or in the branches of ``anyOf``."""
    branches = schema.get("anyOf") if isinstance(schema, Mapping) else None
    types = set[str]()
    for branch in (schema, *(branches if isinstance(branches, list) else ())):
        named = branch.get("type") if isinstance(branch, Mapping) else None
        types.update(
            n for n in (named if isinstance(named, list) else [named]) if isinstance(n, str)
        )
    return types


def _json_types(value: object) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case None:
            return {"null"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}
