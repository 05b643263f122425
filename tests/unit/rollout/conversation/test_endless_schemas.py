"""Which schemas have values with an end, and which go round and round."""

from __future__ import annotations

from typing import Any

import pytest

from realsys.rollout.conversation.endless_schemas import is_endless

LOOP = {"$ref": "#"}
NULL = {"type": "null"}


def node(*required: str, of: Any = LOOP) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": of, "b": NULL}, "required": list(required)}


def at(start: str, **named: Any) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{start}", "$defs": named}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (LOOP, True),
        (at("a", a={"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/a"}), True),
        (at("a~1b", **{"a/b": {"$ref": "#/%24defs/a~1b"}}), True),
        (node("a"), True),
        (node("b"), False),
        (node("c"), False),
        ({**node("c"), "additionalProperties": LOOP}, True),
        ({**node("a"), "type": ["object", "null"]}, False),
        ({"const": {"$ref": "#"}}, False),
        ({"allOf": [NULL, LOOP]}, True),
        ({"anyOf": [LOOP, LOOP]}, True),
        ({"oneOf": [LOOP, NULL]}, False),
        (node("a", of={"anyOf": [LOOP, NULL]}), False),
        ({"type": "array", "items": LOOP}, False),
        ({"type": "array", "items": LOOP, "minItems": 1}, True),
        ({"type": "array", "prefixItems": [NULL], "items": LOOP, "minItems": 1}, False),
        ({"type": "array", "prefixItems": [NULL], "items": LOOP, "minItems": 2}, True),
        (at("a", a=node("a", of={"$ref": "#/$defs/b"}), b={"oneOf": [at("a"), NULL]}), False),
        (at("a", a=node("a", of={"$ref": "#/$defs/b"}), b={"oneOf": [at("a"), at("b")]}), True),
        (at("a", a=node("a", of={"$ref": "#/$defs/b"}), b=node("b")), False),
        ({"$ref": "#/$defs/lost"}, False),  # the schema's reader refuses it
        ({"$ref": "https://json-schema.org/draft"}, False),
    ],
)
def test_a_schema_that_needs_another_of_itself_has_no_end(
    schema: dict[str, Any], wanted: bool
) -> None:
    assert is_endless(schema) is wanted


@pytest.mark.parametrize("is_open", [False, True])
def test_long_ways_through_references_are_followed_once(is_open: bool) -> None:
    count = 3000
    chain = {str(i): node("a", of={"$ref": f"#/$defs/{i + 1}"}) for i in range(count)}
    last = NULL if is_open else LOOP
    assert is_endless(at("0", **chain, **{str(count): last})) is not is_open
    star = {"allOf": [{"$ref": f"#/$defs/{i}"} for i in range(count)]}
    named = {str(i): NULL for i in range(1, count)}
    assert is_endless({**star, "$defs": {"0": last, **named}}) is not is_open
