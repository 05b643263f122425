"""A trial's paths and records, through which every verb works from any terminal or node.

``TrialFiles`` defines every path once. The records are small JSON files (or name-resolution values)
written by one process and read by many; each is written atomically (temporary file, then rename).

    <file root>/runs/<user>/<experiment>/<trial>/
      plan.json  trial.json                 the plan and its hash; who launched it, when, where
      plans/<hash>.json                     all plans, if a resume changed it
      prediction.json                       predicted step time, if known
      secrets/                              on Slurm: the environment of the job, 0600
      code/ snapshot.json                   on Slurm: the copy of the code that runs, and its revision
      submitit/                             the submission: batch script, pickled call, its output
      attempts/0001/                        attempt.json, exit.json, logs/<type>-<index>.log,
      latest -> attempts/0001                 last_words/<type>-<index>.json, secrets/, history/,
                                              stacks/, resumed-<phase>.json, done-<phase>.json
                                              restarts.jsonl of restarted workers
                                              scaling.jsonl of added and removed workers
                                              on Slurm also exits/, hosts/, steps.jsonl
      rows/0001/                            metrics.jsonl events.jsonl ledger.jsonl samples.jsonl
                                              of an attempt (of the main phase);
                                              rollouts/ episodes/ of rollout workers
      metrics.jsonl …                       links to the newest attempt's
      tensorboard/  checkpoints/<role>/step-000200/  recover/step-000100.<attempt>/
      evaluations.jsonl evaluations/<role>-step-000200.json   of saved checkpoints
      dataflow_graph.png  report.html  evals/  (of realsys eval)
      prepare/<phase>/                      the same files of a preparing phase
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from realsys.api.errors import ConfigError, TrialError
from realsys.api.plain import from_plain, to_plain
from realsys.trial.machine_identity import MachineIdentity
from realsys.trial.temporary_names import temporary_beside

T = TypeVar("T")
KEY_PREFIX = "realsys/v1/"  # of every key in name resolution (realsys/name_resolve/key_table.py)


class _SubPath:
    """A path relative to ``root`` of the owning object."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __get__(self, files: Any, owner: type | None = None) -> Path:
        root: Path = files.root
        return root.joinpath(*self.parts)


RUN_FILE = "run.json"  # in the folder of dumped rollouts: the length of the run


@dataclass(frozen=True)
class PhaseFiles:
    """Paths of one phase."""

    root: Path

    metrics = _SubPath("metrics.jsonl")
    events = _SubPath("events.jsonl")
    ledger = _SubPath("ledger.jsonl")
    samples = _SubPath("samples.jsonl")
    generation = _SubPath("generation.jsonl")
    evaluations = _SubPath("evaluations.jsonl")  # of saved checkpoints, a line each
    evaluation_results = _SubPath("evaluations")  # the same including pending ones, a file each
    timeline = _SubPath("timeline.json")
    tensorboard = _SubPath("tensorboard")
    checkpoints = _SubPath("checkpoints")
    recover = _SubPath("recover")
    graph_picture = _SubPath("dataflow_graph.png")
    rollout_dump = _SubPath("rollout_dump")  # deliveries of rollout workers, for a replay
    rollouts = _SubPath("rollouts")  # of an attempt: outcomes of tickets, a file per rollout worker
    episodes = _SubPath("episodes")  # the same tickets' grants and ends, without texts
    skipped_batches = _SubPath("skipped_batches")  # of updates without a finite gradient

    def rows_of(self, attempt: int) -> PhaseFiles:
        """Returns the paths of one attempt's own metrics, events, ledger and samples; those of the
        phase link to the newest attempt's."""
        return PhaseFiles(self.root / "rows" / f"{attempt:04d}")


