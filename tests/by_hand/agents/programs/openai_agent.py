"""OpenAI's own client: Chat Completions and Responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from agent_report import CALCULATOR, Report, calculate, run

MODEL = "policy"
ABOUT = {"name": "calculate", "description": "Works out one operation.", "parameters": CALCULATOR}
TOOLS: Any = [{"type": "function", "function": ABOUT}]
TOOLS_OF_RESPONSES: Any = [{"type": "function", "strict": False, **ABOUT}]
ARGUMENTS = {"operation": "add", "a": 2, "b": 3}


def plain(report: Report) -> None:
    """A conversation of two turns, a system message before it; then one of Responses."""
    client = openai.OpenAI()
    messages: Any = [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": report.question},
    ]
    first = client.chat.completions.create(model=MODEL, messages=messages)
    report.saw(first.choices[0].message.content)
    messages += [first.choices[0].message, {"role": "user", "content": "Are you sure?"}]
    second = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=8)
    report.saw(second.choices[0].message.content)
    response = client.responses.create(model=MODEL, instructions="Be brief.", input=report.question)
    report.saw(response.output_text)


def streaming(report: Report) -> None:
    """Chunks by hand, the helper that accumulates them, and the events of Responses."""
    client = openai.OpenAI()
    messages: Any = [{"role": "user", "content": report.question}]
    chunks = client.chat.completions.create(
        model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
    )
    text, tokens = "", 0
    for chunk in chunks:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    assert tokens > 0
    report.saw(text)
    with client.chat.completions.stream(model=MODEL, messages=messages) as stream:
        for _ in stream:
            pass
        try:
            completion: Any = stream.get_final_completion()
        except openai.LengthFinishReasonError as error:  # this helper wants whole answers
            completion = error.completion
        report.saw(completion.choices[0].message.content)
    deltas, whole = "", None
    for event in client.responses.create(model=MODEL, input=report.question, stream=True):
        if event.type == "response.output_text.delta":
            deltas += event.delta
        elif event.type in ("response.completed", "response.incomplete"):
            whole = event.response.output_text
    assert deltas == whole
    report.saw(whole)


def tools(report: Report) -> None:
    """Offers a tool, answers what the policy calls, and goes on from a call that is put into its mouth."""
    client = openai.OpenAI()
    messages: Any = [{"role": "user", "content": report.question}]
    for _ in range(2):
        reply = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        report.saw(message.content)
        messages.append(message)
        for call in message.tool_calls or ():
            result = _result(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            call_id = f"call_{len(messages)}"
            function = {"name": "calculate", "arguments": json.dumps(ARGUMENTS)}
            made = {"id": call_id, "type": "function", "function": function}
            messages += [
                {"role": "user", "content": "Use the tool."},
                {"role": "assistant", "content": None, "tool_calls": [made]},
                {"role": "tool", "tool_call_id": call_id, "content": calculate(**ARGUMENTS)},
            ]
    items: Any = [
        {"role": "user", "content": report.question},
        {
            "type": "function_call",
            "call_id": "call_0",
            "name": "calculate",
            "arguments": json.dumps(ARGUMENTS),
        },
        {"type": "function_call_output", "call_id": "call_0", "output": calculate(**ARGUMENTS)},
    ]
    for _ in range(2):
        response = client.responses.create(model=MODEL, input=items, tools=TOOLS_OF_RESPONSES)
        report.saw(response.output_text)
        items += response.output
        items += [
            {
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": _result(item.arguments),
            }
            for item in response.output
            if item.type == "function_call"
        ]
        items.append({"role": "user", "content": "And then?"})


def _result(arguments: str) -> str:
    try:
        return calculate(**json.loads(arguments))
    except (TypeError, ValueError) as error:
        return f"error: {error}"


def parallel(report: Report) -> None:
    """Four questions at the same time, two of them the same; and two answers to one request."""

    async def ask_all() -> None:
        async with openai.AsyncOpenAI() as client:

            async def ask(text: str, n: int = 1) -> None:
                messages: Any = [{"role": "user", "content": text}]
                reply = await client.chat.completions.create(model=MODEL, messages=messages, n=n)
                for choice in reply.choices:
                    report.saw(choice.message.content)

            texts = [report.question, report.question, "Is it even?", "Is it odd?"]
            await asyncio.gather(*map(ask, texts), ask("How many?", n=2))

    asyncio.run(ask_all())


def retry(report: Report) -> None:
    """Two questions; what the connection loses, the client sends again by itself."""
    client = openai.OpenAI()
    for text in (report.question, "Are you sure?"):
        messages: Any = [{"role": "user", "content": text}]
        reply = client.chat.completions.create(model=MODEL, messages=messages)
        report.saw(reply.choices[0].message.content)


def cut(report: Report) -> None:
    """A stream that breaks off: no client resumes one by itself, its user asks again."""
    client = openai.OpenAI()
    messages: Any = [{"role": "user", "content": report.question}]
    for _ in range(2):
        text = ""
        try:
            for chunk in client.chat.completions.create(
                model=MODEL, messages=messages, stream=True
            ):
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            report.saw(text)
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
