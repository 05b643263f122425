"""`make mutants` (tests/by_hand/mutants): which faults it plants, where, and how it counts."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest
from mutants.mutants import (
    JUDGED,
    ROOMS,
    ROOT,
    counts,
    draw,
    files_of,
    files_that_test,
    read_judged,
)
from mutants.mutations import REACHED, mutants_of, mutated, telling
from mutants.planting import functions_of, plant


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("a < b", {"a <= b", "a >= b"}),
        ("a == b", {"a != b"}),
        ("a is None", {"a is not None"}),
        ("a in b", {"a not in b"}),
        ("a and b", {"a or b"}),
        ("a + b", {"a - b"}),
        ("a / b", {"a * b"}),
        ("a | b", {"a & b"}),
        ("f(2)", {"f(3)", "f(1)", "pass"}),
        ("f(True)", {"f(False)", "pass"}),
        ("not a", {"a"}),
        ("-a", {"a"}),
        ("return a", {"return None"}),
        ("return None", set()),
        ("f(a)", {"pass"}),
        ("a.b = c", {"pass"}),
        ("a = b", set()),
        ("a += b", {"a -= b", "pass"}),
        ("raise a", {"pass"}),
        ("return min(a)", {"return None", "return max(a)"}),
        ("return any(a)", {"return None", "return all(a)"}),
        ("a[b:c]", {"a[b + 1:c]", "a[b:c - 1]"}),
        ("a[:c]", {"a[1:c]", "a[:c - 1]"}),
        ("a[b:]", {"a[b + 1:]", "a[b:-1]"}),
        ("a if b else c", {"a if True else c", "a if False else c"}),
        ("[a for a in b if c]", {"[a for a in b if True]", "[a for a in b if False]"}),
        # What no test should hold.
        ("log.info(f(2))", set()),
        ("assert a < b", set()),
        ("import a", set()),
        ("'a text'", set()),
        ("a: Literal[2] = b", set()),
        ("f'{a:.2f}'", set()),
        ("__all__ = [2]", set()),
    ],
)
def test_each_kind_of_fault(line: str, wanted: set[str]) -> None:
    source = f"def function():\n    {line}\n"
    found = mutants_of(source)
    planted = {ast.unparse(mutated(source, m.number)).splitlines()[1].strip() for m in found}
    assert planted == wanted
    assert len(found) == len(wanted)
    assert all((m.line, m.text, m.inside) == (2, line, True) for m in found)


def test_conditions_are_forced_and_loops_ended() -> None:
    source = "if a:\n    pass\nwhile b:\n    break\n"
    found = [(m.line, m.kind, m.change) for m in mutants_of(source)]
    assert found == [
        (1, "forced condition", "a → True"),
        (1, "forced condition", "a → False"),
        (3, "forced condition", "b → False"),
        (4, "deleted statement", "break → pass"),
    ]


def test_what_runs_at_import_is_told_from_what_a_function_runs() -> None:
    source = "A = 1\n@f(2)\ndef g(x: int = 3) -> int:\n    return lambda: 4\n"
    found = {m.change: m.inside for m in mutants_of(source)}
    assert found == {
        **dict.fromkeys(("1 → 2", "1 → 0", "3 → 4", "3 → 2"), False),
        **dict.fromkeys(("return lambda: 4 → return None", "4 → 5", "4 → 3"), True),
    }


@pytest.mark.thorough
def test_a_fault_is_planted_in_functions_that_others_hold_already(tmp_path: Path) -> None:
    path = tmp_path / "planted_here.py"
    path.write_text(
        textwrap.dedent("""
            import functools
            @functools.lru_cache
            def kept(a):
                return a + 1
            class Held:
                def inner(self):
                    return [n + 1 for n in (1, 2)]
        """)
    )
    names: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    kept, held = names["kept"], names["Held"]
    assert (kept(1), held().inner()) == (2, [2, 3])  # type: ignore[operator]
    found = [m for m in mutants_of(path.read_text()) if m.kind == "arithmetic"]
    for mutant in found:
        plant(path, mutated(path.read_text(), mutant.number), functions_of([str(path)])[str(path)])
        planted = kept(1), held().inner()  # type: ignore[operator]
        assert planted == ((0, [2, 3]) if mutant.line == 5 else (2, [0, 1]))
    assert [m.line for m in found] == [5, 8]


def test_each_statement_tells_that_it_is_reached() -> None:
    source = "f = lambda a: a\ndef g(a):\n    if a:\n        return f(a)\n    for _ in a:\n        break\n"
    told = list[int]()
    names = {REACHED: lambda file, line: told.append(line)}
    exec(compile(telling(source, "here"), "here", "exec"), names)
    for argument, wanted in ((1, [3, 4, 1]), ([], [3, 5])):
        told.clear()
        names["g"](argument)  # type: ignore[call-arg, arg-type]
        assert told == wanted
    statements = {m.change: m.statement for m in mutants_of(source)}
    assert statements["break → pass"] == 6
    assert statements["a → True"] == 3


def test_tests_of_a_file_are_its_mirror_and_those_that_import_it() -> None:
    first, *others = files_that_test("realsys/data/sequence_sample.py")
    assert first == "tests/unit/data/test_sequence_sample.py"
    assert all(name.startswith("tests/unit/data/") for name in others), "where many import it"
    assert files_that_test("launcher/audit/ticket_fates.py") == [
        "tests/unit/launcher/audit/test_audit_checks.py",
        "tests/unit/launcher/audit/test_audit_reader.py",
    ]


def test_a_seed_draws_the_same_faults() -> None:
    drawn = [draw("launcher/audit", files_of("launcher/audit"), seed, 9) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sum(map(len, drawn[0].values())) == 9


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_has_files(room: str) -> None:
    assert files_of(room)


def test_a_share_counts_what_can_be_found() -> None:
    left = [{"verdict": verdict} for verdict in ("equivalent", "equivalent", "trivial", "hole")]
    assert counts(12, left) == {
        "mutants": 12,
        "killed": 8,
        "equivalent": 2,
        "trivial": 1,
        "hole": 1,
        "found": 0.8,
    }


@pytest.mark.thorough
def test_judged_ones_are_faults_that_are_still_planted() -> None:
    for file, text, change in read_judged(JUDGED.read_text()):
        found = {(m.text, m.change) for m in mutants_of((ROOT / file).read_text())}
        assert (text, change) in found, f"{file}: {change}"
    with pytest.raises(ValueError, match="verdict"):
        read_judged('[[mutant]]\nfile = "a"\ntext = "b"\nchange = "c"\nverdict = "?"\nwhy = "d"\n')
