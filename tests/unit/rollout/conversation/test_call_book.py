"""Equal requests: which are retries of one another, and which are samples of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import golden
import pytest

from realsys.api.errors import DataError
from realsys.rollout.conversation.call_book import (
    CallBook,
    CallState,
    ChatCall,
    request_digest,
)
from realsys.rollout.conversation.chat_messages import ChatMessage, ChatRequest, ToolCall

ASK = ChatRequest(messages=(ChatMessage(role="user", content="?"),))
RETRY = replace(ASK, retries=1)


def answered(book: CallBook[None], request: ChatRequest = ASK, *, read: bool = True) -> Any:
    """A request that was sent, answered, and maybe read."""
    call, is_new = book.claim(request)
    assert is_new
    call.state = CallState.ANSWERED
    book.left(call, read=read)
    return call


def test_two_equal_requests_at_once_are_two_samples() -> None:
    book = CallBook[None]()
    first, second = book.claim(ASK), book.claim(ASK)
    assert (first[1], second[1]) == (True, True)
    assert (first[0].number, second[0].number) == (0, 1)


def test_an_equal_request_behind_a_read_answer_is_a_sample_of_its_own() -> None:
    book = CallBook[None]()
    assert answered(book) is not answered(book)


def test_an_equal_request_takes_an_answer_that_nobody_has_read() -> None:
    book = CallBook[None]()
    call = answered(book, read=False)
    assert book.claim(ASK) == (call, False)
    book.left(call, read=True)
    assert call.state is CallState.READ
    assert book.claim(ASK)[1]


def test_an_equal_request_joins_one_that_runs_and_was_left() -> None:
    book = CallBook[None]()
    call, _ = book.claim(ASK)
    book.left(call, read=False)
    assert book.claim(ASK) == (call, False)


def test_abandoned_answers_are_given_out_oldest_first_and_once() -> None:
    book = CallBook[None]()
    calls = [book.claim(ASK)[0] for _ in range(2)]
    for call in calls:
        call.state = CallState.ANSWERED
        book.left(call, read=False)
    assert [book.claim(ASK)[0] for _ in range(2)] == calls
    assert book.claim(ASK)[1]


def test_a_retry_joins_a_request_whose_connection_seems_alive() -> None:
    book = CallBook[None]()
    call, _ = book.claim(ASK)
    assert book.claim(RETRY) == (call, False)
    assert call.listeners == 2


def test_a_retry_gets_the_answer_that_was_read_by_a_connection_that_broke() -> None:
    book = CallBook[None]()
    call = answered(book)
    assert book.claim(RETRY) == (call, False)


def test_a_retry_of_what_has_never_come_is_new() -> None:
    assert CallBook[None]().claim(RETRY)[1]


def test_what_has_failed_is_asked_anew() -> None:
    book = CallBook[None]()
    call, _ = book.claim(ASK)
    call.state = CallState.FAILED
    book.left(call, read=False)
    assert book.claim(ASK)[1]


def test_a_retry_of_a_failed_sample_does_not_get_the_sample_before_it() -> None:
    book = CallBook[None]()
    first = answered(book)
    second, is_new = book.claim(ASK)  # samples again
    assert is_new
    second.state = CallState.FAILED
    book.left(second, read=False)
    third, is_new = book.claim(RETRY)
    assert is_new
    assert third not in (first, second)


def test_a_key_makes_equal_requests_one_or_several() -> None:
    book, one, two = CallBook[None](), *(replace(ASK, idempotency_key=k) for k in "ab")
    first = answered(book, one)
    assert book.claim(one) == (first, False)
    assert book.claim(two)[1]
    assert book.claim(RETRY)[1]  # those with a key belong to it alone


def test_a_key_may_not_be_of_two_requests_unless_the_first_failed() -> None:
    book, one = CallBook[None](), replace(ASK, idempotency_key="a")
    call, _ = book.claim(one)
    other = replace(one, n=2)
    with golden.raises(DataError):
        book.claim(other)
    call.state = CallState.FAILED
    assert book.claim(other)[1]


def test_left_without_reading_or_before_the_answer_is_not_read() -> None:
    call = ChatCall[None](number=0, key="", digest=b"", listeners=2)
    book = CallBook[None]()
    book.left(call, read=True)
    assert (call.state, call.listeners) == (CallState.RUNNING, 1)
    call.state = CallState.ANSWERED
    book.left(call, read=False)
    assert (call.state, call.listeners) == (CallState.ANSWERED, 0)


@pytest.mark.parametrize(
    "other",
    [
        {"n": 2},
        {"model": "m"},
        {"max_tokens": 1},
        {"stop": ("x",)},
        {"stream": True},
        {"sampling": {"temperature": 0.5}},
        {"schema": {}},
        {"tools": ({"type": "function"},)},
        {"messages": (*ASK.messages, ChatMessage(role="user", content=""))},
        {"messages": (ChatMessage(role="user", content="? "),)},
        {"messages": (replace(ASK.messages[0], reasoning="r"),)},
        {
            "messages": (
                replace(ASK.messages[0], tool_calls=(ToolCall(id="", name="", arguments=""),)),
            )
        },
    ],
    ids=lambda other: next(iter(other)),
)
def test_all_that_a_request_says_makes_it_another(other: dict[str, Any]) -> None:
    assert request_digest(replace(ASK, **other)) != request_digest(ASK)


def test_what_only_a_retry_says_does_not() -> None:
    assert request_digest(replace(ASK, retries=3, idempotency_key="k")) == request_digest(ASK)
    half = replace(ASK, messages=(ChatMessage(role="user", content="\ud83d"),))
    assert request_digest(half) == request_digest(replace(half))
