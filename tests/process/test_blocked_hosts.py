"""Episodes that hold up the event loop of their process: who is blamed, and what becomes of the others."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest
from chat_families import FAMILIES
from passing_time import pass_time
from scripted_policy import END, ScriptedPolicy

from realsys.api.agent import AgentHost, Environment, EpisodeTask, Observation
from realsys.api.errors import ConfigError, RolloutError
from realsys.rollout.runners import host_process
from realsys.rollout.runners.episode_outcome import EpisodeDropped
from realsys.rollout.runners.host_process import HostProcess
from realsys.rollout.runners.hosted_agent import HOSTS, PythonAgent
from realsys.rollout.runners.hosts.function_host import BLOCKED_S, place_of
from realsys.runtime.child_processes.child_guard import descendants

FAMILY = FAMILIES["chatml"]
CODE = """
import asyncio, json, os, time, urllib.request

async def solve(task, base_url, api_key):
    return await globals()[task["prompt"]](base_url, api_key)

def plain(task, base_url, api_key):
    made = globals()[task["prompt"]](base_url, api_key)
    return asyncio.run(made) if asyncio.iscoroutine(made) else made

async def asker(client):
    return 1

async def sleeper(*_):
    open(__file__ + ".slept", "w").close()
    time.sleep(600)

async def busy(*_):
    async def deeper():
        while True:
            pass
    await asyncio.gather(asyncio.sleep(600), deeper())

async def waits(*_):
    await asyncio.sleep(600)

async def cancelled_at_once(*_):
    await asyncio.sleep(600)

async def till_released(*_):
    while not os.path.exists(__file__ + ".release"):
        await asyncio.sleep(0.01)
    return os.getpid()

def hangs(*_):
    time.sleep(600)

async def quick(*_):
    await asyncio.sleep(0.1)
    return 0.5

async def slow_at_first(base_url, api_key):
    await asyncio.to_thread(ask, base_url, api_key)
    if not os.path.exists(__file__ + ".again"):
        open(__file__ + ".again", "w").close()
        await asyncio.sleep(600)

def ask(base_url, api_key):
    body = json.dumps({"messages": [{"role": "user", "content": api_key}]}).encode()
    headers = {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)).read()
