"""Turns of a policy that works in a shell: which commands an answer gives, and what is said back (pure).

Commands are calls of a tool ``bash``, or the fenced block of an answer, for models whose chat template
shows no tools. An answer without a command ends the work.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from realsys.api.basics.thoughts import text_behind_thoughts
from realsys.rewards.harbor.harbor_rule import SHELLS
from realsys.rewards.programs.fenced_blocks import last_block
from realsys.rewards.sandbox.box_limits import BoxOutcome
from realsys.rollout.conversation.chat_messages import ChatMessage

BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command of bash and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
_WORK = (
    "You work on a task in a Linux shell without a network. Commands run in {workdir}; files stay from "
    "one command to the next, processes and variables do not. "
)
CALLS_SYSTEM = (
    _WORK + "Run commands with the tool bash. When the task is done, answer without a call."
)
BLOCKS_SYSTEM = (
    _WORK
    + "Give one command or script in each answer, in a fenced block: ```bash, the command, ```; "
    "you are then shown what it prints. When the task is done, answer without a block."
)
_ENDS = {
    "wall_time": "it was ended, as it took too long",
    "cpu_time": "it was ended, as it computed for too long",
    "memory": "it was ended, as it needed too much memory",
    "processes": "it was ended, as it started too many processes",
    "output": "it was ended, as it printed too much",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellCommand:
    """A command of an answer.

    Attributes:
        call_id: of the tool call; empty: it was a fenced block.
        fault: why it can't be run; empty: it can.
    """

    text: str = ""
    call_id: str = ""
    fault: str = ""


def commands_of(answer: ChatMessage, *, by_calls: bool) -> list[ShellCommand]:
    """Returns the commands of an answer, in their order; none: the work is done."""
    if by_calls:
        return [_called(call.name, call.arguments, call.id) for call in answer.tool_calls]
    block = last_block(text_behind_thoughts(answer.content) or "", SHELLS)
    return [] if block is None else [ShellCommand(text=block)]


def _called(name: str, arguments: str, call_id: str) -> ShellCommand:
    if name != "bash":
        return ShellCommand(call_id=call_id, fault=f"there is no tool {name!r}, only bash")
    try:
        command = json.loads(arguments)["command"]
    except (ValueError, KeyError, TypeError, RecursionError):
        command = None
    if not isinstance(command, str):
        return ShellCommand(call_id=call_id, fault='the arguments are not {"command": TEXT}')
    return ShellCommand(text=command, call_id=call_id)


def results_of(commands: Sequence[ShellCommand], shown: Sequence[str]) -> list[ChatMessage]:
    """Returns what follows an answer: a message for each of its commands."""
    return [
        ChatMessage(role="tool", content=text, tool_call_id=command.call_id, name="bash")
        if command.call_id
        else ChatMessage(role="user", content=text)
        for command, text in zip(commands, shown, strict=True)
    ]


def shown_output(outcome: BoxOutcome, most_chars: int) -> str:
    """Returns what the policy is shown of a command: its output, cut in the middle, and how it ended."""
    output = (outcome.stdout + outcome.stderr).decode(errors="replace").strip()
    lines = [shortened(output, most_chars)] if output else []
    if outcome.ended in _ENDS:
        lines.append(f"({_ENDS[outcome.ended]})")
    elif outcome.ended == "signal":
        lines.append(f"(it died by signal {outcome.signal})")
    elif outcome.exit_code:
        lines.append(f"(exit status {outcome.exit_code})")
    if outcome.archive is None:
        lines.append("(its files can't be kept: all files are as before)")
    return "\n".join(lines) or "(no output)"


def shortened(text: str, most_chars: int) -> str:
    """Returns the text, or its two ends."""
    if len(text) <= most_chars:
        return text
    head = most_chars // 2
    tail = most_chars - head
    return f"{text[:head]}\n({len(text) - most_chars} characters left out)\n{text[-tail:]}"
