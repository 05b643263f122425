"""The warm process of an ``async`` rule: `python -P -m realsys.rewards.guard.service_host`.

One event loop, and so one client of a service, for all answers, which are scored side by side. The walls
are those of the guard (rule_walls.py), around the process; there is no fork for each answer, so no rule
that runs or evaluates an answer's text may be ``async``.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from typing import Any

from realsys.api.users_code.users_frames import shown_error
from realsys.rewards.guard import frames, inside
from realsys.rewards.guard.frames import CALL, RESULT, Frame
from realsys.rewards.guard.host_start import REQUESTS, HostedRule, hosted_rule


def main() -> int:
    """Serves calls until the caller has gone."""
    rule = hosted_rule()
    if rule is None:
        return 1
    keeper = os.getpid()
    folder = tempfile.mkdtemp(prefix="realsys-rule-")
    os.chdir(folder)
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    try:
        rule.walls.raise_around(rule.walls.ruleset(folder))
        inside.enter(rule.permissions)
        asyncio.run(_Service(rule).serve())
    finally:
        if os.getpid() == keeper:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)  # a thread of the rule's may never end
    return 0


class _Service:
    def __init__(self, rule: HostedRule) -> None:
        self._rule = rule
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    async def serve(self) -> None:
        """Answers calls; returns when the caller has closed its end."""
        loop = asyncio.get_running_loop()
        os.set_blocking(REQUESTS, False)
        loop.add_reader(REQUESTS, self._receive)
        loop.call_soon(self._start_received)
        await self._ended.wait()
        for task in self._tasks:
            task.cancel()

    def _receive(self) -> None:
        try:
            more = os.read(REQUESTS, 1 << 18)
        except BlockingIOError:
            return
        if not more:
            self._ended.set()
            return
        self._rule.received.extend(more)
        self._start_received()

    def _start_received(self) -> None:
        while (frame := frames.parse(self._rule.received)) is not None:
            if frame.kind == CALL:
                task = asyncio.get_running_loop().create_task(self._score(frame))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _score(self, frame: Frame) -> None:
        reply: dict[str, Any]
        try:
            arguments = json.loads(frame.body)["arguments"]
            reply = {"result": await self._rule.call(**arguments)}
            body = json.dumps(reply).encode()
        except Exception as error:  # a plug-in may raise anything; the other end tells it
            inside.note_raised(error)
            reply = {"raised": shown_error(error)[:500]}
            body = b""
        if inside.notes or not body:
            reply["notes"] = list(inside.notes)
            inside.notes.clear()
            body = json.dumps(reply).encode()
        try:
            frames.send(self._rule.replies, Frame(frame.number, RESULT, body))
        except BrokenPipeError:
            self._ended.set()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.exit(main())
