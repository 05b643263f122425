"""A trial's folder and the records in it: what makes every verb work from any terminal or node.

``TrialFiles`` names every path, once. The records are small JSON files (or name-resolution values)
written by one process and read by many; each is written whole (temporary file, then rename).

    <file root>/runs/<user>/<experiment>/<trial>/
      plan.json  trial.json                 the plan and its hash; who launched it, when, where
      plans/<hash>.json                     former plans and the present one, where a resume changed it
      prediction.json                       how long a step should take, where that is known
      secrets/                              on Slurm: the environment that the job takes over, 0600
      code/ snapshot.json                   on Slurm: the copy of the code that runs, and its revision
      submitit/                             the hand-over: batch script, pickled call, its output
      attempts/0001/                        attempt.json, exit.json, logs/<type>-<index>.log,
      latest -> attempts/0001                 last_words/<type>-<index>.json, secrets/, history/,
                                              stacks/, resumed-<phase>.json, done-<phase>.json
                                              restarts.jsonl of workers started again
                                              scaling.jsonl of workers that came or left
                                              on Slurm also exits/, hosts/, steps.jsonl
      rows/0001/                            metrics.jsonl events.jsonl ledger.jsonl samples.jsonl
                                              of an attempt (of the main phase)
      metrics.jsonl …                       links to the newest attempt's
      tensorboard/  checkpoints/<role>/step-000200/  recover/step-000100.<attempt>/
      evaluations.jsonl evaluations/<role>-step-000200.json   of saved checkpoints
      dataflow_graph.png  report.html
      prepare/<phase>/                      the same files of a preparing phase
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from realsys.api.errors import ConfigError, TrialError
from realsys.api.plain import from_plain, to_plain

T = TypeVar("T")
KEY_PREFIX = "realsys/v1/"  # of every key in name resolution (realsys/name_resolve/key_table.py)


class _Under:
    """A path under ``root`` of the object it stands in."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __get__(self, files: Any, owner: type | None = None) -> Path:
        root: Path = files.root
        return root.joinpath(*self.parts)


RUN_FILE = "run.json"  # in the folder of dumped rollouts: the length of the run


@dataclass(frozen=True)
class PhaseFiles:
    """Files of one phase."""

    root: Path

    metrics = _Under("metrics.jsonl")
    events = _Under("events.jsonl")
    ledger = _Under("ledger.jsonl")
    samples = _Under("samples.jsonl")
    generation = _Under("generation.jsonl")
    evaluations = _Under("evaluations.jsonl")  # of saved checkpoints, a line each
    evaluation_results = _Under("evaluations")  # the same with what is pending, a file each
    timeline = _Under("timeline.json")
    tensorboard = _Under("tensorboard")
    checkpoints = _Under("checkpoints")
    recover = _Under("recover")
    graph_picture = _Under("dataflow_graph.png")
    rollout_dump = _Under("rollout_dump")  # what rollout workers delivered, to be trained on again

    def rows_of(self, attempt: int) -> PhaseFiles:
        """Where one attempt's own metrics, events, ledger and samples are; those above point to the
        newest attempt's."""
        return PhaseFiles(self.root / "rows" / f"{attempt:04d}")


