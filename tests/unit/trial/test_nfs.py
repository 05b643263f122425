"""What another host has just written is seen, though an NFS client remembers that it was not there.

No kernel that exports a folder is needed: a process is loaded with a stand-in for such a client
(tests/support/file_calls.c). It looks for everything once, before it is there; then this test, another
host, makes it; then it looks again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from file_calls import FileCalls

from realsys.name_resolve.file.file_store import FileStore
from realsys.trial.records import (
    AttemptRecord,
    ExitMarker,
    Result,
    TrialFiles,
    WorkerExit,
    write_record,
)

REPOSITORY = Path(__file__).parents[3]
KEY = "realsys/v1/site/anna/ppo-math/run1/stop"

OTHER_HOST = f"""
import json, sys
from pathlib import Path
from types import SimpleNamespace
from launcher.trials.status import StatusReader
from realsys.api.errors import RealsysError, StoreUnavailable
from realsys.trial.records import AttemptRecord, TrialFiles, loads
from realsys.name_resolve.file.file_store import FileStore
from realsys.name_resolve.trial_store import open_store_at
from realsys.supervisor.split_jobs.order_follower import OrderFollower
from realsys.supervisor.products import is_done
from realsys.supervisor.steps.slurm_step import SlurmTask, Step
from realsys.supervisor.supervisor import Supervisor
from realsys.worker import srun_task as task
from realsys.worker.requeued import newer_attempt_of_same_job

root = Path(sys.argv[1])
files = TrialFiles(root / "trial")
attempt = files.attempt(1)
reader = StatusReader(TrialFiles(root / "ended"))
worker = SimpleNamespace(worker="model_worker/0")
here = SimpleNamespace(attempt_files=attempt, attempt=attempt, files=files, number=1)
here.store, here.keys = FileStore(root / "store"), SimpleNamespace(attempt="no_attempt")
record = loads(AttemptRecord, attempt.record.read_bytes(), where="")
watch = FileStore(root / "store").watch({KEY!r})

def etcd_has_started():
    try:
        open_store_at("etcd+job://", etcd=None, access_file=attempt.etcd_access)
    except StoreUnavailable:
        return False
    except RealsysError:  # there is a file, and nothing in it
        return True

LOOKS = {{
    "a file whose folder nobody opens": lambda: (root / "plain" / "file").exists(),
    "how a trial ended": lambda: reader.last_attempt().marker is not None,
    "the order to kill a worker": lambda: task.is_there(attempt.end_of("rollout_worker/0", "main", 0)),
    "that a worker left well": lambda: Supervisor._has_left(here, worker),
    "how a task ended": lambda: Step._set_recorded_end(here, worker),
    "an agent's attempt is over": lambda: OrderFollower._is_over(here),
    "the job's own etcd": etcd_has_started,
    "the master is done": lambda: is_done(files, record, "main"),
    "a requeued job's next attempt": lambda: newer_attempt_of_same_job(files, 1) is not None,
    "a key of the store": lambda: bool(watch.poll(0.2 if first else 20.0)),
}}
for first in (True, False):
    print(json.dumps({{name: bool(look()) for name, look in LOOKS.items()}}), flush=True)
    sys.stdin.readline()
"""


def attempt_record(number: int) -> AttemptRecord:
    return AttemptRecord(
        number=number,
        token="ours",
        host="n1",
        supervisor_pid=1,
        supervisor_start=1,
        started_at=0.0,
        job_id="7",
    )


def make_everything(files: TrialFiles, ended: TrialFiles) -> None:
    attempt = files.attempt(1)
    marker = ExitMarker(result=Result.COMPLETED, attempt=1, ended_at=1.0, phase="main")
    write_record(attempt.exit, marker)
    write_record(ended.attempt(1).exit, marker)
    worker = WorkerExit(worker="model_worker/0", host="n1", pid=2, returncode=0, at=1.0)
    write_record(attempt.exit_of("model_worker/0"), worker)
    attempt.end_of("rollout_worker/0", "main", 0).touch()
    attempt.secrets.mkdir()
    attempt.etcd_access.touch(mode=0o600)
    write_record(attempt.done("main"), {"token": "ours", "step": 3})
    write_record(files.attempt(2).record, attempt_record(2))


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bool], dict[str, bool]]:
    """What another host sees before and after."""
    folder = tmp_path_factory.mktemp("nfs")
    root = folder / "root"
    files, ended = TrialFiles(root / "trial"), TrialFiles(root / "ended")
    for trial in (files, ended):
        write_record(trial.attempt(1).record, attempt_record(1))
    files.attempt(1).exits.mkdir()
    files.attempt(2).root.mkdir()  # a supervisor that has not written its record yet
    (root / "plain").mkdir()
    store = FileStore(root / "store")
    calls = FileCalls(root, folder / "scratch", as_nfs=True)
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_HOST, str(root)],
        env={**os.environ, **calls.environment, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        before = json.loads(process.stdout.readline())
        make_everything(files, ended)
        (root / "plain" / "file").touch()
        store.add(KEY, b"now")
        process.stdin.write("\n")
        process.stdin.flush()
        after = json.loads(process.stdout.readline())
    assert process.wait(240) == 0
    store.close()
    return before, after


def test_the_stand_in_remembers_what_was_not_there(looks):
    before, after = looks
    assert not any(before.values()), before
    assert not after["a file whose folder nobody opens"]


@pytest.mark.parametrize(
    "what",
    [
        "how a trial ended",
        "the order to kill a worker",
        "that a worker left well",
        "how a task ended",
        "an agent's attempt is over",
        "the job's own etcd",
        "the master is done",
        "a requeued job's next attempt",
        "a key of the store",
    ],
)
def test_news_of_another_host_are_seen(looks, what: str):
    assert looks[1][what], what
