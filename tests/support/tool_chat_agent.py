"""An agent with one tool, plain Python against the endpoint: two questions, each a call and an answer.

Where the endpoint finds no call in an answer, GLM's are looked for in its text; ``understood`` counts those
alone that the endpoint has found.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Mapping
from typing import Any

PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
IN_TEXT = re.compile(r"<tool_call>add\s+(.*)</tool_call>", re.DOTALL)
ARGUMENTS = {"a", "b"}


def solve(task: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """One episode. Returns the share of right sums as its reward, and what became of its answers."""
    messages: list[dict[str, Any]] = []
    calls, in_api, ended = [], [], []

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        messages.append(message)
        choice = asked(base_url, api_key, messages, task["tools"])
        ended.append(choice["finish_reason"] != "length")
        messages.append(said := choice["message"])
        return said

    right = 0
    for question, known in zip(task["questions"], task["sums"], strict=True):
        said = answer({"role": "user", "content": question})
        in_api.append(given_in_api(said))
        calls.append(in_api[-1] or given_in_text(said))
        if calls[-1] is None:
            break
        ids = [call["id"] for call in said.get("tool_calls") or ()] or ["0"]
        result = {"role": "tool", "tool_call_id": ids[0], "content": sum_of(calls[-1])}
        right += str(answer(result)["content"] or "").strip() == known
    return {
        "reward": right / len(task["sums"]),
        "understood": float(in_api[0] is not None),
        "written": float(calls[0] is not None),
        "ended": sum(ended) / len(ended),
        "later_understood": float(len(in_api) > 1 and in_api[-1] is not None),
    }


def asked(base_url: str, api_key: str, messages: list[Any], tools: list[Any]) -> dict[str, Any]:
    """Asks the policy; returns its choice."""
    body = {"model": "policy", "messages": messages, "tools": tools}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{base_url}/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as response:
        choice: dict[str, Any] = json.load(response)["choices"][0]
    return choice


def given_in_api(said: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments of the call that the endpoint found; None if it is no call of the tool."""
    (function, *more) = [c["function"] for c in said.get("tool_calls") or ()] or [{}]
    if more or function.get("name") != "add":
        return None
    arguments = json.loads(function["arguments"])
    is_whole = isinstance(arguments, dict) and arguments.keys() == ARGUMENTS
    return arguments if is_whole else None


def given_in_text(said: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments of a call as GLM's template writes it."""
    found = IN_TEXT.fullmatch(str(said["content"] or "").strip())
    arguments = dict(PAIR.findall(found[1])) if found else {}
    return arguments if arguments.keys() == ARGUMENTS else None


def sum_of(arguments: Mapping[str, Any]) -> str:
    """What the tool says."""
    try:
        return str(sum(int(value) for value in arguments.values()))
    except (TypeError, ValueError):
        return "no numbers"
