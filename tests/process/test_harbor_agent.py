"""``agent=harbor`` on the task of docs/harbor.md: scripted policies in real boxes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from doc_pages import DocPage
from page_stories import harbor_tasks

from realsys.api import registry
from realsys.api.agent import AgentHost, Answer, Episode, EpisodeTask
from realsys.api.errors import ConfigError, SandboxFailure, WaitTimeout
from realsys.models.hf import load_tokenizer
from realsys.rewards.sandbox import sandbox as door
from realsys.rollout.worker.trajectories import check_episode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's tasks and a tiny model."""
    folder = tmp_path_factory.mktemp("harbor")
    harbor_tasks(DocPage("harbor.md"), folder)
    return folder


class ScriptedPolicy:
    """Says these texts one after the other, and keeps what it was shown. A text may be a function's."""

    def __init__(self, tokenizer: Any, *texts: str | Callable[[], Any]) -> None:
        self.tokenizer, self.left, self.shown = tokenizer, list(texts), list[str]()

    async def __call__(self, tokens: Sequence[int], limit: Any = None, /, **_: Any) -> Answer:
        self.shown.append(self.tokenizer.decode(list(tokens)))
        text = self.left.pop(0)
        if callable(text):
            return await text()  # type: ignore[no-any-return]
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        ids = (*ids, self.tokenizer.eos_token_id)
        numbers = (-1.0,) * len(ids), (3,) * len(ids)
        return Answer(tokens=ids, logprobs=numbers[0], versions=numbers[1], stopped=True)


@pytest.fixture
def play(folder: Path) -> Iterator[Callable[..., tuple[Episode, ScriptedPolicy]]]:
    tokenizer = load_tokenizer(folder / "MODEL")
    agents = []

    def run(*texts: Any, **args: Any) -> tuple[Episode, ScriptedPolicy]:
        args.setdefault("rule", {"disk": 64, "agent_s": 10.0, "verifier_s": 10.0})
        agent = registry.make_agent("harbor", **args)
        agents.append(agent)
        ask = ScriptedPolicy(tokenizer, *texts)

        async def episode() -> Episode:
            ends = frozenset({tokenizer.eos_token_id})
            host = AgentHost(name="w", tokenizer=tokenizer, end_ids=ends, folder=folder / "logs")
            await agent.open(host)
            task = EpisodeTask(
                id="e", prompt=[1], ask=ask, environment=None, tokenizer=tokenizer,  # type: ignore[arg-type]
                record={"prompt": "?", "task_directory": str(folder / "tasks/count-lines-0")},
            )  # fmt: skip
            try:
                return await agent.run_episode(task)  # type: ignore[no-any-return]
            finally:
                await agent.close()

        return asyncio.run(episode()), ask

    yield run
    for agent in agents:
        if (engine := getattr(agent, "_tests", None)) is not None and engine._sandbox is not None:
            engine._sandbox._sandbox.close()


def call(command: str, name: str = "bash") -> str:
    """A tool call as the tokenizer's form has it."""
    body = json.dumps({"name": name, "arguments": {"command": command}})
    return f"<tool_call>{body}</tool_call>"


def test_several_commands_then_the_tests(play: Any) -> None:
    episode, ask = play(
        "I look." + call("cat poem.txt; echo hm >&2; exit 3"),
        call("ls /tests /logs/verifier", name="python"),
        call("n=$(wc -l < poem.txt)") + call("wc -l < poem.txt > lines.txt"),
        "It is done.",
    )
    assert episode.reward == 1.0
    assert "The working folder holds poem.txt" in ask.shown[0]
    assert "run in /app;" in ask.shown[0]
    assert "tool: one\ntwo\nthree\nhm\n(exit status 3)\n" in ask.shown[1]
    assert "'python', only bash)" in ask.shown[2]
    assert ask.shown[3].count("(no output)") == 2
    expected = {
        "reward/written": 1.0, "reward/right": 1.0, "reward/no_verdict": 0.0, "turns": 4.0,
        "commands": 3.0, "out_of_turns": 0.0, "out_of_time": 0.0, "out_of_context": 0.0, "calls": 4.0,
        "branches": 1.0, "unread_answers": 0.0, "unread_calls": 0.0,
    }  # fmt: skip
    assert {k: v for k, v in episode.stats.items() if k != "command_seconds"} == expected
    (sequence,) = episode.sequences
    check_episode(episode, [], agent="harbor")
    said = [t for t, mine in zip(sequence.tokens, sequence.from_policy, strict=True) if mine]
    assert ask.tokenizer.decode(said).count("<tool_call>") == 4
    assert sum(sequence.from_policy) == sum(v == 3 for v in sequence.versions)


