"""No name of a file is made from a pid: equal pids are common on several hosts, and in containers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from realsys.trial.temporary_names import replace_text, temporary_beside

ROOT = Path(__file__).parents[3]
RANDOM = ("token_hex", "token_bytes", "urandom", "uuid4")
# Where text is made from a pid that nothing else in it makes unique, and why that is safe.
EXCEPTIONS = {
    "realsys/generation/served_engines/memory_folder.py": "the kernel's own name, below /proc",
    "realsys/generation/server/build.py": "no file's name: tells one start of a server from the next",
}


def _is_call_of(node: ast.AST, *names: str) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", "")) in names


def pid_names(source: str) -> Iterator[str]:
    """Yields the texts that a module makes from its own pid without anything random."""
    tree = ast.parse(source)
    pids = {
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_call_of(node.value, "getpid")
        for target in node.targets
    }
    for node in ast.walk(tree):
        is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod | ast.Div)
        is_text = isinstance(node, ast.JoinedStr) or _is_call_of(
            node, "format", "join", "with_name", "with_suffix", "with_stem"
        )
        if not (is_text or (is_sum and any(_is_text(x) for x in ast.walk(node)))):
            continue
        inner = list(ast.walk(node))
        has_pid = any(
            _is_call_of(x, "getpid")
            or (isinstance(x, ast.Name | ast.Attribute) and ast.unparse(x) in pids)
            for x in inner
        )
        if has_pid and not any(_is_call_of(x, *RANDOM) for x in inner):
            yield ast.unparse(node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("path.with_suffix(f'.{os.getpid()}')", True),
        ("open(f'{path}.{getpid()}.new', 'w')", True),
        ("name = 'x-' + str(os.getpid())", True),
        ("name = '%s-%d' % (host, os.getpid())", True),
        ("name = '{}.{}'.format(path, os.getpid())", True),
        ("path = folder / str(os.getpid()) / 'x'", True),
        ("pid = os.getpid()\npath = f'{host}-{pid}'", True),
        ("self._pid = os.getpid()\npath = f'{self._pid:04d}'", True),
        ("f'{os.getpid()}-{secrets.token_hex(6)}'", False),
        ("logger.info('pid=%d', os.getpid())", False),
        ("start = os.getpid() * 7919 % 100", False),
        ("Process(pid=os.getpid(), host=f'{host}')", False),
        ("pid = os.getpid()\nargv = [str(pid)]", False),
    ],
)
def test_a_name_made_from_a_pid_is_found(source: str, is_found: bool) -> None:
    assert bool(list(pid_names(source))) == is_found


def test_no_name_is_made_from_a_pid() -> None:
    found = {}
    for folder in ("realsys", "launcher", "experiments", "release"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if "getpid" in text and (names := list(pid_names(text))):
                found[str(path.relative_to(ROOT))] = names
    assert {name: made for name, made in found.items() if name not in EXCEPTIONS} == {}
    assert found.keys() == EXCEPTIONS.keys(), "an exception that nothing needs"


def test_a_temporary_name_lies_beside_its_target_and_is_another_each_time(tmp_path: Path) -> None:
    names = {temporary_beside(tmp_path / "model", prefix=".removed-") for _ in range(100)}
    assert len(names) == 100
    assert {name.parent for name in names} == {tmp_path}
    assert all(name.name.startswith(".removed-model.") for name in names)


def test_a_file_that_can_not_be_replaced_leaves_no_other(tmp_path: Path) -> None:
    replace_text(tmp_path / "a", "1")
    replace_text(tmp_path / "a", "2")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "2")]
    (tmp_path / "folder" / "x").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        replace_text(tmp_path / "folder", "3")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "folder"]
