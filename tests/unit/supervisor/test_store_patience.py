"""How long each part of a run waits for its store: as long as the site says, and where it says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realsys.api.cluster import ClusterSpec
from realsys.api.errors import StoreDenied, StoreUnavailable, WaitTimeout
from realsys.api.options import range_problems
from realsys.heartbeat.heartbeat_link import Heartbeat
from realsys.heartbeat.heartbeat_messages import Init
from realsys.name_resolve import retry
from realsys.supervisor.job_etcd import job_store
from realsys.supervisor.job_etcd.job_store import START_TIMEOUT_S, JobStore
from realsys.trial.records import AttemptRecord, WorkerRecord, dumps
from realsys.worker import runner as runner_module
from realsys.worker.runner import WorkerRunner

PATIENCE_S = 90


def away(error: type[StoreUnavailable] = StoreUnavailable) -> StoreUnavailable:
    return error("etcd did not answer", where="etcd", fix="start it")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that ``patiently`` has waited, which take no time here."""
    waited = [0.0]

    def sleep(seconds: float) -> None:
        waited[0] += seconds

    stand_in = SimpleNamespace(monotonic=lambda: waited[0], sleep=sleep)
    monkeypatch.setattr(retry, "time", stand_in)
    return waited


@pytest.fixture
def runner(tmp_path: Path) -> WorkerRunner:
    cluster = ClusterSpec(store_patience_seconds=PATIENCE_S)
    plan: Any = SimpleNamespace(
        cluster=cluster, user="anna", experiment_name="e", trial_name="t", trial_dir=str(tmp_path),
        name_resolve_url="etcd://h:1",
    )  # fmt: skip
    attempt = AttemptRecord(
        number=1, token="t", host="n1", supervisor_pid=1, supervisor_start=1, started_at=1.0
    )
    phase: Any = SimpleNamespace(name="main")
    return WorkerRunner(plan, phase, attempt, "master_worker", 0)


def test_half_an_hour_unless_the_site_says_otherwise():
    assert ClusterSpec().store_patience_seconds == 1800
    (problem,) = range_problems(ClusterSpec(store_patience_seconds=29))
    assert "store_patience_seconds is 29" in f"{problem.where} {problem.what}"


def test_a_workers_heartbeat_process_is_told(runner: WorkerRunner, monkeypatch: pytest.MonkeyPatch):
    told: list[Init] = []
    monkeypatch.setattr(Heartbeat, "start", lambda link: told.append(link._begin))
    runner.start_heartbeat(on_terminate=lambda over: None)
    assert told[0].patience_s == PATIENCE_S


class Flaky:
    """A store that answers from some second on."""

    def __init__(self, clock: list[float], back_s: float) -> None:
        self.clock, self.back_s = clock, back_s

    def revision(self) -> int:
        return int(self._answer(7))

    def wait(self, keys: list[str], **how: Any) -> dict[str, bytes]:
        record = WorkerRecord(
            worker="model_worker/0", host="n", pid=1, start=1, attempt=1, token="t"
        )
        return dict.fromkeys(self._answer(keys), dumps(record))

    def _answer(self, value: Any) -> Any:
        if self.clock[0] < self.back_s:
            raise away()
        return value


@pytest.mark.parametrize("back_s", [PATIENCE_S - 1.0, PATIENCE_S + 2.0])
def test_a_worker_that_starts_while_the_store_is_away_waits_for_it(
    runner: WorkerRunner, clock: list[float], monkeypatch: pytest.MonkeyPatch, back_s: float
):
    monkeypatch.setattr(runner_module, "open_trial_store", lambda *of: Flaky(clock, back_s))
    if back_s > PATIENCE_S:
        with pytest.raises(StoreUnavailable):
            runner.revision()
        return
    assert runner.revision() == 7
    clock[0] = 0.0
    assert [r.worker for r in runner.peers("model_worker", 1, timeout_s=1.0)] == ["model_worker/0"]


def test_a_worker_that_does_not_come_is_not_taken_for_a_store_that_is_away(
    runner: WorkerRunner, clock: list[float]
):
    def wait(keys: list[str], **how: Any) -> None:
        raise WaitTimeout("1 of 1 keys did not come", where="store", fix="")

    runner._store = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    with pytest.raises(WaitTimeout):
        runner.peers("model_worker", 1, timeout_s=1.0)
    assert clock == [0.0]


@pytest.mark.parametrize(
    ("was_open_before", "error", "at_least_s", "at_most_s"),
    [
        (False, StoreUnavailable, START_TIMEOUT_S, START_TIMEOUT_S + 1),
        (False, StoreDenied, 0, 0),
        (True, StoreUnavailable, PATIENCE_S, PATIENCE_S + 1),  # a requeue during maintenance
        (True, StoreDenied, PATIENCE_S, PATIENCE_S + 1),
    ],
)
def test_a_later_attempt_waits_at_its_start_and_a_first_one_finds_its_mistake_soon(
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    was_open_before: bool,
    error: type[StoreUnavailable],
    at_least_s: float,
    at_most_s: float,
):
    def refuse(*of: Any) -> None:
        raise away(error)

    monkeypatch.setattr(job_store, "open_trial_store", refuse)
    cluster = ClusterSpec(store_patience_seconds=PATIENCE_S)
    plan: Any = SimpleNamespace(name_resolve_url="etcd://h:1", cluster=cluster)
    with pytest.raises(error):
        JobStore.open(plan, "", was_open_before=was_open_before)
    assert at_least_s <= clock[0] <= at_most_s
