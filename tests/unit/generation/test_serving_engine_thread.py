"""The engine's thread: steps and commands take turns, and nobody waits for an engine that has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import golden
import pytest

from realsys.api.errors import WorkerLost
from realsys.generation.engine.engine_requests import GenerationOutput
from realsys.generation.served_engines.engine_thread import EngineThread
from realsys.runtime.progress import ticks

S = 240.0


class CountingEngine:
    """Each request gets as many tokens as steps it was in. ``gate`` lets one step through."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.steps = 0
        self.version = 0
        self.fail = False
        self.gate: threading.Semaphore | None = None
        self.is_at_the_gate = threading.Event()

    def step(self) -> list[GenerationOutput]:
        if self.gate is not None:
            self.is_at_the_gate.set()
            self.gate.acquire()
        if self.fail:
            raise RuntimeError("out of memory")
        self.steps += 1
        made = []
        for rid in list(self.left):
            self.left[rid] -= 1
            finish = "" if self.left[rid] else "length"
            made.append(GenerationOutput(rid, finish=finish))
            if finish:
                del self.left[rid]
        return made

    @property
    def num_running(self) -> int:
        return len(self.left)

    @property
    def num_waiting(self) -> int:
        return 0

    @property
    def num_long(self) -> int:
        return 0

    @property
    def num_tokens(self) -> int:
        return sum(self.left.values())


class Watched:
    """An engine's thread, and what it told."""

    def __init__(self) -> None:
        self.engine = CountingEngine()
        self.outputs: list[GenerationOutput] = []
        self.ends: list[WorkerLost | None] = []
        self.over = threading.Event()
        self.finished = threading.Event()
        self.thread = EngineThread(
            lambda: self.engine,  # type: ignore[arg-type, return-value]
            on_outputs=self._made,
            on_end=self._ended,
        )
        self.thread.start()

    def _made(self, outputs: list[GenerationOutput]) -> None:
        self.outputs += outputs
        if any(output.finish for output in outputs):
            self.finished.set()

    def _ended(self, error: WorkerLost | None) -> None:
        self.ends.append(error)
        self.over.set()

    def call(self, command: Callable[[Any], Any], *, fatal: bool = False) -> Any:
        return self.thread.call(command, fatal=fatal).result(S)

    def submit(self, rid: str, steps: int) -> None:
        self.call(lambda engine: engine.left.__setitem__(rid, steps))


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.engine.gate = None
    made.thread.stop()


def test_it_steps_while_there_is_work(watched: Watched) -> None:
    before = ticks()
    watched.submit("a", 5)
    assert watched.finished.wait(S)
    assert watched.call(lambda engine: engine.steps) == 5
    assert [o.rid for o in watched.outputs] == ["a"] * 5
    assert ticks() >= before + 5
    assert watched.thread.load.num_running == 0


def test_commands_come_between_two_steps(watched: Watched) -> None:
    watched.engine.gate = gate = threading.Semaphore(0)
    watched.submit("a", 1000)
    assert watched.engine.is_at_the_gate.wait(S)
    future = watched.thread.call(lambda engine: engine.steps)
    assert not future.done()  # the first step is under way
    gate.release()
    assert future.result(S) == 1
    assert watched.thread.load.num_running == 1
    watched.engine.gate = None
    gate.release(1000)


def test_a_paused_one_stands_still(watched: Watched) -> None:
    watched.call(lambda engine: setattr(watched.thread, "paused", True))
    watched.submit("a", 3)
    assert watched.call(lambda engine: engine.steps) == 0
    watched.call(lambda engine: setattr(watched.thread, "paused", False))
    assert watched.finished.wait(S)


def test_a_commands_mistake_is_its_callers(watched: Watched) -> None:
    with pytest.raises(ZeroDivisionError):
        watched.call(lambda engine: 1 / 0)
    watched.submit("a", 1)
    assert watched.finished.wait(S)


@pytest.mark.parametrize("how", ["step", "command"])
def test_nobody_waits_for_one_that_has_failed(watched: Watched, how: str) -> None:
    if how == "step":
        watched.call(lambda engine: setattr(engine, "fail", True))
        watched.submit("a", 3)
    else:
        with pytest.raises(ZeroDivisionError):
            watched.call(lambda engine: 1 / 0, fatal=True)
    assert watched.over.wait(S)
    (error,) = watched.ends
    words = "out of memory" if how == "step" else "ZeroDivisionError"
    assert error is not None
    assert words in error.what
    with golden.raises(WorkerLost):
        watched.call(lambda engine: 1)


def test_what_waits_at_the_end_is_refused(watched: Watched) -> None:
    watched.engine.gate = gate = threading.Semaphore(0)
    watched.submit("a", 1000)  # its first step waits for the gate
    assert watched.engine.is_at_the_gate.wait(S)
    ending = threading.Thread(target=watched.thread.stop)
    ending.start()
    while watched.thread._commands.empty():
        pass
    late = watched.thread.call(lambda engine: 1)
    gate.release(2)
    with golden.raises(WorkerLost):
        late.result(S)
    ending.join(S)
    assert watched.ends == [None]
