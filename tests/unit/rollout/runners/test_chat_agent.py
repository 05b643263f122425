"""Agent ``chat``: turns, tools, ends; its tokens are those of an agent behind the endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import golden
import openai
import pytest
from letter_chat import ScriptedPolicy, host, task

from realsys.api.agent import Answer, Environment, Episode, EpisodeTask, Observation
from realsys.api.errors import ConfigError, DataError
from realsys.config.plugin_arguments import argument_problems
from realsys.rollout.conversation.full_context import ContextFull
from realsys.rollout.runners.chat_agent import ChatAgent, first_request
from realsys.rollout.runners.endpoint_agent import EndpointAgent
from realsys.rollout.runners.episode_outcome import AgentOutcome, EpisodeSeat
from realsys.rollout.worker.group import TimeoutEnvironment
from realsys.rollout.worker.trajectories import check_episode

RECORD = {"prompt": " What is 2+3? ", "answer": "5"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def call(name: str = "add", **arguments: Any) -> str:
    """A tool call as the policy writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@dataclass(kw_only=True)
class Adder(Environment):
    """Has a tool that adds; each call earns 0.25; any other text ends the episode and earns 1 for a 5."""

    has_tools: bool = True
    first: str = ""
    ends_at: int = 99
    tries: int = 1
    result: str = ""
    called: list[tuple[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    samples: list[Answer] = field(default_factory=list)

    async def reset(self, record: Mapping[str, Any]) -> None:
        pass

    def opening(self) -> str:
        return self.first

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (ADD,) if self.has_tools else ()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        self.called.append((name, dict(arguments)))
        done = len(self.called) == self.ends_at
        text = self.result or str(arguments.get("a", 0) + arguments.get("b", 0))
        return Observation(text=text, reward=0.25, done=done, info={"calls": len(self.called)})

    def sampled(self, answer: Answer) -> None:
        self.samples.append(answer)

    async def step(self, action: str) -> Observation:
        self.said.append(action)
        done = len(self.said) >= self.tries
        return Observation(text="Again.", reward=float(action == "5"), done=done)


def play(
    policy: ScriptedPolicy,
    environment: Adder,
    folder: Path = Path(),
    record: Mapping[str, Any] = RECORD,
    **arguments: Any,
) -> Episode:
    """One episode, checked as a worker does."""

    async def episode() -> Episode:
        agent = ChatAgent(**arguments)
        await agent.open(host(folder))
        limited = TimeoutEnvironment(environment, name="adder", timeout_s=60)
        return await agent.run_episode(task(policy, limited, record))

    made = asyncio.run(episode())
    check_episode(made, (), agent="chat")
    return made


def text_of(episode: Episode) -> str:
    (sequence,) = episode.sequences
    return "".join(map(chr, sequence.tokens))


def test_a_call_is_answered_and_the_answer_is_scored_token_by_token():
    environment = Adder()
    made = play(ScriptedPolicy(call(a=2, b=3), "5"), environment, system="Add.")
    text = text_of(made)
    assert text.startswith("tools: [{")
    assert text.endswith(
        f"]\nsystem: Add.\nuser: What is 2+3?\nassistant: {call(a=2, b=3)}$\ntool: 5\nassistant: 5$"
    )
    (sequence,) = made.sequences
    trained = "".join(
        chr(t) for t, own in zip(sequence.tokens, sequence.from_policy, strict=True) if own
    )
    assert trained == f"{call(a=2, b=3)}$5$"
    count = len(trained)
    own = [x for x, mine in zip(sequence.logprobs, sequence.from_policy, strict=True) if mine]
    assert own == [-float(i + 1) for i in range(count)]
    assert environment.called == [("add", {"a": 2, "b": 3})]
    assert environment.said == ["5"]
    assert [a.tokens for a in environment.samples] == [(ord("5"), ord("$"))]
    assert (made.reward, sequence.reward) == (1.25, 1.25)
    assert made.stats == {
        "calls": 1.0,
        "turns": 2.0,
        "tool_calls": 1.0,
        "wrong_calls": 0.0,
        "full_context": 0.0,
        "branches": 1.0,
    }


def test_without_tools_the_environment_answers_until_it_is_done():
    environment = Adder(has_tools=False, first="Think.", tries=2)
    made = play(ScriptedPolicy("4", "5"), environment)
    assert text_of(made) == (
        "user: What is 2+3?\n\nThink.\nassistant: 4$\nuser: Again.\nassistant: 5$"
    )
    assert (environment.said, made.reward) == (["4", "5"], 1.0)


def test_half_a_letter_of_a_call_or_a_result_is_shown_as_a_question_mark():
    policy = ScriptedPolicy(call(a="a\ud800"), "5")
    environment = Adder(first="f\ud800", result="x\ud800")
    play(policy, environment)
    assert environment.called == [("add", {"a": "a?"})]
    assert "?\n\nf?\nassistant: " in policy.asked[0]
    assert policy.asked[1].endswith("tool: x?\nassistant: ")


def test_without_tools_a_call_is_text():
    environment = Adder(has_tools=False)
    play(ScriptedPolicy(call(a=1)), environment)
    assert environment.said == [call(a=1)]


def test_a_wrong_call_is_told_to_the_policy_and_counted():
    policy, environment = ScriptedPolicy(call("ad", a=1), "5"), Adder()
    made = play(policy, environment)
    told = "Error: there is no tool 'ad'; there are: add"
    assert policy.asked[1].endswith(f"tool: {told}\nassistant: ")
    assert environment.called == []
    assert (made.stats["tool_calls"], made.stats["wrong_calls"], made.reward) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "written",
    [
        *(
            "",
            "…",
            "<tool_call>",
            "<tool_call>{}</tool_call>",
            '<tool_call>{"name": 1}</tool_call>',
        ),
        *('<tool_call>{"name": "add", "arguments": []}</tool_call>', "</tool_call>", "<think>"),
        *('<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 5000 + "…", "<think>x</think>"),
    ],
)
def test_whatever_the_policy_writes_is_an_answer(written):
    environment = Adder()
    made = play(ScriptedPolicy(written), environment)
    assert len(environment.said) == 1
    assert made.stats["turns"] == 1.0


def test_an_episode_ends_where_the_environment_says_so_in_a_call():
    environment = Adder(ends_at=1)
    made = play(ScriptedPolicy(call(a=1) + call(a=2)), environment)
    assert environment.called == [("add", {"a": 1})]  # the second call has no world to act in
    assert (environment.said, made.reward) == ([], 0.25)


def test_turns_that_end_in_calls_are_scored_by_the_text_beside_them():
    environment = Adder()
    made = play(ScriptedPolicy("5" + call(a=1)), environment, max_turns=1)
    assert (environment.said, made.reward) == (["5"], 1.25)


def test_an_episode_ends_where_the_context_is_full():
    first = ScriptedPolicy("5")
    play(first, Adder())
    policy = ScriptedPolicy(call(a=1, b=1), context=len(first.asked[0]) + 1)
    environment = Adder()
    made = play(policy, environment)
    assert made.stats["full_context"] == 1.0
    assert environment.said == [""]
    assert text_of(made).endswith("</tool_call>$")
    with pytest.raises(ContextFull):
        play(ScriptedPolicy(context=10), Adder())


def test_no_answer_is_asked_for_after_the_episodes_time():
    environment = Adder(has_tools=False, tries=9)
    made = play(ScriptedPolicy("4", "5"), environment, timeout_s=1e-9)
    assert (environment.said, made.stats["turns"]) == (["4"], 1.0)


def test_messages_of_a_record_keep_their_system_message():
    messages = [{"role": "system", "content": "Own."}, {"role": "user", "content": "Q"}]
    request = first_request(messages, system="Other.", opening="O", tools=())
    assert [(m.role, m.content) for m in request.messages] == [
        ("system", "Own."),
        ("user", "Q\n\nO"),
    ]


def test_arguments_are_checked_by_a_plan():
    def problems(**args: Any) -> list[str]:
        return [p.what for p in argument_problems("agent", "chat", args, where="x")]

    assert problems(max_turns=3, system="s", form="hermes") == []
    assert problems(max_turn=3) == ["agent 'chat' takes no 'max_turn'"]
    assert problems(form="herms")
    assert problems(max_turns=0)


def test_an_environment_without_tools_can_not_be_called():
    class Silent(Environment):
        async def reset(self, record: Mapping[str, Any]) -> None: ...

        async def step(self, action: str) -> Observation:
            return Observation()

    assert (Silent().opening(), Silent().tools()) == ("", ())
    with golden.raises(DataError):
        asyncio.run(Silent().call("x", {}))


# ---- the same tokens as behind the endpoint ---------------------------------------------------------


class SdkAgent(EndpointAgent):
    """The same conversation as an OpenAI client has it."""

    async def play(self, task: EpisodeTask, seats: Sequence[EpisodeSeat]) -> AgentOutcome:
        address = seats[0].address
        async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.key) as client:
            messages: list[Any] = [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": "What is 2+3?"},
            ]
            while True:
                reply = await client.chat.completions.create(
                    model="policy", messages=messages, tools=[ADD]
                )
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return AgentOutcome(text=message.content or "")
                for made in message.tool_calls:
                    given = json.loads(made.function.arguments)
                    result = await task.environment.call(made.function.name, given)
                    messages.append(
                        {"role": "tool", "content": result.text, "tool_call_id": made.id}
                    )


@pytest.mark.parametrize("keep_thoughts", [True, False])
@pytest.mark.parametrize(
    "answers",
    [
        (call(a=2, b=3), "5"),
        ("<think>hm</think> I add. " + call(a=2, b=3), "  5  "),
        (call(a=2) + " and " + call(a=1, b=1), call(b=1), "5…"),
    ],
)
def test_it_trains_on_the_tokens_that_an_agent_behind_the_endpoint_trains_on(
    tmp_path, answers, keep_thoughts
):
    async def behind_endpoint() -> Episode:
        agent = SdkAgent(keep_thoughts=keep_thoughts)
        await agent.open(host(tmp_path))
        try:
            return await agent.run_episode(task(ScriptedPolicy(*answers), Adder(), RECORD))
        finally:
            await agent.close()

    theirs = asyncio.run(behind_endpoint())
    ours = play(ScriptedPolicy(*answers), Adder(), system="Add.", keep_thoughts=keep_thoughts)
    for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
        assert mine.tokens == other.tokens
        assert mine.from_policy == other.from_policy
        assert (mine.logprobs, mine.versions) == (other.logprobs, other.versions)
        assert mine.truncated == other.truncated
    assert ours.stats["branches"] == theirs.stats["branches"]


def test_a_template_that_takes_no_conversation_is_a_mistake_of_the_run():
    with golden.raises(ConfigError):
        play(ScriptedPolicy("5"), Adder(), template="{{ messages[9].content.x }}")
