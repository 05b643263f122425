"""Plants faults in a module, in forks of a process that has imported the module and collected its tests.

A fork takes over the code of changed functions and runs the tests until one fails: that costs what the
tests take, mostly far below a second. What runs at import (a constant, a default, a field) is planted in a
fork that imports and collects anew. No file of the checkout is written.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.machinery
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from mutants.mutations import Mutant, mutated

PR_SET_PDEATHSIG = 1
LEAST_S, TIMES = 20, 3  # what loops is ended after that, and so many times what the tests take
EXTRA_BYTES = 4 << 30
LOST, ERROR, FAILED, SURVIVED = -1, 3, 1, 0


@dataclass
class Planting:
    """The faults of one file, and the tests that should find them.

    Attributes:
        path: the source file. tests: test files. results: a file that gets a line of JSON a mutant, with
            ``number`` and ``by``: the test that failed, None where it survived.
    """

    path: Path
    tests: Sequence[str]
    mutants: Sequence[Mutant]
    results: Path
    _failing: list[str] = field(default_factory=list)
    _seconds: float = 0.0
    _by: Path = field(init=False)

    def __post_init__(self) -> None:
        self._by = self.results.with_suffix(".by")

    def run(self) -> None:
        """Runs all. Call it in a process that has not imported the module."""
        child = os.fork()
        if child == 0:
            end_with_parent()
            os._exit(int(pytest.main(self._arguments(), plugins=[self])))
        os.waitpid(child, 0)
        if not self.results.exists():
            raise RuntimeError(f"the tests of {self.path} can't be collected: {self.tests}")
        unmutated = json.loads(self.results.read_text().splitlines()[0])
        self._failing, self._seconds = unmutated["failing"], unmutated["seconds"]
        for mutant in self.mutants:
            if not mutant.inside:
                self._try(mutant, functools.partial(self._anew, mutant))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Runs the collected tests once as they are, then in a fork a mutant."""
        if any(not mutant.inside for mutant in self.mutants) and self.results.exists():
            return None  # collected anew, for a mutant that is planted already
        began_s = time.monotonic()
        self._forked(lambda: _run_items(session.items, self._by, first_only=False))
        self._failing = self._by.read_text().split("\n")[:-1] if self._by.exists() else []
        self._seconds = time.monotonic() - began_s
        session.items[:] = [item for item in session.items if item.nodeid not in self._failing]
        self._write({"failing": self._failing, "seconds": self._seconds})
        for mutant in self.mutants:
            if mutant.inside:
                self._try(mutant, functools.partial(self._in_place, mutant, session.items))
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes which test failed."""
        if report.failed:
            with self._by.open("a") as file:
                file.write(report.nodeid + "\n")

    def _arguments(self) -> list[str]:
        left_out = [word for name in self._failing for word in ("--deselect", name)]
        return ["-x", "-q", "-p", "no:cacheprovider", *left_out, *self.tests]

    def _in_place(self, mutant: Mutant, items: list[pytest.Item]) -> int:
        plant(self.path, mutated(self.path.read_text(), mutant.number))
        return _run_items(items, self._by, first_only=True)

    def _anew(self, mutant: Mutant) -> int:
        tree, path = mutated(self.path.read_text(), mutant.number), str(self.path)
        get_code = importlib.machinery.SourceFileLoader.get_code

        def planted(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
            if loader.path == path:
                return compile(tree, path, "exec", dont_inherit=True)
            return get_code(loader, name)

        importlib.machinery.SourceFileLoader.get_code = planted  # type: ignore[method-assign]
        return int(pytest.main(self._arguments(), plugins=[self]))

    def _try(self, mutant: Mutant, run: Callable[[], int]) -> None:
        self._by.unlink(missing_ok=True)
        status = self._forked(run)
        by = self._by.read_text().split("\n")[0] if self._by.exists() else ""
        if status != SURVIVED and not by:
            by = "time" if status == LOST else f"status {status}"
        self._write({"number": mutant.number, "by": by if status != SURVIVED else None})

    def _write(self, line: dict[str, object]) -> None:
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _forked(self, run: Callable[[], int]) -> int:
        """Runs in a fork, under limits; returns its status, ``LOST`` where a signal or we ended it."""
        folder = tempfile.mkdtemp(prefix="mutant-")
        child = os.fork()
        if child == 0:
            end_with_parent()
            os.setsid()
            os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
            limit_s = int(LEAST_S + TIMES * self._seconds)
            if self._seconds:
                resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_BYTES,) * 2)
            status = ERROR
            try:
                status = run()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        ended = os.pidfd_open(child)
        wall_s = 2 * (LEAST_S + TIMES * self._seconds) if self._seconds else 3600
        select.select([ended], [], [], wall_s)
        os.close(ended)
        for group in (os.killpg, os.kill):
            try:
                group(child, signal.SIGKILL)
            except ProcessLookupError:
                pass
        _, status = os.waitpid(child, 0)
        shutil.rmtree(folder, ignore_errors=True)
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else LOST


def plant(path: Path, tree: object) -> None:
    """Gives the functions of ``path`` that are there their code of the syntax tree ``tree``."""
    codes = dict[tuple[str, int], CodeType]()
    left = [compile(tree, str(path), "exec", dont_inherit=True)]  # type: ignore[call-overload]
    while left:
        code = left.pop()
        codes[code.co_qualname, code.co_firstlineno] = code
        left += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    gc.unfreeze()  # what tests/conftest.py froze is not listed
    for found in gc.get_objects():
        if type(found) is functools._lru_cache_wrapper:  # isinstance would ask the odd ones
            if _is_of(found.__wrapped__, path):
                found.cache_clear()
        elif _is_of(found, path):
            code = codes.get((found.__code__.co_qualname, found.__code__.co_firstlineno))
            if code is not None and code.co_freevars == found.__code__.co_freevars:
                found.__code__ = code


def _is_of(function: object, path: Path) -> bool:
    return type(function) is FunctionType and function.__code__.co_filename == str(path)


def _run_items(items: list[pytest.Item], by: Path, *, first_only: bool) -> int:
    """Runs tests as pytest's own loop does; returns FAILED where one failed."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if first_only and by.exists():
            return FAILED
    return FAILED if by.exists() else SURVIVED


def end_with_parent() -> None:
    """Makes this fork end when the process that made it does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.stdout.flush()
