"""An agent that is a function: run by a process that stays, in any interpreter, many episodes at a time."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from realsys.api.agent import AgentHost, DoubtfulEnd, EpisodeTask
from realsys.api.errors import RolloutError, WaitTimeout
from realsys.rollout.runners import hosts
from realsys.rollout.runners.agent_arguments import HostedArguments, PythonArguments
from realsys.rollout.runners.endpoint_agent import EndpointAgent
from realsys.rollout.runners.episode_outcome import (
    AgentOutcome,
    EpisodeSeat,
    NumberNotFinite,
    outcome_of,
    seat_json,
)
from realsys.rollout.runners.host_process import HostProcess
from realsys.rollout.runners.hosts.function_host import BLOCKED_S
from realsys.rollout.runners.proxy_exceptions import proxy_exceptions
from realsys.runtime.first_error import all_of

HOSTS = Path(hosts.__file__).parent
_FIX = 'return a number, {"reward": NUMBER, …}, a text to score, or None'


@dataclass(eq=False, kw_only=True)
class HostedAgent(HostedArguments, EndpointAgent):
    """Base of agents whose episodes run in processes that stay."""

    program = "function_host.py"

    def arguments(self) -> list[str]:
        """Returns the program's arguments."""
        return []

    @property
    def played(self) -> str:
        """Names in messages what the episodes are played by."""
        return self.program

    def process_environment(self) -> dict[str, str]:
        """Returns the variables that the processes get besides the worker's own."""
        trusted = {} if self.certificate is None else {"SSL_CERT_FILE": str(self.certificate)}
        return {
            **proxy_exceptions(os.environ, urlsplit(self.url).hostname or ""),
            BLOCKED_S: str(self.blocked_s),
            **trusted,
            **self.env,
        }

    async def open(self, host: AgentHost) -> None:
        """Starts the endpoint; the processes start with the first episodes."""
        await super().open(host)
        argv = [self.python or sys.executable, str(HOSTS / self.program), *self.arguments()]
        self._hosts = [
            HostProcess(
                argv,
                name=f"agent host {number} of {host.name}",
                log=host.folder / f"host-{number}.log",
                env=self.process_environment(),
                cwd=Path.cwd(),
                blocked_s=self.blocked_s,
            )
            for number in range(self.processes)
        ]
        self._turns = itertools.cycle(self._hosts)

    async def close(self) -> None:
        """Ends the processes and the endpoint, all whatever fails."""
        try:
            await all_of(process.close() for process in getattr(self, "_hosts", ()))
        finally:
            await super().close()

    async def play(self, task: EpisodeTask, seats: Sequence[EpisodeSeat]) -> AgentOutcome:
        """Has a process run the episode."""
        order = {
            "id": task.id,
            "task": self.task_json(task),
            **seat_json(seats[0]),
            "roles": {seat.role: seat_json(seat) for seat in seats if seat.role},
        }
        async with self.starting(seats):
            try:
                line = await next(self._turns).run(order, timeout_s=self.timeout_s)
            except WaitTimeout as error:
                return self.out_of_time(seats, error.what)
        if "error" in line:
            return AgentOutcome(problem=str(line["error"]))
        if "unusable" in line:
            raise _unusable(str(line["unusable"]), self.played)
        return returned_outcome(line.get("result"), played=self.played)


@dataclass(eq=False, kw_only=True)
class PythonAgent(PythonArguments, HostedAgent):
    """``agent=python``: a function, plain or ``async``, whose parameters name what it gets.

    ``client`` is an ``openai.OpenAI`` at the episode's address, in an ``async`` function an
    ``openai.AsyncOpenAI``; ``anthropic_client`` its counterpart; ``task``, ``base_url``, ``session_url``,
    ``api_key`` and ``model`` are plain values. It returns a reward, or ``{"reward": …}`` with further
    figures, or a text for the environment to score, or None: then the policy's last answer is scored.
    """

    def arguments(self) -> list[str]:
        """The function's name."""
        return [self.function]

    @property
    def played(self) -> str:
        """The function."""
        return f"function {self.function}"


def returned_outcome(result: Any, *, played: str = "the agent's function") -> AgentOutcome:
    """Reads what a function returned, as JSON's values.

    Args:
        played: names the function in errors.
    Raises:
        DoubtfulEnd: a number in it is infinite or NaN, which the policy's text may have caused.
        RolloutError: it is of a type that no episode can end with, a mistake of the function's.
    """
    try:
        match result:
            case None:
                return AgentOutcome()
            case str():
                return AgentOutcome(text=result)
            case dict():
                return outcome_of(result)
            case _:
                return outcome_of({"reward": result})
    except NumberNotFinite as error:
        raise DoubtfulEnd(
            f"{played} returned {result!r:.200}: {error}", where=_where(played), fix=_FIX
        ) from error
    except ValueError as error:
        raise _unusable(f"{result!r:.200}: {error}", played) from error


def _unusable(what: str, played: str) -> RolloutError:
    return RolloutError(f"{played} returned {what}", where=_where(played), fix=_FIX)


def _where(played: str) -> str:
    return f"task.agent_args: {played}"
