"""Sets up an evaluator: checkpoints, results, model, TensorBoard, registration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from realsys.devices.cuda_settings import apply, settings_for
from realsys.evaluator.checkpoints import SavedCheckpoints
from realsys.evaluator.evaluating import evaluate_checkpoint
from realsys.evaluator.evaluator_worker import EvaluatorLoop, Surroundings
from realsys.evaluator.pending import SavedCheckpoint
from realsys.evaluator.results import Results
from realsys.observability.evaluations import metric_rows
from realsys.observability.tensorboard_files import TensorBoardFiles
from realsys.reward_worker.scoring_elsewhere import scoring_elsewhere
from realsys.runtime import worker_exit_codes
from realsys.runtime.lifecycle import WorkerEvent
from realsys.runtime.worker_commands import Verb
from realsys.trial.records import PhaseFiles, is_there
from realsys.worker.device import compute_device
from realsys.worker.runner import WorkerRunner

LOAD_S = 1800.0  # a large checkpoint may take so long to be read, without a tick


def run(runner: WorkerRunner) -> int:
    """Runs the evaluator to its end; returns its exit code."""
    config = runner.config
    device = _set_up_torch(runner)
    files, opened = runner.phase_files, dict[str, Any]()
    done = runner.attempt_files.done(runner.phase.name)
    with ExitStack() as stack:
        stack.enter_context(scoring_elsewhere(runner))
        shows: Callable[[Sequence[Mapping[str, Any]]], None] = lambda rows: None  # noqa: E731
        if runner.phase.config.tensorboard:
            shows = _tensorboard(files, stack)
        loop = EvaluatorLoop(
            config,
            attempt=runner.attempt.number,
            saved=SavedCheckpoints(files.checkpoints / config.role, config.role),
            results=Results(files, config.role),
            evaluate=lambda checkpoint, before_batch: evaluate_checkpoint(
                checkpoint.path,
                config,
                device=device,
                before_batch=before_batch,
                logs=files.rows_of(runner.attempt.number).root / "agents" / "evaluator",
                opened=opened,
            ),
            world=Surroundings(
                is_over=lambda: is_there(done),
                may_write=lambda: runner.check_lease(timeout_s=runner.patience_s),
                begins=lambda checkpoint: _begins(runner, checkpoint),
                ends=lambda: runner.move(WorkerEvent.FINISHED_CALL),
                shows=shows,
            ),
        )
        runner.controls.supported = frozenset(
            {Verb.CONFIGURE, Verb.DUMP, Verb.INTERRUPT, Verb.EXIT}
        )
        runner.controls.leave = loop.leave
        runner.register()
        runner.on_stop = lambda request: loop.leave()
        loop.run()
    return worker_exit_codes.STOPPED if runner.controls.is_interrupted else worker_exit_codes.DONE


def _begins(runner: WorkerRunner, checkpoint: SavedCheckpoint) -> None:
    runner.set_log_step(checkpoint.step)
    call = f"evaluate {checkpoint.role}"
    runner.move(WorkerEvent.STARTED, mfc=call, step=checkpoint.step, may_take_s=LOAD_S)


def _tensorboard(
    files: PhaseFiles, stack: ExitStack
) -> Callable[[Sequence[Mapping[str, Any]]], None]:
    """Returns a writer of a TensorBoard run beside the master's, because an event file has one writer.

    Opened with the first rows, and then given all of them: it makes TensorBoard drop what a former
    process wrote.
    """
    opened: list[TensorBoardFiles] = []

    def show(rows: Sequence[Mapping[str, Any]]) -> None:
        if not opened:
            board = TensorBoardFiles(files.tensorboard / "auto_eval", first_step=0)
            stack.callback(board.close)
            opened.append(board)
        for row in metric_rows(rows):
            opened[0].write(int(row["step"]), {k: v for k, v in row.items() if k != "step"})

    return lambda rows: show(rows) if rows else None


def _set_up_torch(runner: WorkerRunner) -> str:
    """Sets threads and determinism as on a model worker, so that figures agree; returns the device."""
    if runner.config.num_threads is not None:
        torch.set_num_threads(runner.config.num_threads)
    torch.manual_seed(runner.config.base_seed)  # nothing draws from it; a plug-in might
    group = runner.phase.scheduling.evaluator
    gpus = group.scheduling.gpu if group is not None else 0.0
    device = compute_device(
        gpus, sees_gpu=torch.cuda.is_available(), worker=runner.name, environ=os.environ
    )
    apply(settings_for(device, deterministic=runner.phase.config.deterministic, gpus=gpus))
    return device
