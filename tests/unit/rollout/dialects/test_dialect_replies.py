"""Whole answers, errors and lists of models, by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from realsys.api.errors import ClusterError, DataError
from realsys.rollout.conversation.chat_messages import (
    ChatMessage,
    ChatReply,
    ChatRequest,
    ChatResult,
    FinishReason,
    TokenLogprob,
    ToolCall,
    ToolChoice,
)
from realsys.rollout.dialects import (
    anthropic_messages,
    chat_completions,
    model_list,
    responses_api,
    text_completions,
)
from realsys.rollout.dialects.dialect import DIALECTS
from realsys.rollout.dialects.server_sent_events import encoded

USER = (ChatMessage(role="user", content="hi"),)
REQUEST = ChatRequest(messages=USER)
CALL = ToolCall(id="c1", name="weather", arguments='{"city": "Paris"}')
TEXT = ChatReply(
    message=ChatMessage(role="assistant", content="yes"), finish=FinishReason.STOP, num_tokens=2
)
CALLING = ChatReply(
    message=ChatMessage(role="assistant", reasoning="hm", tool_calls=(CALL,)),
    finish=FinishReason.TOOL_CALLS,
    num_tokens=5,
)


def result(*replies: ChatReply) -> ChatResult:
    return ChatResult(
        id="r1",
        created=1700000000,
        model="policy",
        replies=replies,
        num_prompt_tokens=10,
        num_cached=4,
    )


def test_a_chat_completion() -> None:
    assert chat_completions.body(result(TEXT, CALLING), REQUEST) == {
        "id": "r1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "yes",
                    "refusal": None,
                    "annotations": [],
                },
                "logprobs": None,
                "finish_reason": "stop",
            },
            {
                "index": 1,
                "message": {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "annotations": [],
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
                        }
                    ],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
            },
        ],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 7,  # 2 + 5
            "total_tokens": 17,
            "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
        },
        "system_fingerprint": None,
    }


LOGPROBS = (
    TokenLogprob(text="é", logprob=-0.5),
    TokenLogprob(text="\ufffd", logprob=float("-inf")),
)


def test_logprobs_are_sent_if_they_were_asked_for() -> None:
    reply = ChatReply(
        message=TEXT.message, finish=FinishReason.LENGTH, logprobs=LOGPROBS, num_tokens=2
    )
    asked = ChatRequest(messages=USER, logprobs=True)
    (choice,) = chat_completions.body(result(reply), asked)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["content"] == [
        {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": []},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": None, "top_logprobs": []},
    ]
    (message,) = responses_api.body(result(reply), asked)["output"]
    assert [entry["bytes"] for entry in message["content"][0]["logprobs"]] == [[195, 169], []]
    (unasked,) = chat_completions.body(result(reply), REQUEST)["choices"]
    assert unasked["logprobs"] is None


def test_tokens_are_told_if_they_were_asked_for() -> None:
    reply = ChatReply(
        message=TEXT.message, finish=FinishReason.STOP, token_ids=(7, 8), prompt_ids=(1, 2)
    )
    told = chat_completions.body(result(reply), ChatRequest(messages=USER, token_ids=True))
    assert told["prompt_token_ids"] == [1, 2]
    assert told["choices"][0]["token_ids"] == [7, 8]
    assert "prompt_token_ids" not in chat_completions.body(result(reply), REQUEST)
    encoder = chat_completions.stream(ChatRequest(messages=USER, token_ids=True))
    events = (encoder.opening("r1", 1, "m") + encoder.closing(result(reply))).split(b"\n\n")
    chunks = [json.loads(event[6:]) for event in events if event and event != b"data: [DONE]"]
    ids = [chunk["choices"][0].get("token_ids", []) for chunk in chunks]
    assert [t for some in ids for t in some] == [7, 8]
    assert chunks[-1]["prompt_token_ids"] == [1, 2]


def test_a_response() -> None:
    function = {"name": "weather", "parameters": {"type": "object"}}
    request = ChatRequest(
        messages=USER,
        tools=({"type": "function", "function": function},),
        tool_choice=ToolChoice.ONE,
        tool_name="weather",
        max_tokens=99,
        sampling={"temperature": 0.5},
    )
    told = responses_api.body(result(CALLING), request)
    assert told["output"] == [
        {
            "id": "rs_r1_0",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "status": "completed",
        },
        {
            "id": "fc_r1_1",
            "type": "function_call",
            "call_id": "c1",
            "name": "weather",
            "arguments": '{"city": "Paris"}',
            "status": "completed",
        },
    ]
    assert (told["id"], told["object"], told["created_at"]) == ("r1", "response", 1700000000)
    assert (told["status"], told["incomplete_details"]) == ("completed", None)
    assert told["tool_choice"] == {"type": "function", "name": "weather"}
    assert [tool["name"] for tool in told["tools"]] == ["weather"]
    assert (told["max_output_tokens"], told["temperature"], told["top_p"]) == (99, 0.5, None)
    assert told["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 15,
    }


def test_a_response_that_was_cut_is_incomplete() -> None:
    cut = ChatReply(message=TEXT.message, finish=FinishReason.LENGTH, num_tokens=2)
    told = responses_api.body(result(cut), REQUEST)
    assert (told["status"], told["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    (message,) = told["output"]
    assert message == {
        "id": "msg_r1_0",
        "type": "message",
        "role": "assistant",
        "status": "incomplete",
        "content": [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}],
    }


def test_an_anthropic_message() -> None:
    assert anthropic_messages.body(result(CALLING), REQUEST) == {
        "id": "r1",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "realsys"},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 6,  # 10 of which 4 are cached
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 5,
        },
    }


@pytest.mark.parametrize(
    ("finish", "stop_text", "reason", "sequence"),
    [
        (FinishReason.STOP, "", "end_turn", None),
        (FinishReason.STOP, "END", "stop_sequence", "END"),
        (FinishReason.LENGTH, "", "max_tokens", None),
        (FinishReason.TOOL_CALLS, "", "tool_use", None),
    ],
)
def test_anthropics_reasons_to_stop(
    finish: FinishReason, stop_text: str, reason: str, sequence: str | None
) -> None:
    reply = ChatReply(message=TEXT.message, finish=finish, stop_text=stop_text)
    told = anthropic_messages.body(result(reply), REQUEST)
    assert (told["stop_reason"], told["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ("", {}),
        (' {"b": 1, "a": 2}', {"b": 1, "a": 2}),
        ('{"city": ', {"INVALID_JSON": '{"city": '}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('{"a": "\\ud800"}', {"INVALID_JSON": '{"a": "\\ud800"}'}),
        ("[" * 5000, {"INVALID_JSON": "[" * 5000}),
    ],
)
def test_arguments_that_are_no_object_are_told_as_text(
    arguments: str, values: dict[str, Any]
) -> None:
    call = ToolCall(id="c1", name="f", arguments=arguments)
    message = ChatMessage(role="assistant", tool_calls=(call,))
    reply = ChatReply(message=message, finish=FinishReason.TOOL_CALLS)
    (block,) = anthropic_messages.body(result(reply), REQUEST)["content"]
    assert block["input"] == values
    assert list(block["input"]) == list(values)


def test_an_empty_reply_has_an_empty_text() -> None:
    empty = ChatReply(message=ChatMessage(role="assistant"), finish=FinishReason.STOP, num_tokens=1)
    (choice,) = chat_completions.body(result(empty), REQUEST)["choices"]
    assert choice["message"]["content"] == ""
    assert anthropic_messages.body(result(empty), REQUEST)["content"] == [
        {"type": "text", "text": ""}
    ]
    (message,) = responses_api.body(result(empty), REQUEST)["output"]
    assert message["content"][0]["text"] == ""


def test_half_a_letter_of_two_is_encoded_too() -> None:
    half = chr(0xD800)
    assert json.loads(encoded({"text": "é" + half})) == {"text": "é" + half}
    assert encoded({"text": "é"}) == '{"text":"é"}'.encode()


WRONG = DataError("there is no message", where="messages[0].content", fix="send one")
LOST = ClusterError("no server answers", where="node 7:/secret/path", fix="try again")


def test_a_sentence_that_has_its_stop_gets_no_second_one() -> None:
    error = DataError("the limit is exceeded.", where="/v1/responses", fix="send less")
    told = "the limit is exceeded. Fix: send less"
    assert chat_completions.error(error, 413)["error"]["message"] == told
    assert anthropic_messages.error(error, 413)["error"]["message"] == told


def test_a_body_of_another_encoding_is_told_by_its_place() -> None:
    body = '{"messages": [{"role": "user", "content": "café"}]}'.encode("latin-1")
    with pytest.raises(DataError) as caught:
        chat_completions.read(body, {})
    assert caught.value.where == "body"
    assert f"byte 0xe9 at place {body.index(0xE9)}" in caught.value.what


def test_an_openai_error_names_the_field() -> None:
    assert chat_completions.error(WRONG, 400) == {
        "error": {
            "message": "messages[0].content: there is no message. Fix: send one",
            "type": "invalid_request_error",
            "param": "messages[0].content",
            "code": None,
        }
    }
    assert responses_api.error(LOST, 503)["error"] == {
        "message": "no server answers. Fix: try again",
        "type": "server_error",
        "param": None,
        "code": "server_error",
    }


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (401, "authentication_error", "authentication_error"),
        (404, "not_found_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (418, "invalid_request_error", "invalid_request_error"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (503, "server_error", "overloaded_error"),
    ],
)
def test_the_kind_of_error_follows_the_status(status: int, openai: str, anthropic: str) -> None:
    assert chat_completions.error(LOST, status)["error"]["type"] == openai
    assert anthropic_messages.error(LOST, status) == {
        "type": "error",
        "error": {"type": anthropic, "message": "no server answers. Fix: try again"},
    }


def test_lists_of_models() -> None:
    told = model_list.openai_model_list(["a", "b"], 1700000000)
    assert told["object"] == "list"
    assert told["data"][1] == {
        "id": "b",
        "object": "model",
        "created": 1700000000,
        "owned_by": "realsys",
    }
    page = model_list.anthropic_model_list(["a", "b"], 1700000000)
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("a", "b", False)
    assert page["data"][0]["created_at"] == "2023-11-14T22:13:20Z"
    assert model_list.anthropic_model_list([], 0)["first_id"] is None


def test_every_path_has_its_dialect() -> None:
    assert {
        "/v1/chat/completions": chat_completions,
        "/v1/completions": text_completions,
        "/v1/responses": responses_api,
        "/v1/messages": anthropic_messages,
    } == DIALECTS
