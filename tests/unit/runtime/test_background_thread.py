"""Threads with an owner: they end when told to, and their failures are heard of."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from realsys.runtime.background_thread import BackgroundThread
from realsys.runtime.event_loop_thread import EventLoopThread


def test_it_works_until_it_is_told_to_end():
    looks = []

    def work():
        while not thread.is_ending:
            looks.append(threading.current_thread().name)
            thread.pause(250.0)

    thread = BackgroundThread(work, name="looks")
    began_s = time.monotonic()
    thread.start()
    while not looks:
        time.sleep(0.01)
    thread.stop()
    assert time.monotonic() - began_s < 100
    assert looks == ["looks"]
    assert thread.failure is None


def test_one_that_was_never_started_or_stops_itself_can_be_stopped():
    BackgroundThread(lambda: None, name="never").stop()
    ended = threading.Event()
    thread = BackgroundThread(lambda: (thread.stop(), ended.set())[0], name="itself")
    thread.start()
    assert ended.wait(60)


def test_its_owner_hears_of_a_failure_and_of_an_end():
    heard = []
    for work in (lambda: 1 / 0, lambda: None):
        thread = BackgroundThread(work, name="fails", on_end=heard.append)
        thread.start()
        thread.stop()
    assert isinstance(heard[0], ZeroDivisionError)
    assert heard[1:] == [None]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_without_an_owner_who_hears_is_the_interpreters(monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    thread = BackgroundThread(lambda: 1 / 0, name="fails")
    thread.start()
    thread.stop()
    assert seen == [ZeroDivisionError]


def test_an_event_loop_serves_until_it_is_stopped():
    ended = []

    async def serve(ready):
        try:
            ready()
            await asyncio.sleep(3600)
        finally:
            ended.append("cleaned up")

    thread = EventLoopThread(serve, name="serves", on_end=ended.append)
    thread.start()
    assert ended == []
    thread.stop()
    assert ended == ["cleaned up", None]
    assert thread.failure is None
    thread.stop()  # once more


def test_an_event_loop_that_fails_says_so_at_its_start():
    async def serve(ready):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())

    async def fail():
        raise OSError("no port")

    thread = EventLoopThread(serve, name="fails")
    thread.start()
    assert isinstance(thread.failure, OSError)
