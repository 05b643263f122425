"""What a request asks for that leaves everything out."""

from dataclasses import fields

from realsys.rollout.conversation.chat_messages import ChatRequest, ToolChoice


def test_a_request_that_says_nothing_asks_for_one_free_reply_at_once() -> None:
    said = {
        field.name: getattr(ChatRequest(messages=()), field.name) for field in fields(ChatRequest)
    }
    wants = (
        "one_call",
        "logprobs",
        "stream",
        "stream_usage",
        "continues",
        "must_hold",
        "token_ids",
    )
    assert {name: said.pop(name) for name in wants} == dict.fromkeys(wants, False)
    assert said == {
        **dict.fromkeys(
            ("messages", "tools", "stop", "choices", "allowed_tools", "left_out", "prompts"), ()
        ),
        **dict.fromkeys(("model", "tool_name", "idempotency_key", "pattern"), ""),
        **dict.fromkeys(("max_tokens", "schema"), None),
        "tool_choice": ToolChoice.AUTO,
        "n": 1,
        **{name: {} for name in ("sampling", "template_args", "template_hints")},
        "schema_field": "response_format",
        "retries": 0,
        "id_prefix": "chatcmpl-",
    }
