"""OpenEnv servers as openenv-core's documentation shows them, for tests/by_hand/agents/environments.py.

python openenv_servers.py word|grid|tools PORT
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class WordAction(Action):
    """A guess."""

    message: str


class WordObservation(Observation):
    """What is said to a guess."""

    text: str = ""


class WordEnvironment(Environment):
    """Wants the word of the reset's seed; says whether it is longer."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._word, self._steps = "", 0

    def reset(self, seed: int | None = None, **_: Any) -> WordObservation:
        self._word, self._steps = "abc"[(seed or 0) % 3] * 3, 0
        return WordObservation(text=f"a word of {self._word[0]}")

    def step(self, action: WordAction, **_: Any) -> WordObservation:
        self._steps += 1
        if action.message == "crash":
            raise RuntimeError("the environment broke")
        is_right = action.message.strip() == self._word
        return WordObservation(text="no", reward=float(is_right), done=is_right)

    @property
    def state(self) -> State:
        return State(step_count=self._steps)


class GridAction(Action):
    """A move."""

    x: int
    y: int


class GridObservation(Observation):
    """Where one is."""

    x: int = 0
    y: int = 0


class GridEnvironment(Environment):
    """Wants to be at 3, 4."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._x = self._y = 0

    def reset(self, **_: Any) -> GridObservation:
        self._x = self._y = 0
        return GridObservation()

    def step(self, action: GridAction, **_: Any) -> GridObservation:
        self._x, self._y = self._x + action.x, self._y + action.y
        done = (self._x, self._y) == (3, 4)
        return GridObservation(x=self._x, y=self._y, reward=float(done), done=done)

    @property
    def state(self) -> State:
        return State()


class ToolsEnvironment(MCPEnvironment):
    """Adds by a tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("tools")

        @tools.tool
        def add(a: int, b: int) -> int:
            """Adds two whole numbers."""
            return a + b

        super().__init__(tools)

    def reset(self, **_: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, **_: Any) -> Observation:
        return Observation(done=True)

    @property
    def state(self) -> State:
        return State()


SERVERS = {
    "word": (WordEnvironment, WordAction, WordObservation),
    "grid": (GridEnvironment, GridAction, GridObservation),
    "tools": (ToolsEnvironment, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    made, action, observation = SERVERS[sys.argv[1]]
    app = create_fastapi_app(made, action, observation, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
