"""Workers of test_restart_alone.py, as an ``--import`` file: they register, and wait for the test.

The real entry point of a worker, its heartbeat process and its store; only what it would compute is left
out. All leave when the file ``finish`` is in the trial's folder.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from realsys.api.experiment import ExperimentConfig
from realsys.runtime import worker_exit_codes
from realsys.runtime.lifecycle import WorkerEvent
from realsys.runtime.progress import tick
from realsys.worker.runner import WorkerRunner


def run(runner: WorkerRunner) -> int:
    """Any of them. The master says that the phase is done."""
    runner.register()
    for step in range(1, 6):  # so that its usual pace is known
        runner.move(WorkerEvent.STARTED, step=step)
        if step < 5:
            runner.move(WorkerEvent.FINISHED_CALL)
    finish = Path(runner.plan.trial_dir) / "finish"
    while not finish.exists():
        tick()
        time.sleep(0.02)
    if runner.worker_type == "master_worker":
        done = runner.attempt_files.done(runner.phase.name)
        done.write_text(json.dumps({"token": runner.attempt.token}))
    runner.move(WorkerEvent.FINISHED_CALL)
    return worker_exit_codes.DONE


def no_config(config: ExperimentConfig, kind: str, index: int, **_: object) -> SimpleNamespace:
    return SimpleNamespace(worker_info=SimpleNamespace(watch_keys=()))


ExperimentConfig.resolve_worker_config = no_config  # type: ignore[method-assign, assignment]
main = sys.modules["__main__"]
for kind in getattr(main, "ROLES", {}):
    main.ROLES[kind] = f"{__name__}:run"
sys.modules[__name__].run = run  # type: ignore[attr-defined]
