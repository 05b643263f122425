"""What a body holds its reply to: the API's own JSON schema, or a field of other open servers (pure).

vLLM's ``guided_*`` and ``structured_outputs``, SGLang's ``json_schema`` and ``regex``. A run may ignore the
API's own schema; what stands in these fields is held to, or refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import msgspec

from realsys.api.errors import DataError
from realsys.rollout.dialects.body_fields import bounded, refused

MAX_CHOICES = 1024
MAX_PATTERN = 8192  # characters
WAYS = "send a JSON schema, a list of choices (guided_choice) or a regex (guided_regex)"
# Part of structured_outputs → the field that asks for the same
_PARTS: Mapping[str, str] = {
    "json": "guided_json",
    "json_object": "json_object",
    "choice": "guided_choice",
    "regex": "guided_regex",
}
_FREE_PARTS = ("disable_any_whitespace", "disable_fallback")  # so it is in any case


class HeldFields(TypedDict, total=False):
    """Fields of a ``ChatRequest``."""

    schema: Mapping[str, Any] | None
    schema_field: str
    choices: tuple[str, ...]
    pattern: str
    must_hold: bool


def held_fields(fields: Any, schema: Mapping[str, Any] | None, schema_field: str) -> HeldFields:
    """Returns what the reply is held to.

    Args:
        fields: an ``ExtraFields``.
        schema: of the API's own field, which is ``schema_field``.
    Raises:
        DataError: a field is malformed, or two of them are there.
    """
    asked = list(_asked(fields))
    if schema is None and not asked:
        return {"schema": None, "schema_field": schema_field}
    names = [schema_field] * (schema is not None) + [where for _, where, _ in asked]
    if len(names) > 1:
        raise refused(
            f"a reply can't be held to both this and {names[0]}",
            where=names[1],
            fix="leave one of them out",
        )
    if not asked:
        return {"schema": schema, "schema_field": schema_field}
    kind, where, value = asked[0]
    own: HeldFields = {"schema_field": where, "must_hold": True}
    match kind:
        case "guided_choice":
            own["choices"] = _choices(value, where)
        case "guided_regex" | "regex":
            own["pattern"] = _pattern(value, where)
        case "json_object":
            own["schema"] = {"type": "object"}
        case _:
            own["schema"] = _schema(value, where)
    return own


def _asked(fields: Any) -> Iterator[tuple[str, str, Any]]:
    """Yields kind, path and value of each field that is there. An empty text or list asks for nothing."""
    for name in ("guided_json", "json_schema", "guided_choice", "guided_regex", "regex"):
        value = getattr(fields, name)
        if value is not None and value is not False and value not in ("", []):
            yield name, name, value
    parts = fields.structured_outputs
    if parts is None or parts == {}:
        return
    if not isinstance(parts, Mapping):
        raise refused("expected an object", where="structured_outputs", fix='send {"json": …}')
    for part, value in parts.items():
        where = f"structured_outputs.{part}" if part.isidentifier() else "structured_outputs"
        if value is None or value is False or value in ("", []):
            continue
        if part in _PARTS:
            yield _PARTS[part], where, value
        elif part not in _FREE_PARTS:
            raise refused("not served here", where=where, fix=WAYS)


def _schema(value: Any, where: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _malformed(f"no JSON: {error}"[:200], where) from None
    if not isinstance(value, Mapping):
        raise _malformed("expected a JSON schema", where)
    return value


def _choices(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _malformed("expected a list of texts", where)
    bounded(value, MAX_CHOICES, where)
    return tuple(value)


def _pattern(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_PATTERN:
        raise _malformed(f"expected a regex of {MAX_PATTERN} characters at most", where)
    return value


def _malformed(what: str, where: str) -> DataError:
    return refused(what, where=where, fix=WAYS)
