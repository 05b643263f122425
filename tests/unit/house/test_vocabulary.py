"""One name, one thing: class and file names are unique, imports form no circle, words are the field's.

The counting is benchmarks/house.py's; its header says how.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import house  # noqa: E402

MOST_EVERYDAY_NAMES = 145  # what is left of them; it may only become less
MOST_FILES_OF_A_ROOM = 14


@pytest.fixture(scope="module")
def tree() -> list[house.Module]:
    return house.read_tree(ROOT)


@pytest.fixture(scope="module")
def circles(tree: list[house.Module]) -> dict[str, list[list[str]]]:
    return house.all_circles(tree)


def test_no_class_has_anothers_name(tree: list[house.Module]) -> None:
    assert house.classes_twice(tree) == {}


def test_no_file_has_anothers_name(tree: list[house.Module]) -> None:
    assert house.files_twice(tree) == {}


@pytest.mark.parametrize("graph", ["load time", "and inside functions"])
@pytest.mark.parametrize("nodes", ["modules", "rooms"])
def test_imports_form_no_circle(
    circles: dict[str, list[list[str]]], nodes: str, graph: str
) -> None:
    assert circles[f"{nodes}, {graph}"] == []


def test_everyday_words_in_names_become_fewer(tree: list[house.Module]) -> None:
    """A new one: house.BANNED has the word of the field. One less: lower the number here."""
    found = house.banned_names(tree)
    assert len(found) <= MOST_EVERYDAY_NAMES, found


def test_no_room_is_flatter_than_the_flattest(tree: list[house.Module]) -> None:
    sizes = {room: len(files - {"__init__.py"}) for room, files in house.rooms(tree).items()}
    assert max(sizes.values()) <= MOST_FILES_OF_A_ROOM, sizes


def test_every_room_is_in_the_glossary_or_the_map() -> None:
    pages = "".join((ROOT / name).read_text() for name in ("docs/architecture.md", "README.md"))
    rooms = {
        p.parent.relative_to(ROOT)
        for top in ("launcher", "realsys")
        for p in (ROOT / top).rglob("__init__.py")
    }
    assert [str(r) for r in sorted(rooms) if f"{r.name}/" not in pages] == []
