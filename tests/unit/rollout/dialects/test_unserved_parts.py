"""Tools, pictures, sounds and files that a policy of text can't take: refused, or left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from realsys.api.errors import DataError
from realsys.rollout.conversation.chat_messages import ChatRequest, ToolChoice, Unserved
from realsys.rollout.dialects import anthropic_messages, chat_completions, responses_api
from realsys.rollout.dialects.dialect import Dialect

CHAT: Dialect = chat_completions
RESPONSES: Dialect = responses_api
MESSAGES: Dialect = anthropic_messages
HI = {"role": "user", "content": "hi"}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
OPENAI_TOOL = {"type": "function", "function": FUNCTION}
FLAT_TOOL = {"type": "function", **FUNCTION}
CLAUDE_TOOL = {"name": "weather", "input_schema": {"type": "object"}}
URL = "data:image/png;base64,AA"
PNG = {"type": "base64", "media_type": "image/png", "data": "AA"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CLAUDE_CALL = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}


def asked(parts: list[Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": parts}]}


# (dialect, body, where it is refused, kinds that are left out)
ROWS: list[tuple[Dialect, dict[str, Any], str, tuple[str, ...]]] = [
    # Codex CLI
    (
        RESPONSES,
        {
            "input": "hi",
            "tools": [
                FLAT_TOOL,
                {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
                {"type": "namespace", "name": "agents", "tools": [FLAT_TOOL]},
                {"type": "web_search", "external_web_access": True},
            ],
        },
        "tools[1]",
        ("tool custom", "tool namespace", "tool web_search"),
    ),
    # Claude Code
    (
        MESSAGES,
        {
            "messages": [HI],
            "tools": [
                {"type": "bash_20250124", "name": "bash"},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
                {"type": "custom", **CLAUDE_TOOL},
            ],
        },
        "tools[0]",
        ("tool bash_20250124", "tool web_search_20250305"),
    ),
    (
        CHAT,
        {"messages": [HI], "tools": [OPENAI_TOOL, {"type": "custom", "custom": {"name": "x"}}]},
        "tools[1]",
        ("tool custom",),
    ),
    (
        CHAT,
        {"messages": [HI], "tools": [OPENAI_TOOL], "web_search_options": {}},
        "web_search_options",
        ("web_search_options",),
    ),
    (
        MESSAGES,
        {"messages": [HI], "tools": [CLAUDE_TOOL], "mcp_servers": [{"type": "url", "url": "u"}]},
        "mcp_servers",
        ("mcp_servers",),
    ),
    # Browser agents
    (
        CHAT,
        asked([{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": URL}}]),
        "messages[0].content[1]",
        ("image",),
    ),
    (
        CHAT,
        asked(
            [
                {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
                {"type": "text", "text": "hi"},
                {"type": "file", "file": {"file_id": "f"}},
                {"type": "video_url", "video_url": {"url": "u"}},
            ]
        ),
        "messages[0].content[0]",
        ("audio", "file", "video"),
    ),
    (
        RESPONSES,
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "hi"},
                        {"type": "input_image", "image_url": URL},
                        {"type": "input_file", "file_data": "AA"},
                    ],
                }
            ]
        },
        "input[0].content[1]",
        ("image", "file"),
    ),
    (
        MESSAGES,
        asked([{"type": "image", "source": PNG}, {"type": "text", "text": "hi"}]),
        "messages[0].content[0]",
        ("image",),
    ),
    (
        MESSAGES,
        asked([{"type": "document", "source": PNG}, {"type": "text", "text": "hi"}]),
        "messages[0].content[0]",
        ("file",),
    ),
    # Screenshots as results of tools
    (
        CHAT,
        {
            "messages": [
                HI,
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "image_url"}]},
            ]
        },
        "messages[2].content[0]",
        ("image",),
    ),
    (
        RESPONSES,
        {
            "input": [
                HI,
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c1",
                    "output": [{"type": "input_image", "image_url": URL}],
                },
            ]
        },
        "input[2].output[0]",
        ("image",),
    ),
    (
        MESSAGES,
        {
            "messages": [
                HI,
                {"role": "assistant", "content": [CLAUDE_CALL]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c1",
                            "content": [{"type": "image", "source": PNG}],
                        }
                    ],
                },
            ]
        },
        "messages[2].content[0].content[0]",
        ("image",),
    ),
]


def read(dialect: Dialect, body: dict[str, Any], unserved: Unserved) -> ChatRequest:
    return dialect.read(json.dumps(body).encode(), {}, unserved=unserved)


@pytest.mark.parametrize(("dialect", "body", "where", "kinds"), ROWS)
def test_it_is_refused_by_a_name_for_what_leaves_it_out(
    dialect: Dialect, body: dict[str, Any], where: str, kinds: tuple[str, ...]
) -> None:
    with pytest.raises(DataError) as caught:
        read(dialect, body, Unserved.REFUSE)
    assert caught.value.where == where
    assert "unserved=drop" in caught.value.fix


@pytest.mark.parametrize(("dialect", "body", "where", "kinds"), ROWS)
def test_it_is_left_out_and_named(
    dialect: Dialect, body: dict[str, Any], where: str, kinds: tuple[str, ...]
) -> None:
    request = read(dialect, body, Unserved.DROP)
    assert request.left_out == kinds
    assert [t["function"]["name"] for t in request.tools] == ["weather"] * bool(body.get("tools"))
    texts = [m.content for m in request.messages]
    parts = [kind for kind in kinds if kind in ("image", "audio", "file", "video")]
    assert [kind for text in texts for kind in parts if f"[{kind} left out]" in text] == parts
    assert any("hi" in text for text in texts)


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (CHAT, {"messages": [HI], "tools": [OPENAI_TOOL]}),
        (RESPONSES, {"input": [HI], "tools": [FLAT_TOOL]}),
        (MESSAGES, {"messages": [HI], "tools": [CLAUDE_TOOL], "system": "be kind"}),
    ],
)
def test_what_can_be_served_is_the_same_request(dialect: Dialect, body: dict[str, Any]) -> None:
    assert read(dialect, body, Unserved.DROP) == read(dialect, body, Unserved.REFUSE)


@pytest.mark.parametrize(
    ("dialect", "body", "where"),
    [
        (CHAT, asked([{"type": "text"}]), "messages[0].content[0]"),
        (CHAT, asked([{"type": "hologram"}]), "messages[0].content[0]"),
        (RESPONSES, {"input": "hi", "tools": [{"name": "weather"}]}, "tools[0]"),
        (CHAT, {"messages": [HI], "tools": [{"type": 5}]}, "tools[0]"),
        (
            RESPONSES,
            {
                "input": "hi",
                "tools": [{"type": "web_search"}],
                "tool_choice": "required",
            },
            "tool_choice",
        ),
        (
            MESSAGES,
            {
                "messages": [HI],
                "tools": [{"type": "bash_20250124", "name": "bash"}, CLAUDE_TOOL],
                "tool_choice": {"type": "tool", "name": "bash"},
            },
            "tool_choice.name",
        ),
    ],
)
def test_what_is_malformed_or_insisted_on_is_refused_still(
    dialect: Dialect, body: dict[str, Any], where: str
) -> None:
    with pytest.raises(DataError) as caught:
        read(dialect, body, Unserved.DROP)
    assert caught.value.where == where


def test_a_choice_between_the_tools_that_are_left_is_kept() -> None:
    body = {"input": "hi", "tools": [{"type": "web_search"}, FLAT_TOOL], "tool_choice": "required"}
    request = read(RESPONSES, body, Unserved.DROP)
    assert request.tool_choice is ToolChoice.REQUIRED
    assert len(request.tools) == 1
