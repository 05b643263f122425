"""A tiny environment of verifiers (before 0.4), as its own init command lays one out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import verifiers as vf
from agent_report import calculate
from datasets import Dataset


def calculate_tool(operation: str, a: float, b: float) -> str:
    """Works out one operation: add, subtract or multiply."""
    return calculate(operation, a, b)


async def digits(completion: Any) -> float:
    """The share of digits in what the policy wrote."""
    text = "".join(str(m.content or "") for m in completion if m.role == "assistant")
    return sum(c.isdigit() for c in text) / max(1, len(text))


class TwiceEnv(vf.MultiTurnEnv):
    """Asks once more."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        """The nudge behind each answer."""
        return [{"role": "user", "content": "Are you sure?"}]


def _after_a_call(question: str) -> list[dict[str, Any]]:
    """A conversation in which the policy is said to have called the tool."""
    function = {"name": "calculate_tool", "arguments": '{"operation":"add","a":2,"b":3}'}
    return [
        {"role": "user", "content": question},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "5"},
    ]


def load_environment(kind: str = "single") -> Any:
    """Makes the environment ``single``, ``twice``, ``tools`` or ``called``, over the run's question."""
    task = json.loads(Path(os.environ["REALSYS_TASK_FILE"]).read_text())
    question = str(task["prompt"])
    row: dict[str, Any] = {"question": question, "answer": "0"}
    if kind == "called":
        row = {"prompt": _after_a_call(question), "answer": "0"}
    given = {"dataset": Dataset.from_list([row]), "rubric": vf.Rubric(funcs=[digits])}
    if kind == "twice":
        return TwiceEnv(max_turns=2, system_prompt="You answer briefly.", **given)
    if kind in ("tools", "called"):
        return vf.ToolEnv(tools=[calculate_tool], max_turns=3, **given)
    return vf.SingleTurnEnv(**given)
