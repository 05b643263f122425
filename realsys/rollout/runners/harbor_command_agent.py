"""``agent=harbor_command``: an installed agent works in a Harbor task's box, then the tests are run.

    box, without network              this worker
    agent ─▶ 127.0.0.1 ─ a socket that was made in the box, and is served here ─▶ session ─▶ ask

The box has a network of its own, in which nothing is but that socket: what the agent runs for the policy
reaches the policy, and nothing else. It can't set a reward there.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from realsys.api import registry
from realsys.api.agent import AgentHost, EpisodeTask
from realsys.api.errors import ConfigError
from realsys.data.harbor.task_directory import TaskDirectory, read_task
from realsys.rewards.harbor.harbor_rule import HarborTests, directory_of, parts_of
from realsys.rewards.harbor.task_box import INSTRUCTION
from realsys.rewards.sandbox.box_limits import BoxOutcome
from realsys.rewards.sandbox.sandbox import LISTENS_AT, OnListening
from realsys.rollout.endpoint.endpoint_app import answering_app
from realsys.rollout.runners.agent_arguments import HarborCommandArguments
from realsys.rollout.runners.command_agent import agent_environment
from realsys.rollout.runners.endpoint_agent import EndpointAgent
from realsys.rollout.runners.episode_outcome import AgentOutcome, EpisodeSeat

logger = logging.getLogger(__name__)

_NOT_SCORES = ("reward", "correct")
_MOST_VARIABLE = 100_000  # characters of an environment variable; Linux allows 128 KiB
_LOG_BYTES, _SHUTDOWN_S = 1 << 20, 2.0
_SERVE_S = 60.0  # longest until a box's socket is served; the loop is busy then


@dataclass(eq=False, kw_only=True)
class HarborCommandAgent(HarborCommandArguments, EndpointAgent):
    """A command of bash an episode, in the task's box; the reward is that of the task's own tests."""

    _tests: HarborTests = field(init=False, repr=False)

    async def open(self, host: AgentHost) -> None:
        """Gets threads for boxes; the sandbox starts with the first."""
        self._tests = registry.make_reward("harbor", **self.rule)  # type: ignore[assignment]
        if not self.timeout_s > self._tests.verifier_s:
            raise ConfigError(
                f"an episode has {self.timeout_s:g} s, of which its tests may take "
                f"{self._tests.verifier_s:g}",
                where="task.agent_args.timeout_s and task.reward_args.harbor.verifier_s",
                fix="give the episode more time",
            )
        await super().open(host)
        address, port = LISTENS_AT
        self.url = f"http://{address}:{port}"  # within a box
        self._threads = ThreadPoolExecutor(self._tests.boxes_at_once, "harbor-box")
        # Without the paths that set rewards and end sessions: the policy's own commands reach it, too
        self._server = web.AppRunner(
            answering_app(self.registry),
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            shutdown_timeout=_SHUTDOWN_S,
        )
        await self._server.setup()

    async def close(self) -> None:
        """Begins no further commands."""
        await super().close()
        if hasattr(self, "_server"):
            await self._server.cleanup()
        if hasattr(self, "_threads"):
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def play(self, task: EpisodeTask, seats: Sequence[EpisodeSeat]) -> AgentOutcome:
        """Runs the agent to its end or to its deadline, then the tests.

        Raises:
            SandboxFailure: the box failed. DoubtfulEnd: as ``out_of_time``.
        """
        run = asyncio.get_running_loop().run_in_executor
        directory = await run(
            self._threads, lambda: read_task(directory_of(task.record), self._tests.images)
        )
        box = await run(self._threads, lambda: self._tests.open_box(directory))
        async with self.starting(seats), self._served() as on_listening:
            ended = await run(
                self._threads,
                lambda: box.run_agent(
                    self.command,
                    env=self._environment(seats, directory),
                    most_s=self.timeout_s - self._tests.verifier_s,
                    on_listening=on_listening,
                ),
            )
        problem = self._problem(seats, ended)
        await asyncio.to_thread(self._write_log, task.id, ended, problem)
        verdict = await run(self._threads, box.verify)
        if not verdict.rewards:
            logger.info(
                "no verdict task=%s episode=%s why=%s", directory.name, task.id, verdict.why
            )
        parts = {f"reward/{k}": v for k, v in parts_of(verdict).items() if k not in _NOT_SCORES}
        late = float(ended.ended == "wall_time")
        stats = {**parts, "out_of_time": late, "command_seconds": ended.wall_s}
        return AgentOutcome(reward=verdict.reward, problem=problem, stats=stats)

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[OnListening]:
        """Serves what boxes listen with; boxes that are still there at the end are ended."""
        loop = asyncio.get_running_loop()
        ends: list[Callable[[], None]] = []
        sites: list[web.SockSite] = []

        async def serve(listener: socket.socket) -> None:
            sites.append(web.SockSite(self._server, listener))
            await sites[-1].start()

        def on_listening(listener: socket.socket, end: Callable[[], None]) -> None:
            ends.append(end)
            listener.setblocking(False)
            asyncio.run_coroutine_threadsafe(serve(listener), loop).result(_SERVE_S)

        try:
            yield on_listening
        finally:
            for end in ends:
                end()
            for site in sites:
                await site.stop()

    def _environment(
        self, seats: Sequence[EpisodeSeat], directory: TaskDirectory
    ) -> dict[str, str]:
        """Returns the agent's variables: where the policy is, and what to do."""
        instruction = directory.instruction.strip().replace("\0", "")
        short = {"REALSYS_INSTRUCTION": instruction} if len(instruction) <= _MOST_VARIABLE else {}
        return {
            **agent_environment(seats, {}),
            **short,
            "REALSYS_INSTRUCTION_FILE": INSTRUCTION,
            **self.env,
        }

    def _problem(self, seats: Sequence[EpisodeSeat], ended: BoxOutcome) -> str:
        """Returns why the agent failed; empty: it did not."""
        if ended.ended == "wall_time":
            return self.out_of_time(
                seats, f"it was still running after {ended.wall_s:.3g} s"
            ).problem
        if ended.ended != "exit":
            return f"its box ended it: {ended.ended}"
        if ended.exit_code:
            return f"it ended with status {ended.exit_code}: {_last_line(ended)}"
        return ""

    def _write_log(self, episode: str, ended: BoxOutcome, problem: str) -> None:
        """Keeps what the agent has printed, if it failed or ``keep_logs``."""
        if problem or self.keep_logs:
            self.host.folder.mkdir(parents=True, exist_ok=True)
            log = self.host.folder / f"{episode}.log"
            log.write_bytes((ended.stdout + ended.stderr)[-_LOG_BYTES:])


def _last_line(ended: BoxOutcome) -> str:
    lines = (ended.stderr or ended.stdout).decode(errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
