"""A chat: what is sent, remembered, forgotten; commands; answers that are cut off or fail."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import golden
import pytest

from launcher.serving.chat_client import ChatClient, _refusal
from launcher.serving.chat_loop import ChatLoop
from realsys.api.errors import ClusterError, ConfigError, DataError, RemoteError


def chat(*lines: str, answers: Any = None, system: str = "") -> tuple[ChatLoop, list[Any], str]:
    """Runs a chat over these lines; returns it, the conversations sent, and what was written."""
    sent: list[list[dict[str, str]]] = []
    written: list[str] = []

    def echo(messages: Sequence[dict[str, str]]) -> Iterator[str]:
        sent.append(list(messages))
        yield from answers(messages) if answers else ("re: ", messages[-1]["content"])

    left = iter(lines)
    loop = ChatLoop(
        answers=echo,
        read=lambda: next(left, None),
        write=written.append,
        notify=lambda text: written.append(f"[{text[:18]}]"),
        system=system,
    )
    loop.run()
    return loop, sent, "".join(written)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_the_whole_conversation_is_sent_each_time() -> None:
    _, sent, written = chat("a", "", "b", system="S")
    assert sent[1] == [
        *(turn("system", "S"), turn("user", "a"), turn("assistant", "re: a"), turn("user", "b")),
    ]
    assert written == "re: a\nre: b\n"


def test_reset_keeps_the_system_message_alone() -> None:
    _, sent, _ = chat("a", "/reset", "b", system="S")
    assert sent[1] == [turn("system", "S"), turn("user", "b")]


def test_quit_ends_and_an_unknown_command_is_told_and_not_sent() -> None:
    _, sent, written = chat("/nope", "a", "/quit", "b")
    assert len(sent) == 1
    assert "[no command /nope. " in written


def test_a_question_that_failed_is_forgotten() -> None:
    def fail_once(messages: Sequence[dict[str, str]]) -> Iterator[str]:
        if messages[-1]["content"] == "bad":
            raise DataError("too long", where="messages", fix="/reset")
        yield "ok"

    loop, sent, _ = chat("bad", "good", answers=fail_once)
    assert sent[1] == [turn("user", "good")]
    assert loop.num_failed == 1


def test_the_part_of_an_answer_that_was_cut_off_is_kept() -> None:
    def cut(messages: Sequence[dict[str, str]]) -> Iterator[str]:
        yield "half"
        raise KeyboardInterrupt

    loop, _, _ = chat("a", answers=cut)
    assert loop.messages[-1] == turn("assistant", "half")


@pytest.mark.parametrize(
    ("status", "code", "kind", "fix"),
    [
        (400, "context_length_exceeded", DataError, "/reset"),
        (400, None, DataError, "change"),
        (401, None, DataError, "--key-file"),
        (502, None, RemoteError, "output"),
    ],
)
def test_refusals_are_errors_with_what_to_do(
    status: int, code: str | None, kind: type[Exception], fix: str
) -> None:
    error = _refusal(status, json.dumps({"error": {"message": "why", "code": code}}).encode())
    assert isinstance(error, kind)
    assert "why" in error.what
    assert fix in error.fix


def test_an_answer_that_is_no_json_is_told_as_it_is() -> None:
    assert "<html>" in _refusal(500, b"<html>").what


def test_an_address_that_is_none_is_refused_and_one_where_nobody_listens_is_told() -> None:
    with golden.raises(ConfigError):
        ChatClient("localhost:8000", "k", sampling={})
    with golden.raises(ClusterError):
        list(ChatClient("http://127.0.0.1:9", "k", sampling={}).answer([turn("user", "a")]))
