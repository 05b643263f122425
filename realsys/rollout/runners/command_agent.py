"""An agent that is a program: started once an episode, in a folder of its own.

It finds everything in its environment, under the names that clients read by themselves
(``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY``), and may write
a reward into a file.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from realsys.api.agent import AgentHost, DoubtfulEnd, EpisodeTask
from realsys.api.basics.bounded_files import open_regular
from realsys.rollout.runners.agent_arguments import CommandArguments
from realsys.rollout.runners.endpoint_agent import EndpointAgent
from realsys.rollout.runners.episode_outcome import AgentOutcome, EpisodeSeat, outcome_of, seat_json
from realsys.rollout.runners.kept_logs import KeptLogs
from realsys.rollout.runners.proxy_exceptions import proxy_exceptions
from realsys.runtime.child_processes.child_guard import GRACE_S, guarded
from realsys.runtime.child_processes.log_limit import limited_log
from realsys.trial.last_lines import last_log_line

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_MOST_REWARD_BYTES = 1 << 16
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_KILLED = {-9: "SIGKILL", 137: "SIGKILL", -15: "SIGTERM", 143: "SIGTERM"}  # status → by what


@dataclass(eq=False, kw_only=True)
class CommandAgent(CommandArguments, EndpointAgent):
    """``agent=command``: a program an episode.

    It ends with status 0, or has failed. Its reward is what it has written into ``$REALSYS_REWARD_FILE``: a
    number, or a JSON object whose ``reward`` it is, the other numbers being figures. Without one, the
    environment scores the policy's last answer, or the file's ``answer``.
    """

    async def open(self, host: AgentHost) -> None:
        """Starts the endpoint; removes what a killed worker before this one has left."""
        await super().open(host)
        place = host.place or secrets.token_hex()
        name = hashlib.blake2b(place.encode(), digest_size=6).hexdigest()
        self._prefix = f"realsys-agent-{name}-"
        for left in Path(tempfile.gettempdir()).glob(f"{self._prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        self._kept_logs = await asyncio.to_thread(KeptLogs, host.folder)

    async def play(self, task: EpisodeTask, seats: Sequence[EpisodeSeat]) -> AgentOutcome:
        """Runs the program to its end, or to its deadline."""
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=self._prefix))
        log = self.host.folder / f"{task.id}.log"
        is_kept = True
        try:
            await asyncio.to_thread(_prepare, folder, log, self.task_json(task))
            ended = await self._run(seats, folder, log)
            outcome = read_reward(folder / "reward", problem=ended.problem)
            if ended.doubt is not None and outcome.reward is None and not outcome.rewards:
                raise ended.doubt
            is_kept = bool(outcome.problem)
            return outcome
        finally:
            if not self.keep_logs:
                keep = self._kept_logs.add if is_kept else partial(Path.unlink, missing_ok=True)
                await asyncio.to_thread(keep, log)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _run(self, seats: Sequence[EpisodeSeat], folder: Path, log: Path) -> AgentOutcome:
        """Runs the program; returns why it failed, if it did, and a doubt that counts without a reward."""
        loop = asyncio.get_running_loop()
        async with self.starting(seats), limited_log(log):
            process = self._spawn(seats, folder, log)
            ends_s = loop.time() + self.timeout_s
            try:
                while (code := process.poll()) is None and loop.time() < ends_s:
                    await asyncio.sleep(_POLL_S)
                late = self._late(seats)  # before the program is given time to end
            finally:
                await _end(process)
        if code is None:
            return late
        if code in _KILLED:  # by the node, or by what the policy wrote
            raise DoubtfulEnd(
                f"the agent was killed by a signal, {_KILLED[code]}; its log ends: "
                f"{last_log_line(log)!r}",
                where=str(log),
                fix="see whether the node ran out of memory",
            )
        why = f"it ended with status {code}: {last_log_line(log)}" if code else ""
        return AgentOutcome(problem=why)

    def _late(self, seats: Sequence[EpisodeSeat]) -> AgentOutcome:
        what = f"it was still running after {self.timeout_s:g} s"
        try:
            return self.out_of_time(seats, what)
        except DoubtfulEnd as error:  # raised only where the program has written no reward
            return AgentOutcome(problem=what, doubt=error)

    def _spawn(
        self, seats: Sequence[EpisodeSeat], folder: Path, log: Path
    ) -> subprocess.Popen[bytes]:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # From the main thread, which runs the event loop: the child is tied to the starting thread
            return subprocess.Popen(
                guarded(self.argv),
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={
                    **os.environ,
                    **agent_environment(seats, os.environ),
                    **_files(folder),
                    **self.env,
                },
                start_new_session=True,
            )
        finally:
            os.close(descriptor)


def agent_environment(
    seats: Sequence[EpisodeSeat], environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables by which clients find the policy: the first role's, and all by name.

    Args:
        environment: of the worker, whose exceptions of proxies stay.
    """
    address = seats[0].address
    trusted = {} if address.certificate is None else {"SSL_CERT_FILE": str(address.certificate)}
    return {
        **trusted,
        "OPENAI_BASE_URL": address.base_url,
        "OPENAI_API_BASE": address.base_url,
        "OPENAI_API_KEY": address.key,
        "ANTHROPIC_BASE_URL": address.root_url,
        "ANTHROPIC_API_KEY": address.key,
        "REALSYS_SESSION_URL": address.session_url,
        "REALSYS_MODEL": address.model,
        "REALSYS_ROLES": json.dumps({s.role: seat_json(s) for s in seats if s.role}),
        **proxy_exceptions(environment, urlsplit(address.base_url).hostname or ""),
    }


