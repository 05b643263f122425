"""The program that runs functions: every episode gets its line, and none waits for another."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from fractions import Fraction
from functools import partial, wraps
from pathlib import Path
from typing import Any, TextIO

import pytest

from realsys.rollout.runners.hosts import function_host
from realsys.rollout.runners.hosts.function_host import Host, LoopWatch, play, wanted_arguments


class HostEnds:
    """Both ends of a host's pipes, in this process."""

    def __init__(self) -> None:
        (orders, self._orders), (self._lines, lines) = _pipe(), _pipe()
        self.host, self._ours = Host(orders, lines), (orders, lines, self._lines)

    def send(self, *orders: dict[str, Any]) -> None:
        """Writes orders at once, so that they are read at once."""
        self._orders.write("".join(json.dumps(order) + "\n" for order in orders))

    async def line(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await asyncio.to_thread(self._lines.readline))
        return found

    async def close(self, running: asyncio.Task[None]) -> None:
        self._orders.close()
        await running
        for file in self._ours:
            file.close()


def _pipe() -> tuple[TextIO, TextIO]:
    read, write = os.pipe()
    return os.fdopen(read), os.fdopen(write, "w", buffering=1)


@asynccontextmanager
async def hosted(function: Callable[..., Any]) -> AsyncIterator[HostEnds]:
    ends = HostEnds()
    played = partial(play, function, wanted_arguments(function))
    async with asyncio.timeout(200):
        running = asyncio.create_task(ends.host.run(played))
        try:
            assert (await ends.line())["ready"]
            yield ends
        finally:
            await ends.close(running)


@pytest.fixture(autouse=True)
def never_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoopWatch, "run", lambda self: None)  # it would end this process


def order(id_: str, prompt: Any = "") -> dict[str, Any]:
    return {"id": id_, "task": {"prompt": prompt}, "base_url": "", "key": "k", "model": "m"}


def test_an_episode_that_is_cancelled_before_its_first_step_gets_its_line() -> None:
    async def solve(task: Any) -> float:
        await asyncio.Event().wait()
        return 1.0

    async def run() -> None:
        async with hosted(solve) as ends:
            ends.send(order("a"), {"cancel": "a"}, order("b"), {"cancel": "b"}, {"cancel": "none"})
            lines = [await ends.line() for _ in range(2)]
            assert lines == [{"id": id_, "error": "cancelled", "left": 0} for id_ in "ab"]
            assert not ends.host._cancelled

    asyncio.run(run())


def test_as_many_plain_functions_run_at_once_as_there_are_episodes() -> None:
    together = threading.Barrier(64)  # is passed by all or by none

    def solve(task: Any) -> float:
        together.wait(200)
        return 0.5

    async def run() -> None:
        async with hosted(solve) as ends:
            ends.send(*(order(str(i)) for i in range(64)))
            lines = [await ends.line() for _ in range(64)]
            assert {line["id"] for line in lines} == {str(i) for i in range(64)}
            assert {line["result"] for line in lines} == {0.5}

    asyncio.run(run())


def test_a_plain_function_that_hangs_is_counted_until_it_ends_and_holds_up_nobody() -> None:
    begun, release = threading.Barrier(3), threading.Event()

    def solve(task: Any) -> str:
        if task["prompt"] == "hang":
            begun.wait(200)
            release.wait(200)
        return "done"

    async def run() -> None:
        async with hosted(solve) as ends:
            ends.send(order("a", "hang"), order("b", "hang"))
            await asyncio.to_thread(begun.wait, 200)
            ends.send({"cancel": "a"}, {"cancel": "b"})
            lines = [await ends.line() for _ in range(2)]
            assert [line["error"] for line in lines] == ["cancelled"] * 2
            ends.send(order("c"))
            assert await ends.line() == {"id": "c", "result": "done", "left": 2}
            release.set()
            while function_host._threads_left:
                await asyncio.sleep(0)
            ends.send(order("d"))
            assert await ends.line() == {"id": "d", "result": "done", "left": 0}

    asyncio.run(run())


def test_an_asynchronous_function_that_does_not_end_when_cancelled_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(function_host, "OBEY_S", 0.0)
    release = asyncio.Event()

    async def solve(task: Any) -> str:
        while task["prompt"] == "deaf" and not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()
        return "done"

    async def run() -> None:
        async with hosted(solve) as ends:
            ends.send(order("a", "deaf"), {"cancel": "a"})
            # Cancelled before its first step it would have ended: it is deaf from then on
            line = await ends.line()
            ends.send(order("b", "deaf"), order("c"))
            assert await ends.line() == {"id": "c", "result": "done", "left": 0}
            assert (line["id"], line["error"]) == ("a", "cancelled")
            ends.send({"cancel": "b"})
            assert await ends.line() == {"id": "b", "error": "cancelled", "left": 1}
            release.set()
            while ends.host._tasks_left:
                await asyncio.sleep(0)
            ends.send(order("d"))  # and no second line of b
            assert await ends.line() == {"id": "d", "result": "done", "left": 0}

    asyncio.run(run())


