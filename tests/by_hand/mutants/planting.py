"""Plants faults in the files of a room, in forks of a process that has collected the room's tests.

The tests run once as they are; that tells what each takes and which lines it reaches. For a fault in a
function a fork takes over the changed code and runs the tests that reach its statement, until one fails:
mostly far below a second. What runs at import (a constant, a default, a field) is planted in a fork that
imports and collects anew. No file of the checkout is written.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import gc
import importlib
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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from mutants.mutations import REACHED, Mutant, mutated, telling

PR_SET_PDEATHSIG = 1
LEAST_S, TIMES = 20, 3  # what loops is ended after that, and so many times what the tests take
MOST_S = 30  # of tests a mutant, as long as they took unchanged: the nearest and fastest ones
EXTRA_BYTES = 4 << 30
LOST, ERROR, FAILED, SURVIVED = -1, 3, 1, 0

Functions = list[Any]  # FunctionType, or what lru_cache made of one


@dataclass
class Reached:
    """What a test took unchanged, and which lines of which file it reached (those of its set-up: its whole
    file's tests, since a fixture may be shared)."""

    seconds: float = 0.0
    failed: bool = False
    lines: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Planting:
    """The faults of a room's files, and the tests that should find them.

    Attributes:
        mutants: of each source file. near: of each, the test files that are its own. tests: test files and
            folders. results: a file that gets a line of JSON a mutant, with ``file``, ``number`` and
            ``by``: the test that failed, None where it survived.
    """

    mutants: Mapping[str, Sequence[Mutant]]
    near: Mapping[str, Sequence[str]]
    tests: Sequence[str]
    results: Path
    _reached: dict[str, Reached] = field(default_factory=dict)
    _chosen: list[str] | None = None
    _functions: dict[str, Functions] = field(default_factory=dict)
    _sound: set[str] = field(
        default_factory=set
    )  # tests that failed with a fault, and pass without
    _by: Path = field(init=False)

    def __post_init__(self) -> None:
        self._by = self.results.with_suffix(".by")

    def run(self) -> None:
        """Runs all. Call it in a process that has not imported the files."""
        child = os.fork()
        if child == 0:
            end_with_parent()
            os._exit(int(pytest.main(_arguments(self.tests), plugins=[self])))
        os.waitpid(child, 0)
        if not self.results.exists():
            raise RuntimeError(
                f"the tests of {list(self.mutants)} can't be collected: {self.tests}"
            )
        self._read_reached()
        for file, mutants in self.mutants.items():
            chosen = self._tests_of(file, None)
            for mutant in mutants:
                if not mutant.inside:
                    self._try(file, mutant, chosen, functools.partial(self._anew, file, mutant))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Runs the collected tests once as they are, then in a fork a mutant; or what was chosen."""
        items = {item.nodeid: item for item in session.items}
        if self._chosen is not None:  # collected anew, for a mutant that is planted already
            self._run(items[name] for name in self._chosen if name in items)
            return True
        for file in self.mutants:
            importlib.import_module(".".join(Path(file).with_suffix("").parts))
        self._functions = functions_of(self.mutants)
        self._forked(functools.partial(self._run_unchanged, session.items), None)
        self._read_reached()
        failing = [name for name, of in self._reached.items() if of.failed]
        took_s = sum(of.seconds for of in self._reached.values())
        self._write({"failing": failing, "tests": len(items), "seconds": took_s})
        for file, mutants in self.mutants.items():
            for mutant in mutants:
                if mutant.inside:
                    chosen = self._tests_of(file, mutant)
                    while (by := self._try_in_place(file, mutant, chosen, items)) in items:
                        if by in self._sound or self._passes_alone(items[by]):
                            self._sound.add(by)
                            break
                        chosen.remove(by)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes which test failed."""
        if report.failed:
            with self._by.open("a") as file:
                file.write(report.nodeid + "\n")

    def _run_unchanged(self, items: Sequence[pytest.Item]) -> int:
        hits = set[tuple[str, int]]()
        setattr(builtins, REACHED, lambda file, line: hits.add((file, line)))
        for file, of in self._functions.items():
            path = Path(file).resolve()
            plant(path, telling(path.read_text(), file), of)
        shared = defaultdict[str, set[tuple[str, int]]](set)
        own = dict[str, set[tuple[str, int]]]()
        for item, following in zip(items, [*items[1:], None], strict=True):
            began_s, file = time.monotonic(), item.nodeid.partition("::")[0]
            self._by.unlink(missing_ok=True)
            hits.clear()
            call = item.runtest

            def run_test(call: Callable[[], None] = call, file: str = file) -> None:
                shared[file] |= hits  # by its set-up
                hits.clear()
                call()

            item.runtest = run_test  # type: ignore[method-assign]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self._reached[item.nodeid] = Reached(time.monotonic() - began_s, self._by.exists())
            own[item.nodeid] = set(hits)
        with self._by.with_suffix(".reached").open("w") as written:
            for name, reached in self._reached.items():
                for file, line in sorted(own[name] | shared[name.partition("::")[0]]):
                    reached.lines.setdefault(file, []).append(line)
                row = [name, reached.seconds, reached.failed, reached.lines]
                written.write(json.dumps(row) + "\n")
        return SURVIVED

    def _passes_alone(self, item: pytest.Item) -> bool:
        """Does a test pass without a fault, without those before it and under a mutant's limits?"""
        self._by.unlink(missing_ok=True)
        run = functools.partial(self._run, [item])
        return self._forked(run, self._reached[item.nodeid].seconds) == SURVIVED

    def _read_reached(self) -> None:
        lines = self._by.with_suffix(".reached").read_text().splitlines()
        self._reached = {name: Reached(*rest) for name, *rest in map(json.loads, lines)}

    def _tests_of(self, file: str, mutant: Mutant | None) -> list[str]:
        """Names the tests that reach a mutant's statement; without one, those that may show a change of the
        module. The file's own first, then by what they take; not for longer than MOST_S."""
        near, found = set(self.near[file]), dict[str, list[tuple[float, str]]]()
        for name, of in self._reached.items():
            test_file, lines = name.partition("::")[0], of.lines.get(file, ())
            may_show = bool(lines) or test_file in near
            is_reached = may_show if mutant is None else mutant.statement in lines
            if is_reached and not of.failed:
                found.setdefault(test_file, []).append((of.seconds, name))
        files = sorted(
            found, key=lambda f: (f not in near, sum(s for s, _ in found[f]) > MOST_S / 3)
        )
        chosen, seconds = list[str](), 0.0
        for test_file in files:
            for took_s, name in sorted(found[test_file]):
                seconds += took_s
                if seconds <= MOST_S:
                    chosen.append(name)
        return chosen

    def _run(self, items: Iterable[pytest.Item]) -> int:
        """Runs tests as pytest's own loop does, until one fails."""
        left = list(items)
        for item, following in zip(left, [*left[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._by.exists():
                return FAILED
        return SURVIVED

    def _try_in_place(
        self, file: str, mutant: Mutant, tests: list[str], items: Mapping[str, pytest.Item]
    ) -> str:
        def run() -> int:
            path = Path(file).resolve()
            tree = mutated(path.read_text(), mutant.number)
            plant(path, tree, self._functions[file])
            return self._run(items[name] for name in tests)

        return self._try(file, mutant, tests, run)

    def _anew(self, file: str, mutant: Mutant) -> int:
        path = str(Path(file).resolve())
        tree, self._chosen = (
            mutated(Path(path).read_text(), mutant.number),
            self._tests_of(file, None),
        )
        get_code = importlib.machinery.SourceFileLoader.get_code

        def planted(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
            if loader.path == path:
                return compile(tree, path, "exec", dont_inherit=True)
            return get_code(loader, name)

        importlib.machinery.SourceFileLoader.get_code = planted  # type: ignore[method-assign]
        files = dict.fromkeys(name.partition("::")[0] for name in self._chosen)
        status = int(pytest.main(_arguments(list(files)), plugins=[self]))
        return FAILED if self._by.exists() else status

    def _try(self, file: str, mutant: Mutant, tests: list[str], run: Callable[[], int]) -> str:
        self._by.unlink(missing_ok=True)
        began_s = time.monotonic()
        unchanged_s = sum(self._reached[name].seconds for name in tests)
        status = self._forked(run, unchanged_s) if tests else SURVIVED
        by = self._by.read_text().split("\n")[0] if self._by.exists() else ""
        if status != SURVIVED and not by:
            by = "time" if status == LOST else f"status {status}"
        took_s = round(time.monotonic() - began_s, 2)
        self._write({"file": file, "number": mutant.number, "by": by or None, "seconds": took_s})
        return by

    def _write(self, line: dict[str, object]) -> None:
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _forked(self, run: Callable[[], int], unchanged_s: float | None) -> int:
        """Runs in a fork, under limits; returns its status, ``LOST`` where a signal or we ended it."""
        folder = tempfile.mkdtemp(prefix="mutant-")
        child = os.fork()
        if child == 0:
            end_with_parent()
            os.setsid()
            os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
            if unchanged_s is not None:
                limit_s = int(LEAST_S + TIMES * unchanged_s)
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
        wall_s = 3600 if unchanged_s is None else 2 * (LEAST_S + TIMES * unchanged_s)
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


def functions_of(files: Iterable[str]) -> dict[str, Functions]:
    """Finds the functions of source files that are there now, and those that keep what they returned."""
    found = {str(Path(file).resolve()): Functions() for file in files}
    gc.unfreeze()  # what tests/conftest.py froze is not listed
    for each in gc.get_objects():
        if type(each) in (
            FunctionType,
            functools._lru_cache_wrapper,
        ):  # isinstance asks the odd ones
            inner = _inner(each)
            if type(inner) is FunctionType and inner.__code__.co_filename in found:
                found[inner.__code__.co_filename].append(each)
    gc.freeze()
    return {file: found[str(Path(file).resolve())] for file in files}


def plant(path: Path, tree: object, functions: Functions) -> None:
    """Gives the functions of ``path`` their code of the syntax tree ``tree``."""
    codes = {
        (code.co_qualname, code.co_firstlineno): code
        for code in _codes(compile(tree, str(path), "exec", dont_inherit=True))  # type: ignore[call-overload]
    }
    for found in functions:
        if isinstance(found, functools._lru_cache_wrapper):
            found.cache_clear()
            continue
        code = codes.get((found.__code__.co_qualname, found.__code__.co_firstlineno))
        if code is not None and code.co_freevars == found.__code__.co_freevars:
            found.__code__ = code


def _inner(function: Any) -> Any:
    is_kept = isinstance(function, functools._lru_cache_wrapper)
    return function.__wrapped__ if is_kept else function


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _arguments(tests: Sequence[str]) -> list[str]:
    unread = "ignore::pytest.PytestAssertRewriteWarning"  # what was imported before the fork
    return ["-x", "-q", "-p", "no:cacheprovider", "-W", unread, *tests]


def end_with_parent() -> None:
    """Makes this fork end when the process that made it does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.stdout.flush()
