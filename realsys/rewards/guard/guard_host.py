"""The warm process of a guard: `python -P -m realsys.rewards.guard.guard_host`, started by guarded.py.

    guarded.py ── calls ──▶ this process, one thread ── forks for each ──▶ the fork of an answer
         ▲                        │                                             │ JSON, then its end
         └── results, or why ─────┴──────────────── its own pipe ───────────────┘
             there is none

The rule is made here once, and no answer is looked at: a fork gets it, says what it found through a pipe of
its own and ends, with all that it changed, wrote or started. Limits are the kernel's, with its default
actions, and this process', so the rule's code need not cooperate. All end with the caller.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from realsys.api.users_code.users_frames import shown_error
from realsys.rewards.guard import frames, inside
from realsys.rewards.guard.frames import CALL, ENDED, LONGEST_REPLY, RESULT, Frame
from realsys.rewards.guard.host_start import REQUESTS, HostedRule, hosted_rule
from realsys.runtime.child_processes.child_guard import descendants
from realsys.runtime.child_processes.parent_death import die_with_parent

_OUT_OF_MEMORY = 77
_ENDED_BY: dict[int, str] = {
    signal.SIGPROF: "cpu_time",
    signal.SIGXCPU: "cpu_time",
    signal.SIGALRM: "wall_time",
}


@dataclass(kw_only=True)
class _ForkSlot:
    """A place for one fork at a time, with the folder that it may write in."""

    folder: str
    ruleset: int
    pid: int = 0  # 0: free
    pipe: int = -1
    number: int = 0
    deadline_s: float = 0.0
    reply: bytearray = field(default_factory=bytearray)


def main() -> int:
    """Serves calls until the caller has gone."""
    rule = hosted_rule()
    if rule is None:
        return 1
    base = tempfile.mkdtemp(prefix="realsys-rule-")
    host = _ForkingHost(rule, base, int(sys.argv[1]))
    try:
        host.serve()
    except BrokenPipeError:  # nobody reads the replies any more
        pass
    finally:
        host.end_all()
        shutil.rmtree(base, ignore_errors=True)
    return 0


class _ForkingHost:
    def __init__(self, rule: HostedRule, base: str, at_once: int) -> None:
        self._rule, self._pid = rule, os.getpid()
        self._waiting: list[Frame] = []
        self._slots: list[_ForkSlot] = []
        for number in range(at_once):
            folder = os.path.join(base, str(number))
            os.mkdir(folder, 0o700)
            self._slots.append(_ForkSlot(folder=folder, ruleset=rule.walls.ruleset(folder)))

    def serve(self) -> None:
        """Forks for calls as slots get free; returns when the caller has closed its end."""
        while True:
            busy = {slot.pipe: slot for slot in self._slots if slot.pid}
            poll = select.poll()
            for descriptor in (REQUESTS, *busy):
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(self._wait_ms(busy.values())):
                if descriptor in busy:
                    self._read(busy[descriptor])
                elif not self._receive():
                    return
            now_s = time.monotonic()
            for slot in self._slots:
                if slot.pid and now_s >= slot.deadline_s:
                    self._settle(slot, Frame(slot.number, ENDED, b"wall_time"))
            self._start_waiting()

    def _wait_ms(self, busy: Any) -> float | None:
        deadlines = [slot.deadline_s for slot in busy]
        return max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1 if deadlines else None

    def _receive(self) -> bool:
        received = self._rule.received
        if not (more := os.read(REQUESTS, 1 << 18)):
            return False
        received += more
        while (frame := frames.parse(received)) is not None:
            if frame.kind == CALL:
                self._waiting.append(frame)
        return True

    def _start_waiting(self) -> None:
        for slot in self._slots:
            if self._waiting and not slot.pid:
                self._start(slot, self._waiting.pop(0))

    # ---- one call -------------------------------------------------------------------------------

    def _start(self, slot: _ForkSlot, frame: Frame) -> None:
        call = json.loads(frame.body)
        if before_fork := getattr(self._rule.call, "before_fork", None):
            with suppress(Exception):  # the fork will meet it again, and say so
                before_fork(**call["arguments"])
        num_answers = int(call["num_answers"])
        read, write = os.pipe()
        slot.number, slot.pipe = frame.number, read
        slot.deadline_s = time.monotonic() + self._rule.permissions.deadline_of(num_answers)
        slot.reply.clear()
        if (pid := os.fork()) == 0:
            self._run(slot, write, call["arguments"], num_answers, frame.body)
        os.close(write)
        slot.pid = pid

    def _run(
        self, slot: _ForkSlot, write: int, arguments: dict[str, Any], num_answers: int, seed: bytes
    ) -> NoReturn:
        """Scores in the fork, and ends."""
        try:
            os.setsid()
            die_with_parent(self._pid)
            self._close_others(slot)
            _settle_in(slot.folder, seed)
            self._rule.walls.limit(num_answers)
            # A second line: these can be cancelled. Of the kernel, fractions of a second are these alone.
            signal.setitimer(signal.ITIMER_PROF, self._rule.permissions.computing_of(num_answers))
            self._rule.walls.raise_around(slot.ruleset)
            inside.enter(self._rule.permissions)
            reply: dict[str, Any]
            try:
                reply = {"result": self._rule.call(**arguments)}
                body = json.dumps(reply).encode()
            except (Exception, SystemExit) as error:  # the other end tells it
                if isinstance(error, MemoryError):
                    os._exit(_OUT_OF_MEMORY)
                inside.note_raised(error)
                reply = {"raised": shown_error(error)[:500]}
                body = b""
            if inside.notes or not body:
                reply["notes"] = inside.notes
                body = json.dumps(reply).encode()
            frames.send(write, Frame(slot.number, RESULT, body))
            os._exit(0)
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        except BaseException:  # a fork must never return
            os._exit(1)

    def _close_others(self, slot: _ForkSlot) -> None:
        """Closes what only the host is to have; what the rule opened when it was made stays open."""
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, REQUESTS)
        os.close(devnull)
        for other in self._slots:
            if other.pid or other is slot:
                os.close(other.pipe)
            if other is not slot and other.ruleset >= 0:
                os.close(other.ruleset)
        os.close(self._rule.replies)

    def _read(self, slot: _ForkSlot) -> None:
        more = os.read(slot.pipe, 1 << 16)
        slot.reply += more
        if len(slot.reply) > LONGEST_REPLY:
            self._settle(slot, Frame(slot.number, ENDED, b"a reply that is too long"))
        elif (found := _reply_of(slot)) is not None:
            self._settle(slot, found)
        elif not more:
            status, used_s = _end_of(slot.pid)
            why = _why(os.waitstatus_to_exitcode(status), used_s, self._rule)
            self._settle(slot, Frame(slot.number, ENDED, why.encode()), is_gone=True)

    def _settle(self, slot: _ForkSlot, reply: Frame, *, is_gone: bool = False) -> None:
        """Sends the reply of a call and ends its fork, with all that it left."""
        os.close(slot.pipe)
        frames.send(self._rule.replies, reply)
        if not is_gone:
            with suppress(ProcessLookupError):
                os.kill(slot.pid, signal.SIGKILL)
            os.waitpid(slot.pid, 0)
        slot.pid = 0
        if self._rule.permissions.programs:
            self._end_left()
        _empty(slot.folder)

    def _end_left(self) -> None:
        """Kills processes that belong to no call that runs: started by an answer, and left behind."""
        for _ in range(1000):  # a process may start others until it is killed
            running = {slot.pid for slot in self._slots if slot.pid}
            own = running.union(*(descendants(pid) for pid in running)) if running else set()
            left = [pid for pid in descendants(self._pid) if pid not in own]
            if not left:
                return
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            for pid in left:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.001)

    def end_all(self) -> None:
        """Kills every fork and what they started."""
        for slot in self._slots:
            if slot.pid:
                with suppress(ProcessLookupError):
                    os.kill(slot.pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(slot.pid, 0)
                slot.pid = 0
        self._end_left()


def _reply_of(slot: _ForkSlot) -> Frame | None:
    """Returns the fork's reply once it is whole; one that is not a reply to its call says so."""
    received = slot.reply
    try:
        frame = frames.parse(received)
    except ValueError:
        frame = None
    if frame is None:
        return None
    if frame.number != slot.number or frame.kind != RESULT or received:
        return Frame(slot.number, ENDED, b"no reply to its call")
    return frame


def _settle_in(folder: str, seed: bytes) -> None:
    """Makes the call's own folder its working directory and the place of temporary files, and seeds
    ``random`` by the call, so that equal answers are scored equally."""
    os.chdir(folder)
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        with suppress(Exception):
            numpy.random.seed(random.getrandbits(32))


def _empty(folder: str) -> None:
    """Deletes what an answer wrote."""
    with suppress(OSError):
        names = os.listdir(folder)
        if names:
            for name in names:
                path = os.path.join(folder, name)
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    os.unlink(path)


def _end_of(pid: int) -> tuple[int, float]:
    """Returns the status of a fork that has closed its pipe, and the seconds that it has computed. One that
    lives on is killed."""
    for _ in range(100):
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            break
        time.sleep(0.01)
    else:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
    return status, usage.ru_utime + usage.ru_stime


def _why(code: int, used_s: float, rule: HostedRule) -> str:
    if code == _OUT_OF_MEMORY:
        return "memory"
    if code >= 0:
        return f"exit {code}"
    if -code == signal.SIGKILL and used_s >= rule.permissions.cpu_s:
        return "cpu_time"
    return _ENDED_BY.get(-code, f"signal {-code}")  # some have no name in Python


if __name__ == "__main__":
    sys.exit(main())
