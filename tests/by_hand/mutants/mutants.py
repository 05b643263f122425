"""Plants faults in our pure files, one at a time: which of them does the unit tier not find?

Run by hand (``make mutants``): the faults are drawn with seeds from all that may be planted in a room; its
tests are those of its folder and the few elsewhere that import a drawn file; of them, those that reach the
fault. A survivor is a hole, unless ``judged.toml`` beside this says why no test could or should find it: by
file, line of the source and change, ``equivalent`` or ``trivial``. Wants 95 % of those that matter found,
92 % a room. ``fresh`` in the table is the share before any survivor was closed.

    python tests/by_hand/mutants/mutants.py --seed 1 2 --a-room 40 -- launcher/audit realsys/data
    python tests/by_hand/mutants/mutants.py --again  # the survivors of the committed result
    python tests/by_hand/mutants/mutants.py --only launcher/audit/audit_reader.py:114  # all of it
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import json
import os
import random
import re
import socket
import struct
import sys
import tempfile
import tomllib
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:1] = [*(str(ROOT / "tests" / part) for part in ("by_hand", "support")), str(ROOT)]

from by_hand import HandCheck  # noqa: E402
from mutants.mutations import Mutant, mutants_of  # noqa: E402
from mutants.planting import Planting, end_with_parent  # noqa: E402

JUDGED = Path(__file__).parent / "judged.toml"
RESULT = Path(__file__).parent / "results" / "mutants.json"
WANTED, WANTED_OF_ROOM = 0.95, 0.92
OTHERS = ("hypothesis", "numpy", "pyarrow", "pyarrow.parquet", "transformers", "yaml")
APART = "REALSYS_MUTANTS_APART"
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1  # netdevice(7)
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
Found = dict[str, dict[int, str | None]]  # file → number of a mutant → the test that found it
Survivor = dict[str, Any]
Row = dict[str, int | float]


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rooms", nargs="*", help="rooms (default: all)", metavar="ROOM")
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--a-room", type=int, default=40, metavar="N", help="so many a room and seed"
    )
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="so many rooms")
    parser.add_argument(
        "--again", action="store_true", help="the survivors of the result, judged anew"
    )
    parser.add_argument("--only", action="append", metavar="FILE[:LINE]", help="writes no result")
    parser.add_argument("--tests", nargs="*", help="of --only and --again: instead of those found")
    asked = parser.parse_args()
    os.chdir(ROOT)
    go_apart()
    if asked.only:
        return _only(asked.only, asked.at_once, asked.tests)
    check = HandCheck(__file__)
    rooms = asked.rooms or list(ROOMS)
    table, survivors = _tried_again(asked, rooms) if asked.again else _tried_fresh(asked)
    table.pop("all", None)
    table["all"] = {
        seed: _counts_of([row[seed] for row in table.values() if seed in row])
        for seed in sorted({seed for row in table.values() for seed in row})
    }
    problems = list[str]()
    for room, rows in table.items():
        for seed, row in rows.items():
            sys.stdout.write(f"{room:22} seed {seed} {json.dumps(row)}\n")
            if float(row["found"]) < (WANTED if room == "all" else WANTED_OF_ROOM):
                problems.append(f"{room}, seed {seed}: {row['found']:.1%} found")
    return check.write(
        "faults planted in pure files, and what the unit tier finds of them",
        problems,
        args=" ".join(sys.argv[1:]),
        rooms=table,
        survivors=survivors,
    )


def go_apart() -> None:
    """Goes on in namespaces of our own: a fault that asks the kernel for something else reaches nobody.

    (The number of SIOCGIFADDR less one is SIOCSIFFLAGS, which took a machine's network down.)
    """
    if APART not in os.environ:
        os.environ[APART] = "1"
        command = ["unshare", "--net", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
        command += ["--kill-child"] if os.geteuid() == 0 else ["--kill-child", "--map-root-user"]
        os.execvp(command[0], [*command, "--", sys.executable, *sys.argv])
    with socket.socket() as any_socket:  # the loopback device of a new namespace is down
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


Table = dict[str, dict[str, Row]]  # room → seed → counts


def _last_result() -> tuple[Table, list[Survivor]]:
    said = json.loads(RESULT.read_text()) if RESULT.exists() else {"rooms": {}, "survivors": []}
    return said["rooms"], said["survivors"]


def _tried_fresh(asked: argparse.Namespace) -> tuple[Table, list[Survivor]]:
    """Draws for the rooms asked for; what the result says of others and other seeds stays."""
    rooms, judged = asked.rooms or list(ROOMS), read_judged(JUDGED.read_text())
    drawn = {
        (room, str(seed)): draw(room, files_of(room), seed, asked.a_room)
        for room in rooms
        for seed in asked.seed
    }
    found = run({room: _together(drawn, room) for room in rooms}, asked.at_once)
    table, survivors = _last_result()
    for (room, seed), of in drawn.items():
        survivors = [s for s in survivors if (s["room"], s["seed"]) != (room, seed)]
        left = [
            _described(room, seed, file, mutant, judged)
            for file, mutants in of.items()
            for mutant in mutants
            if found[file][mutant.number] is None
        ]
        survivors += left
        row = counts(sum(map(len, of.values())), left)
        table.setdefault(room, {})[seed] = {**row, "fresh": row["found"]}
    return table, survivors


def _together(drawn: Mapping[tuple[str, str], Drawn], room: str) -> Drawn:
    both: Drawn = {}
    for (of, _), files in drawn.items():
        for file, mutants in files.items() if of == room else ():
            both[file] = list(dict.fromkeys([*both.get(file, ()), *mutants]))
    return both


def _tried_again(asked: argparse.Namespace, rooms: Sequence[str]) -> tuple[Table, list[Survivor]]:
    """Plants anew what survived and is not judged; what is no longer there counts as found."""
    (_, survivors), judged = _last_result(), read_judged(JUDGED.read_text())
    there = dict[tuple[str, str, str], Mutant]()
    wanted: dict[str, Drawn] = {}
    for s in survivors:
        key = s["file"], s["text"], s["change"]
        if s["room"] in rooms and key not in judged:
            same = [
                m for m in mutants_of(Path(s["file"]).read_text()) if (m.text, m.change) == key[1:]
            ]
            for mutant in sorted(same, key=lambda m: abs(m.line - s["line"]))[:1]:
                there[key] = mutant
                of = wanted.setdefault(s["room"], {}).setdefault(s["file"], [])
                of += [mutant] if mutant not in of else []
    found = run(wanted, asked.at_once, asked.tests)
    table, survivors = _last_result()  # of rooms that somebody tried meanwhile
    left = list[Survivor]()
    for s in survivors:
        key = s["file"], s["text"], s["change"]
        if s["room"] not in rooms or (key in there and found[s["file"]][there[key].number] is None):
            left.append(s)
        elif key in judged:
            left.append({**s, "verdict": judged[key]})
    for room in set(rooms) & set(table) - {"all"}:
        for seed, row in table[room].items():
            here = [s for s in left if (s["room"], s["seed"]) == (room, seed)]
            table[room][seed] = {**counts(int(row["mutants"]), here), "fresh": row["fresh"]}
    return table, left


def _counts_of(rows: Sequence[Row]) -> Row:
    sums = {name: sum(int(row[name]) for row in rows) for name in list(rows[0])[:5]}
    fresh = sum(row["fresh"] * (row["mutants"] - row["equivalent"]) for row in rows)
    found = sum(row["found"] * (row["mutants"] - row["equivalent"]) for row in rows)
    of = max(1, sums["mutants"] - sums["equivalent"])
    return {**sums, "found": round(found / of, 3), "fresh": round(fresh / of, 3)}


def _only(wanted: Iterable[str], at_once: int, tests: Sequence[str] | None) -> int:
    """Plants all faults of lines or files, and says for each which test finds it."""
    drawn: Drawn = {}
    for word in wanted:
        file, _, line = word.partition(":")
        here = mutants_of(Path(file).read_text())
        drawn.setdefault(file, []).extend(m for m in here if not line or m.line == int(line))
    every = [test for file in drawn for test in files_that_test(file)] if tests is None else tests
    found = run({"": drawn}, at_once, list(dict.fromkeys(every)))
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


def run(rooms: Mapping[str, Drawn], at_once: int, tests: Sequence[str] | None = None) -> Found:
    """Plants all, ``at_once`` rooms at a time; returns for each mutant of a file the test that found it.

    Raises:
        RuntimeError: tests could not be run; after those of the other rooms.
    """
    _import_others()
    found, running = Found(), dict[int, tuple[str, Path]]()
    left, troubles = [room for room, drawn in rooms.items() if drawn], list[str]()
    with tempfile.TemporaryDirectory() as folder:
        while left or running:
            while left and len(running) < at_once:
                room = left.pop(0)
                results = Path(folder) / f"{room.replace('/', '.')}.jsonl"
                near = {file: files_that_test(file) for file in rooms[room]}
                of_room = tests or tests_of_room(room, near)
                running[_forked(Planting(rooms[room], near, of_room, results))] = room, results
            pid, status = os.wait()
            if pid not in running:  # an orphan of the tests: we are the first process here
                continue
            room, results = running.pop(pid)
            if status:
                log = results.with_suffix(".log").read_text()[-3000:]
                troubles.append(f"{room}: its tests did not run\n{log}")
                continue
            first, *rows = map(json.loads, results.read_text().splitlines())
            for row in rows:
                found.setdefault(row["file"], {})[row["number"]] = row["by"]
            lines = [
                f"    {file}:{m.line} {m.kind}: {m.change}"
                for file, mutants in rooms[room].items()
                for m in mutants
                if found[file][m.number] is None
            ]
            without = f", failing without: {first['failing']}" if first["failing"] else ""
            said = f"{room}: {len(lines)} of {len(rows)} survived, {first['tests']} tests took"
            said += f" {first['seconds']:.0f} s, a mutant {mean(r['seconds'] for r in rows):.1f} s"
            sys.stdout.write("\n".join([said + without, *lines]) + "\n")
            sys.stdout.flush()
    if troubles:
        raise RuntimeError("\n".join(troubles))
    return found


def tests_of_room(room: str, near: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the room's folder, and files of others that are near one of its files."""
    (folder,) = folder_that_tests(f"{room}/any.py")
    others = (test for tests in near.values() for test in tests)
    return [folder, *dict.fromkeys(t for t in others if not Path(t).is_relative_to(folder))]


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

    for name in OTHERS:
        importlib.import_module(name)
    torch.set_num_threads(1)  # a pool of threads would be lost in a fork


def read_judged(text: str) -> dict[tuple[str, str, str], str]:
    """Reads (file, line of the source, change) → ``equivalent`` or ``trivial`` from judged.toml."""
    return {(m["file"], m["text"], m["change"]): m["verdict"] for m in _tables(text)}


def _tables(text: str) -> Iterator[dict[str, str]]:
    for table in tomllib.loads(text).get("mutant", ()):
        if table["verdict"] not in ("equivalent", "trivial") or not table["why"]:
            raise ValueError(f"{JUDGED.name}: {table} needs a verdict and why")
        yield table


def _described(
    room: str, seed: str, file: str, m: Mutant, judged: Mapping[tuple[str, str, str], str]
) -> Survivor:
    verdict = judged.get((file, m.text, m.change), "hole")
    place: Survivor = {"room": room, "seed": seed, "file": file, "line": m.line}
    return {**place, "text": m.text, "change": m.change, "verdict": verdict}


def counts(number: int, survivors: Sequence[Survivor]) -> dict[str, int | float]:
    """Returns a room's row: ``found`` is the share of those that are not equivalent."""
    by = Counter(survivor["verdict"] for survivor in survivors)
    killed = number - len(survivors)
    share = killed / max(1, number - by["equivalent"])
    verdicts = {name: by[name] for name in ("equivalent", "trivial", "hole")}
    return {"mutants": number, "killed": killed, **verdicts, "found": round(share, 3)}


if __name__ == "__main__":
    sys.exit(main())