def test_fenced_blocks_for_models_without_tools(play: Any) -> None:
    episode, ask = play(
        "```bash\nwc -l < poem.txt\n```",
        "```sh\necho 3 > lines.txt\n```",
        "Done.",
        commands="blocks",
    )
    assert episode.reward == 1.0
    assert ask.shown[1].endswith("user: 3\nassistant: ")
    assert "fenced block" in ask.shown[0]


def test_the_last_turns_command_counts_and_an_early_end_gets_what_it_has(play: Any) -> None:
    episode, _ = play(call("echo 3 > lines.txt"), max_turns=1)
    assert (episode.reward, episode.stats["out_of_turns"]) == (1.0, 1.0)
    episode, _ = play(call("echo 4 > lines.txt"), "ok")
    assert (episode.reward, episode.stats["reward/written"]) == (0.5, 1.0)
    episode, _ = play("I can't.")
    assert (episode.reward, episode.stats["commands"]) == (0.0, 0.0)


def test_a_long_output_is_cut_and_a_slow_command_ended(play: Any) -> None:
    slow = {"disk": 64, "agent_s": 3.0, "verifier_s": 10.0}
    episode, ask = play(
        call("seq 100000"), call("echo 3 > lines.txt; sleep 60"), "ok", output_chars=40, rule=slow
    )
    assert "characters left out)" in ask.shown[1]
    assert "it was ended," in ask.shown[2]
    assert episode.reward == 1.0


def test_the_time_of_an_episode_leaves_time_for_the_tests(play: Any) -> None:
    async def never() -> Answer:
        await asyncio.sleep(600)
        raise AssertionError

    began = time.monotonic()
    episode, _ = play(call("echo 3 > lines.txt"), never, timeout_s=16.0)
    assert (episode.reward, episode.stats["out_of_time"]) == (1.0, 1.0)
    assert time.monotonic() - began < 60
    with pytest.raises(WaitTimeout, match="episode"):
        play(never, timeout_s=12.0)
    with pytest.raises(ConfigError, match="tests may take 10"):
        play(timeout_s=10.0)


def test_a_full_context_ends_the_work_and_not_the_reward(play: Any) -> None:
    async def full() -> Answer:
        return Answer(tokens=(), logprobs=(), versions=(), stopped=False)

    episode, _ = play(call("echo 3 > lines.txt"), full)
    assert (episode.reward, episode.stats["out_of_context"]) == (1.0, 1.0)


def test_a_box_that_fails_by_itself_is_tried_again_once(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, failures = door.Sandbox._reply, [2]

    def failing(*args: Any) -> Any:
        failures[0] -= 1
        return door.messages.BoxReply(failure="killed") if failures[0] == 0 else reply(*args)

    monkeypatch.setattr(door.Sandbox, "_reply", failing)  # the first is the Dockerfile's
    episode, _ = play(call("echo 3 > lines.txt"), "ok")
    assert (episode.reward, episode.stats["commands"]) == (1.0, 1.0)
    monkeypatch.setattr(door.Sandbox, "_reply", lambda *_: door.messages.BoxReply(failure="killed"))
    with pytest.raises(SandboxFailure, match="killed"):
        play(call("echo 3 > lines.txt"), "ok")
