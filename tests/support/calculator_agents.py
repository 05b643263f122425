"""The same task for a third-party agent and for an agent of our own: a question and a calculator.

``solve`` is OpenAI's agents SDK, unmodified, as its documentation shows it; ``OwnCalculatorAgent``
speaks in tokens. Both show the policy the same conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from realsys.api.agent import AgentHost, Episode, EpisodeAgent, EpisodeTask
from realsys.api.registry import register_agent
from realsys.rollout.agents.transcript import Transcript
from realsys.rollout.conversation.answer_forms import ANSWER_FORMS
from realsys.rollout.conversation.chat_messages import ChatMessage, ToolCall
from realsys.rollout.conversation.chat_rendering import TemplateRenderer
from realsys.rollout.environments.calculator import NotArithmetic, evaluate

SYSTEM = "Use the calculator."
MAX_TURNS = 4
# As the SDK sends the function below
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Works out an expression.",
        "parameters": {
            "properties": {"expression": {"title": "Expression", "type": "string"}},
            "required": ["expression"],
            "title": "calculator_args",
            "type": "object",
            "additionalProperties": False,
        },
        "strict": True,
    },
}


def calculate(expression: str) -> str:
    """Works out an expression; an error as text, as tools tell policies."""
    try:
        return evaluate(expression)
    except NotArithmetic as error:
        return f"({error})"


async def solve(client: Any, task: Mapping[str, Any], model: str) -> str:
    """One episode with OpenAI's agents SDK. Returns the final answer, which the environment scores."""
    from agents import (
        Agent,
        MaxTurnsExceeded,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)

    @function_tool
    def calculator(expression: str) -> str:
        """Works out an expression."""
        return calculate(expression)

    agent = Agent(
        name="calculator",
        instructions=SYSTEM,
        tools=[calculator],
        model=OpenAIChatCompletionsModel(model=model, openai_client=client),
    )
    try:
        result = await Runner.run(agent, question_of(task["prompt"]), max_turns=MAX_TURNS)
    except MaxTurnsExceeded:
        return ""
    return str(result.final_output)


def question_of(prompt: Any) -> str:
    """The question as a user's message."""
    return str(prompt).strip()


@dataclass(kw_only=True)
class OwnCalculatorAgent(EpisodeAgent):
    """The same loop over ``ask``."""

    async def open(self, host: AgentHost) -> None:
        self._renderer = TemplateRenderer(host.tokenizer, end_ids=host.end_ids)
        self._end_ids, self._form = host.end_ids, ANSWER_FORMS["hermes"]

    async def run_episode(self, task: EpisodeTask) -> Episode:
        messages = [
            ChatMessage(role="system", content=SYSTEM),
            ChatMessage(role="user", content=question_of(task.record["prompt"])),
        ]
        transcript = Transcript(self._renderer.whole(messages, [TOOL]).tokens)
        final = ""
        for turn in range(MAX_TURNS):
            answer = await task.ask(transcript.tokens)
            if answer.is_none:
                break
            transcript.answered(answer)
            said = self._form.parse(
                self._text(task.tokenizer, answer.tokens), thinking=False, tools=True
            )
            if not said.calls:
                final = said.content
                break
            calls = tuple(
                ToolCall(id=f"{turn}-{i}", name=c.name, arguments=c.arguments)
                for i, c in enumerate(said.calls)
            )
            messages.append(ChatMessage(role="assistant", content=said.content, tool_calls=calls))
            answered, prompt = len(messages), transcript.tokens[: -len(answer.tokens)]
            messages += [
                ChatMessage(role="tool", content=self._result(call), tool_call_id=call.id)
                for call in calls
            ]
            more = self._renderer.behind(
                messages, answered, [TOOL], prompt=prompt, sampled=answer.tokens
            )
            assert more is not None
            if turn + 1 < MAX_TURNS:
                transcript.observed(more.tokens)
        observation = await task.environment.step(final)
        made = transcript.trajectory(
            reward=observation.reward, truncated=not answer.stopped, stats=observation.info
        )
        return Episode(sequences=(made,), reward=made.reward, stats=made.stats)

    def _text(self, tokenizer: Any, tokens: tuple[int, ...]) -> str:
        ended = tokens[-1:] and tokens[-1] in self._end_ids
        return str(tokenizer.decode(list(tokens[: -1 if ended else None])))

    def _result(self, call: ToolCall) -> str:
        try:
            arguments = json.loads(call.arguments)
            return calculate(arguments["expression"])
        except (ValueError, KeyError, TypeError):
            return "An error occurred while running the tool."


register_agent("own_calculator", OwnCalculatorAgent)
