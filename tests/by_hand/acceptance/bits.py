"""Do the same seeds still give the same bits? Seven small runs, compared. By hand; some 2 minutes.

    python tests/by_hand/acceptance/bits.py                     this tree against results/bits.json
    python tests/by_hand/acceptance/bits.py --against REVISION  this tree against that revision
    python tests/by_hand/acceptance/bits.py --tree DIR --out F  another checkout's record into F
    python tests/by_hand/acceptance/bits.py --compare A B       two records; runs nothing

For whoever changes code that must not change numbers. A record holds every metric of every step, except
LEFT_OUT, and SHA-256 hashes: of each saved model's tensors, of the evaluations' samples, of the ledger.
A comparison prints a table, names the first metric that differs with both values, and exits with 1 at a
difference. A metric that only one of the two revisions writes is named, and is no difference. Rounding
depends on the processor's instructions and on torch: records of two kinds of machine are not compared (exit
status 2).

It uses the command line and the files of a trial's folder only, so it runs trees whose modules have other
names. Whether the numbers are right is not its subject.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from realsys.observability.metric_catalogue import with_current_names

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
RESULT = HERE / "results" / "bits.json"
TRIAL_S, COMMAND_S = 900.0, 180.0
LEFT_OUT = {
    r"time/": "seconds",
    r"perf/": "rates and idle shares, computed from seconds",
    r"rollout/seconds": "seconds that an answer took",
    r"rollout/(in_flight|ready|waiting)$": "questions under way at the moment of counting",
    r"rollout/servers_at_version$": "servers that had the weights at the moment of asking",
}
# A setting that has another name in an older tree: today's name → the older one, used where the tree's
# `show --config --json` does not list today's.
FORMER_NAMES: dict[str, str] = {
    "scheduling.model_worker.cpu": "cpus_per_model_worker",
    "sft.scheduling.model_worker.cpu": "sft.cpus_per_model_worker",
}

SMALL = (
    "sft.init.hidden_size=32",
    "sft.init.num_layers=2",
    "sft.task.train_size=960",
    "sft.task.eval_size=16",
    "sft.exp_ctrl.eval_freq_steps=8",
    "sft.scheduling.model_worker.cpu=1",
    "task.train_size=96",
    "train_bs_n_seqs=8",
    "task.eval_size=16",
    "group_size=4",
    "gen.max_new_tokens=16",
    "algorithm.overlong_buffer_len=12",  # a score that depends on the answer, before any is right
    "algorithm.ppo_n_minibatches=2",
    "actor.optimizer.lr=1e-3",
    "exp_ctrl.ckpt_freq_steps=3",
    "exp_ctrl.ckpt_freq_secs=none",
    "exp_ctrl.eval_freq_steps=4",
    "exp_ctrl.save_freq_steps=6",
    "scheduling.model_worker.cpu=1",
    "tensorboard=false",
    "sft.tensorboard=false",
)
SAVED = "checkpoints/actor/step-000012"
STOP_AT = 4  # of 12 steps
# Answers of one digit, some of which the starting policy guesses: rewards are not all 0.
QUESTIONS = [
    {
        "prompt": f"Ida has {i % 4 + 1} pencils and buys {i % 3 + 1} more. How many?\n",
        "answer": str(i % 4 + i % 3 + 2),
    }
    for i in range(112)
]
# A model that is given has neither by itself, since 2026-11-27.
PULLED = ("algorithm.kl_ctl=0.01", "algorithm.entropy_coef=0.01")
# Name in the table → experiment, further settings. `resume` and `replay` follow in record_of.
RUNS = {
    "ppo-math": ("ppo-math", ()),
    "grpo-math": ("grpo-math", ("task.path={questions}", "actor.path={saved}", *PULLED)),
    "ppo-math-split": ("ppo-math-split", ()),
    "ppo-math-async": ("ppo-math-async", ("schedule.max_staleness=0", "schedule.servers=2")),
    "megatron": (
        "ppo-math",
        ("actor.backend=megatron", "actor.parallel=t2", "placement.allocation=actor_gen:d2"),
    ),
}


class Tree:
    """A checkout, its command line, and a file root of its own."""

    def __init__(self, folder: Path, file_root: Path) -> None:
        self.folder, self.file_root = folder.resolve(), file_root
        own = self.folder / ".venv" / "bin" / "python"
        scripts = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["scripts"]
        module, _, function = scripts["realsys"].partition(":")
        call = f"import sys; from {module} import {function}; sys.exit({function}())"
        self._start = [str(own if own.exists() else sys.executable), "-c", call]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("REALSYS_", "SLURM_"))}
        self._environment = {
            **kept,
            "PYTHONPATH": str(self.folder),
            "REALSYS_FILE_ROOT": str(file_root),
            "XDG_CONFIG_HOME": str(file_root / "config"),
            "XDG_STATE_HOME": str(file_root / "state"),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
        }

    def realsys(self, *words: str, timeout_s: float = COMMAND_S) -> str:
        """Runs a command; returns its stdout and stderr. Raises RuntimeError if it failed."""
        done = subprocess.run(
            [*self._start, *words],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"realsys {' '.join(words)}: {done.returncode}\n{done.stdout}")
        return done.stdout

    def machine(self) -> dict[str, Any]:
        """What rounding depends on."""
        ask = "import torch; print(torch.__version__, torch.backends.cpu.get_cpu_capability())"
        done = subprocess.run(
            [self._start[0], "-c", ask], capture_output=True, text=True, check=True
        )
        torch, capability = done.stdout.split()
        facts = dict(
            (part.strip() for part in line.split(":", 1))
            for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        )
        wide = re.compile(r"avx|fma|amx|sse4|f16c|bf16")
        return {
            "processor": f"{facts.get('model name')}, family {facts.get('cpu family')}, "
            f"model {facts.get('model')}",
            "vector_instructions": " ".join(
                sorted(w for w in facts.get("flags", "").split() if wide.search(w))
            ),
            "torch_capability": capability,
            "torch": torch,
        }

    def launch(self, experiment: str, trial: str, settings: tuple[str, ...]) -> Path:
        """Starts a trial; returns its folder."""
        listed = self.realsys("show", "--config", experiment, "--json") if FORMER_NAMES else ""
        critic = ("critic.optimizer.lr=1e-3",) if experiment.startswith("ppo") else ()
        words = [as_named_in(listed, word) for word in (*SMALL, *critic, *settings)]
        self.realsys("launch", experiment, "--trial", trial, "--detach", *words)
        (folder,) = self.file_root.glob(f"runs/*/{experiment}/{trial}")
        return folder

    def wait(self, folder: Path) -> None:
        """Until the trial is over; RuntimeError, with its words, when it did not complete."""
        name = f"{folder.parent.name}/{folder.name}"
        try:
            self.realsys("wait", name, "--timeout", str(TRIAL_S), timeout_s=TRIAL_S + COMMAND_S)
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):
                raise RuntimeError(f"{error}\n{self.realsys('explain', name)}") from None
            raise

    def stop_all(self) -> None:
        """Ends what is left under this file root."""
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            self.realsys("stop", "--all", "--yes", "--grace", "5")


def as_named_in(listed: str, word: str) -> str:
    """A setting, by the name that it has in a tree whose `show --config --json` listed so."""
    name, _, value = word.partition("=")
    if name in FORMER_NAMES and f'"path": "{name}"' not in listed:
        name = FORMER_NAMES[name]
    return f"{name}={value}"


def stop_in_the_middle(folder: Path) -> None:
    """Stops a trial after STOP_AT steps, by the signal that `realsys stop` falls back to: at once."""
    deadline = time.monotonic() + TRIAL_S
    while rows_done(folder) < STOP_AT:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{folder} made no {STOP_AT} steps in {TRIAL_S:.0f} s")
        time.sleep(0.02)
    attempt = json.loads((folder / "attempts" / "0001" / "attempt.json").read_text())
    os.kill(attempt["supervisor_pid"], signal.SIGTERM)
    ended = folder / "attempts" / "0001" / "exit.json"
    while not ended.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{folder} was told to stop and did not")
        time.sleep(0.1)
    if (result := json.loads(ended.read_text())["result"]) != "stopped":
        raise RuntimeError(f"{folder} was to be stopped in its middle and {result}: run this again")


def rows_done(folder: Path) -> int:
    """Steps that the main phase has written."""
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n") - 1  # row 0: before any step
    except FileNotFoundError:
        return 0


# ---- what is recorded -------------------------------------------------------------------------


def bits_of(folder: Path) -> dict[str, Any]:
    """Of a trial that is over: what its phases measured, and the hashes of what they saved."""
    phases = {"main": folder, **{p.name: p for p in sorted(folder.glob("prepare/*"))}}
    return {
        "phases": {name: phase_bits(phase) for name, phase in phases.items()},
        "weights": {
            str(file.relative_to(folder)): tensors_hash(file)
            for name, phase in phases.items()
            for file in sorted(phase.glob("checkpoints/*/step-*/*.safetensors"))
        },
    }


def phase_bits(phase: Path) -> dict[str, Any]:
    """A column for each metric, ``None`` in the rows that don't have it."""
    rows = [json.loads(line) for line in (phase / "metrics.jsonl").read_text().splitlines()]
    keys = sorted({key for row in rows for key in row if key != "step" and is_kept(key)})
    return {
        "steps": [row["step"] for row in rows],
        "metrics": {key: [row.get(key) for row in rows] for key in keys},
        "samples": hashlib.sha256((phase / "samples.jsonl").read_bytes()).hexdigest(),
        "ledger": hashlib.sha256((phase / "ledger.jsonl").read_bytes()).hexdigest(),
    }


