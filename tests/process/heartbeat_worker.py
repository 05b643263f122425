"""A worker of the tests: registers through its heartbeat process and does what its argv says.

``python heartbeat_worker.py STORE ATTEMPT_DIR PLAN`` with PLAN in JSON; see ``main``.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import sys
import time
from pathlib import Path

from realsys.api.errors import RealsysError
from realsys.heartbeat.heartbeat_link import ARGV, Heartbeat
from realsys.heartbeat.heartbeat_messages import Init, Terminate
from realsys.name_resolve.key_table import TrialKeys
from realsys.observability.worker_logs import configure_logging
from realsys.runtime.progress import tick
from realsys.trial.records import WorkerRecord, WorkerStatus, process_start

KEYS = TrialKeys(cluster="here", user="anna", experiment="ppo", trial="run")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def is_told() -> bool:
    return bool(select.select([0], [], [], 0.0)[0])


def over(message: Terminate) -> None:
    say(f"over {message.code} {message.kind}: {message.why}")


def main() -> None:
    store, attempt_dir, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    configure_logging("model_worker/0")
    say(f"pid {os.getpid()}")
    link = Heartbeat(
        Init(
            worker_type="model_worker",
            index=0,
            pid=os.getpid(),
            attempt=1,
            token="ours",
            store_url=store,
            attempt_dir=str(attempt_dir),
            keys=KEYS,
        ),
        on_stop=lambda request: say(f"stop {request.by}"),
        on_command=lambda value: say(f"command {value.decode()}"),
        on_terminate=over,
    ).start(argv=plan.get("argv") or ARGV)
    say(f"heartbeat {link.process.pid}")
    status = {"attempt": 1, "token": "ours"}
    record = WorkerRecord(
        worker="model_worker/0",
        host=socket.gethostname(),
        pid=os.getpid(),
        start=process_start(os.getpid()) or 0,
        attempt=1,
        token="ours",
    )
    began = time.monotonic()
    try:
        link.register(
            record,
            WorkerStatus(state="ready", **status),
            ttl_s=plan.get("ttl_s", 3.0),
            timeout_s=60.0,
            watch_keys=plan.get("watch_keys", ()),
        )
    except RealsysError as error:
        say(f"refused {type(error).__name__}: {error.what}")
        return
    say(f"registered {time.monotonic() - began:.3f}")
    for step in range(1, plan.get("steps", 0) + 1):
        link.publish_status(WorkerStatus(state="running", step=step, mfc="actor_train", **status))
        time.sleep(plan.get("step_s", 0.1))
        tick()
    if tells := plan.get("tells"):
        os.read(0, 1)
        for step in range(1, tells + 1):
            link.publish_status(WorkerStatus(state="running", step=step, **status))
        say("told")
    if hold_s := plan.get("hold_gil_s"):
        link.publish_status(WorkerStatus(state="running", step=1, mfc="holds", **status))
        ctypes.PyDLL(None).usleep(int(hold_s * 1e6))  # PyDLL keeps the GIL
        tick()
        say("let go")
    if plan.get("still"):
        os.read(0, 1)  # until the test says so
        tick()
        say("moved")
    deadline, lease_status = time.monotonic() + plan.get("for_s", 0.0), ""
    while time.monotonic() < deadline and not (plan.get("until_told") and is_told()):
        if link.lease_status != lease_status:
            lease_status = link.lease_status
            say(f"lease_status {lease_status}")
        time.sleep(0.02)
    began = time.monotonic()
    link.deregister(WorkerStatus(state="done", **status), timeout_s=60.0)
    say(f"goodbye {time.monotonic() - began:.3f}")


if __name__ == "__main__":
    main()