@dataclass(frozen=True)
class AttemptFiles:
    """Files of one attempt (one incarnation of a trial)."""

    root: Path

    record = _Under("attempt.json")
    exit = _Under("exit.json")
    logs = _Under("logs")
    last_words = _Under("last_words")
    exits = _Under("exits")
    hosts = _Under("hosts")
    steps = _Under("steps.jsonl")
    restarts = _Under("restarts.jsonl")  # of single workers, a line each
    scaling = _Under("scaling.jsonl")  # of workers that came or left while the run lived
    rendezvous = _Under("rendezvous")
    stacks = _Under("stacks")
    secrets = _Under("secrets")
    curve_keys = _Under("secrets", "curve.json")  # sockets of this attempt take these and no other
    etcd_access = _Under("secrets", "etcd.json")  # of an etcd of the job's own
    history = _Under("history")
    preflight = _Under("preflight.json")
    ballast = _Under(".ballast")  # space kept for the exit marker, should the disk fill up

    def exit_of(self, worker: str) -> Path:
        """Where the parent of ``model_worker/3`` says how it ended (on Slurm)."""
        return self.exits / (worker.replace("/", "-") + ".json")

    def place_of(self, worker: str) -> Path:
        """What Slurm gave ``rollout_worker/3`` on its node, for when it is started again."""
        return self.hosts / (worker.replace("/", "-") + ".json")

    def end_of(self, worker: str, phase: str, restart: int) -> Path:
        """Asks the parent of ``rollout_worker/3``, as started for the ``restart``-th time again in that
        phase, to kill it (on Slurm)."""
        return self.exits / (worker.replace("/", "-") + f".end-{phase}-{restart}")

    @property
    def number(self) -> int:
        """The attempt's number, from 1."""
        return int(self.root.name)

    def log(self, worker: str) -> Path:
        """Log file of ``model_worker/3`` (or ``supervisor``)."""
        return self.logs / (worker.replace("/", "-") + ".log")

    def done(self, phase: str) -> Path:
        """Where the master says that a phase is done."""
        return self.root / f"done-{phase}.json"

    def resumed(self, phase: str) -> Path:
        """Where the master says from which step it goes on in a phase."""
        return self.root / f"resumed-{phase}.json"

    def stacks_of(self, worker: str) -> Path:
        """Where the stacks of ``model_worker/3`` go when it stalls or somebody asks for them."""
        return self.stacks / (worker.replace("/", "-") + ".txt")

    def words(self, worker: str) -> Path:
        """Where ``model_worker/3`` says why it died."""
        return self.last_words / (worker.replace("/", "-") + ".json")


@dataclass(frozen=True)
class TrialFiles:
    """Every path under a trial."""

    root: Path

    plan = _Under("plan.json")
    plans = _Under("plans")
    record = _Under("trial.json")
    secrets = _Under("secrets")
    host_environment = _Under("secrets", "host.env")
    task_environment = _Under("secrets", "task.env")
    code = _Under("code")
    snapshot = _Under("snapshot.json")
    submitit = _Under("submitit")
    submission = _Under("submitit", "submission.json")
    attempts = _Under("attempts")
    latest = _Under("latest")
    report = _Under("report.html")
    prediction = _Under("prediction.json")

    def plan_of(self, plan_hash: str) -> Path:
        """Where a plan is kept beside the present one."""
        return self.plans / f"{plan_hash[:12]}.json"

    def attempt(self, number: int) -> AttemptFiles:
        """Files of attempt ``number``."""
        return AttemptFiles(self.attempts / f"{number:04d}")

    def all_attempts(self) -> list[AttemptFiles]:
        """Attempts so far, oldest first."""
        try:
            found = os.listdir(self.attempts)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = sorted((name for name in found if name.isdecimal()), key=int)
        return [AttemptFiles(self.attempts / n) for n in names]

    @staticmethod
    def phase(folder: str | Path) -> PhaseFiles:
        """Files of the phase whose plan names ``folder``."""
        return PhaseFiles(Path(folder))


def trial_dir(file_root: str | Path, user: str, experiment: str, trial: str) -> Path:
    """Folder of a trial."""
    return Path(file_root) / "runs" / user / experiment / trial


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """Settings that a resume has changed: the plan of the attempts from ``from_attempt`` on."""

    from_attempt: int
    plan_hash: str
    at: float  # seconds since the epoch
    settings: Mapping[str, tuple[Any, Any]]  # as typed → the value before, and since
    command: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """``trial.json``: written by the launch, and by a resume that changes settings."""

    experiment_name: str
    trial_name: str
    user: str
    cluster: str
    plan_hash: str
    created_at: float  # seconds since the epoch
    launch_host: str
    command: tuple[str, ...] = ()
    realsys_version: str = ""
    code: str = ""  # digest of the code as it was at the launch (realsys/trial/snapshot.py)
    sweep: str = ""  # name of the sweep that launched it, and its values there
    point: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""  # where the launch ran: relative paths in the settings begin there
    changes: tuple[PlanChange, ...] = ()  # oldest first


