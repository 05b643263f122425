"""Rule ``code_tests``: the program in an answer is run on the record's tests, in a sandbox."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from realsys.api.basics.thoughts import FinalTextRule
from realsys.api.errors import DataError
from realsys.api.options import option
from realsys.rewards.programs.code_tests import check_tests, grade, read_tests
from realsys.rewards.sandbox.box_limits import BoxLimits
from realsys.rewards.sandbox.sandbox import Sandbox


@dataclass(kw_only=True)
class CodeTests(FinalTextRule):
    """Share of a record's tests that a program passes; part ``tests_passed``, correct if all do.

    A record's tests are a list of ``{"stdin": …, "stdout": …}`` or ``{"code": "assert …"}``. A box that
    fails is no score: the answer is tried again, then its record is set aside. A node that can't contain
    untrusted code ends the run with what is missing.
    """

    tests: str = option("tests", "field of a record with its tests")
    fenced: bool = option(True, "the program is the last fenced block; else the whole answer")
    partial: bool = option(True, "the share of tests passed counts; else all or nothing")
    wall_s: float = option(10.0, "limit of one test", unit="s", gt=0)
    cpu_s: float = option(10.0, "computing time of one test", unit="s", gt=0)
    mem: int = option(512, "memory of one box", unit="MiB", ge=32)
    boxes_at_once: int = option(8, "boxes of one process at the same time", ge=1)
    allow_missing: tuple[str, ...] = option(
        (), "what a node may lack: net, ipc, uts, seccomp (docs/sandbox.md)"
    )
    _sandbox: Sandbox | None = field(init=False, repr=False, default=None)
    _lock: threading.Lock = field(init=False, repr=False, default_factory=threading.Lock)

    async def __call__(
        self, response: str, record: Mapping[str, Any], final: str | None = None
    ) -> dict[str, float]:
        """Runs the program behind the answer's thoughts.

        Raises:
            DataError: the record has no usable tests. SandboxFailure: its box failed. ClusterError: this
                node lacks what a sandbox needs.
        """
        tests = self._tests_of(record)
        text = self.text_of(response, final)
        if text is None:
            return {"reward": 0.0, "correct": 0.0, "tests_passed": 0.0}
        limits = BoxLimits(wall_s=self.wall_s, cpu_s=self.cpu_s, memory_bytes=self.mem << 20)
        found = await asyncio.to_thread(
            grade, text, tests, self._open(), limits, is_fenced=self.fenced
        )
        all_passed = float(found.fraction == 1.0)
        return {
            "reward": found.fraction if self.partial else all_passed,
            "correct": all_passed,
            "tests_passed": found.fraction,
        }

    def check_record(self, record: Mapping[str, Any]) -> None:
        """Raises DataError: the record has no usable tests. A plan asks about the records that it reads."""
        check_tests(self._tests_of(record))

    def _tests_of(self, record: Mapping[str, Any]) -> list[Any]:
        """Returns the tests, which may be written as JSON."""
        tests = read_tests(record.get(self.tests))
        if tests is None:
            raise DataError(
                f"the record has no list of tests in its field {self.tests!r}",
                where=f"a record with the fields {sorted(record)}",
                fix='give [{"stdin": …, "stdout": …}, …], or task.reward_args.code_tests.tests=FIELD',
            )
        return tests

    def _open(self) -> Sandbox:
        with self._lock:
            if self._sandbox is None:
                self._sandbox = Sandbox(
                    allow_missing=self.allow_missing, boxes_at_once=self.boxes_at_once
                )
                atexit.register(self._sandbox.close)
            return self._sandbox
