"""``agent=harbor_command``: programs that know of an URL and a key work in boxes without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from doc_pages import DocPage
from page_stories import harbor_tasks
from test_harbor_agent import ScriptedPolicy

from realsys.api import registry
from realsys.api.agent import AgentHost, Episode, EpisodeTask
from realsys.api.errors import ConfigError, RolloutError
from realsys.models.hf import load_tokenizer
from realsys.rewards.sandbox.landlock_rules import abi_version
from realsys.rollout.worker.trajectories import check_episode

# An agent as it is installed somewhere: it asks, runs what it is told, shows the output, and so on.
AGENT = """
import json, os, socket, subprocess, sys, urllib.error, urllib.request

def ask(path, body):
    url = os.environ["OPENAI_BASE_URL"] + path
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, {}

messages = [{"role": "user", "content": os.environ["REALSYS_INSTRUCTION"]}]
while True:
    _, reply = ask("/chat/completions", {"model": "policy", "messages": messages})
    text = reply["choices"][0]["message"]["content"]
    if text.startswith("done"):
        break
    shown = subprocess.run(text, shell=True, capture_output=True, text=True)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": shown.stdout}]
"""
RULE: dict[str, Any] = {"disk": 64, "verifier_s": 10.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's tasks, a tiny model and an agent."""
    folder = tmp_path_factory.mktemp("harbor")
    harbor_tasks(DocPage("harbor.md"), folder)
    (folder / "installed").mkdir()
    (folder / "installed/agent.py").write_text(AGENT)
    return folder


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Any]]:
    """Makes agents; their warm processes end with the test."""
    agents = []

    def made(command: str, rule: Mapping[str, Any] = RULE, **args: Any) -> Any:
        rule = {**RULE, **rule, "reads": (str(folder / "installed"),)}
        command = command.format(agent=f"python3 {folder}/installed/agent.py")
        agents.append(registry.make_agent("harbor_command", command=command, rule=rule, **args))
        return agents[-1]

    yield made
    for agent in agents:
        if agent._tests._sandbox is not None:
            agent._tests._sandbox._sandbox.close()


@asynccontextmanager
async def opened(agent: Any, folder: Path, *texts: Any) -> AsyncIterator[EpisodeTask]:
    """An episode of the page's task, whose policy says these texts."""
    tokenizer = load_tokenizer(folder / "MODEL")
    ends = frozenset({tokenizer.eos_token_id})
    host = AgentHost(name="w", tokenizer=tokenizer, end_ids=ends, folder=folder / "logs")
    await agent.open(host)
    ask = ScriptedPolicy(tokenizer, *texts)
    try:
        yield EpisodeTask(
            id="e", prompt=[], ask=ask, environment=None, tokenizer=tokenizer,  # type: ignore[arg-type]
            record={"prompt": "?", "task_directory": str(folder / "tasks/count-lines-0")},
        )  # fmt: skip
    finally:
        await agent.close()


def played(agent: Any, folder: Path, *texts: Any) -> tuple[Episode, list[str]]:
    async def main() -> tuple[Episode, list[str]]:
        async with opened(agent, folder, *texts) as task:
            return await agent.run_episode(task), task.ask.shown  # type: ignore[attr-defined]

    return asyncio.run(main())


def test_an_installed_agent_works_in_a_box_and_the_tests_pay(make: Any, folder: Path) -> None:
    """What the policy has it run reaches the policy, nothing else, and sets no reward there."""
    code = (
        "import os, urllib.request as u; "
        "head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}; "
        "at = os.environ['OPENAI_BASE_URL'].removesuffix('/v1'); "
        "u.urlopen(u.Request(at + '/rl/set_reward', b'9', head))"
    )
    reach = (
        "for to in 169.254.169.254/80 10.0.0.1/22 127.0.0.1/22; do "
        f'(exec 3<>/dev/tcp/$to) 2>/dev/null && echo reached $to; done; python3 -c "{code}" 2>&1 | tail -1'
        """; python3 -c 'import socket; socket.create_server(("127.0.0.1", 0))' 2>&1 | tail -1"""
    )
    agent = make(
        "cmp $REALSYS_INSTRUCTION_FILE <(echo hm); {agent}; echo end of $REALSYS_MODEL; exit 3"
    )
    texts = ("cat poem.txt", reach, "wc -l < poem.txt > lines.txt", "done")
    episode, shown = played(agent, folder, *texts)
    assert episode.reward == 1.0
    assert "3" in episode.problem  # told, although the tests pay
    assert "holds poem.txt" in shown[0]
    assert shown[1].endswith("user: one\ntwo\nthree\n\nassistant: ")
    said = shown[2].removeprefix(shown[1])
    assert "404" in said
    assert "\nreached" not in said
    assert abi_version() < 4 or "PermissionError" in said  # it can open no port of its own
    figures = {k: v for k, v in episode.stats.items() if k != "command_seconds"}
    assert figures == {
        "reward/written": 1.0, "reward/right": 1.0, "reward/no_verdict": 0.0, "out_of_time": 0.0,
        "failed": 1.0, "calls": 4.0, "branches": 1.0, "unread_answers": 0.0,
        "unread_calls": 0.0,
    }  # fmt: skip
    check_episode(episode, [], agent="harbor_command")
    (sequence,) = episode.sequences
    assert sum(sequence.from_policy) == sum(v == 3 for v in sequence.versions) > 3
    log = (folder / "logs/e.log").read_text()
    assert "end of policy" in log
    assert "differ" in log  # the file has the instruction, not "hm"


def test_an_agent_that_does_not_end_is_scored_by_what_it_left(make: Any, folder: Path) -> None:
    agent = make("echo 3 > lines.txt; {agent}; sleep 600", timeout_s=RULE["verifier_s"] + 3)
    episode, _ = played(agent, folder, "done")
    assert (episode.reward, episode.stats["out_of_time"]) == (1.0, 1.0)


def test_an_episode_that_is_given_up_ends_its_box(make: Any, folder: Path) -> None:
    """Else the box would go on for the rest of the episode's time, and hold its place."""
    agent = make("{agent}; sleep 3000", rule={"boxes_at_once": 1}, timeout_s=3600.0)

    async def main() -> None:
        asked = asyncio.Event()

        async def waits() -> None:
            asked.set()
            await asyncio.Event().wait()

        async with asyncio.timeout(300), opened(agent, folder, waits) as task:
            episode = asyncio.create_task(agent.run_episode(task))
            await asked.wait()
            episode.cancel()
            await asyncio.gather(episode, return_exceptions=True)
            # The only thread for boxes is free again
            await asyncio.get_running_loop().run_in_executor(agent._threads, int)

    asyncio.run(main())


def test_an_agent_that_asks_nothing_is_an_error(make: Any, folder: Path) -> None:
    with pytest.raises(RolloutError):
        played(make("true"), folder)


@pytest.mark.parametrize(
    ("args", "where"),
    [
        ({"command": " "}, "command"),
        ({"command": "x", "roles": ("a", "b")}, "roles"),
        ({"command": "x", "listen": "https"}, "listen"),
    ],
)
def test_arguments_that_can_not_be_are_refused(args: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.make_agent("harbor_command", **args)
    assert where in str(caught.value.where)
