"""Golden texts: what is stored is what was compared, and what differs, is new or is left over fails."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import golden
import pytest

from realsys.api.errors import ConfigError


def running(folder: Path, name: str, *, writes: bool = False) -> golden._Running:
    return golden._Running(folder / "test_it.py", name, folder, writes)


def write(folder: Path, name: str, *texts: str) -> str:
    test = running(folder, name, writes=True)
    for text in texts:
        test.compare(text)
    test.end()
    return (folder / golden.NAME).read_text()


def retell(folder: Path, name: str, texts: list[str]) -> None:
    test = running(folder, name)
    for text in texts:
        test.compare(text)
    test.end()


def test_texts_are_kept_a_line_each_and_read_back(tmp_path: Path) -> None:
    write(tmp_path, "test_b[x: y]", "one: two", "three\n  four")
    content = write(tmp_path, "test_a", "1: five")
    assert content.splitlines()[2:] == [
        "test_it.py", "test_a: 1: five", "test_b[x: y]: one: two", "test_b[x: y] 2: three", "      four"
    ]  # fmt: skip
    retell(tmp_path, "test_a", ["1: five"])
    assert "test_a" not in write(tmp_path, "test_a")


@pytest.mark.parametrize("texts", [["other"], ["one", "more"], []])
def test_what_differs_is_new_or_is_left_over_fails(tmp_path: Path, texts: list[str]) -> None:
    write(tmp_path, "test_a", "one")
    with pytest.raises(pytest.fail.Exception):
        retell(tmp_path, "test_a", texts)


@dataclass
class Found:
    what: str
    fix: str
    number: int = 3


def test_texts_of_errors_findings_and_collections() -> None:
    error = ConfigError("a", where="b", fix="c")
    assert golden._plain(golden._text(error), Path("/x")) == "a | where: b | fix: c"
    assert golden._text(Found("a", "b")) == "what: a | fix: b"
    assert golden._text({1: "a", 2: (3, "b")}) == "1: a\n2: 3, b"
    assert golden._text(["a", "b"]) == "a\nb"


def test_what_differs_between_runs_is_named_by_its_kind() -> None:
    text = "pid 71 at 127.0.0.1:4000\x1b[0m\n\n/x/test_y0/run1, a.py:12, '127.0.0.1', 33\t!"
    expected = "pid PID at 127.0.0.1:PORT\nTMP/run1, a.py:LINE, '127.0.0.1', PORT\\t!"
    assert golden._plain(text, Path("/x")) == expected
    assert golden._plain("a" * 500, Path("/x")) == f"{'a' * 200} … 500 characters … {'a' * 60}"
