"""A file of plain lines gives the settings that YAML gives, without it."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from realsys.config.settings import _plain_settings
from realsys.config.typed_values import from_node

LINES = st.sampled_from(
    [
        *(
            "name: local",
            "a: ~/x.y-z",
            "b: ~",
            "b: .5",
            "c: 1e5",
            "d: ..",
            "# a: b",
            "#",
            "",
            "e: x-",
        ),
        *(
            "f: -1",
            "g:",
            " h: 1",
            "i: 'x'",
            "j: [1]",
            "k: x # y",
            "l.m: 1",
            "n:  1",
            "o: 1 ",
            "---",
        ),
        *("null: null", "yes: 0x1", "_: /", "# ü", "p: ü", "q: a:b", "- r", "...", "\ts: 1"),
    ]
)


@given(st.lists(LINES, max_size=6), st.sampled_from(["", "\n"]))
def test_yaml_gives_the_same(lines: list[str], end: str) -> None:
    text = "\n".join(lines) + end
    found = _plain_settings(text, Path("f"))
    if found is None:
        return
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs = [] if node is None else node.value
    assert [(s.path, s.written, s.origin) for s in found] == [
        (key.value, from_node(value), f"f:{value.start_mark.line + 1}") for key, value in pairs
    ]


@pytest.mark.parametrize(
    ("text", "are"), [("a: 1\n# b\n", 1), ("\n", 0), ("a: [1]", None), ("a: 1\n" * 1000, None)]
)
def test_only_short_files_of_words_are_read_without_yaml(text: str, are: int | None) -> None:
    found = _plain_settings(text, Path("f"))
    assert (found if found is None else len(found)) == are