def is_kept(key: str) -> bool:
    """Whether a metric measures the training, not the machine."""
    return not any(re.match(pattern, key) for pattern in LEFT_OUT)


def tensors_hash(file: Path) -> str:
    """Of the names, dtypes, shapes and bytes in a safetensors file, in the order of the names.

    Not of the file: its metadata and the order in which it holds the tensors are not weights.
    """
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), memoryview(content)[8 + size :]
    whole = hashlib.sha256()
    for name in sorted(header.keys() - {"__metadata__"}):
        begin, end = header[name]["data_offsets"]
        whole.update(f"{name} {header[name]['dtype']} {header[name]['shape']}\n".encode())
        whole.update(data[begin:end])
    return whole.hexdigest()


def record_of(tree: Tree) -> dict[str, Any]:
    """Runs everything in a tree."""
    found: dict[str, Any] = {}
    folders: dict[str, Path] = {}
    began = time.monotonic()
    questions = tree.file_root / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))

    def note(name: str) -> None:
        found[name] = bits_of(folders[name])
        sys.stderr.write(f"{time.monotonic() - began:5.0f} s  {name}\n")

    try:
        for name, (experiment, settings) in RUNS.items():
            paths = {"questions": questions, "saved": folders.get("ppo-math", Path()) / SAVED}
            words = tuple(setting.format(**paths) for setting in settings)
            folders[name] = tree.launch(experiment, name, words)
            tree.wait(folders[name])
            note(name)
        folders["resume"] = tree.launch("ppo-math", "resume", ())
        stop_in_the_middle(folders["resume"])
        tree.realsys("resume", "ppo-math/resume", "--detach")
        tree.wait(folders["resume"])
        note("resume")
        of = folders["ppo-math-async"]
        tree.realsys("replay", f"{of.parent.name}/{of.name}", "--trial", "replay", "--detach")
        (folders["replay"],) = tree.file_root.glob("runs/*/*/replay")
        tree.wait(folders["replay"])
        note("replay")
    finally:
        tree.stop_all()
    return found


