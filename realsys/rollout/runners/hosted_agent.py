"""An agent that is a function: run by a process that stays, in any interpreter, many episodes at a time."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.api.agent import AgentHost, DoubtfulEnd, EpisodeTask
from realsys.api.errors import WaitTimeout
from realsys.rollout.runners import hosts
from realsys.rollout.runners.agent_arguments import HostedArguments, PythonArguments
from realsys.rollout.runners.endpoint_agent import EndpointAgent
from realsys.rollout.runners.episode_outcome import AgentOutcome, EpisodeSeat, outcome_of, seat_json
from realsys.rollout.runners.host_process import HostProcess
from realsys.rollout.runners.hosts.function_host import BLOCKED_S

HOSTS = Path(hosts.__file__).parent


@dataclass(eq=False, kw_only=True)
class HostedAgent(HostedArguments, EndpointAgent):
    """Base of agents whose episodes run in processes that stay."""

    program = "function_host.py"

    def arguments(self) -> list[str]:
        """Returns the program's arguments."""
        return []

    async def open(self, host: AgentHost) -> None:
        """Starts the endpoint; the processes start with the first episodes."""
        await super().open(host)
        argv = [self.python or sys.executable, str(HOSTS / self.program), *self.arguments()]
        trusted = {} if self.certificate is None else {"SSL_CERT_FILE": str(self.certificate)}
        self._hosts = [
            HostProcess(
                argv,
                name=f"agent host {number} of {host.name}",
                log=host.folder / f"host-{number}.log",
                env={
                    "NO_PROXY": "127.0.0.1,localhost",
                    BLOCKED_S: str(self.blocked_s),
                    **trusted,
                    **self.env,
                },
                cwd=Path.cwd(),
            )
            for number in range(self.processes)
        ]
        self._turns = itertools.cycle(self._hosts)

    async def close(self) -> None:
        """Ends the processes and the endpoint."""
        for process in getattr(self, "_hosts", ()):
            await process.close()
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
                return AgentOutcome(problem=error.what)
        if "error" in line:
            return AgentOutcome(problem=str(line["error"]))
        return returned_outcome(line.get("result"))


@dataclass(eq=False, kw_only=True)
class PythonAgent(PythonArguments, HostedAgent):
    """``agent=python``: a function, plain or ``async``, whose parameters name what it gets.

    ``client`` is an ``openai.AsyncOpenAI`` at the episode's address, ``anthropic_client`` its counterpart;
    ``task``, ``base_url``, ``session_url``, ``api_key`` and ``model`` are plain values. It returns a
    reward, or ``{"reward": …}`` with further figures, or a text for the environment to score, or None:
    then the policy's last answer is scored.
    """

    def arguments(self) -> list[str]:
        """The function's name."""
        return [self.function]


def returned_outcome(result: Any) -> AgentOutcome:
    """Reads what a function returned.

    Raises:
        DoubtfulEnd: it is nothing that an episode can end with.
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
    except ValueError as error:
        raise DoubtfulEnd(
            f"the agent's function returned {result!r:.200}: {error}",
            where="task.agent_args.function",
            fix='return a number, {"reward": NUMBER, …}, a text to score, or None',
        ) from error