@dataclass(frozen=True, kw_only=True)
class PredictionRecord:
    """``prediction.json``: how long a step should take, written by the launch when that was known."""

    basis: str  # where the figures come from: an earlier trial, or formulas for a device
    step_s: float  # from the first request to the last reply
    calls: Mapping[str, float] = field(default_factory=dict)  # call → seconds inside the interface
    idle: float = 0.0  # share of the workers' time


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """``attempt.json``: written by the supervisor when it has taken the attempt."""

    number: int
    token: str  # random, hex: fences this incarnation off from any other
    host: str
    supervisor_pid: int
    supervisor_start: int  # clock ticks after boot, /proc/<pid>/stat field 22
    started_at: float
    job_id: str = ""  # of Slurm, or of submitit's local executor
    restart_count: int = (
        0  # of a job that Slurm requeued; (job id, restart count) is one incarnation
    )
    nodes: str = ""  # hostlist of the job's nodes; empty on this machine
    ended_at: float | None = None  # in the store: its supervisor has ended it


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """``resumed-<phase>.json``: from whose checkpoint an attempt goes on; step 0: from nothing. What
    others wrote beyond it does not count any more."""

    attempt: int
    phase: str
    step: int
    of_attempt: int = 0


class Result(StrEnum):
    """How an attempt ended, as far as its supervisor could say."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One worker's end: which, where, why, and the last lines of its log."""

    worker: str
    host: str
    pid: int
    why: str  # one sentence: exit code or signal, or the error's own text
    at: float
    kind: str = ""  # class of the error; "" for an end without last words
    fix: str = ""
    log: str = ""
    log_tail: tuple[str, ...] = ()
    secondary: bool = False  # only says that somebody else was missing
    resume_with: str = ""  # NAME=VALUE for a resume that gets past it

    @property
    def who(self) -> str:
        """``model_worker/3 (pid 4242 on n1)``; without a pid where it is the node's fault."""
        pid = f"pid {self.pid} " if self.pid else ""
        return f"{self.worker} ({pid}on {self.host})"


@dataclass(frozen=True, kw_only=True)
class PreflightRecord:
    """``preflight.json``: what was found before the workers started (realsys/slurm/preflight)."""

    mode: str  # warn or stop
    at: float
    seconds: float
    checks: tuple[
        Mapping[str, Any], ...
    ]  # name, ok (None: not checked), what, fix, against (node → why)
    ill: Mapping[str, str]  # node → why: those that others can do without


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """``exits/<type>-<index>.json``: how a worker ended, written by its parent on the same node."""

    worker: str
    host: str
    pid: int
    returncode: int  # negative: the signal that ended it
    at: float
    hint: str = ""  # what the kernel's counts of memory kills prove


@dataclass(frozen=True, kw_only=True)
class ExitMarker:
    """``exit.json``: the supervisor's last act."""

    result: Result
    attempt: int
    ended_at: float
    phase: str
    step: int = 0
    first_failure: Failure | None = None
    other_failures: tuple[Failure, ...] = ()
    resume: str = ""  # the command that goes on


