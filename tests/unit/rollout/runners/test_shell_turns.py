"""What an answer asks a shell to do, and what it is shown."""

from __future__ import annotations

import golden
import pytest

from realsys.rewards.sandbox.box_limits import BoxOutcome
from realsys.rollout.conversation.chat_messages import ChatMessage, ToolCall
from realsys.rollout.runners.shell_turns import (
    ShellCommand,
    commands_of,
    results_of,
    shortened,
    shown_output,
)


def outcome(**changes: object) -> BoxOutcome:
    given = {
        "ended": "exit", "exit_code": 0, "signal": None, "stdout": b"", "stderr": b"",
        "wall_s": 0.1, "cpu_s": 0.1, "archive": b"x",
    }  # fmt: skip
    return BoxOutcome(**{**given, **changes})  # type: ignore[arg-type]


def called(*calls: tuple[str, str]) -> ChatMessage:
    made = [ToolCall(id=f"c{i}", name=n, arguments=a) for i, (n, a) in enumerate(calls)]
    return ChatMessage(role="assistant", content="```bash\nno\n```", tool_calls=tuple(made))


def test_calls_are_commands_in_their_order_and_blocks_are_not() -> None:
    answer = called(("bash", '{"command":"ls"}'), ("bash", '{"command":"pwd","why":1}'))
    assert commands_of(answer, by_calls=True) == [
        ShellCommand(text="ls", call_id="c0"),
        ShellCommand(text="pwd", call_id="c1"),
    ]
    assert commands_of(called(), by_calls=True) == []


@pytest.mark.parametrize("arguments", ["{}", "[]", '"ls"', '{"command":3}', "{", "[" * 100_000])
def test_a_call_without_a_command_is_a_fault_and_not_the_end(arguments: str) -> None:
    (command,) = commands_of(called(("bash", arguments)), by_calls=True)
    assert command == ShellCommand(call_id="c0", fault='the arguments are not {"command": TEXT}')


def test_another_tool_is_a_fault() -> None:
    (command,) = commands_of(called(("python", '{"command":"ls"}')), by_calls=True)
    golden.check(command.fault)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("So:\n```bash\nls\n```", "ls\n"),
        ("```sh\na\n```\nIt prints:\n```\nb\n```", "a\n"),
        ("```\na\n```\nNo:\n```\nb\n```", "b\n"),
        ("<think>```sh\na\n```</think>1. Run:\n   ```sh\n   b\n   ```", "b\n"),
        ("<think>\n```sh\na\n```", None),
        ("```python\n1\n```", None),
        ("```bash\nls", None),  # cut off
        ("done", None),
    ],
)
def test_the_last_fenced_block_is_the_command(content: str, text: str | None) -> None:
    found = commands_of(ChatMessage(role="assistant", content=content), by_calls=False)
    assert found == ([] if text is None else [ShellCommand(text=text)])


def test_results_answer_their_calls_and_blocks_are_answered_by_the_user() -> None:
    tool, user = results_of([ShellCommand(call_id="c0"), ShellCommand(text="ls")], ["a", "b"])
    assert (tool.role, tool.content, tool.tool_call_id) == ("tool", "a", "c0")
    assert (user.role, user.content, user.tool_call_id) == ("user", "b", "")


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, "(no output)"),
        ({"stdout": b"a\n", "stderr": b"b\n", "exit_code": 3}, "a\nb\n(exit status 3)"),
        ({"ended": "wall_time", "exit_code": None}, "(it was ended, as it took too long)"),
        ({"ended": "signal", "exit_code": None, "signal": 9}, "(it died by signal 9)"),
        ({"stdout": b"\xff"}, "\ufffd"),
        ({"archive": None}, "(its files can't be kept: all files are as before)"),
    ],
)
def test_the_policy_sees_output_and_how_it_ended(changes: dict[str, object], shown: str) -> None:
    assert shown_output(outcome(**changes), 100) == shown


def test_a_long_output_keeps_its_two_ends() -> None:
    assert shortened("abcdefghij", 10) == "abcdefghij"
    golden.check(shortened("abcdefghij", 5))
