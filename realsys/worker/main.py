"""Entry point of every worker process: ``python -m realsys.worker.main TYPE INDEX …``.

Reads the plan (checking its hash), finds its own part, calls the role's ``run`` and writes a failure
record if that fails. argv holds no secret; the attempt's token comes from its record.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from realsys.api import registry
from realsys.api.errors import RealsysError, StaleAttempt
from realsys.api.plan import read_plan
from realsys.heartbeat.heartbeat_messages import Terminate
from realsys.observability.worker_logs import configure_logging
from realsys.runtime import worker_exit_codes
from realsys.runtime.child_processes.parent_death import PARENT_PID_VARIABLE, die_with_parent
from realsys.runtime.failures import failure_by_order, failure_of, first_line
from realsys.runtime.lifecycle import FINAL, WorkerEvent
from realsys.trial.folders import restrict_umask
from realsys.trial.records import (
    AttemptRecord,
    Failure,
    TrialFiles,
    read_record,
    write_record,
)
from realsys.worker.network import raise_open_file_limit
from realsys.worker.runner import WorkerRunner

logger = logging.getLogger(__name__)

ROLES = {
    "master_worker": "realsys.master.build:run",
    "model_worker": "realsys.model_worker.build:run",
    "generation_server": "realsys.generation.server.build:run",
    "gserver_manager": "realsys.generation.manager.build:run",
    "rollout_worker": "realsys.rollout.worker.build:run",
    "evaluator": "realsys.evaluator.build:run",
    "reward_worker": "realsys.reward_worker.build:run",
}


def command(
    *,
    trial_dir: str,
    plan_hash: str,
    phase: str,
    attempt: int,
    worker_type: str,
    index: int,
    like: int | None = None,
) -> list[str]:
    """Returns the argv that starts a worker (the supervisor's counterpart of ``main``).

    Args:
        like: for an added worker: index of the planned one with the same configuration.
    """
    return [
        sys.executable,
        "-P",  # no module is imported from the working folder
        "-m",
        "realsys.worker.main",
        worker_type,
        str(index),
        f"--trial-dir={trial_dir}",
        f"--plan-hash={plan_hash}",
        f"--phase={phase}",
        f"--attempt={attempt}",
        *([] if like is None else [f"--like={like}"]),
    ]


def main() -> int:
    """Runs one worker; returns its exit code."""
    args = _parse()
    restrict_umask()
    raise_open_file_limit()
    if parent := os.environ.get(PARENT_PID_VARIABLE):
        die_with_parent(int(parent))
    name = f"{args.worker_type}/{args.index}"
    context = configure_logging(name)
    files = TrialFiles(Path(args.trial_dir))
    runner: WorkerRunner | None = None
    try:
        runner = _make_runner(args, files)
        # Before everything slow, so that it is ready when the worker registers.
        runner.start_heartbeat(
            on_terminate=lambda terminate: _write_termination_record(
                files, args.attempt, name, terminate
            )
        )
        run = import_role(args.worker_type, runner.plan.imports)
        runner.config = runner.phase.config.resolve_worker_config(
            args.worker_type, args.index, like=args.like
        )
        runner.set_log_step = lambda step: setattr(context, "step", step)
        code = run(runner)
        runner.move(WorkerEvent.EXIT)
        return code
    # Outermost frame: every error is recorded. Code that calls exit counts as a failure.
    except (Exception, SystemExit) as error:
        _write_failure_record(files, args.attempt, name, error)
        if runner is not None and runner.state not in FINAL:
            runner.move(WorkerEvent.ERROR, reason=first_line(error))
        return worker_exit_codes.FAILED
    finally:
        if runner is not None:
            _deregister(runner)


def import_role(worker_type: str, plugins: Sequence[str]) -> Callable[[WorkerRunner], int]:
    """Loads the plugins and returns the role's ``run``.

    Raises:
        ConfigError: a plugin can't be imported.
    """
    gc.disable()  # module contents are never freed: scanning them repeatedly takes a fifth of the time
    try:
        registry.load_plugins(plugins)
        module, _, function = ROLES[worker_type].partition(":")
        run: Callable[[WorkerRunner], int] = getattr(importlib.import_module(module), function)
    finally:
        gc.freeze()
        gc.enable()
    return run


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worker_type", choices=sorted(ROLES))
    parser.add_argument("index", type=int)
    parser.add_argument("--trial-dir", required=True)
    parser.add_argument("--plan-hash", required=True)
    parser.add_argument("--phase", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--like", type=int)
    return parser.parse_args()


def _make_runner(args: argparse.Namespace, files: TrialFiles) -> WorkerRunner:
    plan = read_plan(files.plan, expected_hash=args.plan_hash)
    attempt = read_record(AttemptRecord, files.attempt(args.attempt).record)
    newest = files.all_attempts()[-1].number if files.all_attempts() else 0
    if attempt is None or newest != args.attempt:
        raise StaleAttempt(
            f"attempt {args.attempt} is not the newest ({newest})",
            where=str(files.attempts),
            fix="none: a newer attempt runs the trial",
        )
    return WorkerRunner(
        plan=plan,
        phase=plan.phase(args.phase),
        attempt=attempt,
        worker_type=args.worker_type,
        index=args.index,
    )


def _deregister(runner: WorkerRunner) -> None:
    """Ends the lease. A failing store (a full disk) must not hide why the worker ended."""
    try:
        runner.deregister()
    except RealsysError as error:
        logger.warning("deregistration failed error=%s", error.what)


def _write_failure_record(
    files: TrialFiles, attempt: int, name: str, error: Exception | SystemExit
) -> None:
    text = "".join(traceback.format_exception(error))
    logger.error("failed error=%s\n%s", first_line(error), text)
    _write_record(files.attempt(attempt).failure_record(name), failure_of(name, error))


def _write_termination_record(
    files: TrialFiles, attempt: int, name: str, terminate: Terminate
) -> None:
    """Records why this process must exit, unless it has already recorded a failure."""
    path = files.attempt(attempt).failure_record(name)
    if not path.exists():
        _write_record(path, failure_by_order(name, terminate.why, terminate.kind))


def _write_record(path: Path, record: Failure) -> None:
    try:
        write_record(path, record)
    except OSError as disk_error:
        logger.error("failure record not written error=%s", disk_error)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of libraries (torch, zmq) must not delay the end of a worker that has deregistered.
    os._exit(code)