def read_reward(path: Path, *, problem: str) -> AgentOutcome:
    """Reads an agent's reward file, if it has written one.

    Raises:
        DoubtfulEnd: it holds neither a number nor an object with one.
    """
    try:
        with open_regular(path) as file:
            text = file.read(_MOST_REWARD_BYTES).decode("utf-8-sig").strip()
    except FileNotFoundError:
        return AgentOutcome(problem=problem)
    except (OSError, UnicodeDecodeError) as error:  # a pipe, a folder, bytes
        raise _unreadable(str(error)) from error
    if not text:  # it died while it wrote
        return AgentOutcome(problem=problem or "its reward file is empty")
    try:
        # JSON knows no .5, which bc and awk write
        read = float(text) if _NUMBER.fullmatch(text) else json.loads(text)
        given = read if isinstance(read, dict) else {"reward": read}
        return outcome_of(given, problem=problem)
    except (ValueError, RecursionError) as error:
        raise _unreadable(f"{error}: {text[:200]!r}") from error


def _unreadable(why: str) -> DoubtfulEnd:
    return DoubtfulEnd(
        f"the agent's reward file can't be read: {why}",
        where="$REALSYS_REWARD_FILE",
        fix='write a number, or {"reward": NUMBER, …}, or {"answer": TEXT} to have that scored',
    )


def _prepare(folder: Path, log: Path, task_json: Mapping[str, object]) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    (folder / "task.json").write_text(json.dumps(task_json, default=str))
    (folder / "work").mkdir()


def _files(folder: Path) -> dict[str, str]:
    return {
        "REALSYS_TASK_FILE": str(folder / "task.json"),
        "REALSYS_REWARD_FILE": str(folder / "reward"),
        "TMPDIR": str(folder / "work"),
    }


async def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the program and everything that it has started."""
    if process.poll() is None:
        process.terminate()  # the guard gives it some seconds, then kills all of them
        for _ in range(int(2 * GRACE_S / _POLL_S)):
            if process.poll() is not None:
                return
            await asyncio.sleep(_POLL_S)
        with suppress(ProcessLookupError):
            process.kill()
        await asyncio.to_thread(process.wait)