# ---- comparing --------------------------------------------------------------------------------


def first_difference(
    a: dict[str, Any], b: dict[str, Any], *, of_both: bool = False
) -> tuple[str | None, str | None]:
    """Of two runs' bits: the first metric (step by step) or hash that differs, and the first weights.

    Args:
        of_both: metrics that only one of them has are passed over.
    """
    metrics = None
    for phase in sorted(a["phases"].keys() | b["phases"].keys(), reverse=True):  # sft before main
        if metrics is None:
            phases = (a["phases"].get(phase), b["phases"].get(phase))
            metrics = phase_difference(phase, *phases, of_both=of_both)
    files = sorted(a["weights"].keys() | b["weights"].keys())
    weights = next((f for f in files if a["weights"].get(f) != b["weights"].get(f)), None)
    return metrics, weights


def metrics_of_one(a: dict[str, Any], b: dict[str, Any]) -> set[str]:
    """Metrics that only one of two runs has, in a phase of both."""
    found: set[str] = set()
    for phase in a["phases"].keys() & b["phases"].keys():
        one, other = (set(with_current_names(x["phases"][phase]["metrics"])) for x in (a, b))
        found |= set(filter(is_kept, one ^ other))
    return found


def phase_difference(
    name: str, a: dict[str, Any] | None, b: dict[str, Any] | None, *, of_both: bool = False
) -> str | None:
    """The first that differs, with both values."""
    if a is None or b is None:
        return f"phase {name} is missing in the {'first' if a is None else 'second'}"
    if a["steps"] != b["steps"]:
        return f"{name}: steps {a['steps']} and {b['steps']}"
    columns = [with_current_names(x["metrics"]) for x in (a, b)]  # of an older tree, too
    every = set(columns[0]) & set(columns[1]) if of_both else set(columns[0]) | set(columns[1])
    for row, step in enumerate(a["steps"]):
        for key in sorted(filter(is_kept, every)):
            values = [x[key][row] if key in x else None for x in columns]
            if values[0] != values[1]:
                return f"{name}, step {step}, {key}: {values[0]!r} and {values[1]!r}"
    return next((f"{name}: {what}" for what in ("ledger", "samples") if a[what] != b[what]), None)


