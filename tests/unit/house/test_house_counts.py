"""What the gates of test_vocabulary.py count with (benchmarks/house.py) finds what they forbid."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import house

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


def test_class_names_twice_are_found_inside_of_others(modules: list[house.Module]) -> None:
    assert house.classes_twice(modules) == {
        "Verdict": ["launcher/status.py", "realsys/master/loop.py"]
    }


def test_file_names_of_mirrored_rooms_may_repeat(modules: list[house.Module]) -> None:
    assert house.files_twice(modules) == {"status.py": ["launcher/status.py", "realsys/status.py"]}


def test_a_third_file_of_a_mirrored_name_is_a_repetition(modules: list[house.Module]) -> None:
    third = house.Module("launcher/lease.py", "")
    assert "lease.py" in house.files_twice([*modules, third])


def test_rooms(modules: list[house.Module]) -> None:
    assert house.rooms(modules)["launcher"] == {"build.py", "cli.py", "status.py"}


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


def test_banned_names_of_the_tree(modules: list[house.Module]) -> None:
    assert house.banned_names(modules) == [
        ("desk", "rollout_desk", "realsys/master/loop.py"),
        ("told", "told", "launcher/status.py"),
    ]
