"""LangGraph: a graph of a model and its tools, with langchain-openai's model."""

from __future__ import annotations

import asyncio
from typing import Any

from agent_report import Report, calculate, run
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

MODEL, MOST_STEPS = "policy", 8
ARGUMENTS: dict[str, Any] = {"operation": "add", "a": 2, "b": 3}


@tool("calculate")
def calculate_tool(operation: str, a: float, b: float) -> str:
    """Works out one operation: add, subtract or multiply."""
    return calculate(operation, a, b)


def _graph() -> Any:
    model = ChatOpenAI(model=MODEL, max_tokens=64).bind_tools([calculate_tool])

    async def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def answer_now(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    from langchain_core.runnables import RunnableLambda

    builder = StateGraph(MessagesState)
    builder.add_node("answer", RunnableLambda(answer_now, afunc=answer))
    builder.add_node("tools", ToolNode([calculate_tool]))
    builder.add_edge(START, "answer")
    builder.add_conditional_edges("answer", tools_condition)
    builder.add_edge("tools", "answer")
    return builder.compile()


def _see(report: Report, messages: list[Any], known: int) -> None:
    for message in messages[known:]:
        if isinstance(message, AIMessage):
            report.saw(str(message.text))


def plain(report: Report) -> None:
    """A model alone, two turns; then the same over Responses."""
    for over_responses in (False, True):
        model = ChatOpenAI(model=MODEL, use_responses_api=over_responses)
        history: list[Any] = [("system", "You answer briefly."), ("user", report.question)]
        first = model.invoke(history)
        report.saw(str(first.text))
        second = model.invoke([*history, first, HumanMessage("Are you sure?")])
        report.saw(str(second.text))


def streaming(report: Report) -> None:
    """A graph whose model's chunks are streamed."""
    text = ""
    for chunk, _ in _graph().stream(
        {"messages": [HumanMessage(report.question)]},
        {"recursion_limit": MOST_STEPS},
        stream_mode="messages",
    ):
        if isinstance(chunk, AIMessageChunk):
            text += str(chunk.text)
    report.saw(text)
    model = ChatOpenAI(model=MODEL, stream_usage=True)
    report.saw("".join(str(chunk.text) for chunk in model.stream(report.question)))


def tools(report: Report) -> None:
    """The graph with its tool; then from a call that the policy is said to have made, and its result."""
    history: list[Any] = [HumanMessage(report.question)]
    for turn in range(2):
        state = _graph().invoke({"messages": history}, {"recursion_limit": MOST_STEPS})
        _see(report, state["messages"], len(history))
        call = {"name": "calculate", "args": ARGUMENTS, "id": f"call_{turn}"}
        history = [
            *state["messages"],
            HumanMessage("Use the tool."),
            AIMessage("", tool_calls=[call]),
            ToolMessage(calculate(**ARGUMENTS), tool_call_id=f"call_{turn}"),
        ]


def parallel(report: Report) -> None:
    """Four graphs at the same time, two of them the same."""

    async def ask_all() -> None:
        graph = _graph()
        texts = [report.question, report.question, "Is it even?", "Is it odd?"]
        states = await asyncio.gather(
            *(
                graph.ainvoke({"messages": [HumanMessage(t)]}, {"recursion_limit": MOST_STEPS})
                for t in texts
            )
        )
        for state in states:
            _see(report, state["messages"], 1)

    asyncio.run(ask_all())


def retry(report: Report) -> None:
    """Two questions; what the connection loses, the client sends again by itself."""
    model = ChatOpenAI(model=MODEL)
    for text in (report.question, "Are you sure?"):
        report.saw(str(model.invoke(text).text))


def cut(report: Report) -> None:
    """A stream that breaks off: its user asks again."""
    model = ChatOpenAI(model=MODEL)
    for _ in range(2):
        try:
            report.saw("".join(str(chunk.text) for chunk in model.stream(report.question)))
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
