"""THE MAIN LOOP: one step after another until all are done or a stop is requested.

    while steps are left: walk the graph → write the metrics → save, checkpoint, evaluate when due

The master holds metadata only. function_executor.py runs the graph of a step, build.py creates the
loop's parts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from realsys.api.model import ModelName
from realsys.api.worker_configs import ExperimentSaveEvalControl
from realsys.master.checkpoint import recover
from realsys.master.checkpoint.outbox import Outbox
from realsys.master.checkpoint.publication import Publisher
from realsys.master.graph.curriculum import Curriculum
from realsys.master.graph.data_schedule import DataSchedule
from realsys.master.graph.dynamic_sampling import BatchNotFilled, DynamicSampling
from realsys.master.graph.function_executor import FunctionExecutor, StepReport
from realsys.master.graph.master_state import MasterState
from realsys.master.graph.model_workers import ModelWorkers
from realsys.master.periodic import Periodic
from realsys.master.rollouts.rollout_dispatcher import base_ids
from realsys.master.rollouts.rollout_service import RolloutService
from realsys.master.run_progress import ProgressBoard
from realsys.master.statistics import headline, metrics_row, success_rates
from realsys.observability.events import (
    EventLog,
    MfcEvent,
    MoveEvent,
    PeriodicEvent,
    PeriodicKind,
    StepEvent,
)
from realsys.observability.jsonl import JsonlAppender
from realsys.observability.metrics import MetricsWriter, point_to_newest
from realsys.runtime import worker_exit_codes
from realsys.transport import worker_requests as rq
from realsys.trial.records import PhaseFiles
from realsys.worker.runner import WorkerRunner

logger = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 3600.0
EVALUATE_TIMEOUT_S = 4 * 3600.0
SAY_WHY_S = 300.0  # a wait ends with its own reason before the master counts as stalled
EXIT_TIMEOUT_S = 30.0


@dataclass
class RunFiles:
    """The master's open files."""

    metrics: MetricsWriter
    events: EventLog
    ledger: JsonlAppender
    samples: JsonlAppender

    def sync(self) -> None:
        """Syncs all rows to the disk, before anything that depends on them."""
        for file in (self.ledger, self.metrics, self.samples, self.events):
            file.sync()

    def close(self) -> None:
        """Closes all files."""
        for file in (self.metrics, self.events, self.ledger, self.samples):
            file.close()