def compare(a: dict[str, Any], b: dict[str, Any]) -> int:
    """Prints the table; 0 where all is equal, 1 where not, 2 where the two can't be compared."""
    differ = [k for k in sorted(a["machine"] | b["machine"]) if _of(a, k) != _of(b, k)]
    if differ:
        sys.stdout.write(
            "not compared: rounding depends on the processor's instructions and on torch, and the"
            " two records differ in these. Make both on one machine (--against REVISION).\n"
        )
        for key in differ:
            sys.stdout.write(f"  {key}: {_of(a, key)} and {_of(b, key)}\n")
        return 2
    first, second = (f"{r['revision'][:12]}{' with changes' * r['changed']}" for r in (a, b))
    sys.stdout.write(f"first: {first}; second: {second}\n")
    lines, notes, of_one = [("experiment", "metrics equal", "weights equal")], [], set[str]()
    for name in dict.fromkeys([*a["runs"], *b["runs"]]):
        if name not in a["runs"] or name not in b["runs"]:
            lines.append((name, "missing", "missing"))
            notes.append(f"{name}: only in one of the records")
            continue
        metrics, weights = first_difference(a["runs"][name], b["runs"][name], of_both=True)
        of_one |= metrics_of_one(a["runs"][name], b["runs"][name])
        lines.append((name, _yes(metrics is None), _yes(weights is None)))
        notes += [f"{name}: first difference: {x}" for x in (metrics, weights) if x is not None]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    for line in lines:
        cells = (word.ljust(width) for word, width in zip(line, widths, strict=True))
        sys.stdout.write(" | ".join(cells).rstrip() + "\n")
    sys.stdout.write("".join(f"{note}\n" for note in notes))
    if of_one:
        sys.stdout.write(f"written by one of the two only: {', '.join(sorted(of_one))}\n")
    return 1 if notes else 0


