"""OpenAI's ``tool_choice`` of type ``allowed_tools``: some of the tools that are offered (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realsys.rollout.conversation.chat_messages import ToolChoice
from realsys.rollout.dialects.body_fields import refused, unserved_tool
from realsys.rollout.dialects.unserved_parts import LeftOut

_FORM = 'send mode "auto" or "required", and tools by type and name'


@dataclass(frozen=True, kw_only=True)
class AllowedTools:
    """A choice. ``names``: tools that may be called; empty: all that are offered."""

    choice: ToolChoice
    names: tuple[str, ...] = ()


def allowed_tools(
    choice: str | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]], left: LeftOut
) -> AllowedTools | None:
    """Returns the choice as Chat Completions or Responses have it; None: it is of another type.

    Raises:
        DataError: it is malformed, or names a tool that isn't offered.
    """
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return None
    inner, where = choice.get("allowed_tools"), "tool_choice.allowed_tools"
    if not isinstance(inner, Mapping):  # of Responses
        inner, where = choice, "tool_choice"
    mode, given = inner.get("mode"), inner.get("tools")
    if mode not in ("auto", "required"):
        raise refused(f"{mode!r:.40} is no mode", where=f"{where}.mode", fix=_FORM)
    if not isinstance(given, list) or not given:
        raise refused("expected a list of tools", where=f"{where}.tools", fix=_FORM)
    offered = [str(tool["function"]["name"]) for tool in tools]
    names = dict[str, None]()
    for i, tool in enumerate(given):
        path = f"{where}.tools[{i}]"
        if not isinstance(tool, Mapping):
            raise refused("expected an object", where=path, fix=_FORM)
        if tool.get("type", "function") != "function":
            if left.tool(tool, ("function",)):
                continue
            raise unserved_tool(tool.get("type"), path, _FORM)
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else tool.get("name")
        if name not in offered:
            raise refused(
                f"tool {name!r:.60} is not among tools", where=path, fix="name some of the tools"
            )
        names[str(name)] = None
    if not names and mode == "required":
        raise refused("none of them is served", where=f"{where}.tools", fix="name a function")
    if not names:
        return AllowedTools(choice=ToolChoice.NONE)
    is_all = len(names) == len(set(offered))
    return AllowedTools(choice=ToolChoice(mode), names=() if is_all else tuple(names))
