"""What a tree does when it is started: the files that a setting goes through, times of the command line.

`benchmarks/house.py` prints these rows beside those that it reads. By itself, with all files by name:

    python benchmarks/house_start.py [--tree DIR] [--rounds 15] [--trace-only]

**Files that touch ``actor.optimizer.lr``** between the command line and AdamW, counted in a run: a small
``ppo-math`` is launched on this machine with a value that nothing else has (``MARKER``). Every Python
process of the trial traces itself and looks at each frame of the tree's code when it returns, yields or
ends by an exception, and at those still open when the value arrives in ``torch.optim.AdamW.__init__``.
A file *touches* the setting when a local variable or the returned value of such a frame is the value (a
float, or a text of at most 200 characters that has it: a word of the command line), or is a mapping, a
sequence, a set or an object of which an item or an attribute is. In a second row also count files that
only have what holds such a thing, as a model's configuration holds its optimizer's (in the first 300
returns of each function). Further in does not count: a file that hands on the whole plan is in neither.
Counting ends, for all processes, when the value is in AdamW; then the trial is killed. A file is listed
with the function that had it first, in the order of their returns. Modules' own frames are left out, so
code that only states a default does not count.

**Times** of the command line are medians of rounds in which all commands take turns, so that other load
hits them alike, divided by that of ``python -c pass``. The tree's own code is run, by the interpreter that
runs this file, through the same lines as the installed program. Tab is what the shell calls: ``realsys
__complete la``, and for settings ``realsys __complete launch ppo-math algorithm.``, when they are known.
``status`` and ``ls`` see a trial that was launched and killed. All modules have been compiled by a round
before the first that counts. The same by computing time (user and system) stands beside it: on a busy
machine it is the steadier of the two. Compare figures of one environment only: the ``.pth`` files of its
packages can double the time of ``python -c pass``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType, MemberDescriptorType
from typing import Any

MARKER = 1.2345678e-05
MARKER_TEXT = repr(MARKER)
LONGEST_TEXT = 200
MOST_ITEMS = 200
MOST_DEEP_RETURNS = 300  # of a function's returns
SETTING = "actor.optimizer.lr"
FOLDER = "REALSYS_HOUSE_FOLDER"  # where processes write what they saw
PACKAGES = ("realsys", "launcher", "experiments")
SMALL_RUN = (
    "task.train_size=16",
    "task.eval_size=8",
    "train_bs_n_seqs=8",
    "group_size=2",
    "gen.max_new_tokens=12",
    "algorithm.ppo_n_minibatches=2",
    "scheduling.model_worker.cpu=1",
)


# What is looked at in a process of the trial


def distance(value: object, *, deep: bool) -> int | None:
    """0: a value is the marker, 1: it holds it, 2: it holds what does (asked if ``deep``); None: else."""
    if _is_marker(value):
        return 0
    held = list(_direct(value))
    if any(map(_is_marker, held)):
        return 1
    if deep and any(_is_marker(inner) for item in held for inner in _direct(item)):
        return 2
    return None


def _is_marker(value: object) -> bool:
    if type(value) is float:
        return value == MARKER
    return type(value) is str and len(value) <= LONGEST_TEXT and MARKER_TEXT in value


def _direct(value: object) -> Iterator[object]:
    """Items or attributes of a value, read without running code of its class."""
    if isinstance(value, dict):
        yield from list(value.values())[:MOST_ITEMS]
    elif isinstance(value, list | tuple | set | frozenset):
        yield from list(value)[:MOST_ITEMS]
    elif not isinstance(value, type | str | bytes | int | float):
        try:
            yield from list(object.__getattribute__(value, "__dict__").values())[:MOST_ITEMS]
        except AttributeError:
            pass  # it has none
        for kind in type(value).__mro__:
            members = [m for m in list(vars(kind).values()) if isinstance(m, MemberDescriptorType)]
            for member in members:
                try:
                    yield member.__get__(value)
                except AttributeError:
                    pass  # not set


def module_path(frame: FrameType) -> str | None:
    """The file of the tree that a frame runs, relative to it; None for code of others."""
    names = frame.f_globals
    name = names.get("__name__")
    if name == "__main__":
        name = getattr(names.get("__spec__"), "name", None)
    if not isinstance(name, str) or name.partition(".")[0] not in PACKAGES:
        return None
    package = frame.f_code.co_filename.endswith("/__init__.py")
    return name.replace(".", "/") + ("/__init__.py" if package else ".py")


class Watch:
    """Traces this process; writes each file's first touch, and the arrival in AdamW, to the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: dict[str, str | None] = {}  # by co_filename; None: need not be looked at
        self.near: set[str] = set()  # files that had what holds it
        self.examined: Counter[CodeType] = Counter()

    def begin(self) -> None:
        threading.settrace(self.on_call)
        sys.settrace(self.on_call)

    def on_call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        filename = code.co_filename
        if filename not in self.paths:
            self.paths[filename] = module_path(frame)
        if self.paths[filename] is None:
            adamw = code.co_name == "__init__" and filename.endswith("torch/optim/adamw.py")
            if adamw and frame.f_locals.get("lr") == MARKER:
                self.examine_callers(frame)
                self.write("", "AdamW", 0)
            return None
        if code.co_name == "<module>":
            return None
        frame.f_trace_lines = False
        return self.on_return

    def on_return(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "return" and self.paths[frame.f_code.co_filename] is not None:
            self.examine(frame, argument)
        return self.on_return

    def examine(self, frame: FrameType, returned: object) -> None:
        """Writes what a frame of the tree adds to what is known of its file."""
        code = frame.f_code
        path = self.paths[code.co_filename]
        if path is None:
            return
        self.examined[code] += 1
        deep = path not in self.near and self.examined[code] <= MOST_DEEP_RETURNS
        values = [returned, *frame.f_locals.values()]
        found = [d for value in values if (d := distance(value, deep=deep)) is not None]
        if found and min(found) < 2:
            self.paths[code.co_filename] = None  # nothing nearer is asked
            self.write(path, code.co_qualname, 1)
        elif found:
            self.near.add(path)
            self.write(path, code.co_qualname, 2)

    def examine_callers(self, frame: FrameType) -> None:
        """The frames that wait for this one have not returned yet."""
        above = frame.f_back
        while above is not None:
            if above.f_code.co_name != "<module>" and above.f_code.co_filename in self.paths:
                self.examine(above, None)
            above = above.f_back

    def write(self, path: str, function: str, distance: int) -> None:
        row = json.dumps([time.monotonic_ns(), path, function, distance]) + "\n"
        file = os.open(self.folder / f"{os.getpid()}.rows", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        try:
            os.write(file, row.encode())
        finally:
            os.close(file)


def watch_this_process() -> None:
    """What `sitecustomize` of the processes calls."""
    Watch(Path(os.environ[FOLDER])).begin()


# The run


def first_touches(rows: Iterable[list[Any]], *, most: int = 1) -> dict[str, str] | None:
    """File -> function that touched the setting first, in order of time; None before it is in AdamW.

    Args:
        most: the largest `distance` that counts.
    """
    ordered = sorted(rows)
    arrival = next((row[0] for row in ordered if row[2] == "AdamW"), None)
    if arrival is None:
        return None
    found: dict[str, str] = {}
    for when, path, function, away in ordered:
        if path and when <= arrival and away <= most:
            found.setdefault(path, function)
    return found


def read_rows(folder: Path) -> list[list[Any]]:
    """What all processes have written; the last line of a file may be half written."""
    lines = [line for file in folder.glob("*.rows") for line in file.read_text().splitlines(True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def environment_of(tree: Path, root: Path) -> dict[str, str]:
    """Of every command: the tree's code, files below ``root``, nothing of the user's."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("REALSYS_")},
        "PYTHONPATH": str(tree),
        "REALSYS_FILE_ROOT": str(root),
        "XDG_CONFIG_HOME": str(root / "config"),
        "XDG_STATE_HOME": str(root / "state"),
        "XDG_CACHE_HOME": str(root / "cache"),
        "COLUMNS": "200",
    }


def program(folder: Path) -> list[str]:
    """The installed program, as pip writes it; of a revision before launcher/cli too."""
    path = folder / "realsys"
    path.write_text(
        "import sys\n"
        "try:\n    from launcher.cli.entry import main\n"
        "except ModuleNotFoundError:\n    from launcher.entry import main\n"
        "sys.exit(main())\n"
    )
    return [sys.executable, str(path)]


def processes_of(root: Path) -> list[int]:
    """Pids of the processes whose environment names a file root that only this run has."""
    mark = f"REALSYS_FILE_ROOT={root}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                pass  # gone, or another user's
    return found


def kill_trial(root: Path) -> None:
    """Kills the processes of a run until there are none."""
    while pids := processes_of(root):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.1)


def trace_setting(tree: Path, *, timeout_s: float = 60) -> list[list[Any]]:
    """Launches the small run and returns its rows for `first_touches`.

    Raises:
        TimeoutError: the marker did not arrive in AdamW in time.
    """
    with tempfile.TemporaryDirectory(prefix="house-") as name:
        folder = Path(name)
        root, seen, site = folder / "root", folder / "seen", folder / "site"
        for made in (root, seen, site):
            made.mkdir()
        (site / "sitecustomize.py").write_text(
            "import importlib.util as u\n"
            f"s = u.spec_from_file_location('house_start', {str(Path(__file__).resolve())!r})\n"
            "m = u.module_from_spec(s)\ns.loader.exec_module(m)\nm.watch_this_process()\n"
        )
        environment = environment_of(tree, root) | {FOLDER: str(seen)}
        environment["PYTHONPATH"] = f"{site}:{tree}"
        policy = make_policy(tree, folder / "policy", environment_of(tree, root))
        words = ["launch", "ppo-math", f"{SETTING}={MARKER_TEXT}", f"actor.path={policy}"]
        words += [*SMALL_RUN, "--detach"]
        deadline = time.monotonic() + timeout_s
        try:
            done = subprocess.run(
                [*program(folder), *words],
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"the run was not launched:\n{done.stdout}{done.stderr}")
            while first_touches(rows := read_rows(seen)) is None:
                if time.monotonic() > deadline or not processes_of(root):
                    raise TimeoutError(_explanation(root, rows))
                time.sleep(0.2)
            return rows
        finally:
            kill_trial(root)


def _explanation(root: Path, rows: list[list[Any]]) -> str:
    logs = sorted(root.glob("runs/*/*/*/latest/logs/*.log"))
    tails = [f"{log.name}: {log.read_text(errors='replace')[-2000:]}" for log in logs]
    files = sorted({row[1] for row in rows})
    return "\n".join([f"the marker did not arrive in AdamW; seen so far: {files}", *tails])


def defining_module(tree: Path, name: str) -> str:
    """The dotted name of the module of a tree that defines a function, wherever that stands by now."""
    for path in sorted((tree / "realsys").rglob("*.py")):
        if f"\ndef {name}(" in path.read_text(encoding="utf-8"):
            return path.relative_to(tree).as_posix().removesuffix(".py").replace("/", ".")
    raise LookupError(f"no module of {tree} defines {name}")


def make_policy(tree: Path, folder: Path, environment: dict[str, str]) -> Path:
    """A random policy of a few thousand weights, so that the run needs no phase that trains one first."""
    code = f"""
from pathlib import Path
from {defining_module(tree, "build_tiny_llama")} import build_tiny_llama
from {defining_module(tree, "arithmetic_word_problems")} import arithmetic_word_problems
problems = arithmetic_word_problems(num_problems=500, seed=0, split="train")
build_tiny_llama(
    Path({str(folder)!r}), seed=0, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1,
    corpus=[p["prompt"] + p["answer"] for p in problems],
)
"""
    # Not where we stand: -c puts that folder before PYTHONPATH.
    subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=folder.parent, check=True, timeout=60
    )
    return folder


# Times


def commands(realsys: list[str]) -> dict[str, list[str]]:
    """What is timed, by the name of its row."""
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "--help": [*realsys, "--help"],
        "Tab": [*realsys, "__complete", "la"],
        "Tab of settings": [*realsys, "__complete", "launch", "ppo-math", "algorithm."],
        "status": [*realsys, "status", "ppo-math/run1"],
        "ls": [*realsys, "ls"],
        "plan": [*realsys, "plan", "ppo-math"],
    }


def time_ratios(tree: Path, *, rounds: int) -> dict[str, float]:
    """Median time of each command as a multiple of ``python -c pass``, by clock and by CPU."""
    with tempfile.TemporaryDirectory(prefix="house-") as name:
        folder = Path(name)
        root = folder / "root"
        root.mkdir()
        environment = environment_of(tree, root) | {"PYTHONPYCACHEPREFIX": str(folder / "pycache")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling is not what is measured
        realsys = program(folder)
        try:
            launch = [*realsys, "launch", "ppo-math", "--trial", "run1", "--detach"]
            subprocess.run(launch, env=environment, check=True, capture_output=True, timeout=60)
        finally:
            kill_trial(root)
        names = commands(realsys)
        wall: dict[str, list[float]] = {name: [] for name in names}
        cpu: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds + 1):
            for name, command in names.items():
                seconds = timed(command, environment, folder)
                wall[name].append(seconds[0])
                cpu[name].append(seconds[1])
    rows: dict[str, float] = {}
    for kind, taken in (("", wall), (", CPU", cpu)):
        medians = {name: statistics.median(found[1:]) for name, found in taken.items()}
        base = medians.pop("python -c pass")
        rows[f"python -c pass{kind} (ms)"] = round(1000 * base, 1)
        rows |= {f"{name} / pass{kind}": round(value / base, 1) for name, value in medians.items()}
    return rows


def timed(command: list[str], environment: dict[str, str], folder: Path) -> tuple[float, float]:
    """Seconds that a command took, on the clock and of computing; its output goes nowhere."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime


def rows_of(tree: Path, *, rounds: int) -> dict[str, str | int | float]:
    """All rows of this file for `benchmarks/house.py`."""
    rows = trace_setting(tree)
    return {
        f"files that touch {SETTING}": len(first_touches(rows) or ()),
        f"files that touch {SETTING} or what holds it": len(first_touches(rows, most=2) or ()),
        **time_ratios(tree, rounds=rounds),
    }


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--trace-only", action="store_true")
    given = parser.parse_args()
    tree: Path = given.tree.resolve()
    rows = trace_setting(tree)
    near = first_touches(rows) or {}
    away = {k: v for k, v in (first_touches(rows, most=2) or {}).items() if k not in near}
    for title, found in ((f"files that touch {SETTING}", near), ("that hold what has it", away)):
        sys.stdout.write(f"{len(found)} {title}:\n")
        for number, (path, function) in enumerate(found.items(), 1):
            sys.stdout.write(f"  {number}. {path}: {function}\n")
    if not given.trace_only:
        for name, value in time_ratios(tree, rounds=given.rounds).items():
            sys.stdout.write(f"{name}: {value}\n")


if __name__ == "__main__":
    main()
