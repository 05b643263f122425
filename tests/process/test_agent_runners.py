"""Programs, functions and clients from outside as agents: real processes and sockets, a scripted policy."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from chat_families import FAMILIES
from passing_time import pass_time
from scripted_policy import END, ScriptedPolicy

from realsys.api.agent import (
    AgentHost,
    DoubtfulEnd,
    Environment,
    Episode,
    EpisodeAgent,
    EpisodeTask,
    Observation,
)
from realsys.api.errors import ConfigError, RolloutError
from realsys.rollout.runners.command_agent import CommandAgent
from realsys.rollout.runners.external_agent import ADDRESS_FILE, ExternalAgent
from realsys.rollout.runners.host_process import HostProcess
from realsys.rollout.runners.hosted_agent import PythonAgent
from realsys.runtime.child_processes import log_limit
from realsys.runtime.child_processes.log_limit import cut_log

FAMILY = FAMILIES["chatml"]
ASK = """
import json, os, sys, time, urllib.request
def ask(text="hi", url=os.environ.get("OPENAI_BASE_URL"), key=os.environ.get("OPENAI_API_KEY")):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)) as r:
        return json.load(r)["choices"][0]["message"]["content"]
"""


@dataclass
class Scorer(Environment):
    """1 for "right", and remembers what it was given."""

    given: list[str] = field(default_factory=list)

    async def reset(self, record: Mapping[str, Any]) -> None: ...

    async def step(self, action: str) -> Observation:
        self.given.append(action)
        return Observation(reward=float(action == "right"), info={"seen": 1.0})


def played(
    agent: EpisodeAgent,
    folder: Path,
    *script: str,
    environment: Environment | None = None,
    beside: Callable[[EpisodeAgent], Coroutine[Any, Any, Any]] | None = None,
    passes_s: Sequence[float] = (),
) -> Episode:
    """One episode of an agent, while ``beside`` runs; so much time passes in the policy's answers, of which
    the last then never comes."""
    asked = 0
    policy = ScriptedPolicy(FAMILY, [f"{text}{END}" for text in script])

    async def ask(
        tokens: Any,
        limit: Any = None,
        /,
        *,
        stop: Any = (),
        on_tokens: Any = None,
        grammar: str = "",
    ) -> Any:
        nonlocal asked
        asked += 1
        if asked <= len(passes_s):
            pass_time(passes_s[asked - 1])
            if asked == len(passes_s):
                await asyncio.Event().wait()
        return await policy.sample(tokens, limit=limit, stop=stop, sampling={}, on_tokens=on_tokens)

    async def run() -> Episode:
        await agent.open(
            AgentHost(
                name="rollout_worker/0",
                tokenizer=FAMILY.tokenizer,
                end_ids=frozenset(FAMILY.end_ids),
                folder=folder / "agents",
                secret=b"s" * 32,
                place=str(folder),
            )
        )
        task = EpisodeTask(
            id="0-1-0",
            prompt=(1,),
            record={"prompt": "What is it?", "answer": "secret", "level": 3},
            ask=ask,
            environment=environment or Scorer(),
            tokenizer=FAMILY.tokenizer,
        )
        try:
            async with asyncio.timeout(200), asyncio.TaskGroup() as group:
                if beside is not None:
                    group.create_task(beside(agent))
                episode = group.create_task(agent.run_episode(task))
            return episode.result()
        finally:
            await agent.close()

    try:
        return asyncio.run(run())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def command(folder: Path, code: str, **more: Any) -> CommandAgent:
    program = folder / "agent.py"
    program.write_text(ASK + textwrap.dedent(code))
    return CommandAgent(command=[sys.executable, "-S", str(program)], **more)


def function(folder: Path, code: str, **more: Any) -> PythonAgent:
    module = folder / "an_agent.py"
    module.write_text(ASK + textwrap.dedent(code))
    return PythonAgent(function=f"{module}:solve", **more)


# ---- programs -------------------------------------------------------------------------------------


def test_a_programs_last_answer_is_scored_by_the_environment(tmp_path):
    scorer = Scorer()
    agent = command(tmp_path, "ask(); ask('again')")
    episode = played(agent, tmp_path, "wrong", "right", environment=scorer)
    assert scorer.given == ["right"]
    assert episode.reward == 1.0
    assert len(episode.sequences) == 2  # two questions that have nothing in common
    assert [s.reward for s in episode.sequences] == [1.0, 1.0]
    assert (episode.stats["calls"], episode.stats["failed"], episode.stats["seen"]) == (2, 0, 1)
    assert not list((tmp_path / "agents").glob("*.log"))  # of an agent that ended well


@pytest.mark.parametrize(
    ("written", "reward", "stats"),
    [
        ("0.25", 0.25, {}),
        ('{"reward": 2, "steps": 7}', 2.0, {"steps": 7.0}),
        ('{"answer": "right"}', 1.0, {"seen": 1.0}),
    ],
)
def test_a_program_may_reward_itself(tmp_path, written, reward, stats):
    code = f"ask(); open(os.environ['REALSYS_REWARD_FILE'], 'w').write({written!r})"
    episode = played(command(tmp_path, code), tmp_path, "wrong")
    assert episode.reward == reward
    assert stats.items() <= episode.stats.items()


@pytest.mark.parametrize("written", ["nan", "much", "[1]", '{"score": 1}', '{"rewards": {"x": 1}}'])
def test_a_reward_file_that_says_nothing_is_an_error(tmp_path, written):
    code = f"ask(); open(os.environ['REALSYS_REWARD_FILE'], 'w').write({written!r})"
    with pytest.raises(RolloutError, match=r"reward"):
        played(command(tmp_path, code), tmp_path, "wrong")


@pytest.mark.parametrize(
    "make", ["os.mkfifo(path)", "os.mkdir(path)", "open(path, 'wb').write(b'\\xff')"]
)
def test_a_reward_file_that_is_no_text_is_an_error(tmp_path, make):
    code = f"path = os.environ['REALSYS_REWARD_FILE']; {make}; ask()"
    with pytest.raises(RolloutError, match="reward file"):
        played(command(tmp_path, code), tmp_path, "right")


def test_a_function_finds_nothing_in_standard_input(tmp_path):
    code = """
    import subprocess

    def solve(base_url, api_key):
        ask(url=base_url, key=api_key)
        left = subprocess.run(["cat"], capture_output=True, text=True, timeout=60).stdout
        return {"reward": len(left + sys.stdin.read())}
    """
    episode = played(function(tmp_path, code, timeout_s=60), tmp_path, "right")
    assert (episode.reward, episode.stats["failed"], episode.problem) == (0.0, 0.0, "")


def test_what_a_killed_worker_left_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    agent = command(tmp_path, "ask()")
    played(agent, tmp_path, "right")
    left = tmp_path / f"{agent._prefix}left"
    left.mkdir()
    played(command(tmp_path, "ask()"), tmp_path, "right")
    assert not left.exists()


def test_a_program_knows_its_task_but_not_the_answer(tmp_path):
    code = """
        task = json.load(open(os.environ["REALSYS_TASK_FILE"]))
        assert task == {"id": "0-1-0", "prompt": "What is it?", "level": 3}, task
        assert sorted(os.listdir(".")) == ["task.json", "work"]
        ask()
    """
    assert played(command(tmp_path, code), tmp_path, "right").stats["failed"] == 0


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise KeyError('x')", "time.sleep(600)"])
def test_an_agent_that_fails_after_an_answer_gets_the_failed_reward_and_keeps_its_log(
    tmp_path, end
):
    async def its_time_is_over(_: EpisodeAgent) -> None:
        while not any("so far" in log.read_text() for log in tmp_path.glob("agents/*.log")):
            await asyncio.sleep(0.01)
        if "sleep" in end:
            pass_time(100)

    agent = command(
        tmp_path, f"ask(); print('so far', flush=True); {end}", timeout_s=100, failed_reward=-1
    )
    episode = played(agent, tmp_path, "right", beside=its_time_is_over)
    assert (episode.reward, episode.stats["failed"]) == (-1.0, 1.0)
    (log,) = (tmp_path / "agents").glob("*.log")
    assert log.read_text().startswith("so far")


@pytest.mark.parametrize("make", [command, function])
@pytest.mark.parametrize(("passes_s", "is_lesson"), [((0, 80, 20), True), ((0, 20, 80), False)])
def test_a_limit_that_passed_in_one_answer_teaches_nothing(tmp_path, make, passes_s, is_lesson):
    code = {
        command: "for _ in range(3): ask()",
        function: """
            def solve(base_url, api_key):
                for _ in range(3): ask("x", base_url, api_key)
        """,
    }
    agent = make(tmp_path, code[make], timeout_s=100, failed_reward=-1)
    with nullcontext() if is_lesson else pytest.raises(DoubtfulEnd):
        episode = played(agent, tmp_path, "right", "right", passes_s=passes_s)
        assert (episode.reward, episode.stats["failed"]) == (-1.0, 1.0)


def test_a_reward_that_was_written_before_the_limit_passed_counts(tmp_path):
    code = "ask(); open(os.environ['REALSYS_REWARD_FILE'], 'w').write('0.25'); ask('again')"
    agent = command(tmp_path, code, timeout_s=100, failed_reward=-1)
    episode = played(agent, tmp_path, "right", passes_s=(0, 100))
    assert (episode.reward, episode.stats["failed"]) == (0.25, 1.0)


@pytest.mark.parametrize("make", [command, function])
def test_a_log_without_end_keeps_its_beginning_and_its_end(tmp_path, monkeypatch, make):
    monkeypatch.setattr(cut_log, "__kwdefaults__", {"most_bytes": 4000, "end_bytes": 1000})
    monkeypatch.setattr(log_limit, "LOOK_S", 600.0)  # what is written during a look is lost
    writes = "print('first'); print('line\\n' * 100_000); print('the last words', flush=True)"
    code = {
        command: f"ask(); {writes}; sys.exit(3)",
        function: f"def solve(base_url, api_key): ask('x', base_url, api_key); {writes}",
    }
    played(make(tmp_path, code[make]), tmp_path, "right")
    (log,) = (tmp_path / "agents").glob("*.log")
    text = log.read_text()
    assert len(text) <= 4000
    assert text.startswith("first\nline\n")
    assert "bytes left out" in text
    assert text.endswith("line\n\nthe last words\n")


def test_an_agent_that_asks_nothing_is_an_error_that_quotes_it(tmp_path):
    with pytest.raises(RolloutError, match=r"status 1.*KeyError: 'token'"):
        played(command(tmp_path, "os.environ['token']"), tmp_path)


def test_an_agent_that_is_killed_is_nobodys_answer(tmp_path):
    code = "ask(); os.kill(os.getpid(), 9)"
    with pytest.raises(RolloutError, match="signal"):
        played(command(tmp_path, code), tmp_path, "right")


def test_nothing_that_an_agent_has_started_outlives_its_episode(tmp_path):
    code = """
        import subprocess
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"],
                                 start_new_session=True)
        open(sys.argv[0] + ".pid", "w").write(str(child.pid))
        ask()
    """
    played(command(tmp_path, code), tmp_path, "right")
    pid = int((tmp_path / "agent.py.pid").read_text())
    until_s = time.monotonic() + 240
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until_s
        time.sleep(0.05)


# ---- functions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("def solve(task, base_url, api_key): ask(task['prompt'], base_url, api_key)", 1.0),
        ("async def solve(session_url): ask('x', session_url, 'none'); return 0.5", 0.5),
        ("def solve(base_url, api_key): ask('x', base_url, api_key); return 'right'", 1.0),
        (
            "from fractions import Fraction\n"
            "def solve(base_url, api_key): ask('x', base_url, api_key); return Fraction(3, 4)",
            0.75,
        ),
    ],
)
def test_a_function_gets_what_its_parameters_name(tmp_path, code, reward):
    assert played(function(tmp_path, code), tmp_path, "right").reward == reward


def test_a_function_that_hangs_is_ended_with_its_process(tmp_path):
    asked = tmp_path / "asked"
    code = f"""
        def solve(base_url, api_key):
            ask('x', base_url, api_key)
            open({str(asked)!r}, "w").close()
            time.sleep(600)
    """

    async def its_time_is_over(_: EpisodeAgent) -> None:
        while not asked.exists():
            await asyncio.sleep(0.01)
        pass_time(100)

    agent = function(tmp_path, code, timeout_s=100)
    episode = played(agent, tmp_path, "right", beside=its_time_is_over)
    assert (episode.reward, episode.stats["failed"]) == (0.0, 1.0)


def test_a_process_that_dies_at_its_start_is_noticed_by_every_episode(tmp_path):
    """Also by those that come between its last output and its exit status."""
    host = HostProcess(
        [sys.executable, "-S", "-c", "import sys; sys.exit('no such agent')"],
        name="host 0",
        log=tmp_path / "host.log",
        env={},
        cwd=tmp_path,
    )

    async def several() -> list[Any]:
        try:
            async with asyncio.timeout(60):
                calls = [host.run({"id": str(i)}, timeout_s=3600) for i in range(4)]
                return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await host.close()

    found = asyncio.run(several())
    assert [type(error) for error in found] == [ConfigError] * 4
    assert all("no such agent" in str(error) for error in found)


def test_a_function_that_ends_its_process_is_an_error_and_the_next_one_runs(tmp_path):
    code = """
        def solve(task, base_url, api_key):
            ask('x', base_url, api_key)
            if not os.path.exists(__file__ + ".once"):
                open(__file__ + ".once", "w").close()
                os.kill(os.getpid(), 9)
    """
    agent = function(tmp_path, code)
    with pytest.raises(Exception, match="ended"):
        played(agent, tmp_path, "right")
    assert played(function(tmp_path, code), tmp_path, "right").reward == 1.0


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("def solve(teacher): ...", "parameter 'teacher' is none of client"),
        ("def resolve(): ...", "has no attribute 'solve'"),
        (
            "def solve(base_url, api_key): ask('x', base_url, api_key); return [1]",
            r"returned \[1\]",
        ),
    ],
)
def test_a_function_that_can_not_be_one_says_so(tmp_path, code, what):
    with pytest.raises(Exception, match=what):
        played(function(tmp_path, code), tmp_path, "right")


def test_roles_have_keys_conversations_and_rewards_of_their_own(tmp_path):
    code = """
        def solve(roles):
            for name in ("asker", "solver"):
                ask(name, roles[name]["base_url"], roles[name]["key"])
            return {"rewards": {"asker": 0.25, "solver": 0.75}}
    """
    agent = function(tmp_path, code, roles=("asker", "solver"))
    episode = played(agent, tmp_path, "a question", "an answer")
    assert [(s.role, s.reward) for s in episode.sequences] == [("asker", 0.25), ("solver", 0.75)]
    assert episode.reward == 0.5
    assert episode.stats["reward_asker"] == 0.25


# ---- clients from outside ---------------------------------------------------------------------------


def post(url: str, body: Mapping[str, Any], key: str) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_client_from_outside_starts_rewards_and_ends_its_episode(tmp_path):
    told = tmp_path / "agents" / ADDRESS_FILE

    async def client(_: EpisodeAgent) -> None:
        def life() -> None:
            address = json.loads(told.read_text())
            assert os.stat(told).st_mode & 0o77 == 0
            url, admin = address["url"], address["admin_key"]
            assert post(f"{url}/rl/start_session", {}, "sk-wrong")[0] == 401
            status, started = post(f"{url}/rl/start_session", {"wait_s": 60}, admin)
            assert (status, started["task"]["prompt"]) == (200, "What is it?")
            assert post(f"{url}/rl/start_session", {}, admin)[0] == 429  # it was the only one
            key = started["api_key"]
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            assert post(f"{started['base_url']}/chat/completions", body, key)[0] == 200
            assert post(f"{url}/rl/set_reward", {"reward": 0.5}, key)[0] == 200
            assert post(f"{url}/rl/end_session", {}, key)[0] == 200
            assert post(f"{started['base_url']}/chat/completions", body, key)[0] == 410

        while not told.exists():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(life)

    episode = played(ExternalAgent(), tmp_path, "right", beside=client)
    assert (episode.reward, len(episode.sequences)) == (0.5, 1)


def test_what_a_client_leaves_unfinished_is_offered_to_the_next(tmp_path):
    told = tmp_path / "agents" / ADDRESS_FILE

    async def clients(_: EpisodeAgent) -> None:
        loop = asyncio.get_running_loop()

        def life() -> None:
            address = json.loads(told.read_text())
            url, admin = address["url"], address["admin_key"]
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            started = [post(f"{url}/rl/start_session", {"wait_s": 60}, admin)[1] for _ in "a"]
            asked = post(f"{started[0]['base_url']}/chat/completions", body, started[0]["api_key"])
            assert asked[0] == 200  # and then it is never heard of again
            loop.call_soon_threadsafe(pass_time, 100)
            second = post(f"{url}/rl/start_session", {"wait_s": 60}, admin)[1]
            old_key = started[0]["api_key"]
            assert post(f"{started[0]['base_url']}/chat/completions", body, old_key)[0] == 410
            assert post(f"{url}/rl/end_session", {}, second["api_key"])[0] == 200  # asked nothing
            third = post(f"{url}/rl/start_session", {"wait_s": 60}, admin)[1]
            answered = post(f"{third['base_url']}/chat/completions", body, third["api_key"])[1]
            assert answered["choices"][0]["message"]["content"] == "right"
            assert answered["id"] != asked[1]["id"]
            assert post(f"{url}/rl/end_session", {}, third["api_key"])[0] == 200

        while not told.exists():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(life)

    episode = played(ExternalAgent(timeout_s=100), tmp_path, "wrong", "right", beside=clients)
    assert (episode.reward, len(episode.sequences), episode.stats["calls"]) == (1.0, 1, 1.0)


@pytest.mark.parametrize("key", ["short", "two words", "schlüssel-lang", 5, "k" * 257])
def test_a_sessions_key_can_be_sent_in_a_header(tmp_path, key):
    told = tmp_path / "agents" / ADDRESS_FILE

    async def client(_: EpisodeAgent) -> None:
        def life() -> None:
            address = json.loads(told.read_text())
            url, admin = address["url"], address["admin_key"]
            for wrong in (key, admin):
                status, said = post(f"{url}/rl/start_session", {"api_key": wrong}, admin)
                assert (status, "key" in said["error"]["message"]) == (400, True)
            mine = "my-own.key_1"
            started = post(f"{url}/rl/start_session", {"api_key": mine, "wait_s": 60}, admin)[1]
            assert started["api_key"] == mine
            assert post(f"{url}/rl/set_reward", {"reward": 1e300}, mine)[0] == 400
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            assert post(f"{started['base_url']}/chat/completions", body, mine)[0] == 200
            assert post(f"{url}/rl/end_session", {}, mine)[0] == 200

        while not told.exists():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(life)

    assert played(ExternalAgent(), tmp_path, "right", beside=client).reward == 1.0


def test_the_endpoint_serves_https_where_it_is_told_to(tmp_path):
    agent = command(
        tmp_path, "assert 'https://' in os.environ['OPENAI_BASE_URL']; ask()", listen="https"
    )
    assert played(agent, tmp_path, "right").reward == 1.0


def test_signals_of_a_terminal_do_not_reach_an_agent(tmp_path):
    code = "import signal; ask(); assert os.getsid(0) != int(os.environ['SESSION'])"
    agent = command(tmp_path, code, env={"SESSION": str(os.getsid(0))})
    assert played(agent, tmp_path, "right").stats["failed"] == 0