@dataclass(frozen=True)
class AttemptFiles:
    """Paths of one attempt (one incarnation of a trial)."""

    root: Path

    record = _SubPath("attempt.json")
    exit = _SubPath("exit.json")
    logs = _SubPath("logs")
    failure_records = _SubPath("last_words")
    exits = _SubPath("exits")
    hosts = _SubPath("hosts")
    steps = _SubPath("steps.jsonl")
    restarts = _SubPath("restarts.jsonl")  # of single workers, a line each
    scaling = _SubPath("scaling.jsonl")  # of workers added or removed during the run
    rendezvous = _SubPath("rendezvous")
    stacks = _SubPath("stacks")
    secrets = _SubPath("secrets")
    curve_keys = _SubPath("secrets", "curve.json")  # accepted by sockets of this attempt only
    etcd_access = _SubPath("secrets", "etcd.json")  # of the job's own etcd
    history = _SubPath("history")
    preflight = _SubPath("preflight.json")
    ballast = _SubPath(".ballast")  # space reserved for the exit marker in case the disk fills up

    def exit_of(self, worker: str) -> Path:
        """Exit record of ``model_worker/3``, written by its parent (on Slurm)."""
        return self.exits / (worker.replace("/", "-") + ".json")

    def place_of(self, worker: str) -> Path:
        """Node and resources that Slurm gave ``rollout_worker/3``, for a restart."""
        return self.hosts / (worker.replace("/", "-") + ".json")

    def end_of(self, worker: str, phase: str, restart: int) -> Path:
        """Marker that makes the parent of ``rollout_worker/3`` kill it (on Slurm); ``restart``
        counts the worker's restarts in that phase."""
        return self.exits / (worker.replace("/", "-") + f".end-{phase}-{restart}")

    @property
    def number(self) -> int:
        """The attempt's number, from 1."""
        return int(self.root.name)

    def log(self, worker: str) -> Path:
        """Log file of ``model_worker/3`` (or ``supervisor``)."""
        return self.logs / (worker.replace("/", "-") + ".log")

    def done(self, phase: str) -> Path:
        """Marker of a finished phase, written by the master."""
        return self.root / f"done-{phase}.json"

    def resumed(self, phase: str) -> Path:
        """Resume record of a phase, written by the master."""
        return self.root / f"resumed-{phase}.json"

    def stacks_of(self, worker: str) -> Path:
        """Stacks of ``model_worker/3``, written when it stalls or on request."""
        return self.stacks / (worker.replace("/", "-") + ".txt")

    def failure_record(self, worker: str) -> Path:
        """Failure record of ``model_worker/3``, written by itself when it fails."""
        return self.failure_records / (worker.replace("/", "-") + ".json")


@dataclass(frozen=True)
class TrialFiles:
    """Every path of a trial."""

    root: Path

    plan = _SubPath("plan.json")
    plans = _SubPath("plans")
    record = _SubPath("trial.json")
    secrets = _SubPath("secrets")
    host_environment = _SubPath("secrets", "host.env")
    task_environment = _SubPath("secrets", "task.env")
    code = _SubPath("code")
    snapshot = _SubPath("snapshot.json")
    submitit = _SubPath("submitit")
    submission = _SubPath("submitit", "submission.json")
    attempts = _SubPath("attempts")
    latest = _SubPath("latest")
    report = _SubPath("report.html")
    prediction = _SubPath("prediction.json")
    assumed_end = _SubPath("assumed-end.json")

    def plan_of(self, plan_hash: str) -> Path:
        """Copy of a plan that is kept beside the present one."""
        return self.plans / f"{plan_hash[:12]}.json"

    def attempt(self, number: int) -> AttemptFiles:
        """Paths of attempt ``number``."""
        return AttemptFiles(self.attempts / f"{number:04d}")

    def all_attempts(self) -> list[AttemptFiles]:
        """Returns the attempts so far, oldest first."""
        try:
            found = os.listdir(self.attempts)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = sorted((name for name in found if name.isdecimal()), key=int)
        return [AttemptFiles(self.attempts / n) for n in names]

    @staticmethod
    def phase(folder: str | Path) -> PhaseFiles:
        """Returns the paths of the phase whose plan names ``folder``."""
        return PhaseFiles(Path(folder))


