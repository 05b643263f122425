"""An environment of verifiers before 0.4: one turn, two turns, or a tool; rewards are written down."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import verifiers as vf
from datasets import Dataset


def letters(completion: Any, info: dict[str, Any]) -> float:
    """More for fewer letters of the policy's, and for later rows."""
    text = "".join(_content(m) for m in completion if _role(m) == "assistant")
    reward: float = (info["row"] + 1) / (1 + len(text))
    with open(os.environ["LETTERS_FILE"], "a") as file:
        file.write(json.dumps([info["row"], reward]) + "\n")
    return reward


def _content(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else message.content
    return str(content or "")


def _role(message: Any) -> str:
    return str(message.get("role") if isinstance(message, dict) else message.role)


def count(text: str) -> str:
    """Counts the letters of a text."""
    return str(len(text))


class TwiceEnv(vf.MultiTurnEnv):
    """Asks once more."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        """The nudge behind the first answer."""
        return [{"role": "user", "content": "Are you sure?"}]


def load_environment(kind: str = "single") -> Any:
    """Makes the environment ``single``, ``twice`` or ``tools``."""
    rows = [
        {"question": f"Write {i}.", "answer": str(i % 10), "info": {"row": i}} for i in range(40)
    ]
    sys.stdout.write("what an environment prints is no line of the host's\n")
    given = {"dataset": Dataset.from_list(rows), "rubric": vf.Rubric(funcs=[letters])}
    if kind == "twice":
        return TwiceEnv(max_turns=2, system_prompt="You answer briefly.", **given)
    if kind == "tools":
        return vf.ToolEnv(tools=[count], max_turns=3, **given)
    return vf.SingleTurnEnv(**given)
