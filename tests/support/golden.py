"""Texts that people read, compared whole with ``golden.txt`` beside the test: rewording one is one command.

``with golden.raises(ConfigError): ...`` is `pytest.raises` that also compares the error's text.
``golden.check(text)`` compares a text, a finding or an error; ``golden.line(text, "fix")`` the lines of a
long one that hold a word. ``pytest --write-golden tests/unit/data`` writes what is told now: read its diff.
A text that no test tells, or that differs, fails. Not for numbers, states and names that a test is about,
which stay in asserts, and not for output that differs between runs or machines.

A line is ``test[case] 2: text``: the second text of that test; where and fix of an error follow on it.
Paths of a run, ports, pids, line numbers and addresses in memory are replaced by their kind.
"""

from __future__ import annotations

import fcntl
import platform
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from launcher.sites.places import user_name

NAME = "golden.txt"
SAID = ("what", "why", "reason", "reason_words", "where", "fix")  # fields of findings
HEAD = (
    "# What the tests of this folder are told. `pytest --write-golden` on the folder renews it.\n"
)
_ENTRY = re.compile(r"(?P<key>\w+(::\w+)*(\[.*?\])?( \d+)?):( (?P<text>.*))?")
_FILE = re.compile(r"[\w.]+\.py")
_REPLACED = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(rf"{re.escape(sys.executable)}\b"), "PYTHON"),
    (re.compile(rf"{re.escape(sys.prefix)}(?=\s|$)"), "VENV"),
    (re.compile(re.escape(str(Path(__file__).parents[2]))), "CHECKOUT"),
    (
        re.compile(
            rf"{re.escape(tempfile.gettempdir())}/(pytest-of-\w+/pytest-\d+(/[\w-]+)?|[\w.-]+)"
        ),
        "TMP",
    ),
    (re.compile(r"((127\.0\.0\.1|localhost|0\.0\.0\.0|\[::1?\])(:|'?, ))\d+"), r"\1PORT"),
    (re.compile(r"/dev/fd/\d+"), "/dev/fd/N"),
    (re.compile(r"/proc/\d+/fd/-?\d+"), "/proc/PID/fd/N"),
    (re.compile(rf"\b{re.escape(platform.release())}\b"), "KERNEL"),
    (re.compile(r"before='[^']*'"), "before='MOMENT'"),
    (re.compile(r"\bpid \d+"), "pid PID"),
    (re.compile(r"(\w\.py):\d+"), r"\1:LINE"),
    (re.compile(r'(\w\.py", line )\d+'), r"\1N"),
    (re.compile(r"\b0x[0-9a-f]{8,}"), "ADDRESS"),
    (re.compile(r"\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{12,}\b"), "HASH"),
    (re.compile(r"[^\s(]*/lib/python3\.\d+/[^\s,]+, line \d+"), "LIBRARY"),
    (re.compile(rf"\b(on |where: ){re.escape(socket.gethostname())}\b"), r"\1HOST"),
    (re.compile(rf"/runs/{re.escape(user_name())}\b"), "/runs/USER"),
    # Python 3.13 adds a guess.
    (re.compile(r"(unexpected keyword argument '\w+')\. Did you mean '\w+'\?"), r"\1"),
    (re.compile(r"\n  where: "), " | where: "),
    (re.compile(r"\n  fix:   "), " | fix: "),
)

E = TypeVar("E", bound=BaseException)
Texts = dict[str, dict[str, str]]  # file -> key -> text


@dataclass
class _Running:
    """The test that runs now."""

    file: Path
    name: str
    base: Path  # of temporary folders
    is_written: bool
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def golden(self) -> Path:
        return self.file.parent / NAME

    def compare(self, text: str) -> None:
        __tracebackhide__ = True
        number = len(self.texts) + 1
        key = self.name if number == 1 else f"{self.name} {number}"
        self.texts[key] = text
        if self.is_written:
            return
        expected = _read(self.golden).get(self.file.name, {}).get(key)
        if text != expected:
            pytest.fail(
                f"{self.golden} has for {self.file.name}::{key}\n{expected}\nbut it is now\n{text}\n"
                "`pytest --write-golden` on this file renews it"
            )

    def end(self) -> None:
        """A test that has passed has told all its texts."""
        known = _read(self.golden).get(self.file.name, {})
        mine = {key: text for key, text in known.items() if _test_of(key) == self.name}
        if self.is_written and mine != self.texts:
            _change(self.golden, self.file.name, lambda key: _test_of(key) == self.name, self.texts)
        elif left := mine.keys() - self.texts.keys():
            pytest.fail(f"{self.golden} has texts that are not told any more: {', '.join(left)}")


_running: _Running | None = None
_cache: dict[Path, Texts] = {}


@contextmanager
def raises(kind: type[E] | tuple[type[E], ...]) -> Iterator[pytest.ExceptionInfo[E]]:
    """`pytest.raises`, and the error's text is the golden one."""
    __tracebackhide__ = True
    with pytest.raises(kind) as caught:
        yield caught
    check(caught.value)


def check(told: object) -> None:
    """The text of an error, a finding, or the lines of several of them, is the golden one."""
    __tracebackhide__ = True
    assert _running is not None, "golden texts are compared inside of a test, not of a fixture"
    _running.compare(_plain(_text(told), _running.base))


