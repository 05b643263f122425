"""Pages of the docs that tests run as they are written: their files, and the words of their commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
MOST_LINES = 40  # of a user's code


class DocPage:
    """One page of ``docs/``."""

    def __init__(self, name: str) -> None:
        self.text = (DOCS / name).read_text()

    def blocks(self, language: str) -> list[str]:
        """The fenced blocks of a language."""
        return re.findall(rf"^```{language}\n(.*?)^```", self.text, flags=re.DOTALL | re.MULTILINE)

    def write_code(self, folder: Path, *names: str, most_lines: int = MOST_LINES) -> None:
        """Writes the page's Python, a block a name, each short enough for a user to write."""
        for block, name in zip(self.blocks("python"), names, strict=True):
            assert len(block.strip().splitlines()) <= most_lines, name
            (folder / name).write_text(block)

    def commands(self, verb: str, having: str = "") -> list[list[str]]:
        """Words behind ``realsys <verb>`` of each command in bash blocks that has a word ``having``."""
        blocks = [block.replace("\\\n", " ") for block in self.blocks("bash")]
        found = [words for block in blocks for words in _commands(block)]
        return [w[2:] for w in found if w[:2] == ["realsys", verb] and (not having or having in w)]


def _commands(block: str) -> Iterator[list[str]]:
    """Yields the words of each command; one whose quotation marks go over several lines has all of them."""
    command = ""
    for line in block.splitlines():
        command += line
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # a mark is still open
            command += "\n"
            continue
        yield words
        command = ""
    assert not command, f"a quotation mark is not closed: {command}"


def in_folder(folder: Path, words: list[str]) -> list[str]:
    """The words, with the files and folders that ``folder`` has by their whole paths."""

    def whole(word: str) -> str:
        name, equals, value = word.rpartition("=")
        return f"{name}{equals}{folder / value}" if value and (folder / value).exists() else word

    return [whole(word) for word in words]
