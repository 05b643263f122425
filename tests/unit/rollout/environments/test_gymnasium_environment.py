"""Environment ``gymnasium``: texts, seeds, limits; on a stand-in with gymnasium's names.

That it fits gymnasium itself is checked by hand: tests/by_hand/agents/environments.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from types import SimpleNamespace
from typing import Any

import golden
import pytest

from realsys.api.agent import Observation
from realsys.api.errors import ConfigError
from realsys.config.plugin_arguments import argument_problems
from realsys.rollout.environments.gymnasium_environment import (
    GymnasiumEnvironment,
    NoAction,
    action_of,
    seed_of,
    text_of_observation,
    without_colours,
)


class Discrete:
    """As gymnasium's: whole numbers from ``start`` on."""

    def __init__(self, n: int, start: int = 0) -> None:
        self.n, self.start = n, start


class Text:
    """As gymnasium's."""


class Box:
    """As gymnasium's, of one number from -2 to 2."""

    def from_jsonable(self, values: list[Any]) -> list[Any]:
        return [[float(x) for x in value] for value in values]

    def contains(self, value: Any) -> bool:
        return len(value) == 1 and -2 <= value[0] <= 2

    def __str__(self) -> str:
        return "Box(-2, 2)"


class Line:
    """Wants to be at 2; a step to the right is 1, to the left 0."""

    action_space = Discrete(2)

    def __init__(self, wanted: int = 2, render_mode: str | None = None) -> None:
        self.wanted, self.render_mode = wanted, render_mode
        self.seeds: list[int] = []
        self.threads: set[str] = set()
        self.closed = 0
        self.hang: threading.Event | None = None

    def reset(self, *, seed: int) -> Any:
        self.seeds.append(seed)
        self.at = 0
        return {"at": self.at}, {}

    def step(self, action: int) -> Any:
        self.threads.add(threading.current_thread().name)
        if self.hang is not None:
            self.hang.wait(60)
        self.at += 1 if action else -1
        return {"at": self.at}, 0.5, self.at == self.wanted, self.at == -2, {}

    def render(self) -> str:
        return f"at \x1b[41m{self.at}\x1b[0m"

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Line]:
    """The environments that gymnasium has made."""
    lines: list[Line] = []

    def make(id_: str, **kwargs: Any) -> Line:
        lines.append(Line(**kwargs))
        return lines[-1]

    module = SimpleNamespace(registry={"Line-v0": None}, make=make)
    monkeypatch.setitem(sys.modules, "gymnasium", module)
    return lines


def play(*actions: str, record: Any = None, **args: Any) -> tuple[str, list[Observation]]:
    """The opening, and what was said to each action."""

    async def episode() -> tuple[str, list[Observation]]:
        environment = GymnasiumEnvironment(**{"id": "Line-v0", **args})
        await environment.reset({"prompt": "?"} if record is None else record)
        said = [await environment.step(action) for action in actions]
        opening = environment.opening()
        await environment.close()
        return opening, said

    return asyncio.run(episode())


def test_actions_are_numbers_in_the_text_and_rewards_the_environments(made):
    opening, said = play("I go to 1", "right", "-1", "not 0 but 1")
    wrong = "Error: answer with a whole number from 0 to 1"
    assert opening == '{"at": 0}'
    assert [(o.text, o.reward, o.done) for o in said] == [
        ('{"at": 1}', 0.5, False),
        (wrong, 0.0, False),
        (wrong, 0.0, False),
        ("", 0.5, True),
    ]
    assert said[-1].info == {"steps": 2.0, "wrong_actions": 2.0}
    assert threading.main_thread().name not in made[0].threads
    assert made[0].closed == 1


def test_an_episode_ends_where_it_is_truncated_or_has_no_more_steps(made):
    assert [o.done for o in play("0", "0")[1]] == [False, True]
    assert [o.done for o in play("1", max_steps=1, kwargs={"wanted": 9})[1]] == [True]
    assert made[1].wanted == 9


def test_a_drawing_is_shown_with_brackets_for_colours(made):
    opening, said = play("1", show="render")
    assert (opening, said[0].text) == ("at [0]", "at [1]")
    assert made[0].render_mode == "ansi"
    assert without_colours("a\x1b[1;31mb\x1b[mc\n") == "a[b]c\n"
    assert without_colours("\x1b[31ma\x1b[32mb\x1b[0mc\x1b[33md") == "[a\x1b[32mb]c\x1b[33md"
    assert without_colours("a\x1b[mb") == "a\x1b[mb"


def test_all_episodes_of_a_question_begin_alike(made):
    for record in ({"prompt": "a"}, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a", "seed": 7}):
        play(record=record)
    first, same, other, given = (line.seeds[0] for line in made)
    assert first == same != other
    assert given == 7
    assert seed_of({"prompt": "a", "level": 3}, "level") == 3
    assert seed_of({"prompt": "a", "seed": -1}, "seed") == first


def test_a_call_that_hangs_is_left_to_its_thread(made):
    async def episode() -> None:
        environment = GymnasiumEnvironment(id="Line-v0")
        await environment.reset({"prompt": "?"})
        hang = made[0].hang = threading.Event()
        call = asyncio.create_task(environment.step("1"))
        while not made[0].threads:  # it has begun
            await asyncio.sleep(0.001)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await environment.close()
        assert made[0].closed == 0
        hang.set()

    asyncio.run(episode())


@pytest.mark.parametrize(
    ("text", "space", "action"),
    [
        ("go 2", Discrete(4), 2),
        ("-1", Discrete(3, start=-1), -1),
        ("any text", Text(), "any text"),
        ("[0.5]", Box(), [0.5]),
    ],
)
def test_a_text_is_an_action(text, space, action):
    assert action_of(text, space) == action


@pytest.mark.parametrize(
    ("text", "space"),
    [
        *((text, Discrete(4)) for text in ("", "x", "4", "-1", "9" * 5000)),
        *((text, Box()) for text in ("", "x", "1", "[3]", "{}", "null", "[" * 99999, "[NaN]")),
    ],
)
def test_what_is_no_action_is_told(text, space):
    with golden.raises(NoAction):
        action_of(text, space)


def test_observations_are_text_or_json():
    array = SimpleNamespace(tolist=lambda: [1, 2])
    assert text_of_observation("a") == "a"
    assert json.loads(text_of_observation({"x": array, "y": (1, "ä")})) == {
        "x": [1, 2],
        "y": [1, "ä"],
    }


def test_what_can_not_be_made_is_a_mistake_of_the_run(made, monkeypatch):
    with golden.raises(ConfigError) as caught:
        GymnasiumEnvironment(id="Line-v1")
    assert "'Line-v0'" in caught.value.fix
    with golden.raises(ConfigError):
        play(kwargs={"bad": 1})
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with golden.raises(ConfigError) as caught:
        GymnasiumEnvironment(id="Line-v0")
    assert "pip install gymnasium" in caught.value.fix


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"id": "A-v0", "kwargs": {"x": 1}, "show": "render"}, ""),
        ({}, "environment gymnasium has no id"),
        ({"id": "A-v0", "max_steps": 0}, "max_steps"),
        ({"id": "A-v0", "shows": "render"}, "takes no 'shows'"),
    ],
)
def test_arguments_are_checked_by_a_plan_without_gymnasium(args, words):
    found = [str(p) for p in argument_problems("environment", "gymnasium", args, where="x")]
    assert len(found) == bool(words), found
    assert not words or words in found[0]