"""


def written(folder: Path) -> Path:
    module = folder / "an_agent.py"
    module.write_text(textwrap.dedent(CODE))
    return module


def line_of(text: str) -> int:
    return CODE.splitlines().index(text) + 1


def order(id_: str, name: str) -> dict[str, Any]:
    return {"id": id_, "task": {"prompt": name}, "base_url": "", "key": ""}


def over_host(
    folder: Path,
    blocked_s: float,
    test: Callable[[HostProcess], Coroutine[Any, Any, None]],
    function: str = "solve",
) -> None:
    """Runs a test over a host of its own, without installed packages."""
    host = HostProcess(
        [sys.executable, "-S", str(HOSTS / "function_host.py"), f"{written(folder)}:{function}"],
        name="host 0",
        log=folder / "host.log",
        env={BLOCKED_S: str(blocked_s)},
        cwd=folder,
    )

    async def run() -> None:
        try:
            async with asyncio.timeout(200):
                await test(host)
        finally:
            await host.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("blocker", "function", "line"),
    [("sleeper", "sleeper", "    time.sleep(600)"), ("busy", "deeper", "            pass")],
)
def test_who_blocks_is_failed_by_its_line_and_the_others_are_dropped(
    tmp_path: Path, blocker: str, function: str, line: str
) -> None:
    async def test(host: HostProcess) -> None:
        orders = [order("a", "waits"), order("b", blocker), order("c", "waits")]
        calls = [host.run(one, timeout_s=3600) for one in orders]
        before, blame, behind = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(blame, Mapping)
        said = blame["error"]
        assert said.startswith(f"{function} ({tmp_path / 'an_agent.py'}, line ")
        if blocker == "sleeper":  # where a busy loop is met is not certain
            assert f"line {line_of(line)}: {line.strip()})" in said
        assert "for 1 s" in said
        assert said.endswith("await, or asyncio.to_thread")
        for other in (before, behind):
            assert isinstance(other, EpisodeDropped)
            assert said in other.what
        assert function in (tmp_path / "host.log").read_text()  # with its whole stack
        assert (await host.run(order("d", "quick"), timeout_s=240))["result"] == 0.5

    over_host(tmp_path, 1.0, test)


def test_who_does_not_end_in_time_is_failed_and_the_others_are_dropped(tmp_path: Path) -> None:
    """Also before the loop is found to be blocked."""

    async def test(host: HostProcess) -> None:
        calls = [
            host.run(order("a", "waits"), timeout_s=3600),
            host.run(order("b", "sleeper"), timeout_s=100),
        ]
        both = asyncio.gather(*calls, return_exceptions=True)
        while not (tmp_path / "an_agent.py.slept").exists():
            await asyncio.sleep(0.01)
        pass_time(100)
        other, late = await both
        assert "running after 100" in str(late)
        assert isinstance(other, EpisodeDropped)
        assert "end when cancelled:" in other.what

    over_host(tmp_path, 3600, test)


def test_a_group_that_is_cancelled_as_it_begins_harms_no_other_episode(tmp_path: Path) -> None:
    """Each order and its cancel are in one read."""

    async def test(host: HostProcess) -> None:
        await host.run(order("w", "quick"), timeout_s=3600)
        bystanders = [
            asyncio.create_task(host.run(order(f"b{i}", "till_released"), timeout_s=3600))
            for i in range(4)
        ]
        for number in range(8):
            names = [f"c{number}-{i}" for i in range(6)]
            group = [
                asyncio.create_task(host.run(order(name, "cancelled_at_once"), timeout_s=3600))
                for name in names
            ]
            while not all(name in host._current._waiting for name in names):  # type: ignore[union-attr]
                await asyncio.sleep(0)
            for task in group:
                task.cancel()
            ended = await asyncio.gather(*group, return_exceptions=True)
            assert [type(error) for error in ended] == [asyncio.CancelledError] * 6
            assert (await host.run(order(f"n{number}", "quick"), timeout_s=3600))["result"] == 0.5
        assert not host._current._cancelled  # type: ignore[union-attr]  # each had its line
        (tmp_path / "an_agent.py.release").touch()
        pids = {line["result"] for line in await asyncio.gather(*bystanders)}
        assert len(pids) == 1

    over_host(tmp_path, 3600, test)


def test_who_begins_while_a_process_is_closed_by_several_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_process, "START_S", 1e6)

    async def test(host: HostProcess) -> None:
        for number in (0, 2):
            await host.run(order(f"w{number}", "quick"), timeout_s=3600)
            old = host._current
            assert old is not None
            closes = [asyncio.create_task(old.close()) for _ in range(6)]
            late = asyncio.create_task(host.run(order(f"x{number}", "quick"), timeout_s=3600))
            for _ in range(number):
                await asyncio.sleep(0)
            late.cancel()  # while its process starts, for which others wait, too
            news = [host.run(order(f"{number}-{i}", "quick"), timeout_s=3600) for i in range(6)]
            made = await asyncio.gather(*news)
            assert [line["result"] for line in made] == [0.5] * 6
            await asyncio.gather(*closes, late, return_exceptions=True)

    over_host(tmp_path, 3600, test)


def test_code_that_hangs_keeps_no_place_and_its_process_ends_with_the_other_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_process, "MOST_LEFT", 3)

    async def test(host: HostProcess) -> None:
        other = asyncio.create_task(host.run(order("o", "till_released"), timeout_s=3600))
        hung = [
            asyncio.create_task(host.run(order(f"h{i}", "hangs"), timeout_s=3600)) for i in range(3)
        ]
        await host.run(order("q", "quick"), timeout_s=3600)
        for task in hung:
            task.cancel()
        old = host._current
        assert old is not None
        while old.num_left < 3:
            await asyncio.sleep(0.01)
        assert (await host.run(order("n", "quick"), timeout_s=3600))["result"] == 0.5
        assert host._current is not old
        assert not old.is_over
        assert not other.done()
        (tmp_path / "an_agent.py.release").touch()
        (pid,) = descendants(old._process.pid)
        assert (await other)["result"] == pid
        while host._retired:
            await asyncio.sleep(0.01)
        assert old.is_over
        assert (await host.run(order("m", "quick"), timeout_s=3600))["result"] == 0.5

    over_host(tmp_path, 3600, test, function="plain")


def test_a_process_that_was_stopped_as_a_whole_blocks_nothing(tmp_path: Path) -> None:
    async def test(host: HostProcess) -> None:
        await host.run(order("a", "quick"), timeout_s=240)
        assert host._current is not None
        (pid,) = descendants(host._current._process.pid)
        waiting = asyncio.create_task(host.run(order("b", "waits"), timeout_s=3600))
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1.5)
        os.kill(pid, signal.SIGCONT)
        assert (await host.run(order("c", "quick"), timeout_s=240))["result"] == 0.5
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    over_host(tmp_path, 1.0, test)


def test_libraries_of_clients_are_imported_before_the_first_episode(tmp_path: Path) -> None:
    """Which would take its time within one, and hold up the others."""

    async def test(host: HostProcess) -> None:
        with pytest.raises(ConfigError, match="'openai'"):
            await host.run(order("a", "quick"), timeout_s=240)

    over_host(tmp_path, 60, test, function="asker")


def test_the_users_own_line_is_named_not_that_of_what_it_calls(
    tmp_path: Path,
) -> None:
    def stopped_in(*files: str) -> str:
        """Where code is, of which each file calls the next; the last looks at itself."""
        scope: dict[str, Any] = {"last": lambda: place_of(sys._getframe(1))}
        for number, file in reversed(list(enumerate(files))):
            called = f"f{number + 1}" if number + 1 < len(files) else "last"
            exec(compile(f"def f{number}(): return {called}()", file, "exec"), scope)
        return str(scope["f0"]())

    user, package = "/home/me/agent.py", "/venv/lib/python3.11/site-packages/client/http.py"
    python = sysconfig.get_path("stdlib") + "/ssl.py"
    assert stopped_in(python, user, package, python).startswith(f"f1 ({user}, line 1")
    assert stopped_in(user, package, user, python).startswith(f"f2 ({user}, line 1")


# ---- whole episodes ---------------------------------------------------------------------------------


class Scorer(Environment):
    async def reset(self, record: Mapping[str, Any]) -> None: ...

    async def step(self, action: str) -> Observation:
        return Observation(reward=1.0)


def test_an_episode_that_another_one_ended_is_begun_anew(tmp_path: Path) -> None:
    policy = ScriptedPolicy(FAMILY, [f"first{END}", f"second{END}"])
    agent = PythonAgent(function=f"{written(tmp_path)}:solve", blocked_s=1.0)

    async def ask(
        tokens: Any,
        limit: Any = None,
        /,
        *,
        stop: Any = (),
        on_tokens: Any = None,
        grammar: str = "",
    ) -> Any:
        return await policy.sample(tokens, limit=limit, stop=stop, sampling={}, on_tokens=on_tokens)

    def task(number: int, name: str) -> EpisodeTask:
        return EpisodeTask(
            id=f"0-{number}-0",
            prompt=(1,),
            record={"prompt": name},
            ask=ask,
            environment=Scorer(),
            tokenizer=FAMILY.tokenizer,
        )

    async def run() -> Any:
        ends = frozenset(FAMILY.end_ids)
        await agent.open(
            AgentHost(
                name="rollout_worker/0",
                tokenizer=FAMILY.tokenizer,
                end_ids=ends,
                folder=tmp_path / "agents",
            )
        )
        try:
            async with asyncio.timeout(200):
                slow = asyncio.create_task(agent.run_episode(task(0, "slow_at_first")))
                while not (tmp_path / "an_agent.py.again").exists():
                    await asyncio.sleep(0.02)
                bad = asyncio.create_task(agent.run_episode(task(1, "sleeper")))
                return await asyncio.gather(slow, bad, return_exceptions=True)
        finally:
            await agent.close()

    episode, error = asyncio.run(run())
    assert isinstance(error, RolloutError)  # it blocked before it had asked: nothing to train on
    assert f"line {line_of('    time.sleep(600)')}: time.sleep(600)" in error.what
    assert not isinstance(error, EpisodeDropped)
    (sequence,) = episode.sequences  # what was answered before is forgotten
    assert (episode.reward, episode.stats["calls"], episode.stats["failed"]) == (1.0, 1, 0)
    sampled = [t for t, ours in zip(sequence.tokens, sequence.from_policy, strict=True) if ours]
    assert FAMILY.tokenizer.decode(sampled).startswith("second")
    one, two = policy.contexts
    assert one != two  # the key, which it was asked with, is a new one