@dataclass(frozen=True, kw_only=True)
class WorkerRecord:
    """Name-resolution value of a registered worker (key ``worker/<type>/<index>``)."""

    worker: str
    host: str
    pid: int
    start: int
    attempt: int
    token: str
    control: str = ""  # ZMQ endpoint for requests
    data: str = ""  # ZMQ endpoint that serves tensors
    rendezvous: str = ""  # host:port of a store where model workers form process groups
    node: str = ""  # Slurm's name of the host, which may be another one; empty elsewhere


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """Name-resolution value of a worker's state (key ``worker_status/<type>/<index>``)."""

    state: str
    mfc: str = ""
    step: int = 0
    since: float = 0.0
    reason: str = ""
    attempt: int = 0
    token: str = ""
    waits_for: str = (
        ""  # what another worker must do first, e.g. "model_worker/1: tensors of rewards"
    )
    stalled_s: float = 0.0  # how long it has not got on although it computes; 0: it gets on
    stalled_where: str = ""  # the innermost frames of its main thread then
    last_command: str = ""  # id of the last command that took effect or was refused
    command_refused: str = ""  # why it was


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Name-resolution value of a run's progress (key ``progress``), for the live view."""

    attempt: int
    phase: str
    step: int  # finished steps
    total_steps: int
    epoch: int = 0
    step_seconds: float = 0.0
    eta_seconds: float | None = None
    tokens_per_second: float = 0.0
    running: Mapping[str, str] = field(default_factory=dict)  # MFC → worker names
    headline: Mapping[str, float] = field(default_factory=dict)  # reward, KL, accuracy, …
    doing: str = ""  # between steps: "evaluating", "saving", …
    updated_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """Name-resolution value that asks for an end (key ``stop``)."""

    grace_seconds: float
    by: str
    at: float
    attempt: int


def dumps(record: Any) -> bytes:
    """A record as JSON bytes."""
    return json.dumps(to_plain(record), ensure_ascii=False).encode()


def loads(kind: type[T], data: bytes, *, where: str) -> T:
    """A record from JSON bytes. Raises TrialError when they are not one."""
    try:
        return from_plain(kind, json.loads(data), where=where)
    except (ValueError, OverflowError, RecursionError, ConfigError) as error:
        what, place = (
            (error.what, error.where) if isinstance(error, ConfigError) else (error, where)
        )
        if where.startswith(KEY_PREFIX):
            raise _damaged_key(kind, where, what) from error
        raise TrialError(
            f"not a {kind.__name__}: {what}",
            where=place,
            fix="the file was damaged; see its folder",
        ) from error


def _damaged_key(kind: type[Any], key: str, what: object) -> TrialError:
    """The error of a value in name resolution that nobody of ours can have written."""
    trial = "/".join(key.split("/")[4:6])
    return TrialError(
        f"the key {key!r} holds no {kind.__name__}: {what}",
        where=key,
        fix=f"`realsys resume {trial}` clears it and goes on; to remove it from a live etcd: "
        f"etcdctl del '/{key}'",
    )


def write_record(path: Path, record: Any) -> None:
    """Writes a record whole: temporary file beside it, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(to_plain(record), ensure_ascii=False, indent=1).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def replace_symlink(link: Path, target: str) -> None:
    """Makes ``link`` a symbolic link to ``target`` in one step, whatever it was before."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def fresh(folder: str | Path, *, dir_fd: int | None = None) -> None:
    """Makes the next look at a name in ``folder`` a fresh one; nothing where there is no such folder.

    An NFS client remembers that a file was not there for as long as it believes the folder's attributes,
    up to a minute. Opening the folder by its name makes it ask for them ("close-to-open"); looking at
    other files in it, or listing the folder above, does not. Of a folder that seems not to be there those
    above it are opened first.
    """
    try:
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd))
    except NotADirectoryError:
        pass
    except FileNotFoundError:
        above = Path(folder).parent
        if dir_fd is None and above != Path(folder):
            fresh(above)
            with suppress(FileNotFoundError, NotADirectoryError):
                os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def is_there(path: Path) -> bool:
    """Whether a file is there that another host may have made a moment ago."""
    fresh(path.parent)
    return path.exists()


def read_fresh(kind: type[T], path: Path) -> T | None:
    """As ``read_record``, of a record that another host may have written a moment ago."""
    fresh(path.parent)
    return read_record(kind, path)


def read_record(kind: type[T], path: Path) -> T | None:
    """The record at ``path``; None when there is none. Raises TrialError when it is damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return loads(kind, data, where=str(path))


def process_start(pid: int) -> int | None:
    """Start of a process on this host in clock ticks after boot (proc(5), stat field 22).

    (pid, start) names a process for good: a pid alone is reused. None when it is gone or a zombie.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def is_alive(pid: int, start: int) -> bool:
    """True while exactly that process runs on this host."""
    return process_start(pid) == start
