"""``agent=harbor_command``: an installed agent works in a Harbor task's box, then the tests are run.

    box, without network              this worker
    agent ─▶ 127.0.0.1 ─ a socket that was made in the box, and is served here ─▶ session ─▶ ask

The box has a network of its own, in which nothing is but that socket: what the agent runs for the policy
reaches the policy, and nothing else. It can't set a reward there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from realsys.api import registry
from realsys.api.agent import AgentHost, EpisodeTask
from realsys.api.errors import ConfigError, SandboxFailure
from realsys.data.harbor.task_directory import TaskDirectory, read_task
from realsys.rewards.harbor.harbor_rule import HarborTests, directory_of, parts_of
from realsys.rewards.harbor.task_box import INSTRUCTION, TaskBox
from realsys.rewards.sandbox.box_limits import BoxOutcome
from realsys.rewards.sandbox.sandbox import LISTENS_AT
from realsys.rollout.runners.agent_arguments import HarborCommandArguments
from realsys.rollout.runners.box_endpoint import BoxEndpoint
from realsys.rollout.runners.command_agent import agent_environment
from realsys.rollout.runners.endpoint_agent import EndpointAgent
from realsys.rollout.runners.episode_outcome import AgentOutcome, EpisodeDropped, EpisodeSeat
from realsys.rollout.runners.kept_logs import KeptLogs

logger = logging.getLogger(__name__)

_NOT_SCORES = ("reward", "correct")
_MOST_VARIABLE = 100_000  # bytes of an environment variable; Linux allows 128 KiB
_LOG_BYTES = 1 << 20
T = TypeVar("T")


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
        self._kept_logs = await asyncio.to_thread(KeptLogs, host.folder)
        self._open_places()

    def _open_places(self) -> None:
        self._threads = ThreadPoolExecutor(self._tests.boxes_at_once, "harbor-box")
        self._places = asyncio.Semaphore(self._tests.boxes_at_once)

    async def close(self) -> None:
        """Begins no further commands, and stops the endpoint."""
        if hasattr(self, "_threads"):
            self._threads.shutdown(wait=False, cancel_futures=True)
        await super().close()

    async def play(self, task: EpisodeTask, seats: Sequence[EpisodeSeat]) -> AgentOutcome:
        """Runs the agent to its end or to its deadline, then the tests.

        Raises:
            EpisodeDropped: its box failed; nothing of it is trained on. DoubtfulEnd: as ``out_of_time``.
        """
        async with self._places:  # until its tests are done: they wait for no other's agent
            try:
                return await self._play(task, seats)
            except SandboxFailure as error:
                raise EpisodeDropped(error.what, where=error.where, fix=error.fix) from error

    async def _play(self, task: EpisodeTask, seats: Sequence[EpisodeSeat]) -> AgentOutcome:
        directory = await self._in_thread(
            lambda: read_task(directory_of(task.record), self._tests.images)
        )
        box = await self._in_thread(lambda: self._tests.open_box(directory))
        ended = await self._run_agent(box, self._environment(seats, directory), seats)
        problem = self._problem(seats, ended)
        try:
            verdict = await self._in_thread(box.verify)
        finally:
            await asyncio.to_thread(self._write_log, task.id, ended, problem)
        if not verdict.rewards:
            logger.info(
                "no verdict task=%s episode=%s why=%s", directory.name, task.id, verdict.why
            )
        parts = {f"reward/{k}": v for k, v in parts_of(verdict).items() if k not in _NOT_SCORES}
        late = float(ended.ended == "wall_time")
        stats = {**parts, "out_of_time": late, "command_seconds": ended.wall_s}
        return AgentOutcome(reward=verdict.reward, problem=problem, stats=stats)

    async def _run_agent(
        self, box: TaskBox, env: dict[str, str], seats: Sequence[EpisodeSeat]
    ) -> BoxOutcome:
        async with self.starting(seats), BoxEndpoint(self.registry) as endpoint:
            return await self._in_thread(
                lambda: box.run_agent(
                    self.command,
                    env=env,
                    most_s=self.timeout_s - self._tests.verifier_s,
                    on_listening=endpoint.on_listening,
                )
            )

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _environment(
        self, seats: Sequence[EpisodeSeat], directory: TaskDirectory
    ) -> dict[str, str]:
        """Returns the agent's variables: where the policy is, and what to do."""
        instruction = directory.instruction.strip().replace("\0", "")
        size = len(instruction.encode())
        short = {"REALSYS_INSTRUCTION": instruction} if size <= _MOST_VARIABLE else {}
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
        """Keeps the end of what the agent has printed, if it failed or ``keep_logs``."""
        if not problem and not self.keep_logs:
            return
        log = self.host.folder / f"{episode}.log"
        with suppress(OSError):  # a log is no reason to fail an episode
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_bytes((ended.stdout + ended.stderr)[-_LOG_BYTES:])
        if not self.keep_logs:
            self._kept_logs.add(log)


def _last_line(ended: BoxOutcome) -> str:
    lines = (ended.stderr or ended.stdout).decode(errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
