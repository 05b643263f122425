"""A gserver_manager's process without a trial around it: its own build.py, with a runner of a few fields.

``python gserver_manager_alone.py FOLDER PARENT_PID``: keys, store and record are in FOLDER.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from realsys.api.model import ModelName
from realsys.api.worker_configs import GserverManager
from realsys.generation.manager import build
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.runtime.child_processes.parent_death import die_with_parent
from realsys.trial.records import WorkerRecord, dumps, process_start
from realsys.worker.controls import Controls

TRIAL, ATTEMPT, TOKEN = "ppo-math/run1", 1, "5f" * 16
KEYS = TrialKeys(cluster="local", user="u", experiment="ppo-math", trial="run1")


def curve_keys(folder: Path) -> Path:
    return folder / "curve.json"


def record_file(folder: Path) -> Path:
    return folder / "generation.jsonl"


def store_url(folder: Path) -> str:
    return f"file://{folder}/store"


def record_of(worker: str, *, control: str, pid: int = 0, start: int = 0) -> bytes:
    """What a worker registers."""
    record = WorkerRecord(
        worker=worker,
        host=socket.gethostname(),
        pid=pid,
        start=start,
        attempt=ATTEMPT,
        token=TOKEN,
        control=control,
    )
    return dumps(record)


@dataclass
class RunnerAlone:
    """The part of ``WorkerRunner`` that the role uses."""

    folder: Path
    config: GserverManager
    name: str = "gserver_manager/0"
    host: str = "127.0.0.1"
    ports: range | None = None
    controls: Controls = field(default_factory=Controls)
    keys: TrialKeys = KEYS

    def __post_init__(self) -> None:
        self.plan = SimpleNamespace(trial=TRIAL)
        self.phase = SimpleNamespace(name="main")
        self.attempt = SimpleNamespace(number=ATTEMPT, token=TOKEN)
        self.attempt_files = SimpleNamespace(curve_keys=curve_keys(self.folder))
        self.phase_files = SimpleNamespace(generation=record_file(self.folder))
        self.store = open_store(store_url(self.folder))

    def register(self, *, control: str) -> None:
        pid = os.getpid()
        value = record_of(self.name, control=control, pid=pid, start=process_start(pid) or 0)
        self.store.add(self.keys.worker("gserver_manager", 0), value, replace=True)

    def move(self, *event: Any, **told: Any) -> None:
        pass


def main() -> int:
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    config = GserverManager(model_name=ModelName("actor"), n_servers=2, schedule_policy="sticky")
    return build.run(RunnerAlone(folder, config))  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