def line(told: object, word: str) -> None:
    """The lines that hold a word, of which there are some, are the golden ones."""
    __tracebackhide__ = True
    found = [one for one in _text(told).splitlines() if word in one]
    assert found, f"no line has {word!r}:\n{_text(told)}"
    check(found)


def _text(told: object) -> str:
    match told:
        case pytest.ExceptionInfo():
            return str(told.value)
        case str() | BaseException():
            return str(told)
        case Mapping():
            return "\n".join(f"{_text(name)}: {_text(value)}" for name, value in told.items())
        case tuple() if not all(isinstance(one, str) for one in told):
            return ", ".join(map(_text, told))
        case set() | frozenset():
            return "\n".join(sorted(map(_text, told)))
        case Iterable():
            return "\n".join(map(_text, told))
    parts = {name: getattr(told, name) for name in SAID if getattr(told, name, None)}
    if not parts:
        return str(told)
    return "".join(f" | {name}: {said}" for name, said in parts.items()).removeprefix(" | ")


def _plain(text: str, base: Path) -> str:
    """What is the same in each run, in lines that git and people can read."""
    text = re.sub(rf"{re.escape(str(base))}(/[\w-]+)?", "TMP", text)
    for pattern, by in _REPLACED:
        text = pattern.sub(by, text)
    lines = (one.rstrip() for one in re.split("[\n\r]", text))
    return "\n".join(_shortened(one) for one in lines if one)


def _shortened(one: str) -> str:
    """A line without the middle of what is longer than anybody reads, as printable characters."""
    if len(one) > 400:
        one = f"{one[:200]} … {len(one)} characters … {one[-60:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in one)


def _name(nodeid: str) -> str:
    """A test as it stands before ``: `` in a golden file."""
    return nodeid.partition("::")[2].replace(": ", ":")


def _test_of(key: str) -> str:
    return re.sub(r"(?<=[\w\]]) \d+$", "", key)


def _read(path: Path) -> Texts:
    if path not in _cache:
        _cache[path] = {}
        if path.exists():
            with path.open(encoding="utf-8") as golden:
                fcntl.flock(golden, fcntl.LOCK_SH)
                _cache[path] = _parsed(golden.read())
    return _cache[path]


def _parsed(content: str) -> Texts:
    texts: Texts = {}
    file, key = "", ""
    for one in content.splitlines():
        if one.startswith("    "):
            texts[file][key] += "\n" + one[4:]
        elif _FILE.fullmatch(one):
            file = one
            texts[file] = {}
        elif entry := _ENTRY.fullmatch(one):
            key = entry["key"]
            texts[file][key] = entry["text"] or ""
    return texts


def _written(texts: Texts) -> str:
    def natural(key: str) -> list[tuple[int, str]]:
        return [(int(p), "") if p.isdigit() else (0, p) for p in re.split(r"(\d+)", key)]

    parts = [HEAD]
    for file in sorted(texts):
        parts.append(f"\n{file}\n")
        for key in sorted(texts[file], key=natural):
            text = texts[file][key].replace("\n", "\n    ")
            parts.append(f"{key}: {text}".rstrip() + "\n")
    return "".join(parts)


def _change(path: Path, file: str, old: Callable[[str], bool], new: Mapping[str, str]) -> None:
    """Puts texts of a file in place of old ones; several processes may write those of a folder."""
    with path.open("a+", encoding="utf-8") as golden:
        fcntl.flock(golden, fcntl.LOCK_EX)
        golden.seek(0)
        texts = _parsed(golden.read())
        left = {key: text for key, text in texts.get(file, {}).items() if not old(key)}
        texts[file] = left | dict(new)
        texts = {name: told for name, told in texts.items() if told}
        golden.truncate(0)
        golden.write(_written(texts))
    _cache.pop(path, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    help_ = "write the texts that tests compare, golden.txt of each folder, instead of comparing"
    parser.addoption("--write-golden", action="store_true", help=help_)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    global _running
    base = item.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    is_written = item.config.getoption("write_golden")
    _running = running = _Running(item.path, _name(item.nodeid), base, is_written)
    try:
        yield
    finally:
        _running = None
    running.end()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A text whose test is not there any more ends the run, or is removed where texts are written."""
    if any("::" in word for word in config.args) or config.getoption("lf", False):
        return  # not all tests of a file are collected
    tests: dict[Path, set[str]] = {}
    for item in items:
        tests.setdefault(item.path, set()).add(_name(item.nodeid))
    for golden in sorted({path.parent / NAME for path in tests}):
        for file, texts in _read(golden).items():
            there = tests.get(golden.parent / file)
            if there is None and (golden.parent / file).exists():
                continue  # not collected
            gone = [key for key in texts if _test_of(key) not in (there or ())]
            if not config.getoption("write_golden"):  # cases may depend on what is installed
                functions = {name.partition("[")[0] for name in there or ()}
                gone = [key for key in gone if _test_of(key).partition("[")[0] not in functions]
            if gone and not config.getoption("write_golden"):
                raise pytest.UsageError(f"{golden}: no test tells {file}::{', '.join(gone)}")
            if gone:
                _change(golden, file, gone.__contains__, {})