@dataclass(eq=False, repr=False)
class MasterWorkerLoop:
    """Runs the steps ``step + 1 … total_steps``. Created by build.py."""

    runner: WorkerRunner
    _: KW_ONLY
    executor: FunctionExecutor
    workers: ModelWorkers
    schedule: DataSchedule
    curriculum: Curriculum | None
    sampling: DynamicSampling | None
    files: RunFiles
    progress: ProgressBoard
    publisher: Publisher
    rollouts: RolloutService | None
    saved_models: tuple[ModelName, ...]
    evaluated: tuple[ModelName, ...]
    total_steps: int
    step: int

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.runner.may_publish, self.runner.patience_s)
        self.checkpointed_step = (
            self.step
        )  # of the checkpoint that we go on from, then of our newest
        ctrl: ExperimentSaveEvalControl = self.runner.config.exp_ctrl
        self.ckpt_keep = ctrl.ckpt_keep
        self.save_period = Periodic(
            ctrl.save_freq_epochs, ctrl.save_freq_steps, ctrl.save_freq_secs
        )
        self.ckpt_period = Periodic(
            ctrl.ckpt_freq_epochs, ctrl.ckpt_freq_steps, ctrl.ckpt_freq_secs
        )
        self.eval_period = Periodic(
            ctrl.eval_freq_epochs, ctrl.eval_freq_steps, ctrl.eval_freq_secs
        )
        self.stop_requested = False

    async def run(self) -> int:
        """Runs the loop; returns the master's exit code: all done, or stopped after a complete step."""
        publishing = asyncio.create_task(self.outbox.run(), name="outbox")
        try:
            async with self.executor:
                return await self._run()
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)

    async def _run(self) -> int:
        self._start_clocks()
        if self.step == 0 and self.evaluated:
            await self._record_first(await self.evaluate())
        while self.step < self.total_steps:
            if self.stop_requested:
                return await self.stop()
            try:
                await self.run_step()
            except BatchNotFilled:  # a resume goes on from here, with other limits
                await self.keep()
                raise
        await self.finish()
        return worker_exit_codes.DONE

    def close(self) -> None:
        """Ends the background tasks."""
        self.progress.close()
        self.publisher.close()

    @property
    def may_take_s(self) -> float:
        """Longest time without a tick of the master: with no delivery, no reply, or in an evaluation."""
        silence_s = 0.0 if self.rollouts is None else self.rollouts.silence_s
        return max(EVALUATE_TIMEOUT_S, silence_s) + SAY_WHY_S

    async def run_step(self) -> None:
        """Runs one step: the graph, its metrics, and what is due after it."""
        self.runner.set_log_step(self.step + 1)
        # It waits for workers, who are watched themselves, and for evaluations, which may take long.
        self.runner.publish_status(mfc="main loop", step=self.step + 1, may_take_s=self.may_take_s)
        report = await self.executor.run_step(self.step + 1)
        self.step = report.step
        epoch = self.schedule.epoch_of(self.step - 1)
        row = metrics_row(report, self.executor.graph, epoch=epoch)
        if self.rollouts is not None:
            row |= self.rollouts.metrics()
        if self.curriculum is not None:
            row |= self._follow_success(self.curriculum, report)
        self.progress.step_done(
            self.step, epoch=epoch, seconds=report.wall_s, tokens_per_s=row["perf/tokens_per_s"]
        )
        if self._evaluation_due():
            row |= await self.evaluate()
        self.progress.headline = headline(row, self.progress.headline)
        self.progress.publish()
        self.outbox.put(f"step {report.step}", partial(self._record, report, row))
        await self.outbox.flush()
        logger.info(
            "step done seconds=%.3f %s",
            report.wall_s,
            " ".join(f"{k}={v:.4g}" for k, v in self.progress.headline.items()),
        )
        await self._save_what_is_due()

    def _follow_success(self, curriculum: Curriculum, report: StepReport) -> dict[str, float]:
        """Tells the curriculum which answers of a step were correct; returns its metrics."""
        if self.rollouts is None:  # else the dispatcher has, before it granted more prompts
            for id, rate in success_rates(report, curriculum.source_of).items():
                curriculum.answered(id, rate)
            curriculum.trained(report.step)
        return curriculum.metrics(report.step, base_ids(report.ids))

    async def _record_first(self, evaluation: dict[str, float]) -> None:
        """Records the evaluation before the first step."""

        async def record() -> None:
            self.files.metrics.write(0, {"epoch": 0, **evaluation})

        self.outbox.put("step 0", record)
        await self.outbox.flush()

    async def _record(self, report: StepReport, row: dict[str, float]) -> None:
        """Writes the step's lines into metrics, ledger and events, each atomically."""
        runs = [(name, run) for name, call in report.calls.items() for run in call.runs]
        for name, call in runs:
            for worker, reply in call.replies.items():
                mfc = MfcEvent(
                    step=report.step,
                    name=name,
                    worker=self.workers.records[worker].worker,
                    queued=call.queued,
                    start=reply.started,
                    end=reply.ended,
                    compute_s=reply.compute_s,
                    tokens=reply.tokens,
                )
                self.files.events.note(mfc)
            for what, moved in call.moves.items():
                for worker, move in moved.items():
                    movement = MoveEvent(
                        step=report.step,
                        name=what,
                        worker=self.workers.records[worker].worker,
                        start=move.started,
                        end=move.ended,
                        num_bytes=move.bytes_received,
                    )
                    self.files.events.note(movement)
        done = StepEvent(step=report.step, start=report.started, end=report.ended)
        self.files.events.note(done)
        row_ids: dict[str, Any] = {"step": report.step, "ids": base_ids(report.ids)}
        if row_ids["ids"] != list(report.ids):
            row_ids["samples"] = list(report.ids)  # under which names their rollouts were dumped
        if report.sampled is not None:
            row_ids["filtered"] = list(report.sampled.filtered)
        self.files.ledger.append(row_ids)
        self.files.metrics.write(report.step, row)
        point_to_newest(self._phase)
        self.publisher.step(report.step)

    # ---- what happens between steps ---------------------------------------------------------

    def _start_clocks(self) -> None:
        now_s, epochs = time.monotonic(), self._epochs_done()
        for period in (self.save_period, self.ckpt_period, self.eval_period):
            period.start(now_s=now_s, epochs_done=epochs)

    def _epochs_done(self) -> int:
        return self.step * self.schedule.batch_size // self.schedule.dataset_size

    def _due(self, period: Periodic) -> bool:
        return period.due(step=self.step, epochs_done=self._epochs_done(), now_s=time.monotonic())

    def _evaluation_due(self) -> bool:
        due = self._due(self.eval_period)
        return bool(self.evaluated) and (due or self.step == self.total_steps)

    async def _save_what_is_due(self) -> None:
        if self._due(self.save_period) and self.step < self.total_steps:
            await self.save()
        if self._due(self.ckpt_period) and self.step < self.total_steps:
            await self.checkpoint()

    async def evaluate(self) -> dict[str, float]:
        """Returns held-out statistics as ``eval/<statistic>``; stores the sample answers."""
        self.progress.publish("evaluating")
        started = time.time()
        await self.executor.refresh(self.evaluated, step=self.step)
        replies: list[rq.Evaluated] = await self.workers.call_all(
            partial(rq.Evaluate, step=self.step),
            timeout_s=EVALUATE_TIMEOUT_S,
            what=f"evaluate after step {self.step}",
        )
        ended = time.time()
        stats: dict[str, float] = {}
        for reply in reversed(replies):  # the first worker's view wins: ranks agree
            for found in reply.stats.values():
                stats |= {f"eval/{key}": value for key, value in found.items()}
        samples = next((r.samples for r in replies if r.samples), ())
        step = self.step

        async def record() -> None:
            self._note_periodic("evaluate", step, started, ended)
            for sample in samples:
                self.files.samples.append({"step": step, **sample})

        self.outbox.put(f"evaluation of step {step}", record)
        return stats

    async def save(self) -> None:
        """Saves every trained role as a Hugging Face directory, and points ``latest`` to it."""
        self.progress.publish("saving")
        started = time.time()
        for model in self.saved_models:
            name = f".step-{self.step:06d}.{self.runner.attempt.number}"
            folder = self._phase.checkpoints / model.role / name
            await self.workers.call(
                dict.fromkeys(
                    self._holders(model),
                    partial(rq.SaveModel, model=str(model), folder=str(folder)),
                ),
                timeout_s=SAVE_TIMEOUT_S,
                what=f"save {model} after step {self.step}",
            )
            publish = partial(self.publisher.model, model.role, self.step, written=folder)
            self.outbox.put(
                f"{model.role} of step {self.step}", partial(asyncio.to_thread, publish)
            )
        self._note_when_saved(started)
        await self.outbox.flush()

    def _note_periodic(self, kind: PeriodicKind, step: int, start: float, end: float) -> None:
        self.files.events.note(PeriodicEvent(kind=kind, step=step, start=start, end=end))

    def _note_when_saved(self, started: float) -> None:
        step, ended = self.step, time.time()

        async def record() -> None:
            self._note_periodic("save", step, started, ended)

        self.outbox.put(f"the save of step {step}", record)

    def _holders(self, model: ModelName) -> list[int]:
        return sorted(w for s, w in self.runner.config.msid2mwid if s.model_name == model)

    async def checkpoint(self) -> None:
        """Writes everything that a resume needs, atomically."""
        self.progress.publish("checkpointing")
        started = time.time()
        state = MasterState(
            ahead=await self.executor.prefetched(),
            rollouts=self.rollouts.desk.snapshot() if self.rollouts is not None else None,
            curriculum=self.curriculum.snapshot() if self.curriculum is not None else None,
            sampling=self.sampling.snapshot() if self.sampling is not None else None,
        )
        folder = recover.begin(
            self._phase.recover, step=self.step, attempt=self.runner.attempt.number
        )
        replies: list[rq.RecoverSaved] = await self.workers.call_all(
            partial(rq.SaveRecover, folder=str(folder)),
            timeout_s=SAVE_TIMEOUT_S,
            what=f"checkpoint after step {self.step}",
        )
        names = [record.worker for record in self.workers.records]
        await asyncio.to_thread(
            recover.complete,
            folder,
            step=self.step,
            attempt=self.runner.attempt.number,
            saved=dict(zip(names, replies, strict=True)),
            state=None if state == MasterState() else state,
        )
        logger.info("checkpoint written folder=%s seconds=%.3f", folder, time.time() - started)
        self.outbox.put(
            f"checkpoint of step {self.step}",
            partial(self._publish_checkpoint, folder, self.step, started, time.time()),
            withdraw=partial(recover.withdraw, folder),
        )
        await self.outbox.flush()

    async def _publish_checkpoint(
        self, folder: Path, step: int, started: float, ended: float
    ) -> None:
        await asyncio.to_thread(self.files.sync)  # the rows it counts on, which are written by now
        final = await asyncio.to_thread(
            recover.publish,
            folder,
            step=step,
            attempt=self.runner.attempt.number,
            keep=self.ckpt_keep,
            lineage=self.publisher.lineage,
            allow=partial(self.publisher.allow_checkpoint, step),
        )
        self.checkpointed_step = step
        self._note_periodic("checkpoint", step, started, ended)
        logger.info("checkpoint published folder=%s", final)

    @property
    def _phase(self) -> PhaseFiles:
        return self.runner.phase_files

    # ---- the two ends -----------------------------------------------------------------------

    async def stop(self) -> int:
        """Ends after a complete step: writes its checkpoint, then deregisters."""
        logger.info("stopping after_step=%d of=%d", self.step, self.total_steps)
        await self.keep()
        await self.workers.say_exit(timeout_s=EXIT_TIMEOUT_S)
        return worker_exit_codes.STOPPED

    async def keep(self) -> None:
        """Publishes the checkpoint of the last complete step, if there is none yet."""
        await self.outbox.drain()
        if self.step > self.checkpointed_step:
            await self.checkpoint()
            await self.outbox.drain()

    async def finish(self) -> None:
        """Completes the run: publishes the product and the marker, then deregisters."""
        await self.save()
        await self.outbox.drain()
        await asyncio.to_thread(self.files.sync)
        self.files.close()
        self.outbox.put("the end", partial(asyncio.to_thread, self.publisher.done, self.step))
        await self.outbox.drain()
        await self.workers.say_exit(timeout_s=EXIT_TIMEOUT_S)
        self.progress.publish("done")