def _of(record: dict[str, Any], key: str) -> Any:
    return record["machine"].get(key)


def _yes(equal: bool) -> str:
    return "yes" if equal else "NO"


def problems_within(runs: dict[str, Any]) -> list[str]:
    """What one record shows by itself: a resume equals the whole run, a replay what it replays."""
    found = []
    metrics, weights = first_difference(main_of(runs["ppo-math"]), main_of(runs["resume"]))
    found += [f"resume is not ppo-math: {x}" for x in (metrics, weights) if x is not None]
    metrics, weights = first_difference(
        replayable(runs["ppo-math-async"]), replayable(runs["replay"])
    )
    found += [f"replay is not ppo-math-async: {x}" for x in (metrics, weights) if x is not None]
    return found


def replayable(run: dict[str, Any]) -> dict[str, Any]:
    """Without what servers and rollout workers count: a replay has none of them."""
    bits = main_of(run)
    metrics = bits["phases"]["main"]["metrics"]
    kept = {key: column for key, column in metrics.items() if not key.startswith("rollout/")}
    return {**bits, "phases": {"main": {**bits["phases"]["main"], "metrics": kept}}}


def main_of(run: dict[str, Any]) -> dict[str, Any]:
    """Without the preparing phases: the first run leaves their product in the cache for the others."""
    return {
        "phases": {"main": run["phases"]["main"]},
        "weights": {k: v for k, v in run["weights"].items() if k.startswith("checkpoints/")},
    }


# ---- the script -------------------------------------------------------------------------------


def make_record(folder: Path) -> dict[str, Any]:
    """Runs a checkout under a file root that is removed afterwards."""
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="realsys-bits-") as root:
        tree = Tree(folder, Path(root))
        machine, runs = tree.machine(), record_of(tree)
    problems = problems_within(runs)
    return {
        "what": "metrics, samples and weights of small runs, bit for bit",
        "command": "python tests/by_hand/acceptance/bits.py",
        "revision": _git(folder, "rev-parse", "HEAD"),
        "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no")),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "minutes": round((time.time() - began) / 60, 1),
        "ok": not problems,
        "problems": problems,
        "machine": machine,
        "left_out": LEFT_OUT,
        "runs": runs,
    }


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A worktree of a revision, for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="realsys-bits-") as folder:
        place = Path(folder, "tree")
        _git(ROOT, "worktree", "add", "--detach", str(place), revision)
        try:
            yield place
        finally:
            _git(ROOT, "worktree", "remove", "--force", str(place))


def write(record: dict[str, Any], file: Path) -> None:
    """A metric a line."""
    text = json.dumps(record, indent=1)
    flat = re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(flat + "\n")
    sys.stderr.write(f"{file}\n")


def main() -> int:
    """Returns 0 where bits are the same."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="REVISION")
    parser.add_argument("--tree", metavar="DIR", type=Path, default=ROOT)
    parser.add_argument("--compare", metavar=("A", "B"), nargs=2, type=Path)
    parser.add_argument("--out", metavar="F", type=Path)
    options = parser.parse_args()
    if options.compare:
        a, b = (json.loads(file.read_text()) for file in options.compare)
        return compare(a, b)
    if options.against:
        _git(ROOT, "rev-parse", "--verify", "--quiet", f"{options.against}^{{commit}}")
    record = make_record(options.tree)
    if options.out:
        write(record, options.out)
    sys.stdout.write("".join(f"{problem}\n" for problem in record["problems"]))
    status = 1 if record["problems"] else 0
    if options.against:
        with checked_out(options.against) as place:
            return compare(make_record(place), record) or status
    if not options.out:
        return compare(json.loads(RESULT.read_text()), record) or status
    return status


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"git {' '.join(words)}: {done.returncode} {done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its trials are stopped
    try:
        sys.exit(main())
    except (RuntimeError, subprocess.TimeoutExpired) as error:  # a run that did not complete
        sys.exit(str(error))
