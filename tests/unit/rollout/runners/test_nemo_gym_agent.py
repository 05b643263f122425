"""Agent ``nemo_gym``: the contract of NeMo Gym's servers, with a stand-in for agent and model server.

The stand-in does what Gym's documented servers do: ``/run`` asks ``{policy_base_url}/responses`` with the
given ``responses_create_params``, and answers with the request, the response and a reward.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import aiohttp
import golden
import pytest
from aiohttp import web
from letter_chat import ScriptedPolicy, host, task

from realsys.api.agent import DoubtfulEnd, Environment, Episode, Observation
from realsys.api.errors import ClusterError, RealsysError, RolloutError, WaitTimeout
from realsys.config.plugin_arguments import argument_problems
from realsys.rollout.runners.nemo_gym_agent import (
    NemoGymAgent,
    outcome_of_run,
    run_request,
    session_key,
)
from realsys.transport import retry_pauses

PARAMS = {"input": [{"role": "user", "content": "What is 2+3?"}], "metadata": {"own": "x"}}
RECORD = {"prompt": "What is 2+3?", "expected": "5", "responses_create_params": PARAMS}


class Unscored(Environment):
    """Is never asked: Gym has the reward."""

    async def reset(self, record: Mapping[str, Any]) -> None: ...

    async def step(self, action: str) -> Observation:
        raise AssertionError("the reward is Gym's")


class GymDouble:
    """An agent's server whose model server is at ``policy_url``; rewards the expected answer with 1."""

    def __init__(
        self, *, status: int = 200, reply: str | None = None, before: tuple[int, ...] = ()
    ) -> None:
        """``before``: statuses of the first requests, which ask nothing."""
        self.policy_url, self._status, self._reply = "", status, reply
        self.runs: list[Any] = []
        self.before = list(before)

    async def __aenter__(self) -> GymDouble:
        app = web.Application()
        app.add_routes([web.post("/run", self._run)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _run(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.runs.append(body)
        if self.before:
            return web.Response(status=self.before.pop(0), text="not yet")
        url = f"{self.policy_url}/responses"
        # Gym's model server replaces the model's name and passes on what else is set
        asked = {**body["responses_create_params"], "model": "its own"}
        async with (
            aiohttp.ClientSession() as client,
            client.post(url, json=asked, headers={"Authorization": "Bearer any"}) as answer,
        ):
            response = await answer.json()
        if self._status != 200:
            return web.Response(status=self._status, text="broken")
        if self._reply is not None:
            return web.Response(text=self._reply)
        text = response["output"][-1]["content"][0]["text"]
        reward = float(text == body["expected"])
        return web.json_response({**body, "response": response, "reward": reward, "length": 1})


def play(folder: Path, gym: GymDouble, *answers: str, **args: Any) -> list[Episode]:
    """An episode an answer, at the same time."""

    async def episodes() -> list[Episode]:
        async with gym:
            agent = NemoGymAgent(gym_url=gym.url, **args)
            await agent.open(host(folder))
            gym.policy_url = agent.model_url
            try:
                return await asyncio.gather(
                    *(
                        agent.run_episode(task(ScriptedPolicy(a), Unscored(), RECORD))
                        for a in answers
                    )
                )
            finally:
                await agent.close()

    return asyncio.run(episodes())


def test_episodes_at_the_same_time_are_told_apart_and_rewarded_by_gym(tmp_path):
    gym = GymDouble()
    right, wrong = play(tmp_path, gym, "5", "4")
    assert [right.reward, wrong.reward] == [1.0, 0.0]
    texts = ["".join(map(chr, e.sequences[0].tokens)) for e in (right, wrong)]
    assert texts == [f"user: What is 2+3?\nassistant: {answer}$" for answer in "54"]
    assert right.stats["length"] == 1.0
    run = gym.runs[0]
    assert run["expected"] == "5"
    assert run["responses_create_params"]["input"] == PARAMS["input"]
    assert run["responses_create_params"]["metadata"]["own"] == "x"


@pytest.mark.parametrize(
    ("status", "raised"), [(500, DoubtfulEnd), (503, WaitTimeout), (429, WaitTimeout)]
)
def test_a_server_that_fails_or_is_away_has_the_episode_played_again(
    tmp_path: Path, status: int, raised: type[Exception]
) -> None:
    with pytest.raises(RealsysError) as caught:
        play(tmp_path, GymDouble(status=status), "5", failed_reward=-1.0)
    assert type(caught.value) is raised


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_failing_run_is_the_agents_failure(tmp_path, status):
    (failed,) = play(tmp_path, GymDouble(status=status), "5", failed_reward=-1.0)
    assert (failed.reward, failed.stats["failed"]) == (-1.0, 1.0)


@pytest.mark.parametrize("status", [401, 404, 405])
def test_a_wrong_address_is_a_mistake_of_the_run_and_no_episodes_failure(tmp_path, status):
    with pytest.raises(RolloutError) as caught:
        play(tmp_path, GymDouble(before=(status,)), "5", failed_reward=-1.0)
    assert "gym_url" in caught.value.fix


def test_a_busy_server_is_asked_again_while_the_policy_was_not(tmp_path, monkeypatch):
    monkeypatch.setattr(retry_pauses, "FIRST_S", 0.001)
    gym = GymDouble(before=(429, 503, 500))
    (right,) = play(tmp_path, gym, "5")
    assert (right.reward, len(right.sequences), len(gym.runs)) == (1.0, 1, 4)
    monkeypatch.setattr(retry_pauses, "FIRST_S", 1e9)  # after which the time is over
    with pytest.raises(WaitTimeout):
        play(tmp_path, GymDouble(before=(429, 429)), "5")


@pytest.mark.thorough
def test_more_episodes_than_connections_of_a_pool_play_at_once(tmp_path):
    """Each holds one for its /run, and another for what it asks."""
    played = play(tmp_path, GymDouble(), *["5"] * 101, starting_at_once=200)
    assert [episode.reward for episode in played] == [1.0] * 101


def test_a_response_without_a_reward_fails_the_question(tmp_path):
    with golden.raises(RolloutError):
        play(tmp_path, GymDouble(reply='{"response": {}}'), "5")
    for text in ("[]", "x", '{"reward": NaN}', '{"reward": "1"}'):
        with pytest.raises(RolloutError):
            outcome_of_run(text, "url")


def test_numbers_of_a_response_are_figures_if_they_are_finite() -> None:
    text = (
        '{"reward": 1, "accuracy": 0.5, "note": "x", "extra": {"a": 2}, "bad": NaN, "big": 1e999, '
    )
    made = outcome_of_run(text + f'"huge": 1{"0" * 400}' + "}", "url")
    assert (made.reward, made.stats) == (1.0, {"accuracy": 0.5})


def test_requests_without_an_open_episode_are_told_why(tmp_path: Path) -> None:
    async def statuses() -> list[tuple[int, bool]]:
        agent = NemoGymAgent(gym_url="http://127.0.0.1:1")
        await agent.open(host(tmp_path))
        try:
            key = agent.registry.open(cast(Any, object()))
            agent.registry.close(key)
            found = []
            async with aiohttp.ClientSession() as client:
                for metadata in ({}, {"realsys_session": key}, {"realsys_session": "wrong"}):
                    body = {"input": "Q", "metadata": metadata}
                    async with client.post(f"{agent.model_url}/responses", json=body) as answer:
                        why = (await answer.json())["error"]["message"]
                        found.append((answer.status, "metadata" in why))
            return found
        finally:
            await agent.close()

    assert asyncio.run(statuses()) == [(400, True), (410, False), (401, False)]


def test_a_server_that_is_not_there_fails_the_question(tmp_path):
    async def episode() -> None:
        agent = NemoGymAgent(gym_url="http://127.0.0.1:1")
        await agent.open(host(tmp_path))
        second = NemoGymAgent(
            gym_url="http://127.0.0.1:1", model_port=int(agent.model_url.split(":")[2][:-3])
        )
        try:
            with golden.raises(WaitTimeout):
                await agent.run_episode(task(ScriptedPolicy("5"), Unscored(), RECORD))
            with golden.raises(ClusterError):
                await second.open(host(tmp_path))
        finally:
            await second.close()
            await agent.close()

    asyncio.run(episode())


def test_a_record_without_parameters_asks_its_prompt():
    request = run_request({"prompt": "Q", "answer": "5", "record": b"x"}, key="k", model="policy")
    assert request == {
        "prompt": "Q",
        "answer": "5",
        "responses_create_params": {
            "input": "Q",
            "model": "policy",
            "metadata": {"realsys_session": "k"},
        },
    }
    assert session_key(json.dumps(request["responses_create_params"]).encode()) == "k"


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"metadata": 1}', b"\xff"])
def test_a_request_without_a_key_has_none(body):
    assert session_key(body) == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"gym_url": "http://127.0.0.1:8100", "model_port": 8200}, ""),
        ({}, "there is no URL"),
        ({"gym_url": "http://a", "listen": "https"}, "on its own node"),
        ({"gym_url": "http://a", "model_port": 70000}, "model_port"),
        ({"gym_urls": "http://a"}, "takes no 'gym_urls'"),
    ],
)
def test_arguments_are_checked_by_a_plan(args, words):
    found = [str(p) for p in argument_problems("agent", "nemo_gym", args, where="x")]
    assert len(found) == bool(words), found
    assert not words or words in found[0]
