"""Which fenced blocks a text has, in any of the ways in which policies write them, however hostile."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from realsys.rewards.programs import fenced_blocks as module
from realsys.rewards.programs.fenced_blocks import FencedBlock, fenced, fenced_blocks, last_block

DOCSTRING = (
    'def add(a, b):\n    """Adds.\n\n    ```\n    add(1, 2)\n    ```\n    """\n    return a + b\n'
)
QUOTED = 'x = \'"""\' # """\n'
AT_THE_EDGE = (
    '"""\n```python\nadd(1, 2)\n```\nand\n```\n3\n```\n"""\ndef add(a, b):\n    return a + b\n'
)


def listed(text: str) -> list[tuple[str, str, bool]]:
    return [(block.language, block.text, block.is_closed) for block in fenced_blocks(text)]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("", []),
        ("no `block` and ``none``", []),
        ("```python\nx = 1\n```", [("python", "x = 1\n", True)]),
        ("a\n~~~py\nx\n~~~\nb\n```\ny\n```\n", [("py", "x\n", True), ("", "y\n", True)]),
        ("```python\n```", [("python", "", True)]),
        ("```python\r\nx\r\n```\r\n", [("python", "x\n", True)]),
        ('```Python title="a.py"\nx\n```', [("python", "x\n", True)]),
        ("```{.python .numbered}\nx\n```", [("python", "x\n", True)]),
        ("``` c++\nx\n```  ", [("c++", "x\n", True)]),
        ("```print(1)```\nx", []),  # code in a line
        ("  ```python\n  if x:\n      y\n  ```", [("python", "if x:\n    y\n", True)]),
        ("1. do\n\n   ```python\n   x\n   ```\n", [("python", "x\n", True)]),
        ("- ```python\n  if x:\n      y\n  ```\n", [("python", "if x:\n    y\n", True)]),
        ("10) a\n    * ```sh\n      ls\n\n      pwd\n      ```", [("sh", "ls\n\npwd\n", True)]),
        ("1. a\n   ```python\nx\n```\n", [("python", "x\n", True)]),  # not indented as the fence
        ("\t```python\n\tif x:\n\t\ty\n\t```", [("python", "if x:\n    y\n", True)]),
        ("```python\nprint('cut off", [("python", "print('cut off\n", False)]),
        ("```py\nx = (\n\n```python\ny\n```", [("py", "x = (\n\n", False), ("python", "y\n", True)]),
        ("````python\ns = '''\n```\n'''\n````", [("python", "s = '''\n```\n'''\n", True)]),
        ("```python\nx\n`````", [("python", "x\n", True)]),
        ("~~~\n```\nx\n```\n~~~", [("", "```\nx\n```\n", True)]),
        ("```python\nx\n```\nIt prints:\n```\n1\n```", [("python", "x\n", True), ("", "1\n", True)]),
        (f"```python\n{DOCSTRING}```\nso", [("python", DOCSTRING, True)]),
        (f"```py\n{AT_THE_EDGE}```\nso", [("py", AT_THE_EDGE, True)]),
        (f"```py\n{QUOTED}```\n\n```\n1\n```", [("py", QUOTED, True), ("", "1\n", True)]),
        ("```sh\necho '\"\"\"'\n```\nb\n```\nc\n```", [("sh", "echo '\"\"\"'\n", True), ("", "c\n", True)]),
        # Three quotes that end nowhere hide no block
        ('```python\n"""a\n```\nb', [("python", '"""a\n', True)]),
        (
            '```py\n"""\n```\n```\nb\n```\n```py\nc\n```',
            [("py", '"""\n', True), ("", "b\n", True), ("py", "c\n", True)],
        ),
        ('```python\n"""a\n\n```python\nb\n```', [("python", '"""a\n\n', False), ("python", "b\n", True)]),
    ],
)  # fmt: skip
def test_blocks_are_found_as_a_reader_finds_them(
    text: str, blocks: list[tuple[str, str, bool]]
) -> None:
    assert listed(text) == blocks


@pytest.mark.parametrize("language", ["python", "bash", ""])
@pytest.mark.parametrize("text", ["x", "```\nx\n```", "~~~~\n  ```python\n   `````", DOCSTRING])
def test_what_is_fenced_is_found_again(text: str, language: str) -> None:
    found = fenced_blocks(fenced(text, language))
    assert found == [FencedBlock(language=language, text=text.rstrip() + "\n", is_closed=True)]
    assert fenced_blocks(textwrap.indent(fenced(text, language), "   ")) == found


def test_the_last_block_of_a_language_goes_before_those_without() -> None:
    text = "```python\n1\n```\n```\n2\n```\n```py\n3\n```\n```\n4\n```\n```text\n5\n```\n```py\n6"
    assert last_block(text, ("python", "py")) == "3\n"
    assert last_block(text, ("sh",)) == "4\n"
    assert last_block("```text\n1\n```", ("sh",)) is None


PIECES = (
    *("```python\n", "```\n", "~~~\n", "- ```\n", "   ```\n", "    ```\n", "````\n", "```text\n"),
    *(
        '```python\n"""\n',
        "```py\n'''\n",
        '"""\n',
        "'''\n",
        "\"\"\"x'''\n",
        "'''x\"\"\"\n",
        "# '''\n",
    ),
)


@pytest.mark.parametrize("seed", range(30))
def test_no_line_is_read_more_than_three_times(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(seed)
    pieces = drawn.sample(PIECES, drawn.randint(1, 5))
    lines = "```python\n" + "".join(drawn.choices(pieces, k=4000))
    number = 0

    def counted(line: str, read: Callable[[str], Any] = module._fence) -> Any:
        nonlocal number
        number += 1
        return read(line)

    monkeypatch.setattr(module, "_fence", counted)
    fenced_blocks(lines)
    assert number <= 3 * lines.count("\n") + 3


def test_strings_are_heeded_until_so_many_lines_were_read_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heeded: list[bool] = []

    def end(lines: Any, begin: int, opened: Any, *, heeds_strings: bool) -> tuple[int, bool, int]:
        heeded.append(heeds_strings)
        return begin, False, begin + 4

    monkeypatch.setattr(module, "_end", end)
    fenced_blocks("```python\n" * 10)
    assert heeded == [True] * 3 + [False] * 7
