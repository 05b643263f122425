"""Whom a standstill is put down to."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import golden
import pytest

from realsys.runtime import worker_exit_codes
from realsys.supervisor.health.failure_report import FailureReporter, suspects
from realsys.supervisor.health.first_failure import order_failures
from realsys.supervisor.health.peer_failures import is_secondary
from realsys.trial.records import (
    AttemptFiles,
    AttemptRecord,
    TrialFiles,
    WorkerRecord,
    WorkerStatus,
)

IN_COLLECTIVE = "all_reduce (torch/distributed/distributed_c10d.py:2501) < step (engine.py:88)"


def status(stalled_s: float = 0.0, where: str = "", waits_for: str = "") -> WorkerStatus:
    return WorkerStatus(
        state="running", stalled_s=stalled_s, stalled_where=where, waits_for=waits_for
    )


@pytest.mark.parametrize(
    ("statuses", "named"),
    [
        ({"m/0": status(60.0), "m/1": status()}, ["m/0"]),
        (  # the one in a loop of its own, not those that wait for it in a collective
            {"m/0": status(60.0, IN_COLLECTIVE), "m/1": status(58.0, "loop (reward.py:7)")},
            ["m/1"],
        ),
        (  # the one that is waited for, though it does not say that it stands still
            {"m/0": status(60.0, "poll", "m/1: tensors of actor_gen"), "m/1": status()},
            ["m/1"],
        ),
        (  # along the chain
            {
                "m/0": status(60.0, "poll", "m/1: a"),
                "m/1": status(60.0, "poll", "m/2: b"),
                "m/2": status(50.0, "stopped by SIGSTOP"),
            },
            ["m/2"],
        ),
        (  # all in collectives: nobody knows
            {"m/0": status(60.0, IN_COLLECTIVE), "m/1": status(61.0, IN_COLLECTIVE)},
            ["m/1", "m/0"],
        ),
        (  # who waits for somebody that nobody knows is the end itself
            {"m/0": status(60.0, "poll", "m/7: a")},
            ["m/0"],
        ),
        (  # nor has one that is entered from outside
            {
                "m/0": status(60.0, "p", "m/1: a"),
                "m/1": status(59.0, "p", "m/2: b"),
                "m/2": status(58.0, "p", "m/1: c"),
            },
            ["m/1", "m/2"],
        ),
        (  # a circle has no end: those in it are named
            {"m/0": status(60.0, "p", "m/1: a"), "m/1": status(59.0, "p", "m/0: b")},
            ["m/0", "m/1"],
        ),
    ],
)
def test_the_suspects(statuses, named):
    assert suspects(statuses) == named


def test_a_worker_that_ran_out_of_memory_is_told_with_the_setting_to_change(tmp_path):
    attempt = AttemptRecord(
        number=1,
        token="t",
        host="n1",
        supervisor_pid=1,
        supervisor_start=1,
        started_at=1.0,
        job_id="12",
        nodes="n[1-2]",
    )
    hint = "its cgroup's memory limit of 3460 MiB ran out (oom_kill 0 → 1)"
    task = SimpleNamespace(
        worker="model_worker/1", host="n2", pid=7, hint=hint, ended_at=2.0, poll=lambda: -9
    )
    files = TrialFiles(tmp_path / "ppo" / "run1").attempt(1)
    failure = FailureReporter(attempt, files).of_task(task, None)
    assert "3460 MiB" in failure.why
    assert "scheduling.model_worker.mem=" in failure.fix
    assert " ppo/run1 " in failure.fix


# ---- workers that were not started -----------------------------------------------------------------

REFUSED = "srun ended with 255: unrecognized option '--no-container-remap-root'"


@dataclass
class Unstarted:
    """A task that srun could not start."""

    worker: str = "generation_server/1"
    host: str = "n2"
    pid: int = 0
    ended_at: float | None = 5.0
    hint: str = REFUSED

    def poll(self) -> int | None:
        return worker_exit_codes.NOT_STARTED


@pytest.fixture
def reporter(tmp_path: Path) -> FailureReporter:
    record = AttemptRecord(
        number=1, token="t", host="n1", supervisor_pid=1, supervisor_start=1, started_at=1.0
    )
    files = AttemptFiles(tmp_path / "0001")
    files.logs.mkdir(parents=True)
    return FailureReporter(record, files)


def test_of_a_worker_that_was_not_started_sruns_words_and_log_are_told(reporter):
    log = reporter.files.logs / "srun-generation_server.log"
    log.write_text("srun: unrecognized option '--no-container-remap-root'\n")
    found = reporter.of_task(Unstarted(), None)
    assert found.why == f"was not started: {REFUSED}"
    assert found.log == str(log)
    golden.check(found.log_tail)
    golden.check(found)


def test_a_log_that_is_not_there_is_not_named(reporter):
    found = reporter.of_task(Unstarted(), None)
    assert (found.log, found.log_tail) == ("", ())
    own = reporter.files.log("generation_server/1")
    own.write_text("hello\n")
    (reporter.files.logs / "srun-generation_server.log").write_text("srun: something\n")
    assert reporter.of_task(Unstarted(), None).log == str(own)  # its own says most


@pytest.mark.parametrize(
    ("stalled", "words"),
    [
        ({"mfc": "actor_train", "stalled_where": "loop (a.py:7)"}, "stalled"),
        ({}, "stalled"),
        ({"stalled_s": 0.0}, "answer"),
    ],
)
def test_of_a_worker_that_hangs_its_place_and_what_may_be_raised_are_told(reporter, stalled, words):
    told = WorkerStatus(**{"state": "running", "step": 3, "stalled_s": 61.4, **stalled})
    task, before = replace(Unstarted(), host="", ended_at=None), time.time()
    known = WorkerRecord(worker="", host="n7", pid=42, start=1, attempt=1, token="t")
    found = reporter.of_stall(task, known, told)
    assert before <= found.at + told.stalled_s <= time.time()
    assert (found.worker, found.host, found.pid) == ("generation_server/1", "n7", 42)
    assert (found.kind, words in found.why) == ("Stalled", True)
    golden.check(found)
    nobody = reporter.of_stall(task, None, told)
    assert (nobody.host, nobody.pid) == ("n1", 0)
    there = reporter.of_silence(Unstarted(pid=9), known, why="it is silent")
    assert (there.host, there.pid, there.at, there.why) == ("n2", 9, 5.0, "it is silent")
    assert reporter.of_silence(task, known, why="").at == pytest.approx(time.time(), abs=600)


# ---- NCCL's end, which leaves no last words ----------------------------------------------------------

FRAMES = "\n".join(
    f"frame #{i}: c10d::ProcessGroupNCCL::run() + 0x{i:x} (…/libtorch_cuda.so)" for i in range(40)
)
TIMED_OUT = f"""\
[rank1]:[E1123 10:00:00 ProcessGroupNCCL.cpp:688] [Rank 1] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=1800000) ran for 1800012 milliseconds
terminate called after throwing an instance of 'c10::DistBackendError'
{FRAMES}
"""
LOST = f"""\
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 Rank 1] Process group watchdog thread terminated with exception: NCCL error: \
remote process exited or there was a network error, NCCL version 2.27.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
{FRAMES}
"""
SOCKET = f"""\
  what():  [PG ID 0 Rank 1] Process group watchdog thread terminated with exception: NCCL error: \
