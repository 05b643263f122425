"""Plants faults in our pure files, one at a time: which of them does the unit tier not find?

Run by hand (``make mutants``): the faults are drawn with a seed from all that may be planted in a room, and
the tests of a file are its mirrored one (realsys/X/y.py → tests/unit/X/test_y.py) and those that import it;
what they leave is tried again with all of the folder. A survivor is a hole, unless ``judged.toml`` beside
this says why no test could or should find it: by file, line of the source and change, ``equivalent`` or
``trivial``. Wants 95 % of those that matter found, 92 % a room.

    python tests/by_hand/mutants/mutants.py --seed 12 --a-room 40 launcher/audit realsys/data
    python tests/by_hand/mutants/mutants.py --only launcher/audit/audit_reader.py:114  # all of a line
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import tomllib
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:1] = [*(str(ROOT / "tests" / part) for part in ("by_hand", "support")), str(ROOT)]

from by_hand import HandCheck  # noqa: E402
from mutants.mutations import Mutant, mutants_of  # noqa: E402
from mutants.planting import Planting, end_with_parent  # noqa: E402

JUDGED = Path(__file__).parent / "judged.toml"
WANTED, WANTED_OF_ROOM = 0.95, 0.92
FEW = 6  # importing test files
# Room → what of it is pure, or nearly: files whose rules the unit tier is to hold by itself.
ROOMS: Mapping[str, Sequence[str]] = {
    "launcher/audit": ["*.py"],
    "launcher/job": ["*.py"],
    "launcher/plan": ["*.py"],
    "launcher/trials": ["*.py"],
    "realsys/algorithms": ["**/*.py"],
    "realsys/data": ["*.py", "preferences/*.py", "sources/*.py", "transfer/transfer_plan.py"],
    "realsys/interfaces": ["**/*.py"],
    "realsys/master": ["graph/*.py", "run_progress.py", "statistics.py", "periodic.py"],
    "realsys/name_resolve": ["*.py", "file/*.py"],
    "realsys/planner": ["**/*.py"],
    "realsys/rewards": ["*.py", "final_answers/*.py", "programs/*.py", "guard/guarded.py"],
    "realsys/rollout": ["staleness/*.py", "conversation/**/*.py", "dialects/*.py", "worker/g*.py"],
    "realsys/slurm": ["*.py", "preflight/*.py"],
    "realsys/supervisor": ["health/*.py", "scaling/*.py", "attempt/*.py"],
    "realsys/trial": ["*.py"],
    "realsys/weights": ["layouts/*.py", "realloc/realloc_plan.py", "realloc/b*.py", "realloc/r*.py"],
}  # fmt: skip

Drawn = dict[str, list[Mutant]]  # file → its mutants
Survivor = dict[str, str | int]
TestsOf = Callable[[str], Sequence[str]]  # file → what pytest is given


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rooms", nargs="*", help="rooms (default: all)", metavar="ROOM")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--a-room", type=int, default=40, metavar="N", help="so many a room")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="so many files")
    parser.add_argument("--only", action="append", metavar="FILE[:LINE]", help="writes no result")
    parser.add_argument("--tests", nargs="*", help="of --only: instead of those found")
    asked = parser.parse_args()
    os.chdir(ROOT)
    if asked.only:
        return _only(asked.only, asked.at_once, asked.tests)
    rooms = asked.rooms or list(ROOMS)
    check, judged = HandCheck(__file__), read_judged(JUDGED.read_text())
    drawn = {room: draw(room, files_of(room), asked.seed, asked.a_room) for room in rooms}
    every = {file: mutants for of in drawn.values() for file, mutants in of.items()}
    found = run(every, asked.at_once, files_that_test)
    left = {f: [m for m in mutants if found[f][m.number] is None] for f, mutants in every.items()}
    for file, by in run(left, asked.at_once, folder_that_tests).items():
        found[file] |= by
    survivors = list[Survivor]()
    table = dict[str, dict[str, int | float]]()
    for room, of in drawn.items():
        left = [
            _described(file, mutant, judged)
            for file, mutants in of.items()
            for mutant in mutants
            if found[file][mutant.number] is None
        ]
        survivors += left
        table[room] = counts(sum(map(len, of.values())), left)
    table["all"] = counts(sum(int(row["mutants"]) for row in table.values()), survivors)
    for room, row in table.items():
        sys.stdout.write(f"{room:22} {json.dumps(row)}\n")
    problems = [
        f"{room}: {row['found']:.1%} found"
        for room, row in table.items()
        if float(row["found"]) < (WANTED if room == "all" else WANTED_OF_ROOM)
    ]
    args = f"--seed {asked.seed} --a-room {asked.a_room} {' '.join(asked.rooms)}"
    return check.write(
        "faults planted in pure files, and what the unit tier finds of them",
        problems,
        args=args,
        rooms=table,
        survivors=survivors,
    )


def _only(wanted: Iterable[str], at_once: int, tests: Sequence[str] | None) -> int:
    """Plants all faults of lines or files, and says for each which test finds it."""
    drawn: Drawn = {}
    for word in wanted:
        file, _, line = word.partition(":")
        here = mutants_of(Path(file).read_text())
        drawn.setdefault(file, []).extend(m for m in here if not line or m.line == int(line))
    found = run(drawn, at_once, files_that_test if tests is None else lambda _: tests)
    for file, mutants in drawn.items():
        for mutant in mutants:
            by = found[file][mutant.number] or "SURVIVED"
            sys.stdout.write(f"{file}:{mutant.line} [{mutant.kind}] {mutant.change}\n    {by}\n")
    return 0


def files_of(room: str) -> list[str]:
    """Returns the files of a room that faults are planted in."""
    found = {path for pattern in ROOMS[room] for path in (ROOT / room).glob(pattern)}
    return sorted(str(p.relative_to(ROOT)) for p in found if p.name != "__init__.py")


def draw(room: str, files: Sequence[str], seed: int, number: int) -> Drawn:
    """Draws ``number`` mutants from all of a room's files."""
    every = [(file, m) for file in files for m in mutants_of((ROOT / file).read_text())]
    drawn: Drawn = defaultdict(list)
    for file, mutant in random.Random(f"{seed} {room}").sample(every, min(number, len(every))):
        drawn[file].append(mutant)
    return dict(sorted(drawn.items()))


