"""The counts of benchmarks/house.py, on a tree of a few lines; what it reads of a run, on made-up rows."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import house
import house_start

FILES = {
    "launcher/__init__.py": '"""The door."""\n',
    "launcher/build.py": "",
    "launcher/cli.py": """\
from __future__ import annotations

from typing import TYPE_CHECKING

from launcher import status  # a module
import realsys.store.file.lease

if TYPE_CHECKING:
    from realsys.master import loop
""",
    "launcher/status.py": """\
class Verdict:
    \"\"\"One.\"\"\"


def show(told: str) -> None:
    \"\"\"Shows the one thing that nobody has told it,
    on two lines.
    \"\"\"
    from launcher.cli import run
""",
    "realsys/__init__.py": "",
    "realsys/build.py": "",
    "realsys/status.py": "",
    "realsys/master/loop.py": """\
from .. import store
from ..store.file import lease as first_lease

class Outer:
    class Verdict:
        rollout_desk = 1
""",
    "realsys/store/__init__.py": "from realsys.store import file, memory\n",
    "realsys/store/file/__init__.py": "",
    "realsys/store/file/lease.py": "from realsys.master import loop\n",
    "realsys/store/file/watch.py": "",
    "realsys/store/memory/__init__.py": "",
    "realsys/store/memory/lease.py": "",
    "realsys/store/memory/watch.py": "",
    "realsys/store/memory/other.py": "",
    "tests/unit/launcher/trials/test_status.py": "class Verdict: ...\n",
}


@pytest.fixture
def modules(tmp_path: Path) -> list[house.Module]:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    return house.read_tree(tmp_path)


def test_tests_and_other_folders_are_not_read(modules: list[house.Module]) -> None:
    assert {module.path for module in modules} == {p for p in FILES if not p.startswith("tests")}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("", 0),
        ('"""Of two\n\nlines."""\n\n# a comment\n', 0),
        ("x = 1  # said\n\n\ny = 2\n", 2),
        ("x = (\n    1,\n    # between\n)\n", 3),
        ('x = """a\n\nb"""\n', 2),
        ('class A:\n    """It."""\n\n    b: int\n    """Of b."""\n', 2),
        ('def f():\n    """It."""; return 1\n', 1),
    ],
)
def test_code_lines(source: str, lines: int) -> None:
    assert house.code_lines(house.Module("a.py", source)) == lines


def test_names_of_modules_and_rooms() -> None:
    door = house.Module("realsys/store/__init__.py", "")
    file = house.Module("realsys/store/file/lease.py", "")
    assert (door.name, door.room) == ("realsys.store", "realsys.store")
    assert (file.name, file.room) == ("realsys.store.file.lease", "realsys.store.file")


def test_class_names_twice_are_found_inside_of_others(modules: list[house.Module]) -> None:
    assert house.classes_twice(modules) == {
        "Verdict": ["launcher/status.py", "realsys/master/loop.py"]
    }


def test_file_names_of_mirrored_rooms_may_repeat(modules: list[house.Module]) -> None:
    assert house.files_twice(modules) == {"status.py": ["launcher/status.py", "realsys/status.py"]}


def test_a_third_file_of_a_mirrored_name_is_a_repetition(modules: list[house.Module]) -> None:
    third = house.Module("launcher/lease.py", "")
    assert "lease.py" in house.files_twice([*modules, third])


def test_rooms_and_levels(modules: list[house.Module]) -> None:
    assert house.rooms(modules)["launcher"] == {"build.py", "cli.py", "status.py"}
    assert house.levels(modules)[""] == ["launcher", "realsys"]
    assert house.levels(modules)["realsys.store"] == ["file", "memory"]


def test_imports_and_when_they_run(modules: list[house.Module]) -> None:
    found = {(edge.source, edge.target, edge.when) for edge in house.imports(modules)}
    assert found == {
        ("launcher.cli", "launcher.status", "load"),
        ("launcher.cli", "realsys.store.file.lease", "load"),
        ("launcher.cli", "realsys.master.loop", "typing"),
        ("launcher.status", "launcher.cli", "call"),
        ("realsys.master.loop", "realsys.store", "load"),
        ("realsys.master.loop", "realsys.store.file.lease", "load"),
        ("realsys.store", "realsys.store.file", "load"),
        ("realsys.store", "realsys.store.memory", "load"),
        ("realsys.store.file.lease", "realsys.master.loop", "load"),
    }


def test_circles_by_when_imports_run(modules: list[house.Module]) -> None:
    found = house.all_circles(modules)
    at_load = [["realsys.master.loop", "realsys.store.file.lease"]]
    assert found["modules, load time"] == at_load
    assert found["modules, and inside functions"] == [["launcher.cli", "launcher.status"], *at_load]
    # The store imports its rooms, and one of them the master, which imports both.
    assert found["rooms, load time"] == [["realsys.master", "realsys.store.file"]]
    assert found["a room and one inside it, load time"] == []


def test_circles_are_whole_components() -> None:
    edges = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "e"), ("e", "d"), ("f", "a")]
    assert house.circles(edges) == [["a", "b", "c"], ["d", "e"]]
    assert house.circles([("a", "b"), ("a", "c"), ("b", "c")]) == []


def test_a_circle_of_rooms_is_shown_by_its_rarer_direction(modules: list[house.Module]) -> None:
    room_of = {module.name: module.room for module in modules}
    lines = house.ties(["realsys.master", "realsys.store.file"], room_of, house.imports(modules))
    assert lines == [
        "realsys.master.loop -> realsys.store.file.lease (load)",
        "realsys.store.file.lease -> realsys.master.loop (load)",
    ]


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("told", "told"),
        ("_last_words", "last words"),
        ("LastWords", "last words"),
        ("RolloutDesk", "desk"),
        ("Over", "Over"),
        ("over", None),
        ("desktop", None),
        ("last_word", None),
        ("HTTPServer", None),
    ],
)
def test_banned_names(name: str, entry: str | None) -> None:
    assert house.banned_in_name(name) == entry


def test_words_of_the_tree(modules: list[house.Module]) -> None:
    assert house.banned_names(modules) == [
        ("desk", "rollout_desk", "realsys/master/loop.py"),
        ("told", "told", "launcher/status.py"),
    ]
    assert house.banned_in_texts(t for m in modules for t in house.docstrings(m)) == {"told": 1}
    assert house.pronouns(modules) == {
        "one": 2, "whose": 0, "nobody": 1, "somebody": 0, "whoever": 0
    }  # fmt: skip
    assert house.short_docstrings(modules) == [
        ("launcher/__init__.py", "The door."),
        ("launcher/status.py", "One."),
    ]


def test_sentences_are_strings_that_are_no_docstrings() -> None:
    source = '"""Of a file."""\nraise E("it told nobody", f"{x} looks at {y}", "key")\n'
    assert house.sentences(house.Module("a.py", source)) == ["it told nobody", " looks at "]
    assert house.banned_in_texts(["it told", "last words, last_words"]) == {
        "told": 1,
        "last words": 2,
    }


def test_the_table_has_all_rows_and_trees_side_by_side(modules: list[house.Module]) -> None:
    rows = house.counts(modules)
    assert rows["modules"] == 16
    assert rows["largest flat room"] == "3 (realsys.store.memory)"
    text = house.markdown({"before": {"a": 1, "b": 2}, "after": {"b": 3, "c": 4}})
    assert text.splitlines()[2:] == ["| a | 1 |  |", "| b | 2 | 3 |", "| c |  | 4 |"]
    assert "- **class names twice** (1)\n  - **Verdict** (2)\n    - launcher/status.py\n" in (
        house.outline(house.duplicates(modules))
    )


def test_quantile_is_a_value_that_is_there() -> None:
    assert house.quantile(list(range(1, 101)), 0.99) == 99
    assert house.quantile([5], 0.99) == 5


@dataclass(frozen=True, slots=True)
class Optimizer:
    lr: float


class Model:
    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer

    @property
    def never(self) -> None:
        raise AssertionError("looking runs no code of what it looks at")


@pytest.mark.parametrize(
    ("value", "distance"),
    [
        (house_start.MARKER, 0),
        (f"actor.optimizer.lr={house_start.MARKER_TEXT}", 0),
        (f"{house_start.MARKER_TEXT}{' ' * 300}", None),
        ({"lr": house_start.MARKER}, 1),
        (Optimizer(house_start.MARKER), 1),
        (Model(Optimizer(house_start.MARKER)), 2),
        (Model(Model(Optimizer(house_start.MARKER))), None),
        (Optimizer(1e-5), None),
        (Optimizer, None),
        (None, None),
    ],
)
def test_distance_of_a_value_from_the_setting(value: object, distance: int | None) -> None:
    assert house_start.distance(value, deep=True) == distance
    near = distance if distance != 2 else None
    assert house_start.distance(value, deep=False) == near


def test_files_count_until_the_setting_is_in_adamw() -> None:
    rows: list[list[object]] = [
        [3, "c.py", "late", 1],
        [1, "b.py", "first", 2],
        [2, "b.py", "second", 1],
        [1, "a.py", "early", 1],
        [9, "d.py", "metrics", 1],
    ]
    assert house_start.first_touches(rows) is None
    rows.append([4, "", "AdamW", 0])
    assert house_start.first_touches(rows) == {"a.py": "early", "b.py": "second", "c.py": "late"}
    assert house_start.first_touches(rows, most=2) == {
        "a.py": "early",
        "b.py": "first",
        "c.py": "late",
    }


def test_the_tracer_writes_the_files_that_have_the_value(tmp_path: Path) -> None:
    code = "def has(value):\n    return len([value])\n\ndef has_not(value):\n    return 1\n"
    one: dict[str, Any] = {"__name__": "realsys.one"}
    two: dict[str, Any] = {"__name__": "launcher.two"}
    exec(compile(code, str(tmp_path / "one.py"), "exec"), one)
    exec(compile(code, str(tmp_path / "two.py"), "exec"), two)
    watch = house_start.Watch(tmp_path)
    before = sys.gettrace()
    sys.settrace(watch.on_call)
    try:
        one["has"](house_start.MARKER)
        two["has_not"](2.0)
    finally:
        sys.settrace(before)
    assert [row[1:] for row in house_start.read_rows(tmp_path)] == [["realsys/one.py", "has", 1]]
