"""``agent=harbor``: the policy works in a Harbor task's box, command by command, then the tests are run.

    instruction ─▶ policy ─ command ─▶ box ─ output ─▶ policy ─ … ─ done ─▶ tests ─▶ reward

The conversation is a session's (realsys/rollout/conversation/), without HTTP. Boxes block, so they run in
threads of their own. Time for the tests is set aside before the first command.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from realsys.api import registry
from realsys.api.agent import AgentHost, Episode, EpisodeAgent, EpisodeTask
from realsys.api.errors import ConfigError, SandboxFailure, WaitTimeout
from realsys.data.harbor.task_directory import TaskDirectory, read_task
from realsys.rewards.harbor.harbor_rule import HarborTests, directory_of, parts_of
from realsys.rewards.harbor.task_box import TaskBox
from realsys.rewards.harbor.verifier_rewards import TaskVerdict
from realsys.rollout.conversation.answer_forms import PLAIN_FORMS
from realsys.rollout.conversation.chat_messages import (
    ChatMessage,
    ChatReply,
    ChatRequest,
    FinishReason,
)
from realsys.rollout.conversation.episode_session import EpisodeSession
from realsys.rollout.conversation.full_context import ContextFull
from realsys.rollout.runners.agent_arguments import HarborArguments
from realsys.rollout.runners.endpoint_agent import AskPolicy, session_settings
from realsys.rollout.runners.shell_turns import (
    BASH_TOOL,
    BLOCKS_SYSTEM,
    CALLS_SYSTEM,
    ShellCommand,
    commands_of,
    results_of,
    shown_output,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
BOX_TRIES = 2  # of a command whose box failed by itself, which changes nothing
LEAST_S = 1.0  # no command is begun with less time left
_NOT_SCORES = ("reward", "correct")


@dataclass(kw_only=True)
class ShellWork:
    """What became of the work before the tests, as far as the metrics tell."""

    turns: int = 0
    commands: int = 0
    command_s: float = 0.0
    ran_out: str = ""  # of "turns", "time", "context"; empty: the policy said that it is done
    truncated: bool = False

    def figures(self) -> dict[str, float]:
        """Returns numbers for the metrics."""
        counts = {"turns": float(self.turns), "commands": float(self.commands)}
        ends = {
            f"out_of_{what}": float(self.ran_out == what) for what in ("turns", "time", "context")
        }
        return {**counts, "command_seconds": self.command_s, **ends}


@dataclass(eq=False, kw_only=True)
class HarborAgent(HarborArguments, EpisodeAgent):
    """Several turns in a task's box; the reward is that of the task's own tests."""

    _tests: HarborTests = field(init=False, repr=False)

    async def open(self, host: AgentHost) -> None:
        """Gets threads for boxes; the sandbox starts with the first."""
        self._tests = registry.make_reward("harbor", **self.rule)  # type: ignore[assignment]
        if not self.timeout_s > self._tests.verifier_s + LEAST_S:
            raise ConfigError(
                f"an episode has {self.timeout_s:g} s, of which its tests may take "
                f"{self._tests.verifier_s:g}",
                where="task.agent_args.timeout_s and task.reward_args.harbor.verifier_s",
                fix="give the episode more time",
            )
        self._settings = session_settings(self, host)
        self._by_calls = self.commands == "calls" or (
            not self.commands and self._settings.form.name not in PLAIN_FORMS
        )
        self._threads = ThreadPoolExecutor(self._tests.boxes_at_once, "harbor-box")

    async def close(self) -> None:
        """Begins no further commands."""
        if hasattr(self, "_threads"):
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def run_episode(self, task: EpisodeTask) -> Episode:
        """Has the policy work until it is done, or out of turns or time; then runs the tests."""
        end_s = asyncio.get_running_loop().time() + self.timeout_s - self._tests.verifier_s
        directory = await self._in_thread(
            lambda: read_task(directory_of(task.record), self._tests.images)
        )
        box = await self._in_thread(lambda: self._tests.open_box(directory))
        session = EpisodeSession(id=task.id, policy=AskPolicy(task.ask), settings=self._settings)
        try:
            work = await self._work(session, box, directory, end_s)
        finally:
            await session.close()
        verdict = await self._box_call(box.verify)
        if not verdict.rewards:
            logger.info(
                "no verdict task=%s episode=%s why=%s", directory.name, task.id, verdict.why
            )
        return finished_work(session, verdict, work)

    async def _work(
        self, session: EpisodeSession, box: TaskBox, directory: TaskDirectory, end_s: float
    ) -> ShellWork:
        """Asks and runs, in turn. Raises what ``ask`` raises before there is an answer to train on."""
        work = ShellWork(ran_out="turns")
        system = self.system or (CALLS_SYSTEM if self._by_calls else BLOCKS_SYSTEM)
        messages = [
            ChatMessage(role="system", content=system.replace("{workdir}", directory.workdir)),
            ChatMessage(role="user", content=directory.instruction.strip()),
        ]
        while work.turns < self.max_turns:
            try:
                async with asyncio.timeout_at(end_s):
                    reply = await self._reply(session, messages)
            except (TimeoutError, ContextFull) as error:
                if session.last_node() is None:
                    raise _no_answer(error, session.id) from error
                work.ran_out = "time" if isinstance(error, TimeoutError) else "context"
                return work
            work.turns += 1
            commands = commands_of(reply.message, by_calls=self._by_calls)
            if not commands:
                work.ran_out, work.truncated = "", reply.finish is FinishReason.LENGTH
                return work
            shown = []
            for command in commands:
                left_s = self._left_s(directory, work, end_s)
                if left_s < LEAST_S:
                    work.ran_out = "time"
                    return work
                shown.append(await self._run(box, command, left_s, work))
            messages += [reply.message, *results_of(commands, shown)]
        return work

    async def _reply(self, session: EpisodeSession, messages: Sequence[ChatMessage]) -> ChatReply:
        tools = (BASH_TOOL,) if self._by_calls else ()
        async with session.call(ChatRequest(messages=tuple(messages), tools=tools)) as live:
            result = await live.result()
            live.read()
        return result.replies[0]

    def _left_s(self, directory: TaskDirectory, work: ShellWork, end_s: float) -> float:
        """Returns how long a command may take now. What the task gives its agent is for all of them."""
        of_task = (directory.agent.timeout_sec or math.inf) - work.command_s
        return min(of_task, end_s - asyncio.get_running_loop().time())

    async def _run(
        self, box: TaskBox, command: ShellCommand, left_s: float, work: ShellWork
    ) -> str:
        """Runs a command; returns what the policy is shown."""
        if command.fault:
            return f"({command.fault})"
        text = command.text.replace("\0", "")
        outcome = await self._box_call(lambda: box.run(text, most_s=left_s))
        work.commands += 1
        work.command_s += outcome.wall_s
        return shown_output(outcome, self.output_chars)

    async def _box_call(self, call: Callable[[], T]) -> T:
        """Runs something in a box; a box that failed by itself is tried again. Raises SandboxFailure."""
        for _ in range(BOX_TRIES - 1):
            try:
                return await self._in_thread(call)
            except SandboxFailure as error:
                logger.warning("box failed, and is tried again why=%s", error.what)
        return await self._in_thread(call)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def finished_work(session: EpisodeSession, verdict: TaskVerdict, work: ShellWork) -> Episode:
    """Returns the episode: the tests' reward, and their parts as the reward rule names them."""
    parts = {f"reward/{k}": v for k, v in parts_of(verdict).items() if k not in _NOT_SCORES}
    stats: dict[str, Any] = {**parts, **session.figures(), **work.figures()}
    return Episode(
        sequences=tuple(session.sequences(reward=verdict.reward)),
        reward=verdict.reward,
        stats=stats,
    )


def _no_answer(error: Exception, episode: str) -> Exception:
    """Returns the error of an episode that ended before the policy's first answer."""
    if not isinstance(error, TimeoutError):
        return error
    return WaitTimeout(
        "the policy gave no answer in the time of an episode",
        where=f"episode {episode}",
        fix="raise task.agent_args.timeout_s, or see why generation is slow",
    )