def trial_dir(file_root: str | Path, user: str, experiment: str, trial: str) -> Path:
    """Returns the folder of a trial."""
    return Path(file_root) / "runs" / user / experiment / trial


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """Settings changed by a resume: the plan of the attempts from ``from_attempt`` on."""

    from_attempt: int
    plan_hash: str
    at: float  # seconds since the epoch
    settings: Mapping[str, tuple[Any, Any]]  # as typed → (value before, value since)
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
    folder: str = ""  # where the launch ran: relative paths in the settings start there
    changes: tuple[PlanChange, ...] = ()  # oldest first


@dataclass(frozen=True, kw_only=True)
class PredictionRecord:
    """``prediction.json``: predicted step time, written by the launch if known."""

    basis: str  # source of the figures: an earlier trial, or formulas for a device
    step_s: float  # from the first request to the last reply
    calls: Mapping[str, float] = field(default_factory=dict)  # call → seconds inside the interface
    idle: float = 0.0  # share of the workers' time


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """``attempt.json``: written by the supervisor when it has claimed the attempt."""

    number: int
    token: str  # random, hex: distinguishes this incarnation from all others (fencing)
    host: str
    supervisor_pid: int
    supervisor_start: int  # clock ticks after boot, /proc/<pid>/stat field 22
    started_at: float
    job_id: str = ""  # of Slurm, or of submitit's local executor
    restart_count: int = 0  # of a requeued Slurm job; (job id, restart count) is one incarnation
    nodes: str = ""  # hostlist of the job's nodes; empty on this machine
    machine: MachineIdentity | None = (
        None  # the supervisor's; None: on Slurm, or of an older revision
    )
    ended_at: float | None = None  # in the store: when its supervisor ended it


@dataclass(frozen=True, kw_only=True)
class AssumedEnd:
    """``assumed-end.json``: a user knows that a run has ended of which nothing can be seen."""

    attempt: int  # the last one then; 0: there was none
    job_id: str  # of the submission then, submitit's or Slurm's
    by: str
    at: float


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """``resumed-<phase>.json``: which attempt's checkpoint an attempt resumes from; step 0: none.
    What other attempts wrote beyond it no longer counts."""

    attempt: int
    phase: str
    step: int
    of_attempt: int = 0


class Result(StrEnum):
    """How an attempt ended, as far as its supervisor knows."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One worker's failure: which worker, where, why, and the last lines of its log."""

    worker: str
    host: str
    pid: int
    why: str  # one sentence: exit code or signal, or the error's own text
    at: float
    kind: str = ""  # class of the error; "" if the worker left no failure record
    fix: str = ""
    log: str = ""
    log_tail: tuple[str, ...] = ()
    secondary: bool = False  # a consequence of another worker's failure
    resume_with: str = ""  # NAME=VALUE for a resume that avoids it

    @property
    def who(self) -> str:
        """``model_worker/3 (pid 4242 on n1)``; without a pid if the node failed."""
        pid = f"pid {self.pid} " if self.pid else ""
        return f"{self.worker} ({pid}on {self.host})"


@dataclass(frozen=True, kw_only=True)
class PreflightRecord:
    """``preflight.json``: results of the checks before the workers started
    (realsys/slurm/preflight)."""

    mode: str  # warn or stop
    at: float
    seconds: float
    # name, ok (None: not checked), what, fix, against (node → why)
    checks: tuple[Mapping[str, Any], ...]
    ill: Mapping[str, str]  # node → why: nodes that the job can do without


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """``exits/<type>-<index>.json``: how a worker ended, written by its parent on the same node."""

    worker: str
    host: str
    pid: int
    returncode: int  # negative: the signal that ended it
    at: float
    hint: str = ""  # evidence of a memory kill from the kernel's counters


