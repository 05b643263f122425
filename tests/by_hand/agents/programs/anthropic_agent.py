"""Anthropic's own client: Messages."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
from agent_report import CALCULATOR, Report, calculate, run

MODEL, MOST_TOKENS = "policy", 64
TOOLS: Any = [
    {
        "name": "calculate",
        "description": "Works out one operation.",
        "input_schema": CALCULATOR,
    }
]
ARGUMENTS: dict[str, Any] = {"operation": "add", "a": 2, "b": 3}


def _text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def plain(report: Report) -> None:
    """A conversation of two turns, a system text before it."""
    client = anthropic.Anthropic()
    messages: Any = [{"role": "user", "content": report.question}]
    ask: Any = {"model": MODEL, "max_tokens": MOST_TOKENS, "system": "You answer briefly."}
    counted = client.messages.count_tokens(
        model=MODEL, system="You answer briefly.", messages=messages
    )
    first = client.messages.create(messages=messages, **ask)
    assert counted.input_tokens == first.usage.input_tokens, (counted, first.usage)
    report.saw(_text(first))
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "text", "text": "Are you sure?"}]},
    ]
    report.saw(_text(client.messages.create(messages=messages, **ask)))


def streaming(report: Report) -> None:
    """The helper that accumulates, and the events by hand."""
    client = anthropic.Anthropic()
    messages: Any = [{"role": "user", "content": report.question}]
    ask: Any = {"model": MODEL, "max_tokens": MOST_TOKENS, "messages": messages}
    with client.messages.stream(tools=TOOLS, **ask) as stream:
        deltas = list(stream.text_stream)
        whole = _text(stream.get_final_message())
    assert "".join(deltas) == whole
    report.saw(whole)
    text = ""
    for event in client.messages.create(stream=True, **ask):
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            text += event.delta.text
    report.saw(text)


def tools(report: Report) -> None:
    """Offers a tool, answers what the policy calls, and goes on from a call that is put into its mouth."""
    client = anthropic.Anthropic()
    messages: Any = [{"role": "user", "content": report.question}]
    for turn in range(3):
        reply = client.messages.create(
            model=MODEL, max_tokens=MOST_TOKENS, messages=messages, tools=TOOLS
        )
        report.saw(_text(reply))
        messages.append({"role": "assistant", "content": reply.content})
        called = [block for block in reply.content if block.type == "tool_use"]
        if called:
            messages.append({"role": "user", "content": [_result(b.id, b.input) for b in called]})
            continue
        call_id = f"toolu_{turn}"
        use = {"type": "tool_use", "id": call_id, "name": "calculate", "input": ARGUMENTS}
        said = {"type": "text", "text": "I will work it out."}
        messages += [
            {"role": "user", "content": "Use the tool."},
            {"role": "assistant", "content": [said, use]},
            {"role": "user", "content": [_result(call_id, ARGUMENTS)]},
        ]


def _result(call_id: str, arguments: Any) -> dict[str, Any]:
    try:
        result = calculate(**arguments)
    except TypeError as error:
        result = f"error: {error}"
    return {"type": "tool_result", "tool_use_id": call_id, "content": result}


def parallel(report: Report) -> None:
    """Four questions at the same time, two of them the same."""

    async def ask_all() -> None:
        async with anthropic.AsyncAnthropic() as client:

            async def ask(text: str) -> None:
                messages: Any = [{"role": "user", "content": text}]
                reply = await client.messages.create(
                    model=MODEL, max_tokens=MOST_TOKENS, messages=messages
                )
                report.saw(_text(reply))

            texts = [report.question, report.question, "Is it even?", "Is it odd?"]
            await asyncio.gather(*map(ask, texts))

    asyncio.run(ask_all())


def retry(report: Report) -> None:
    """Two questions; what the connection loses, the client sends again by itself."""
    client = anthropic.Anthropic()
    for text in (report.question, "Are you sure?"):
        messages: Any = [{"role": "user", "content": text}]
        reply = client.messages.create(model=MODEL, max_tokens=MOST_TOKENS, messages=messages)
        report.saw(_text(reply))


def cut(report: Report) -> None:
    """A stream that breaks off: no client resumes one by itself, its user asks again."""
    client = anthropic.Anthropic()
    messages: Any = [{"role": "user", "content": report.question}]
    for _ in range(2):
        try:
            with client.messages.stream(
                model=MODEL, max_tokens=MOST_TOKENS, messages=messages
            ) as stream:
                report.saw(_text(stream.get_final_message()))
            return
        except Exception as error:
            report.note(f"asked again after {type(error).__name__}")
    raise SystemExit("the stream broke off twice")


if __name__ == "__main__":
    run(
        {
            "plain": plain,
            "streaming": streaming,
            "tools": tools,
            "parallel": parallel,
            "retry": retry,
            "cut": cut,
        }
    )