unhandled system error (run with NCCL_DEBUG=INFO for details)
Last error:
socketProgressOpt: Call to recv from 10.0.0.2<47133> failed : Connection reset by peer
{FRAMES}
"""
OWN = f"""\
  what():  [PG ID 0 Rank 1] Process group watchdog thread terminated with exception: CUDA error: an \
illegal memory access was encountered
{FRAMES}
"""


@dataclass
class Aborted:
    worker: str = "model_worker/1"
    host: str = "n1"
    pid: int = 7
    ended_at: float | None = 5.0
    hint: str = ""
    returncode: int = -6

    def poll(self) -> int | None:
        return self.returncode


@pytest.mark.parametrize(
    ("said", "secondary", "told"),
    [
        (TIMED_OUT, True, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5"),
        (LOST, True, "remote process exited or there was a network error"),
        (SOCKET, True, "Connection reset by peer"),
        (OWN, False, "killed by SIGABRT (signal 6): a native library gave up"),
        ("double free or corruption (out)\n", False, "a native library gave up"),
        ("GET /x: Connection reset by peer\n" + "free(): invalid pointer\n", False, "gave up"),
    ],
    ids=["timeout", "remote", "socket", "its own", "heap", "another's socket"],
)
def test_a_worker_that_nccl_ended_since_a_peer_was_gone_is_not_the_first(
    reporter, said, secondary, told
):
    reporter.files.log("model_worker/1").write_text(said)
    found = reporter.of_task(Aborted(), None)
    assert told in found.why
    assert is_secondary(found) is secondary
    lost = replace(
        found, worker="model_worker/0", at=9.0, why="its lease has ended: its node is lost"
    )
    first, _ = order_failures([found, lost])
    assert first is not None
    assert first.worker == ("model_worker/0" if secondary else "model_worker/1")


def test_only_an_abort_is_put_down_to_the_watchdog(reporter):
    reporter.files.log("model_worker/1").write_text(LOST)
    assert not is_secondary(reporter.of_task(Aborted(returncode=-9), None))