class _Odd:
    def keys(self) -> Any: ...

    def __repr__(self) -> str:
        raise OSError("no repr")


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (lambda: Fraction(3, 4), {"result": 0.75}),
        (lambda: {"reward": Fraction(1, 2), "note": "x"}, {"result": {"reward": 0.5}}),
        (lambda: {"reward": 1, "turns": True, "tree": [1]}, {"result": {"reward": 1, "turns": 1}}),
        (lambda: {"rewards": {"a": Fraction(1, 4)}}, {"result": {"rewards": {"a": 0.25}}}),
        (lambda: {"answer": "x", "rewards": None}, {"result": {"answer": "x", "rewards": None}}),
        (lambda: None, {"result": None}),
        (lambda: "\ud800", {"result": "\ud800"}),
        (lambda: [1.0], {"unusable": "[1.0], a list"}),
        (lambda: (1.0, {}), {"unusable": "a tuple"}),
        (lambda: b"1", {"unusable": "a bytes"}),
        (lambda: {"reward": "1.0"}, {"unusable": "whose reward is '1.0', a str"}),
        (lambda: _Odd(), {"unusable": "a _Odd"}),
        (lambda: 10**5000, {"unusable": "a int, which is too large"}),
        (lambda: "x" * 300, {"unusable": "its result has"}),
        (lambda: next(iter(())), {"error": "test_function_host.py:"}),
        (lambda: sys.exit(3), {"error": "in <lambda>: SystemExit: 3"}),
        (lambda: {}[1], {"error": "in <lambda>: KeyError: 1"}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_function_gives_or_raises_becomes_one_line(
    made: Callable[[], Any], line: dict[str, Any], is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_host, "MOST_LINE", 250)

    async def solve(task: Any) -> Any:
        return made()

    async def run() -> None:
        async with hosted(solve if is_async else lambda task: made()) as ends:
            ends.send(order("a"))
            found = await ends.line()
            ((kind, value),) = line.items()
            assert found["id"] == "a"
            assert value in found[kind] if kind != "result" else found[kind] == value
            ends.send(order("b"))  # the host lives
            assert (await ends.line())["id"] == "b"

    asyncio.run(run())


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Doubles of the two packages; what was made and closed."""
    seen: list[str] = []

    def client(name: str, is_async: bool) -> type:
        class Client:
            def __init__(self, **_: Any) -> None:
                seen.append(f"made {name}")

            def close(self) -> Any:
                seen.append(f"closed {name}")
                return asyncio.sleep(0) if is_async else None

        return Client

    for package, kind in (("openai", "OpenAI"), ("anthropic", "Anthropic")):
        module = types.ModuleType(package)
        for name in (kind, f"Async{kind}"):
            setattr(module, name, client(name, name.startswith("Async")))
        monkeypatch.setitem(sys.modules, package, module)
    return seen


def test_a_plain_function_gets_clients_that_it_can_call_as_they_are(clients: list[str]) -> None:
    def plain(client: Any, anthropic_client: Any) -> Any:
        return 1

    async def later(client: Any, anthropic_client: Any) -> Any:
        return 1

    @wraps(later)
    def wrapped(**more: Any) -> Any:
        return later(**more)  # makes a coroutine

    class Callee:
        async def __call__(self, client: Any, anthropic_client: Any) -> Any:
            return 1

    for function, prefix in (
        (plain, ""),
        (later, "Async"),
        (wrapped, "Async"),
        (Callee(), "Async"),
    ):
        clients.clear()
        made = play(function, wanted_arguments(function), order("a"))
        assert asyncio.run(made) == 1
        names = [f"{prefix}OpenAI", f"{prefix}Anthropic"]
        assert clients == [f"{what} {name}" for what in ("made", "closed") for name in names]


def test_files_that_the_host_loads_need_nothing_of_ours() -> None:
    """It runs in interpreters without realsys."""
    import subprocess

    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='host'); "
        "assert not [m for m in sys.modules if m.partition('.')[0] in ('realsys', 'numpy')]"
    )
    path = Path(function_host.__file__)
    subprocess.run([sys.executable, "-S", "-I", "-c", code, str(path)], check=True, timeout=240)
