"""smolagents: its OpenAI model, alone and under a ToolCallingAgent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agent_report import Report, calculate, run
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

MODEL, MOST_STEPS = "policy", 2
ARGUMENTS = {"operation": "add", "a": 2, "b": 3}


@tool
def calculate_tool(operation: str, a: float, b: float) -> str:
    """Works out one operation.

    Args:
        operation: add, subtract or multiply.
        a: The first number.
        b: The second number.
    """
    return calculate(operation, a, b)


def _messages(*texts: str) -> list[Any]:
    roles = ("user", "assistant")
    return [
        {"role": roles[i % 2], "content": [{"type": "text", "text": text}]}
        for i, text in enumerate(texts)
    ]


def plain(report: Report) -> None:
    """A conversation of two turns with the model alone."""
    model = OpenAIServerModel(MODEL)
    first = model.generate(_messages(report.question))
    report.saw(first.content)
    second = model.generate(_messages(report.question, first.content or "", "Are you sure?"))
    report.saw(second.content)


def streaming(report: Report) -> None:
    """The model's deltas, and an agent that streams."""
    model = OpenAIServerModel(MODEL)
    deltas = model.generate_stream(_messages(report.question))
    report.saw("".join(delta.content or "" for delta in deltas))
    agent = ToolCallingAgent(
        [calculate_tool], model, max_steps=1, stream_outputs=True, verbosity_level=0
    )
    for _ in agent.run(report.question, stream=True):
        pass
    _note_end(report, agent)


def tools(report: Report) -> None:
    """An agent with a tool; it ends by its own limit where the policy calls nothing."""
    model = OpenAIServerModel(MODEL)
    agent = ToolCallingAgent([calculate_tool], model, max_steps=MOST_STEPS, verbosity_level=0)
    agent.run(report.question)
    agent.run("And then?", reset=False)
    _note_end(report, agent)
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": "calculate_tool", "arguments": ARGUMENTS},
    }
    history = [
        *_messages(report.question),
        {"role": "tool-call", "content": [{"type": "text", "text": f"Calling tools: {[call]}"}]},
        {"role": "tool-response", "content": [{"type": "text", "text": "5"}]},
    ]
    reply = model.generate(history, tools_to_call_from=[calculate_tool])
    report.saw(reply.content)


def _note_end(report: Report, agent: Any) -> None:
    for step in agent.memory.steps:
        message = getattr(step, "model_output_message", None)
        if message is not None:
            report.saw(message.content)
        if (error := getattr(step, "error", None)) is not None:
            report.note(f"{type(error).__name__}: {error}"[:200])


def parallel(report: Report) -> None:
    """Four questions at the same time, two of them the same."""
    model = OpenAIServerModel(MODEL)
    texts = [report.question, report.question, "Is it even?", "Is it odd?"]
    with ThreadPoolExecutor(4) as pool:
        for reply in pool.map(lambda text: model.generate(_messages(text)), texts):
            report.saw(reply.content)


def retry(report: Report) -> None:
    """Two questions; what the connection loses, the client sends again by itself."""
    model = OpenAIServerModel(MODEL)
    for text in (report.question, "Are you sure?"):
        report.saw(model.generate(_messages(text)).content)


def cut(report: Report) -> None:
    """A stream that breaks off: its user asks again."""
    model = OpenAIServerModel(MODEL)
    for _ in range(2):
        try:
            deltas = list(model.generate_stream(_messages(report.question)))
            report.saw("".join(delta.content or "" for delta in deltas))
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