def files_that_test(file: str) -> list[str]:
    """Returns the test files of ``file``: the mirrored one first, then those of its room that import it,
    and of others where they are few; where there is none, ``folder_that_tests``."""
    path = Path(file)
    inner = path.relative_to("realsys") if path.parts[0] == "realsys" else path
    unit = Path("tests/unit")
    mirrored = unit / inner.parent / f"test_{path.stem}.py"
    module = re.escape(".".join(path.with_suffix("").parts))
    package, _, name = module.rpartition(r"\.")
    imported = re.compile(rf"(from|import) {module}\b|from {package} import .*\b{name}\b")
    texts = ((p, p.read_text()) for p in sorted(unit.rglob("test_*.py")) if p != mirrored)
    found = [str(p) for p, text in texts if imported.search(text) and "/house/" not in str(p)]
    if len(found) > FEW:
        found = [test for test in found if Path(test).is_relative_to(unit / inner.parts[0])][:FEW]
    if mirrored.exists():
        return [str(mirrored), *found]
    return found or folder_that_tests(file)


def folder_that_tests(file: str) -> list[str]:
    """Returns the nearest folder of tests/unit that mirrors one of the file's and has tests."""
    path = Path(file)
    inner = path.relative_to("realsys") if path.parts[0] == "realsys" else path
    return [str(next(p for p in (Path("tests/unit") / inner).parents if any(p.rglob("test_*.py"))))]


def run(drawn: Drawn, at_once: int, tests: TestsOf) -> dict[str, dict[int, str | None]]:
    """Plants all, ``at_once`` files at a time; returns for each mutant of a file the test that found it.

    Raises:
        RuntimeError: tests could not be run; after those of the other files.
    """
    _import_others()
    found, running = dict[str, dict[int, str | None]](), dict[int, tuple[str, Path]]()
    left, troubles = [file for file, mutants in drawn.items() if mutants], list[str]()
    with tempfile.TemporaryDirectory() as folder:
        while left or running:
            while left and len(running) < at_once:
                file = left.pop(0)
                results = Path(folder) / f"{file.replace('/', '.')}.jsonl"
                pid = _forked(Planting(ROOT / file, tests(file), drawn[file], results))
                running[pid] = file, results
            pid, status = os.wait()
            file, results = running.pop(pid)
            if status:
                log = results.with_suffix(".log").read_text()[-3000:]
                troubles.append(f"{file}: its tests did not run, {tests(file)}\n{log}")
                continue
            first, *rows = map(json.loads, results.read_text().splitlines())
            found[file] = {row["number"]: row["by"] for row in rows}
            survivors = [m for m in drawn[file] if found[file][m.number] is None]
            without = f", failing without: {first['failing']}" if first["failing"] else ""
            of = (
                f"{len(survivors)} of {len(rows)} survived, tests {first['seconds']:.1f} s{without}"
            )
            lines = (f"    {m.line} {m.kind}: {m.change}" for m in survivors)
            sys.stdout.write("\n".join([f"{file}: {of}", *lines]) + "\n")
            sys.stdout.flush()
    if troubles:
        raise RuntimeError("\n".join(troubles))
    return found


def _forked(planting: Planting) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        end_with_parent()
        log = os.open(planting.results.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        planting.run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _import_others() -> None:
    """Imports what takes long and is not ours, once for all forks."""
    from realsys.worker.environment import strict_sums

    os.environ.update({"HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "2000", **strict_sums()})
    import torch

    torch.set_num_threads(1)  # a pool of threads would be lost in a fork


def read_judged(text: str) -> dict[tuple[str, str, str], str]:
    """Reads (file, line of the source, change) → ``equivalent`` or ``trivial`` from judged.toml."""
    return {(m["file"], m["text"], m["change"]): m["verdict"] for m in _tables(text)}


def _tables(text: str) -> Iterator[dict[str, str]]:
    for table in tomllib.loads(text).get("mutant", ()):
        if table["verdict"] not in ("equivalent", "trivial") or not table["why"]:
            raise ValueError(f"{JUDGED.name}: {table} needs a verdict and why")
        yield table


def _described(file: str, m: Mutant, judged: Mapping[tuple[str, str, str], str]) -> Survivor:
    verdict = judged.get((file, m.text, m.change), "hole")
    return {"file": file, "line": m.line, "text": m.text, "change": m.change, "verdict": verdict}


def counts(number: int, survivors: Sequence[Survivor]) -> dict[str, int | float]:
    """Returns a room's row: ``found`` is the share of those that are not equivalent."""
    by = Counter(survivor["verdict"] for survivor in survivors)
    killed = number - len(survivors)
    share = killed / max(1, number - by["equivalent"])
    verdicts = {name: by[name] for name in ("equivalent", "trivial", "hole")}
    return {"mutants": number, "killed": killed, **verdicts, "found": round(share, 3)}


if __name__ == "__main__":
    sys.exit(main())
