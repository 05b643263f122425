"""An episode's session with an OpenEnv server: a WebSocket at ``/ws``, or ``/reset`` and ``/step``."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from realsys.api.errors import RolloutError, WaitTimeout
from realsys.api.users_code.reward_numbers import shown_value
from realsys.rewards.scores import checked_score
from realsys.rollout.environments.environment_arguments import OpenEnvArguments
from realsys.transport.http_outages import is_away, is_busy, is_misaddressed
from realsys.transport.retry_pauses import RetryPauses, ServerBusy

logger = logging.getLogger(__name__)

_MOST_BYTES = 32 << 20  # of a message
_NO_ROOM = "CAPACITY_REACHED"


@dataclass(frozen=True, kw_only=True)
class StepReply:
    """What an environment answered to a reset or a step."""

    observation: Mapping[str, Any]
    reward: float
    done: bool


class OpenEnvError(RolloutError):
    """The server refused a message; ``code`` is its own, e.g. VALIDATION_ERROR, ``status`` that of HTTP,
    where it says that what was sent is wrong.
    """

    code = ""
    status = 0


class OpenEnvSession:
    """One episode. ``close`` it in any case."""

    def __init__(self, args: OpenEnvArguments) -> None:
        self._args = args
        scheme, _, rest = args.url.rstrip("/").partition("://")
        self._http_url = f"{scheme.replace('ws', 'http', 1)}://{rest}"
        self._ws_url = f"{scheme.replace('http', 'ws', 1)}://{rest}/ws"
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, data: Mapping[str, Any]) -> StepReply:
        """Begins the episode; where the server has no free place, waits for one.

        Raises:
            WaitTimeout: there was none in time, or the server is away. OpenEnvError, RolloutError: it
                refuses.
        """
        if self._args.transport == "http":
            return _reply(await self._request("POST", "/reset", data))
        pauses = RetryPauses(self._args.room_timeout_s)
        while True:
            try:
                await self._connect()
                return await self._exchange("reset", data)
            except ServerBusy as error:
                if not await pauses.pause():
                    raise self._away(error.why, is_outage=True) from error
            except OpenEnvError as error:
                if error.code != _NO_ROOM:
                    raise
                await self._disconnect()
                if not await pauses.pause():
                    raise WaitTimeout(
                        f"no free place in {self._args.room_timeout_s:g} s: {error.what}",
                        where=f"OpenEnv server {self._args.url}",
                        fix="raise its max_concurrent_envs, or lower the questions of a rollout worker",
                    ) from error

    async def step(self, action: Mapping[str, Any]) -> StepReply:
        """Carries out an action.

        Raises:
            OpenEnvError, RolloutError: the server refuses. WaitTimeout: it is away, or takes too long.
        """
        if self._args.transport == "http":
            return _reply(await self._request("POST", "/step", {"action": dict(action)}))
        return await self._exchange("step", action)

    async def schema(self) -> Mapping[str, Any]:
        """Returns the JSON schemas of actions, observations and states."""
        found: Mapping[str, Any] = await self._request("GET", "/schema", None)
        return found

    async def close(self) -> None:
        """Ends the session; the server gives its place to others."""
        if self._socket is not None and not self._socket.closed:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(self._args.message_timeout_s):
                    await self._socket.send_str('{"type": "close"}')
        await self._disconnect()
        if self._session is not None:
            await self._session.close()

    # ---- messages --------------------------------------------------------------------------------

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._args.message_timeout_s):
                self._socket = await self._client().ws_connect(
                    self._ws_url, max_msg_size=_MOST_BYTES, autoping=True
                )
        except aiohttp.WSServerHandshakeError as error:
            if is_busy(error.status):
                raise ServerBusy(f"HTTP {error.status} {error.message}") from error
            raise self._away(error) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._away(error) from error

    async def _disconnect(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(self._args.message_timeout_s):
                    await socket.close()

    async def _exchange(self, kind: str, data: Mapping[str, Any]) -> StepReply:
        if self._socket is None:
            raise self._refused({"message": "there is no session"}, kind)
        try:
            async with asyncio.timeout(self._args.message_timeout_s):
                # The server may have said already why it wants none, and have left
                with suppress(ConnectionResetError):
                    await self._socket.send_str(json.dumps({"type": kind, "data": dict(data)}))
                message = await self._socket.receive()
        except TimeoutError as error:
            raise self._too_long(kind) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._away(error) from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise self._away(f"it closed the session ({message.type.name.lower()})")
        read = self._object(message.data)
        if read.get("type") == "error":
            raise self._refused(read.get("data"), kind)
        return _reply(read.get("data"))

    async def _request(self, method: str, path: str, body: Any) -> dict[str, Any]:
        """Asks by HTTP; a busy server again, until the message's time is over."""
        pauses = RetryPauses(self._args.message_timeout_s)
        while True:
            try:
                async with asyncio.timeout_at(pauses.ends_s):
                    return self._object(await self._answer(method, path, body))
            except ServerBusy as error:
                if not await pauses.pause():
                    raise self._away(error.why, is_outage=True) from error
            except TimeoutError as error:
                raise self._too_long(path) from error
            except (aiohttp.ClientError, OSError) as error:
                raise self._away(error) from error

    async def _answer(self, method: str, path: str, body: Any) -> str:
        """Asks once."""
        no_limit = aiohttp.ClientTimeout()  # but the caller's
        async with self._client().request(
            method, self._http_url + path, json=body, timeout=no_limit
        ) as response:
            text = await response.text()
        status = response.status
        if is_busy(status):
            raise ServerBusy(f"HTTP {status} {text[:200]}")
        if is_misaddressed(status) or 300 <= status < 400:
            raise self._away(f"HTTP {status} {text[:200]}")
        if status >= 400:
            code = "VALIDATION_ERROR" if status == 422 else f"HTTP {status}"
            error = self._refused({"message": text[:500], "code": code}, path)
            error.status = status
            raise error
        return text

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session

    def _object(self, text: str) -> dict[str, Any]:
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            raise self._away(f"it answered {text[:100]!r}, and no JSON object")
        return read

    def _refused(self, data: Any, what: str) -> OpenEnvError:
        fields = data if isinstance(data, Mapping) else {"message": data}
        code = str(fields.get("code") or "")
        details = (
            f" {json.dumps(fields['errors'], default=str)[:300]}" if fields.get("errors") else ""
        )
        error = OpenEnvError(
            f"the environment refused {what}: {code} {fields.get('message') or ''}{details}".strip(),
            where=f"OpenEnv server {self._args.url}",
            fix="see the server's log, and task.env_args against its /schema",
        )
        error.code = code
        return error

    def _too_long(self, what: str) -> WaitTimeout:
        return WaitTimeout(
            f"{what} took more than {self._args.message_timeout_s:g} s",
            where=f"OpenEnv server {self._args.url}",
            fix="raise task.env_args.message_timeout_s, or see the server's log",
        )

    def _away(self, reason: object, *, is_outage: bool = False) -> WaitTimeout | RolloutError:
        text = reason
        if isinstance(reason, Exception):
            text, is_outage = f"{type(reason).__name__}: {reason}", is_away(reason)
        kind = WaitTimeout if is_outage else RolloutError
        return kind(
            f"the environment's server can't be reached: {text}",
            where=f"OpenEnv server {self._args.url}",
            fix="start it, or correct task.env_args.url; rollout workers must reach it from their nodes",
        )


def _reply(data: Any) -> StepReply:
    fields = data if isinstance(data, Mapping) else {}
    observation, reward = fields.get("observation"), fields.get("reward")
    return StepReply(
        observation=observation
        if isinstance(observation, Mapping)
        else {"observation": observation},
        reward=0.0 if reward is None else checked_score(reward, source="the environment's server"),
        done=_is_done(fields.get("done")),
    )


def _is_done(value: Any) -> bool:
    """Returns whether the episode is over: true or false, 0 or 1, as some libraries write them."""
    if value is None or value in (0, 1):  # True and False are 1 and 0
        return bool(value)
    raise RolloutError(
        f"the environment's done is {shown_value(value)}, which is neither true nor false",
        where="the environment's server",
        fix="have it say done as true or false",
    )
