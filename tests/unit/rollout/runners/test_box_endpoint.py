"""How the policy is served in a box: for the episode's time, to so many at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from realsys.rollout.endpoint.session_registry import SessionRegistry
from realsys.rollout.runners import box_endpoint
from realsys.rollout.runners.box_endpoint import BoxEndpoint


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def served(test: Callable[[BoxEndpoint, int], Awaitable[None]]) -> None:
    """Runs a test against what is served at a port."""

    async def main() -> None:
        async with BoxEndpoint(SessionRegistry()) as endpoint:
            made = listener()
            port = made.getsockname()[1]
            await asyncio.to_thread(endpoint.on_listening, made, lambda: None)
            async with asyncio.timeout(300):
                await test(endpoint, port)

    asyncio.run(main())


async def answer(head: str, port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    reply = (await reader.read()).decode()
    writer.close()
    return reply


def test_what_listens_in_a_box_is_served_without_paths_that_set_rewards() -> None:
    async def test(_: BoxEndpoint, port: int) -> None:
        assert " 200 " in await answer("GET /health", port)
        assert " 404 " in await answer("POST /rl/set_reward", port)

    served(test)


@pytest.mark.parametrize("is_late", [True, False])
def test_a_box_is_ended_with_its_episode_also_one_that_listens_only_then(is_late: bool) -> None:
    """Else it would go on for the rest of the episode's time, and hold its place."""
    made, ended = listener(), list[bool]()

    def end() -> None:
        ended.append(True)

    async def main() -> None:
        async with BoxEndpoint(SessionRegistry()) as endpoint:
            if not is_late:
                await asyncio.to_thread(endpoint.on_listening, made, end)
        if is_late:
            with pytest.raises(ConnectionError):
                await asyncio.to_thread(endpoint.on_listening, made, end)
        assert (ended, made.fileno()) == ([True], -1)

    asyncio.run(main())


def test_what_could_not_be_served_in_time_is_closed_with_the_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(box_endpoint, "_SERVE_S", 0.0)
    made, ended = listener(), list[bool]()

    async def main() -> None:
        async with BoxEndpoint(SessionRegistry()) as endpoint:
            # In the loop's own thread, so that the loop is busy
            with pytest.raises(TimeoutError):
                endpoint.on_listening(made, lambda: ended.append(True))
        for _ in range(3):
            await asyncio.sleep(0)
        assert (ended, made.fileno()) == ([True], -1)

    asyncio.run(main())


def test_a_box_has_so_many_connections_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_endpoint, "MOST_CONNECTIONS", 2)

    async def test(endpoint: BoxEndpoint, port: int) -> None:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        while endpoint._connections.count < 2:
            await asyncio.sleep(0)
        with pytest.raises((ConnectionError, AssertionError)):
            assert "200" in await answer("GET /health", port)
        held[0][1].close()
        while endpoint._connections.count > 1:
            await asyncio.sleep(0)
        assert " 200 " in await answer("GET /health", port)
        held[1][1].close()

    served(test)


@pytest.mark.parametrize("head", ["Content-Length: 60", "Transfer-Encoding: chunked"])
def test_bodies_of_a_box_are_bounded_together(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not there yet holds its place; another waits for it, and is answered then."""
    monkeypatch.setattr(box_endpoint, "MOST_BODY_BYTES", 100)
    monkeypatch.setattr(box_endpoint, "MAX_BODY_BYTES", 60)
    start = f"POST /v1/models HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode()
    body = b"x" * 60 if "Length" in head else b"3c\r\n" + b"x" * 60 + b"\r\n0\r\n\r\n"

    async def test(endpoint: BoxEndpoint, port: int) -> None:
        left = endpoint._bodies
        readers = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(start)
            readers.append((reader, writer))
        while left.waiting < 1:
            await asyncio.sleep(0)
        assert left.left == 40
        for _, writer in readers:
            writer.write(body)
        for reader, writer in readers:
            assert b" 405 " in await reader.readline()
            writer.close()
        while left.left < 100:
            await asyncio.sleep(0)

    served(test)
