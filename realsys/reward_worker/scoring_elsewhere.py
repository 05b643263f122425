"""Connects a process that has answers to the run's reward workers, if there are any."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

from realsys.api.basics.grader import set_grader
from realsys.api.basics.reward import fields_of_rules
from realsys.api.errors import TrialError
from realsys.api.scheduling import WorkerType
from realsys.name_resolve.store import NameResolve
from realsys.name_resolve.trial_store import open_trial_store
from realsys.reward_worker.reward_workers import RewardWorkers
from realsys.reward_worker.worker_choice import WorkerChoice
from realsys.transport.channel import RequestClient
from realsys.transport.reward_messages import FromRewardWorker
from realsys.trial.records import WorkerRecord, loads
from realsys.worker.runner import WorkerRunner, channel_identity

logger = logging.getLogger(__name__)


@contextmanager
def scoring_elsewhere(runner: WorkerRunner) -> Iterator[None]:
    """Makes reward workers score this process's answers while the block runs; nothing without any."""
    configs = runner.phase.config.reward_worker
    if not configs:
        yield
        return
    rule = configs[0]  # all have the same
    num_workers = len(configs)
    with ExitStack() as stack:
        workers = RewardWorkers(
            WorkerChoice(
                num_workers=num_workers, first=zlib.crc32(runner.name.encode()) % num_workers
            ),
            look_up=_Registrations(runner, stack).read,
            connect=partial(
                RequestClient,
                sender=runner.name,
                reply_type=FromRewardWorker,
                **channel_identity(runner),
            ),
            looked_at=fields_of_rules(rule.reward, rule.reward_args),
            waiting_for=runner.waiting_for,
        )
        stack.enter_context(workers)
        set_grader(rule.reward, rule.reward_args, workers)
        stack.callback(set_grader, rule.reward, rule.reward_args, None)
        yield


class _Registrations:
    """Reads the registrations of reward workers.

    Over a connection of its own, opened when the first answers are to be scored: a model worker has none,
    and needs this one only to find workers that are new.
    """

    def __init__(self, runner: WorkerRunner, stack: ExitStack) -> None:
        self._runner, self._stack = runner, stack
        self._store: NameResolve | None = None

    def read(self) -> Mapping[int, WorkerRecord]:
        """Returns the registered reward workers of this attempt by index. Raises StoreError."""
        runner, found = self._runner, dict[int, WorkerRecord]()
        if self._store is None:
            self._store = open_trial_store(runner.plan, runner.attempt_files)
            self._stack.callback(self._store.close)
        for entry in self._store.get_subtree(f"{runner.keys.workers}/{WorkerType.REWARD_WORKER}"):
            try:
                record = loads(WorkerRecord, entry.value, where=entry.key)
            except TrialError as error:
                logger.warning("registration not readable key=%s error=%s", entry.key, error)
                continue
            if record.token == runner.attempt.token and record.control:
                found[int(record.worker.rpartition("/")[2])] = record
        return found