@dataclass(frozen=True, kw_only=True)
class ExitMarker:
    """``exit.json``: how the attempt ended, the supervisor's last write."""

    result: Result
    attempt: int
    ended_at: float
    phase: str
    step: int = 0
    first_failure: Failure | None = None
    other_failures: tuple[Failure, ...] = ()
    resume: str = ""  # the command that resumes the trial


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
    rendezvous: str = ""  # host:port of the store with which model workers form process groups
    node: str = ""  # Slurm's name of the host, which may differ; empty without Slurm


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
    waits_for: str = ""  # another worker's task, e.g. "model_worker/1: tensors of rewards"
    stalled_s: float = 0.0  # how long it has computed without progress; 0: it makes progress
    stalled_where: str = ""  # the innermost frames of its main thread at that time
    last_command: str = ""  # id of the last command that took effect or was refused
    command_refused: str = ""  # why it was refused


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
    """Name-resolution value that requests the end of a run (key ``stop``)."""

    grace_seconds: float
    by: str
    at: float
    attempt: int


def dumps(record: Any) -> bytes:
    """Encodes a record as JSON."""
    return _bytes(json.dumps(to_plain(record), ensure_ascii=False))


def _bytes(text: str) -> bytes:
    """Encodes JSON; half of a surrogate pair, which UTF-8 has not, becomes JSON's own escape for it."""
    return text.encode("utf-8", "backslashreplace")


def loads(kind: type[T], data: bytes, *, where: str) -> T:
    """Decodes a record from JSON. Raises TrialError for invalid data."""
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
            fix="the file is damaged; look into its folder",
        ) from error


def _damaged_key(kind: type[Any], key: str, what: object) -> TrialError:
    """Returns the error for a name-resolution value that realsys can't have written."""
    trial = "/".join(key.split("/")[4:6])
    return TrialError(
        f"the key {key!r} holds no {kind.__name__}: {what}",
        where=key,
        fix=f"`realsys resume {trial}` clears it and resumes; to remove it from a live etcd: "
        f"etcdctl del '/{key}'",
    )


def write_record(path: Path, record: Any) -> None:
    """Writes a record atomically: temporary file beside it, fsync, rename."""
    import tempfile  # with shutil, slow to import for those that only read

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            text = json.dumps(to_plain(record), ensure_ascii=False, indent=1)
            file.write(_bytes(text) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def replace_symlink(link: Path, target: str) -> None:
    """Makes ``link`` a symbolic link to ``target`` atomically, whatever it was before."""
    temporary = temporary_beside(link)
    temporary.symlink_to(target)
    try:
        os.replace(temporary, link)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def fresh(folder: str | Path, *, dir_fd: int | None = None) -> None:
    """Makes the next lookup of a name in ``folder`` bypass an NFS client's cache; does nothing if
    there is no such folder.

    An NFS client caches that a file is missing for as long as it trusts the folder's attributes, up to a
    minute. Opening the folder by its name makes it fetch them ("close-to-open"); looking up other files
    in it, or listing the parent, does not. If the folder itself seems missing, its parents are opened
    first.
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
    """Returns whether a file exists that another host may have just written."""
    fresh(path.parent)
    return path.exists()


def read_fresh(kind: type[T], path: Path) -> T | None:
    """Reads a record as ``read_record`` does, one that another host may have just written."""
    fresh(path.parent)
    return read_record(kind, path)


def read_record(kind: type[T], path: Path) -> T | None:
    """Reads the record at ``path``; None if there is none. Raises TrialError if it is damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return loads(kind, data, where=str(path))


def process_start(pid: int) -> int | None:
    """Returns the start of a process on this host in clock ticks after boot (proc(5), stat field
    22).

    (pid, start) identifies a process uniquely: a pid alone is reused. None if it has ended or is a zombie.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def is_alive(pid: int, start: int) -> bool:
    """Returns whether exactly that process runs on this host."""
    return process_start(pid) == start
