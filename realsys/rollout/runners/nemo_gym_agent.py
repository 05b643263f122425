"""Agent that is a NeMo Gym agent server: ``POST /run`` with a record, whose response has the reward.

Gym's model server has one base URL for all episodes, so each worker has the policy at a fixed port, and a
request's episode is found by a key in ``responses_create_params.metadata``, which Gym passes on as it is::

    run_episode ─ POST /run ─▶ Gym's agent ─▶ Gym's model server ─▶ :model_port/v1/… ─▶ endpoint ─▶ session
         reward ◀──────────────────┘

Written after NeMo Gym's servers (https://github.com/NVIDIA-NeMo/Gym); tried against a stand-in of that
contract.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from realsys.api.agent import AgentHost, DoubtfulEnd, EpisodeTask
from realsys.api.errors import ClusterError, RolloutError, WaitTimeout
from realsys.api.users_code.reward_numbers import is_number
from realsys.rollout.runners.agent_arguments import NemoGymArguments
from realsys.rollout.runners.endpoint_agent import LOOPBACK, EndpointAgent
from realsys.rollout.runners.episode_outcome import AgentOutcome, EpisodeSeat, outcome_of
from realsys.transport.http_bodies import request_body
from realsys.transport.http_outages import AWAY, is_away, is_busy, is_misaddressed
from realsys.transport.retry_pauses import RetryPauses

logger = logging.getLogger(__name__)

SESSION = "realsys_session"  # in a request's metadata
NO_SESSION = (
    f"the request has no metadata.{SESSION}, which says whose episode it is of. Fix: have the model server "
    "pass on the metadata of responses_create_params"
)
_NOT_SENT = ("record", "responses_create_params")  # as they stand in our records
_MOST_BYTES = 64 << 20
_BUSY_S = 60.0  # in which a busy server is asked again; then the episode waits, and is played anew


@dataclass(eq=False, kw_only=True)
class NemoGymAgent(NemoGymArguments, EndpointAgent):
    """``agent=nemo_gym``: an episode is one ``POST /run``."""

    async def open(self, host: AgentHost) -> None:
        """Starts the endpoint, and the fixed port before it.

        Raises:
            ClusterError: the port is taken.
        """
        await super().open(host)
        # Without a limit: `/run`s of a hundred episodes would leave no connection for what they ask
        self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        app = web.Application(client_max_size=_MOST_BYTES)
        app.add_routes([web.post("/v1/{path:.+}", self._forwarded)])
        self._runner = web.AppRunner(app, shutdown_timeout=1, auto_decompress=False)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, LOOPBACK, self.model_port).start()
        except OSError as error:
            raise ClusterError(
                f"the policy's port for NeMo Gym can't be opened: {error}",
                where="task.agent_args.model_port",
                fix="choose a free one; one rollout worker a node can have it",
            ) from error
        self.model_url = f"http://{LOOPBACK}:{self._runner.addresses[0][1]}/v1"
        logger.info("policy for NeMo Gym url=%s", self.model_url)

    async def close(self) -> None:
        """Closes the port and the endpoint, both whatever fails."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(super().close)
            if hasattr(self, "_client"):
                stack.push_async_callback(self._client.close)
            if hasattr(self, "_runner"):
                stack.push_async_callback(self._runner.cleanup)

    async def play(self, task: EpisodeTask, seats: Sequence[EpisodeSeat]) -> AgentOutcome:
        """Has Gym's agent run the episode. A busy one is asked again, if it has not asked the policy yet.

        Raises:
            WaitTimeout: it is away, or overloaded. DoubtfulEnd: it failed. RolloutError: a wrong URL.
        """
        body = run_request(task.record, key=seats[0].address.key, model=seats[0].address.model)
        url = self.gym_url.rstrip("/") + "/run"
        try:
            async with self.starting(seats):
                pauses = RetryPauses(min(_BUSY_S, self.timeout_s))
                ends_s = asyncio.get_running_loop().time() + self.timeout_s
                while True:
                    async with asyncio.timeout_at(ends_s):
                        status, text = await self._answer(url, body)
                    # Once it has asked, answers of another /run would join those of the first
                    again = is_busy(status) and not _has_asked(seats[0])
                    if not again or not await pauses.pause():
                        return self._outcome(status, text, url)
        except TimeoutError:
            return self.out_of_time(seats, f"/run took more than {self.timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            kind = WaitTimeout if is_away(error) else RolloutError
            raise kind(
                f"NeMo Gym's agent can't be reached: {type(error).__name__}: {error}",
                where=url,
                fix="start its servers (ng_run), or correct task.agent_args.gym_url",
            ) from error

    async def _answer(self, url: str, body: Mapping[str, Any]) -> tuple[int, str]:
        """Returns status and text of the answer to a request."""
        no_limit = aiohttp.ClientTimeout()  # but the caller's
        async with self._client.post(url, json=body, timeout=no_limit) as response:
            return response.status, await response.text()

    def _outcome(self, status: int, text: str, url: str) -> AgentOutcome:
        """Returns or raises what the answer to ``/run`` means for its episode."""
        why = f"/run answered HTTP {status}: {text[:300]}"
        if status in AWAY:
            raise WaitTimeout(
                why, where=url, fix="see its log; fewer episodes at a time if it is overloaded"
            )
        if status >= 500:  # its own fault, or that of what the policy wrote
            raise DoubtfulEnd(why, where=url, fix="see its log")
        if is_misaddressed(status):
            raise RolloutError(why, where=url, fix="correct task.agent_args.gym_url")
        if status != 200:
            return AgentOutcome(problem=why)
        return outcome_of_run(text, url)

    async def _forwarded(self, request: web.Request) -> web.Response:
        """Passes a request of Gym's model server on to the session that its metadata names."""
        body = await request_body(request)
        headers = {"Content-Type": "application/json"}
        if not (key := session_key(body)):
            raise web.HTTPBadRequest(
                text=json.dumps(
                    {"error": {"message": NO_SESSION, "type": "invalid_request_error"}}
                ),
                content_type="application/json",
            )
        address = f"{self.url}/sessions/{key}/v1/{request.match_info['path']}"
        limit = aiohttp.ClientTimeout(total=self.timeout_s)
        async with self._client.post(address, data=body, headers=headers, timeout=limit) as answer:
            return web.Response(
                body=await answer.read(), status=answer.status, content_type=answer.content_type
            )


def _has_asked(seat: EpisodeSeat) -> bool:
    return bool(seat.session.tree.nodes) or seat.session.asked_s() > 0


# ---- Messages (pure) -------------------------------------------------------------------------------


def run_request(record: Mapping[str, Any], *, key: str, model: str) -> dict[str, Any]:
    """Returns the body of ``/run``: the record's columns, and what the policy is asked.

    A record without ``responses_create_params`` asks its prompt.
    """
    asked = record.get("responses_create_params")
    params = dict(asked) if isinstance(asked, Mapping) else {"input": record["prompt"]}
    metadata = {**(params.get("metadata") or {}), SESSION: key}
    columns = {name: value for name, value in record.items() if name not in _NOT_SENT}
    return {**columns, "responses_create_params": {**params, "model": model, "metadata": metadata}}


def session_key(body: bytes) -> str:
    """Returns the key that a request of the model server carries; empty: none."""
    try:
        metadata = json.loads(body).get("metadata") or {}
        return str(metadata.get(SESSION) or "")
    except (ValueError, AttributeError, RecursionError):
        return ""


def _is_figure(value: Any) -> bool:
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def outcome_of_run(text: str, url: str) -> AgentOutcome:
    """Returns the reward of a response to ``/run``; its other finite numbers are figures.

    Raises:
        DoubtfulEnd: it has none.
    """
    try:
        read = json.loads(text)
        if read.get("reward") is None:
            raise ValueError("it has no reward")
        return outcome_of({k: v for k, v in read.items() if k == "reward" or _is_figure(v)})
    except (ValueError, AttributeError, RecursionError) as error:
        raise DoubtfulEnd(
            f"NeMo Gym's response can't be used: {error}: {text[:200]!r}",
            where=url,
            fix="give the URL of an agent's server, whose /run returns a verified response",
        ) from error
