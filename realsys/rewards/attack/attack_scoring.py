"""Scores the answers of an attack by a rule in a process of its own, so that none hangs or harms this one.

An answer gets ``deadline_s``; then the process is ended, the answer has *hung*, and another process goes
on. After each answer the marker is looked for, which only an answer's own code would write.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from realsys.api.errors import RewardError
from realsys.rewards.attack.attack_answers import Attack
from realsys.rewards.attack.attack_report import AttackScore
from realsys.rewards.guard.frames import parse_json, send_json

_START_S = 300.0
_INHERITED_ENV = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH")  # no secrets
AT_ONCE_FORKED = 16  # exploits of a request; one by one if something happens
AT_ONCE = 64  # honest answers of a request


class AttackProcess:
    """A process that scores answers by ``rule``; use as a context manager.

    Args:
        rule, args: expression of rules and their arguments. imports: files and modules that register them.
        deadline_s: of one answer. cpu_s, memory_bytes: its limits, where each answer gets a fork.
        forks: score exploits in forks; None: if a rule is trusted, so that no guard is around it.
        env: names of variables that the rule gets, such as a judge's key.
    """

    def __init__(
        self,
        rule: str,
        args: Mapping[str, Any],
        *,
        imports: Sequence[str] = (),
        deadline_s: float = 120.0,
        cpu_s: float = 10.0,
        memory_bytes: int = 4 << 30,
        forks: bool | None = None,
        env: Sequence[str] = (),
    ) -> None:
        self._settings = {
            "rule": rule,
            "args": {name: dict(given) for name, given in args.items()},
            "imports": list(imports),
            "forks": forks,
            "cpu_s": cpu_s,
            "memory_bytes": memory_bytes,
            "parent": os.getpid(),
        }
        self._deadline_s, self._env = deadline_s, (*_INHERITED_ENV, *env)
        self._process: subprocess.Popen[bytes] | None = None
        self._received = bytearray()

    def __enter__(self) -> AttackProcess:
        self.folder = Path(tempfile.mkdtemp(prefix="realsys-attack-"))
        self.mark = self.folder / "mark"
        self._work = self.folder / "work"
        self._work.mkdir()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def scores(
        self, attack: Attack, *, report: Callable[[int], None] = lambda done: None
    ) -> list[AttackScore]:
        """Scores all answers, in order.

        Args:
            report: gets the number of answers scored, after each.
        Raises:
            RewardError: the rule can't be made.
        """
        found: list[AttackScore] = []
        for hostile, several in groupby(attack.answers, lambda a: a.role == "exploit"):
            answers = list(several)
            size = AT_ONCE_FORKED if hostile else AT_ONCE
            for begin in range(0, len(answers), size):
                requests = [
                    {
                        "response": answer.response,
                        "answer": attack.questions[answer.question].answer,
                        "question": attack.questions[answer.question].prompt,
                        "record": {
                            "prompt": attack.questions[answer.question].prompt,
                            **attack.questions[answer.question].record,
                        },
                    }
                    for answer in answers[begin : begin + size]
                ]
                found += self._scored(requests, hostile=hostile)
                report(len(found))
        return found

    def _scored(self, requests: list[dict[str, Any]], *, hostile: bool) -> list[AttackScore]:
        """Scores answers together; one by one if something is the matter with one of them."""
        process = self._started()
        assert process.stdin is not None
        try:
            send_json(process.stdin.fileno(), {"answers": requests, "hostile": hostile})
            reply = self._next(process, self._deadline_s * len(requests))
        except OSError:
            reply = None
        ran = self._has_mark()
        if reply is not None and "scores" in reply and not (ran and len(requests) > 1):
            return [AttackScore(ran=ran, **score) for score in reply["scores"]]
        if reply is not None and len(requests) == 1:
            return [AttackScore(ran=ran, **reply)]
        has_died = process.poll() is not None
        if reply is None:
            self._end()
        if len(requests) > 1:
            each = ([request] for request in requests)
            return [score for one in each for score in self._scored(one, hostile=hostile)]
        problem = "the rule's process ended" if has_died else "over the deadline"
        return [AttackScore(hung=not has_died, ran=ran, problem=problem)]

    def _has_mark(self) -> bool:
        found = os.path.lexists(self.mark)
        with suppress(OSError):
            self.mark.unlink()
        with suppress(OSError):
            self.mark.rmdir()
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        environment = {name: os.environ[name] for name in self._env if name in os.environ}
        paths = [
            path for path in map(os.path.abspath, filter(None, sys.path)) if path != os.getcwd()
        ]
        root = str(Path(__file__).parents[3])
        environment |= {
            "PYTHONPATH": os.pathsep.join(dict.fromkeys((root, *paths))),
            "TMPDIR": str(self._work),
        }
        self._received.clear()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                f"{__package__}.attack_process",
                json.dumps(self._settings),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self._work,
            env=environment,
            start_new_session=True,
        )
        hello = self._next(self._process, _START_S)
        if hello is None or "ready" not in hello:
            self._end()
            raise RewardError(
                f"the rule can't be made: {(hello or {}).get('broken', 'its process ended')}",
                where=str(self._settings["rule"]),
                fix="correct it; `realsys plan` tells more",
            )
        return self._process

    def _next(self, process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any] | None:
        assert process.stdout is not None
        descriptor, deadline_s = process.stdout.fileno(), time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while (message := parse_json(self._received)) is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                return None
            if not (more := os.read(descriptor, 1 << 16)):
                process.wait()
                return None
            self._received += more
        return message

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its session, which we made
        process.wait()
