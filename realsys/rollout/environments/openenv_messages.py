"""Actions and observations of OpenEnv environments as text of a policy (pure).

Shapes as openenv-core 0.3 has them: an action and an observation are JSON objects, the observation with
``reward`` and ``done`` beside it; tools are listed and called by actions of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LIST_TOOLS: dict[str, Any] = {"type": "list_tools"}
_OWN_FIELDS = ("metadata", "type")  # of every action, not of one environment's


class WrongAction(ValueError):
    """What the policy wrote is no action; carries what to write instead."""


@dataclass(frozen=True, kw_only=True)
class ActionShape:
    """How the policy's text becomes an action.

    Attributes:
        text_field: holds the text as it is; empty: the text is the whole action as JSON.
        fields: of an action, for the policy's information.
        constant: further fields of every action.
    """

    text_field: str
    fields: tuple[str, ...] = ()
    constant: Mapping[str, Any] = field(default_factory=dict)

    def action_of(self, text: str) -> dict[str, Any]:
        """Returns the action that a text is.

        Raises:
            WrongAction: it is no JSON object.
        """
        if self.text_field:
            return {**self.constant, self.text_field: text}
        start, end = text.find("{"), text.rfind("}")
        try:
            read = json.loads(text[start : end + 1]) if start >= 0 else None
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            names = ", ".join(self.fields) or "those of the environment"
            raise WrongAction(f"answer with one JSON object whose fields are {names}")
        return {**self.constant, **read}


def shape_of(schema: Mapping[str, Any], constant: Mapping[str, Any]) -> ActionShape:
    """Returns how a text becomes an action of this JSON schema.

    The only field, or else the only one that is required, holds the text if it takes a string.
    """
    properties = {
        name: value
        for name, value in (schema.get("properties") or {}).items()
        if name not in _OWN_FIELDS and name not in constant
    }
    required = [name for name in schema.get("required") or () if name in properties]
    chosen = list(properties) if len(properties) == 1 else required
    takes_text = len(chosen) == 1 and properties[chosen[0]].get("type") == "string"
    return ActionShape(
        text_field=chosen[0] if takes_text else "", fields=tuple(properties), constant=constant
    )


def text_of(observation: Mapping[str, Any], text_field: str) -> str:
    """Returns what the policy is shown of an observation: a field, its only text, or all as JSON."""
    shown = {k: v for k, v in observation.items() if k not in ("metadata", "done", "reward")}
    if text_field:
        return _plain(shown.get(text_field, ""))
    texts = [value for value in shown.values() if isinstance(value, str)]
    if len(texts) == 1:
        return texts[0]
    return json.dumps(shown, ensure_ascii=False) if shown else ""


def tools_of(observation: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Returns the tools of a ``list_tools`` step in the form of Chat Completions."""
    return tuple(
        {
            "type": "function",
            "function": {
                "name": str(tool["name"]),
                "description": str(tool.get("description") or ""),
                "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
            },
        }
        for tool in observation.get("tools") or ()
    )


def call_action(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the action that calls a tool."""
    return {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}


def result_text(observation: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns the text of a call's observation, and whether the tool failed."""
    error = observation.get("error")
    if isinstance(error, Mapping):
        return f"Error: {error.get('message') or error}", True
    result = observation.get("result")
    if isinstance(result, Mapping):
        failed = bool(result.get("is_error") or result.get("isError"))
        if result.get("data") is not None:
            return _plain(result["data"]), failed
        parts = [
            str(part.get("text"))
            for part in result.get("content") or ()
            if isinstance(part, Mapping) and part.get("text") is not None
        ]
        if parts:
            return "\n".join(parts), failed
        return _plain(dict(result)), failed
    return _plain(result), False


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
