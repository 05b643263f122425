"""Environment ``openenv``: sessions, actions, refusals, waits; against a server that speaks its protocol.

That it fits openenv-core's own server is checked by hand: tests/by_hand/agents/environments.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import golden
import pytest
from openenv_double import GRID_SCHEMA, TEXT_SCHEMA, OpenEnvDouble, error, observed

from realsys.api.agent import Observation
from realsys.api.errors import ConfigError, RolloutError, WaitTimeout
from realsys.config.plugin_arguments import argument_problems
from realsys.rollout.environments.openenv_environment import OpenEnvEnvironment
from realsys.rollout.environments.openenv_messages import (
    ActionShape,
    WrongAction,
    result_text,
    shape_of,
    text_of,
)
from realsys.transport import retry_pauses

Body = Callable[[OpenEnvEnvironment], Coroutine[Any, Any, Any]]


def play(server: OpenEnvDouble, body: Body, record: Any = None, **args: Any) -> Any:
    """What ``body`` returns with an environment on ``server``, closed afterwards."""

    async def episode() -> Any:
        async with server:
            environment = OpenEnvEnvironment(url=server.url, **args)
            try:
                await environment.reset({"prompt": "?"} if record is None else record)
                return await body(environment)
            finally:
                await environment.close()
                for _ in range(6000):
                    if not server.open:
                        break
                    await asyncio.sleep(0.01)

    return asyncio.run(episode())


async def nothing(_: OpenEnvEnvironment) -> None:
    """Only resets."""


def steps(*actions: str) -> Body:
    """Does these actions."""

    async def body(environment: OpenEnvEnvironment) -> list[Observation]:
        return [await environment.step(action) for action in actions]

    return body


def test_an_episode_is_a_session_that_is_closed():
    server = OpenEnvDouble(
        observed({"text": "Guess.", "metadata": {"x": 1}}),
        observed({"text": "no"}, 0.25),
        observed({"text": "yes"}, True, done=True),
    )

    async def body(environment: OpenEnvEnvironment) -> Any:
        return environment.opening(), await steps("a", "b")(environment)

    record = {"prompt": "?", "seed": 3, "answer": "x"}
    opening, said = play(server, body, record, action={"kind": "guess"})
    assert opening == "Guess."
    assert [(o.text, o.reward, o.done) for o in said] == [("no", 0.25, False), ("yes", 1.0, True)]
    assert said[-1].info == {"steps": 2.0, "wrong_actions": 0.0}
    assert server.received == [
        {"type": "reset", "data": {"seed": 3}},
        {"type": "step", "data": {"kind": "guess", "message": "a"}},
        {"type": "step", "data": {"kind": "guess", "message": "b"}},
        {"type": "close"},
    ]
    assert (server.sessions, server.open) == (1, 0)


def test_an_action_of_several_fields_is_the_policys_json():
    server = OpenEnvDouble(
        observed({"x": 0, "y": 0}),
        error("VALIDATION_ERROR"),
        observed({"x": 3, "y": 4}, 1, done=True),
        schema=GRID_SCHEMA,
    )
    said = play(server, steps("north", '{"x": "3"}', 'I go {"x": 3, "y": 4}.'))
    assert [(o.text, o.done) for o in said] == [
        ("Error: answer with one JSON object whose fields are x, y", False),
        ("Error: the environment refused step: VALIDATION_ERROR because", False),
        ('{"x": 3, "y": 4}', True),
    ]
    assert said[-1].info == {"steps": 3.0, "wrong_actions": 2.0}
    assert server.received[2]["data"] == {"x": 3, "y": 4}


@pytest.mark.parametrize("code", ["EXECUTION_ERROR", "VALIDATION_ERROR", "SESSION_ERROR"])
def test_a_refused_text_fails_the_question(code):
    server = OpenEnvDouble(observed({}), error(code))
    with golden.raises(RolloutError):
        play(server, steps("a"))


def test_a_refused_reset_fails_the_question():
    with golden.raises(RolloutError):
        play(OpenEnvDouble(error("FACTORY_ERROR")), nothing)


def test_an_episode_that_is_over_at_its_reset_has_nothing_to_answer() -> None:
    with pytest.raises(RolloutError) as caught:
        play(OpenEnvDouble(observed({}, 1, done=True)), nothing)
    assert "reset_fields" in caught.value.fix


@pytest.mark.parametrize(
    ("done", "means"), [(None, False), (0, False), (1, True), ("false", None), ([], None)]
)
def test_an_episode_is_done_by_what_is_true(done: Any, means: bool | None) -> None:
    server = OpenEnvDouble(observed({}), observed({}, done=done))
    if means is None:
        with pytest.raises(RolloutError):
            play(server, steps("a"))
    else:
        assert [said.done for said in play(server, steps("a"))] == [means]


def test_where_there_is_no_free_place_it_waits_for_one():
    server = OpenEnvDouble(observed({"text": "in"}), full=2)

    async def body(environment: OpenEnvEnvironment) -> str:
        return environment.opening()

    assert play(server, body) == "in"
    assert server.sessions == 3
    with golden.raises(WaitTimeout):
        play(OpenEnvDouble(full=99), nothing, room_timeout_s=0.5)


@pytest.mark.parametrize(
    ("reply", "raised"),
    [
        (None, WaitTimeout),
        ("[1]", RolloutError),
        ("{", RolloutError),
    ],
)
def test_a_server_that_says_nothing_or_nonsense_fails_the_question(reply, raised):
    async def body(environment: OpenEnvEnvironment) -> None:
        environment.message_timeout_s = 0.2 if raised is WaitTimeout else 60.0  # not of the reset
        await environment.step("a")

    with golden.raises(raised):
        play(OpenEnvDouble(observed({}), reply), body)


def test_a_server_that_leaves_or_is_not_there_fails_the_question():
    with golden.raises(RolloutError):
        play(OpenEnvDouble(observed({})), steps("a"))

    async def away() -> None:
        environment = OpenEnvEnvironment(url="http://127.0.0.1:1")
        try:
            await environment.reset({})
        finally:
            await environment.close()

    with golden.raises(WaitTimeout) as caught:
        asyncio.run(away())
    assert caught.value.where == "OpenEnv server http://127.0.0.1:1"
    assert "task.env_args.url" in caught.value.fix


def test_tools_are_listed_and_called_by_steps():
    tool = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
    server = OpenEnvDouble(
        observed({}),
        observed({"tools": [tool]}),
        observed({"tool_name": "add", "result": {"data": 3, "is_error": False}}, 0.5),
        observed({"tool_name": "add", "error": {"message": "no such tool"}}),
        error("VALIDATION_ERROR"),
    )

    async def body(environment: OpenEnvEnvironment) -> Any:
        called = [await environment.call("add", {"a": n}) for n in (1, 2, 3)]
        return environment.tools(), called, await environment.step("3")

    tools, called, last = play(server, body, offer_tools=True)
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert tools == ({"type": "function", "function": function},)
    assert [(o.text, o.reward, o.done) for o in called] == [
        ("3", 0.5, False),
        ("Error: no such tool", 0.0, False),
        ("Error: the environment refused step: VALIDATION_ERROR because", 0.0, False),
    ]
    assert (last.done, last.reward, last.info["wrong_actions"]) == (True, 0.0, 2.0)
    called = {"type": "call_tool", "tool_name": "add", "arguments": {"a": 1}}
    assert server.received[1:3] == [
        {"type": "step", "data": {"type": "list_tools"}},
        {"type": "step", "data": called},
    ]


def test_by_http_each_message_is_a_request():
    server = OpenEnvDouble(
        observed({"text": "Go."}), observed({"text": "done"}, 1.0, done=True), error("x")
    )
    args = {"transport": "http", "action_field": "message"}
    (said,) = play(server, steps("a"), {"prompt": "?", "level": 2}, reset_fields=("level",), **args)
    assert (said.text, said.reward, said.done) == ("done", 1.0, True)
    assert server.received == [
        ("/reset", {"level": 2}),
        ("/step", {"action": {"message": "a"}}),
    ]


@pytest.mark.parametrize("status", [400, 403, 413, 422])
@pytest.mark.parametrize("kind", ["text", "JSON", "call"])
def test_by_http_a_refused_step_is_that_steps_result(status: int, kind: str) -> None:
    schema = GRID_SCHEMA if kind == "JSON" else TEXT_SCHEMA
    server = OpenEnvDouble(observed({}), status, observed({"text": "on"}, 1.0), schema=schema)
    args = {"transport": "http", "action_field": "" if kind == "JSON" else "message"}

    async def body(environment: OpenEnvEnvironment) -> list[Observation]:
        action = '{"x": 1, "y": 2}' if kind == "JSON" else "a"
        refused = (
            await environment.call("add", {}) if kind == "call" else await environment.step(action)
        )
        return [refused, await environment.step(action)]

    refused, later = play(server, body, **args)
    assert "because" in refused.text
    assert (refused.done, refused.info["wrong_actions"]) == (False, 1.0)
    assert (later.text, later.reward) == ("on", 1.0)


@pytest.mark.parametrize("transport", ["http", "websocket"])
def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    monkeypatch.setattr(retry_pauses, "FIRST_S", 0.001)
    server = OpenEnvDouble(observed({"text": "in"}), observed({}, 1.0), busy=(503, 429, 500))
    args = {"transport": transport, "action_field": "message"}
    (said,) = play(server, steps("a"), **args)
    assert said.reward == 1.0
    monkeypatch.setattr(retry_pauses, "FIRST_S", 1e9)  # after which the time is over
    with pytest.raises(WaitTimeout):
        play(OpenEnvDouble(busy=(503,) * 9), nothing, **args)


@pytest.mark.parametrize("status", [401, 404, 405])
def test_by_http_a_wrong_address_is_not_told_to_the_policy(status: int) -> None:
    server = OpenEnvDouble(observed({}), status)
    with pytest.raises(RolloutError):
        play(server, steps("a"), transport="http", action_field="message")


# ---- texts (pure) ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "constant", "field"),
    [
        (TEXT_SCHEMA, {}, "message"),
        ({"properties": {"move": {"type": "string"}}}, {}, "move"),
        ({"properties": {"move": {"type": "integer"}}}, {}, ""),
        (GRID_SCHEMA, {}, ""),
        (
            {"properties": {"code": {"type": "string"}, "t": {}}, "required": ["code"]},
            {},
            "code",
        ),
        (
            {"properties": {"m": {"type": "string"}, "to": {}}, "required": ["m", "to"]},
            {"to": 1},
            "m",
        ),
        ({}, {}, ""),
    ],
)
def test_the_field_that_holds_a_text_follows_from_the_schema(schema, constant, field):
    assert shape_of(schema, constant).text_field == field


@pytest.mark.parametrize("text", ["", "{", "}{", "[1]", "{'x': 1}", "1", '{"x": ' + "[" * 99999])
def test_what_is_no_object_is_no_action(text):
    with pytest.raises(WrongAction):
        ActionShape(text_field="").action_of(text)


@pytest.mark.parametrize(
    ("observation", "field", "text"),
    [
        ({"text": "a", "n": 1, "metadata": {"t": "b"}}, "", "a"),
        ({"text": "a", "more": "b"}, "", '{"text": "a", "more": "b"}'),
        ({"text": "a", "more": "b"}, "more", "b"),
        ({"board": [1, 2]}, "board", "[1, 2]"),
        ({"board": [1, 2]}, "missing", ""),
        ({}, "", ""),
    ],
)
def test_what_is_shown_of_an_observation(observation, field, text):
    assert text_of(observation, field) == text


@pytest.mark.parametrize(
    ("observation", "text", "failed"),
    [
        ({"result": {"content": [{"type": "text", "text": "a"}], "is_error": True}}, "a", True),
        ({"result": "plain"}, "plain", False),
        ({"result": {"x": 1}}, '{"x": 1}', False),
        ({"result": None}, "", False),
        ({"error": {"message": "m"}}, "Error: m", True),
    ],
)
def test_what_is_shown_of_a_result(observation, text, failed):
    assert result_text(observation) == (text, failed)


# ---- arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"url": "http://127.0.0.1:8000"}, ""),
        ({"url": "ws://host/path", "reward": "math_verify"}, ""),
        ({}, "there is no URL"),
        ({"url": "127.0.0.1:8000"}, "the URL is '127.0.0.1:8000'"),
        ({"url": "http://"}, "the URL is 'http://'"),
        ({"url": "http://a:b"}, "the URL is 'http://a:b'"),
        ({"url": "http://a", "urls": 1}, "environment 'openenv' takes no 'urls'"),
        ({"url": "http://a", "message_timeout_s": 0.0}, "message_timeout_s"),
        ({"url": "http://a", "transport": "tcp"}, "transport"),
        ({"url": "http://a", "transport": "http", "offer_tools": True}, "over HTTP each request"),
    ],
)
def test_arguments_are_checked_by_a_plan(args, words):
    found = [str(p) for p in argument_problems("environment", "openenv", args, where="x")]
    assert len(found) == bool(words), found
    assert not words or words in found[0]


def test_a_worker_refuses_what_a_plan_refuses():
    with golden.raises(ConfigError):
        OpenEnvEnvironment()
