"""OpenAI's Agents SDK, over Responses (its default) and over Chat Completions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from agent_report import Report, calculate, run
from agents import (
    Agent,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)
from agents.exceptions import AgentsException

MODEL, MOST_TURNS = "policy", 3
ARGUMENTS = {"operation": "add", "a": 2, "b": 3}
APIS: tuple[Any, ...] = ("responses", "chat_completions")


@function_tool(name_override="calculate")
def calculate_tool(operation: str, a: float, b: float) -> str:
    """Works out one operation: add, subtract or multiply."""
    return calculate(operation, a, b)


def _agent(*, has_tools: bool = False) -> Agent[Any]:
    return Agent(
        name="counter",
        instructions="You answer briefly.",
        model=MODEL,
        tools=[calculate_tool] if has_tools else [],
    )


def _texts(result: Any) -> list[str]:
    return [
        "".join(part.text for part in item.content if part.type == "output_text")
        for response in result.raw_responses
        for item in response.output
        if item.type == "message"
    ]


def plain(report: Report) -> None:
    """A run, and one that continues it, over each of the APIs."""
    for api in APIS:
        set_default_openai_api(api)
        first = Runner.run_sync(_agent(), report.question, max_turns=MOST_TURNS)
        second = Runner.run_sync(
            _agent(),
            [*first.to_input_list(), {"role": "user", "content": "Are you sure?"}],
            max_turns=MOST_TURNS,
        )
        for text in _texts(first) + _texts(second):
            report.saw(text)


def streaming(report: Report) -> None:
    """A streamed run over each of the APIs: the deltas are the text."""

    async def stream() -> None:
        for api in APIS:
            set_default_openai_api(api)
            result = Runner.run_streamed(_agent(), report.question, max_turns=MOST_TURNS)
            text = ""
            async for event in result.stream_events():
                data: Any = getattr(event, "data", None)
                if getattr(data, "type", "") == "response.output_text.delta":
                    text += data.delta
            assert text == "".join(_texts(result)), (text, _texts(result))
            report.saw(text)

    asyncio.run(stream())


def tools(report: Report) -> None:
    """Runs with a tool; then from a call that the policy is said to have made, and its result."""
    for api in APIS:
        set_default_openai_api(api)
        history: list[Any] = [{"role": "user", "content": report.question}]
        for turn in range(2):
            try:
                result = Runner.run_sync(_agent(has_tools=True), history, max_turns=MOST_TURNS)
            except AgentsException as error:  # e.g. it calls on and on
                report.note(f"{type(error).__name__}: {error}"[:200])
                continue
            for text in _texts(result):
                report.saw(text)
            call_id = f"call_{turn}"
            history = [
                *result.to_input_list(),
                {"role": "user", "content": "Use the tool."},
                {
                    "type": "function_call",
                    "call_id": call_id,
                    "name": "calculate",
                    "arguments": json.dumps(ARGUMENTS),
                },
                {
                    "type": "function_call_output",
                    "call_id": call_id,
                    "output": calculate("add", 2, 3),
                },
            ]


def parallel(report: Report) -> None:
    """Four runs at the same time, two of them the same."""

    async def ask_all() -> None:
        texts = [report.question, report.question, "Is it even?", "Is it odd?"]
        results = await asyncio.gather(*(Runner.run(_agent(), text) for text in texts))
        for result in results:
            for text in _texts(result):
                report.saw(text)

    asyncio.run(ask_all())


def retry(report: Report) -> None:
    """Two runs; what the connection loses, the client sends again by itself."""
    for api, text in zip(APIS, (report.question, "Are you sure?"), strict=True):
        set_default_openai_api(api)
        for seen in _texts(Runner.run_sync(_agent(), text)):
            report.saw(seen)


def cut(report: Report) -> None:
    """A stream that breaks off: its user asks again."""

    async def ask() -> bool:
        result = Runner.run_streamed(_agent(), report.question)
        try:
            async for _ in result.stream_events():
                pass
        except Exception as error:
            report.note(f"asked again after {type(error).__name__}")
            return False
        for text in _texts(result):
            report.saw(text)
        return True

    set_default_openai_api("chat_completions")
    if not (asyncio.run(ask()) or asyncio.run(ask())):
        raise SystemExit("the stream broke off twice")


if __name__ == "__main__":
    set_tracing_disabled(True)  # traces would go to OpenAI
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
