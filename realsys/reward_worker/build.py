"""Runs a reward worker: makes the run's rules, registers, and scores what other workers send."""

from __future__ import annotations

import asyncio

from realsys.api.worker_configs import RewardWorker
from realsys.rewards.rule import RewardRule, rule_of
from realsys.runtime import worker_exit_codes
from realsys.runtime.first_error import first_of
from realsys.runtime.lifecycle import WorkerEvent
from realsys.runtime.progress import tick
from realsys.runtime.worker_commands import Verb
from realsys.transport.channel import RequestServer
from realsys.transport.reward_messages import (
    AskPresence,
    Present,
    ScoredAnswers,
    ToRewardWorker,
    answer_of_json,
    scored_answer,
)
from realsys.trial.records import is_there
from realsys.worker.runner import WorkerRunner, channel_identity

POLL_S = 0.5
# For one answer, more than an asynchronous rule may take; then the worker is taken for hung, and is started
# again.
TICKS_WITHIN_S = 900.0


def run(runner: WorkerRunner) -> int:
    """Runs the reward worker until nobody is left who may have answers; returns its exit code."""
    config: RewardWorker = runner.config
    asyncio.run(_serve(runner, AnswerService(rule_of(config.reward, config.reward_args))))
    return worker_exit_codes.STOPPED if runner.controls.is_interrupted else worker_exit_codes.DONE


class AnswerService:
    """Scores the answers of requests; rules that block are called as everywhere."""

    def __init__(self, rule: RewardRule) -> None:
        self._rule, self._num_requests = rule, 0

    async def handle(self, request: ToRewardWorker) -> ScoredAnswers | Present:
        """Replies to one request."""
        if isinstance(request, AskPresence):
            return Present()
        self._num_requests += 1
        try:
            answers = [answer_of_json(text) for text in request.answers]
            results = await self._rule.score_side_by_side(answers)
        finally:
            self._num_requests -= 1
        return ScoredAnswers(answers=tuple(map(scored_answer, results)))

    async def tick_while_idle(self) -> None:
        """Ticks while there is nothing to score; else each scored answer does (realsys.rewards.rule)."""
        while True:
            if not self._num_requests:
                tick()
            await asyncio.sleep(POLL_S)


async def _serve(runner: WorkerRunner, service: AnswerService) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    runner.controls.supported = frozenset({Verb.CONFIGURE, Verb.DUMP, Verb.INTERRUPT, Verb.EXIT})

    def leave() -> None:
        loop.call_soon_threadsafe(over.set)

    runner.controls.leave = leave
    server = RequestServer(
        name=runner.name,
        request_type=ToRewardWorker,
        bind_host=runner.host,
        ports=runner.ports,
        **channel_identity(runner),
    )
    async with server:
        await asyncio.to_thread(runner.register, control=server.endpoint)
        runner.ticks_within_s = TICKS_WITHIN_S
        runner.move(WorkerEvent.STARTED, mfc="scoring")
        await first_of(
            {
                "commands": over.wait(),
                "end of the phase": _nobody_left(runner),
                "requests": server.serve(service.handle),
                "progress": service.tick_while_idle(),
            }
        )
    runner.move(WorkerEvent.FINISHED_CALL)


async def _nobody_left(runner: WorkerRunner) -> None:
    """Waits until master and evaluator have left, and the master has recorded the phase's end."""
    done = runner.attempt_files.done(runner.phase.name)
    while not (runner.is_alone and await asyncio.to_thread(is_there, done)):
        await asyncio.sleep(POLL_S)
