"""Whom an attempt blames, and whether it goes on by itself, on tables of what may happen to its nodes.

``by_an_outsider.jsonl`` was written by somebody who had not read the code, ``by_an_engineer.jsonl`` by who
wrote it. A row: events on nodes n1 to n4 of a run with ``--requeue`` (seconds since the first), the nodes
to leave out, whether the run goes on by itself, the nodes that the message names, and why. They are
played in virtual time, with the supervisor's own classifier, order, detector of lost leases and verdict.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from stand_in_slurm import make_plan, program

from realsys.api.plan import JobLayout, LaunchPlan
from realsys.name_resolve.lease_validity import TTL_S
from realsys.slurm.job_identity import JobIdentity
from realsys.slurm.lost_nodes import is_silence, lost_nodes
from realsys.slurm.unreachable_nodes import unreachable_nodes
from realsys.supervisor import supervisor_main
from realsys.supervisor.health.failure_detector import LOST_S, FailureDetector
from realsys.supervisor.health.failure_report import LEASE_ENDED, STALLED
from realsys.supervisor.health.first_failure import order_failures
from realsys.supervisor.health.late_evidence import MARGIN_S, TOGETHER_S
from realsys.supervisor.health.peer_failures import addresses_of, is_secondary, with_both_ends
from realsys.supervisor.supervisor import LAST_WORDS_S
from realsys.supervisor.supervisor_main import goes_on_by_itself
from realsys.trial.records import ExitMarker, Failure, Result, WorkerRecord

COLUMNS = ("blame", "retry", "named")
# Rows that we judge otherwise than their author: the columns, and why.
JUDGED_OTHERWISE: dict[str, dict[int, tuple[tuple[str, ...], str]]] = {
    "by_an_outsider": {
        4: (
            ("named",),
            "the first of two agreeing witnesses is named too: whoever looks wants its log",
        ),
        12: (("named",), "of all leases that ended, the message tells the first"),
        21: (("named",), "the first failure is told; the others stand below it"),
        26: (
            ("named",),
            "NCCL does not say who its peers are: n3, and n1, which reports the timeout",
        ),
        32: (
            ("blame", "retry"),
            "debatable: /tmp may be the job's own doing; told, not tried again",
        ),
        34: (
            ("retry",),
            "debatable: a stale handle may be the code that was replaced under the run",
        ),
        36: (("retry",), "debatable: a full /dev/shm comes back with the run"),
        42: (("named",), "the address is a worker's, so its node is known"),
        43: (("named",), "a message names the worker that it quotes"),
        44: (("named",), "the peer that lost its connection to the blamed node is named too"),
        48: (
            ("retry", "named"),
            "debatable: a hang ends the run, and names who does not just wait",
        ),
        52: (
            ("blame",),
            "debatable: who exits gives back its own lease; here another worker's ends on n1, within a "
            "second of n2's, as in a rack",
        ),
    },
    "by_an_engineer": {},
}
HERE = Path(__file__).with_suffix("").parent / "node_failures"
TABLES = ("by_an_outsider", "by_an_engineer")
NODES = tuple(f"n{i}" for i in range(1, 5))
TICK_S, PATIENCE_S = 0.25, TTL_S + LOST_S + MARGIN_S
GLOO = "[…/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.{}]:48293: Connection reset by peer"
KINDS = {
    "by the store": "StoreUnavailable", "was lost, no reply": "WorkerLost", "no reply from": "WaitTimeout",
}  # fmt: skip
NCCL = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)"


def rows_of(table: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / f"{table}.jsonl").read_text().splitlines()]


def record(node: str) -> WorkerRecord:
    i = int(node[1:])
    return WorkerRecord(
        worker=f"model_worker/{i - 1}", host=node, pid=1, start=1, attempt=1, token="t",
        control=f"tcp://10.0.0.{i}:4000", data=f"tcp://10.0.0.{i}:4001",
    )  # fmt: skip


REGISTERED = {record(node).worker: record(node) for node in NODES}
PEERS = set().union(*map(addresses_of, REGISTERED.values()))


def failure(node: str, what: str, at: float) -> Failure:
    """A row's words as a worker's failure says them."""
    what = re.sub(
        r"connection reset by peer (?:n|10\.0\.0\.)(\d)", lambda m: GLOO.format(m[1]), what
    )
    what = re.sub(r"NCCL timeout, peers .*", NCCL, what)
    kind = match[1] if (match := re.match(r"([A-Za-z.]+(?:Error|Timeout))\b", what)) else ""
    for words, told_as in KINDS.items():
        kind = told_as if words in what else kind
    return Failure(
        worker=f"model_worker/{int(node[1:]) - 1}", host=node, pid=1, why=what, at=at, kind=kind
    )


@dataclass
class Played:
    """One attempt in virtual time."""

    failures: list[Failure] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)  # by Slurm
    gone: set[str] = field(default_factory=set)
    is_stopped: bool = False
    is_over: bool = False  # nothing is waited for
    is_of_slurm: bool = False  # Slurm has taken the job down
    detector: FailureDetector = field(default_factory=FailureDetector)

    def meet(self, event: dict[str, Any]) -> None:
        """Something happens."""
        node, what, at = event["node"], event["what"], float(event["t"])
        if node not in NODES:
            return
        if said := re.fullmatch(r"slurm says n\d ([A-Z_]+\S*)", what):
            self.states[node] = said[1]
        elif what == "lease expires":
            self.gone.add(node)
        elif re.search(r"preempted|time limit|scancel", what):
            self.is_stopped = True
        elif "no progress" in what:
            self.failures.append(
                Failure(worker="model_worker/0", host=node, pid=1, why=what, at=at, kind=STALLED)
            )
            self.is_over = True
        elif said := re.match(r"preflight says: (.*)", what):
            self.failures.append(failure(node, f"{said[1]} (failed the preflight)", at))
            self.is_over = True
        elif "heartbeats of the old attempt" not in what and (
            said := re.match(r"(?:worker exits: |srun says: |worker )(.*)", what)
        ):
            self.failures.append(failure(node, said[1], at))

    def silent(self, now_s: float) -> list[Failure]:
        """Workers of nodes that leases or Slurm call lost."""
        present = {f"rollout_worker/{n}": n for n in NODES if n not in self.gone}
        verdict = self.detector.look(present, now_s=now_s)
        lost = [self.detector.hosts[worker] for worker in verdict.lost]
        found = [failure(node, LEASE_ENDED, now_s) for node in lost]
        output = "\n".join(f"{node}|{state}|none" for node, state in self.states.items())
        out = unreachable_nodes(output)
        if self.failures and not found:
            found = [failure(n, f"Slurm can't reach its node: {w}", now_s) for n, w in out.items()]
        elif not self.failures and out and not self.is_stopped:
            self.is_of_slurm = True
        return found

    def is_judged(self, now_s: float) -> bool:
        """Whether the supervisor judges now."""
        if not self.failures:
            return False
        waited_s = now_s - min(f.at for f in self.failures)
        if self.is_stopped or self.is_over:
            return True
        if all(is_secondary(f, PEERS) for f in self.failures):
            return waited_s > PATIENCE_S
        return waited_s > LAST_WORDS_S


def play(row: dict[str, Any], plan: LaunchPlan) -> tuple[list[str], bool, list[str]]:
    """Returns the nodes left out, whether the run goes on, and the nodes that its message names."""
    attempt, events = Played(), sorted(row["events"], key=lambda e: e["t"])
    now_s = -5.0
    while now_s < 100.0:
        while events and events[0]["t"] <= now_s:
            attempt.meet(events.pop(0))
        had = list(attempt.failures)
        only_misses = all(is_secondary(f, PEERS) for f in had)
        silent = attempt.silent(now_s)
        if (
            attempt.is_of_slurm
        ):  # it ends the job and queues it again; a node that is down is not used
            return (
                sorted(
                    unreachable_nodes("\n".join(f"{n}|{s}|" for n, s in attempt.states.items()))
                ),
                True,
                [n for n, s in attempt.states.items() if unreachable_nodes(f"{n}|{s}|")],
            )
        if silent and only_misses and not attempt.is_stopped:
            attempt.failures += silent
            until_s = now_s + TOGETHER_S
            while now_s < until_s:
                now_s += TICK_S
                while events and events[0]["t"] <= now_s:
                    attempt.meet(events.pop(0))
                known = {f.host for f in attempt.failures if is_silence(f)}
                attempt.failures += [f for f in attempt.silent(now_s) if f.host not in known]
            break
        if attempt.is_judged(now_s):
            break
        now_s += TICK_S
    if attempt.is_stopped and all(is_secondary(f, PEERS) for f in attempt.failures):
        return [], not any("scancel" in e["what"] for e in row["events"]), []
    first, others = order_failures(attempt.failures, PEERS)
    if first is None:
        return [], True, []  # it runs on
    first = with_both_ends(first, others, REGISTERED, NODES)
    marker = ExitMarker(
        result=Result.FAILED, attempt=1, ended_at=1.0, phase="main", step=9, first_failure=first,
        other_failures=others,
    )  # fmt: skip
    left_out = sorted(lost_nodes(marker, "n[1-4]"))
    goes_on = goes_on_by_itself(plan, marker, began_at={"main": 3})
    return (
        left_out,
        bool(left_out) or goes_on,
        sorted({first.host, *left_out, *re.findall(r"\bn\d\b", first.why)}),
    )


def differing(table: str, tmp_path: Path) -> dict[int, tuple[str, ...]]:
    """Number of the row → the columns in which the attempt's verdict is another one."""
    found: dict[int, tuple[str, ...]] = {}
    plan = make_plan(tmp_path, requeue=True)
    for number, row in enumerate(rows_of(table), 1):
        verdict = zip(COLUMNS, play(row, plan), strict=True)
        if wrong := tuple(column for column, value in verdict if value != row[column]):
            found[number] = wrong
    return found


@pytest.mark.parametrize("table", TABLES)
def test_whom_an_attempt_blames_and_whether_it_goes_on(table: str, tmp_path: Path) -> None:
    expected = {number: columns for number, (columns, _) in JUDGED_OTHERWISE[table].items()}
    assert differing(table, tmp_path) == expected


def test_what_is_judged_otherwise_is_in_the_tables_and_little() -> None:
    for table, otherwise in JUDGED_OTHERWISE.items():
        rows = rows_of(table)
        assert otherwise.keys() <= set(range(1, len(rows) + 1))
        blamed = [number for number, (columns, _) in otherwise.items() if "blame" in columns]
        assert len(blamed) <= 2


RESET = Failure(
    worker="model_worker/0", host="n1", pid=1, why=GLOO.format(2), at=1.0, secondary=True
)


@pytest.mark.parametrize(
    ("requeue", "result", "first", "step", "goes_on"),
    [
        (True, Result.FAILED, RESET, 9, True),
        (True, Result.FAILED, replace(RESET, why=LEASE_ENDED, secondary=False), 9, True),
        (True, Result.FAILED, RESET, 3, False),  # no step since: it might end so for ever
        (True, Result.FAILED, replace(RESET, why="ValueError: no", secondary=False), 9, False),
        (True, Result.FAILED, None, 9, False),
        (True, Result.STOPPED, RESET, 9, False),
        (False, Result.FAILED, RESET, 9, False),
    ],
)
def test_workers_that_only_lost_each_other_go_on_where_they_had_got_on(
    tmp_path: Path,
    requeue: bool,
    result: Result,
    first: Failure | None,
    step: int,
    goes_on: bool,
) -> None:
    marker = ExitMarker(
        result=result, attempt=1, ended_at=1.0, phase="main", step=step, first_failure=first
    )
    plan = make_plan(tmp_path, requeue=requeue)
    assert goes_on_by_itself(plan, marker, began_at={"main": 3}) is goes_on
    assert not goes_on_by_itself(replace(plan, job=None), marker, began_at={"main": 3})


NO_GPU = "RuntimeError: No CUDA GPUs are available: no CUDA-capable device is detected"


@pytest.mark.parametrize(
    ("nodes", "worker", "step", "of_partition", "layout", "requeued"),
    [
        ("n[1-2]", "model_worker/0", 3, 4, JobLayout.SINGLE, True),  # n2 is well
        ("n[1-2]", "model_worker/0", 3, 2, JobLayout.SINGLE, False),  # too few others: n1 again
        ("n[1-2]", "model_worker/0", 9, 2, JobLayout.SINGLE, True),
        ("n[1-2]", "model_worker/0", 3, 0, JobLayout.SINGLE, False),  # Slurm does not answer
        ("n[1-2]", "model_worker/0", 3, 4, JobLayout.HET, False),  # whose nodes are not left out
        ("n[1-2]", "model_worker/0", 9, 4, JobLayout.HET, True),
        ("n1", "model_worker/0", 3, 4, JobLayout.SINGLE, False),  # all of them: the image's fault
        ("n1", "model_worker/0", 9, 4, JobLayout.SINGLE, True),
        ("n1", "preflight", 3, 4, JobLayout.SINGLE, True),  # which blames no node twice
    ],
)
def test_lost_nodes_are_no_reason_to_begin_the_same_for_ever(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: str,
    worker: str,
    step: int,
    of_partition: int,
    layout: JobLayout,
    requeued: bool,
) -> None:
    left_out: list[str] = []
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(
        supervisor_main, "leave_out", lambda job_id, lost, needed, **more: left_out.extend(lost)
    )
    program(tmp_path / "bin", "scontrol", 'echo "JobId=7 Partition=main ExcNodeList=(null)"')
    program(tmp_path / "bin", "sinfo", f"echo {of_partition}" if of_partition else "exit 1")
    marker = ExitMarker(
        result=Result.FAILED, attempt=1, ended_at=1.0, phase="main", step=step,
        first_failure=Failure(
            worker=worker, host="n1", pid=1, why=f"{NO_GPU} (failed the preflight)", at=1.0
        ),
    )  # fmt: skip
    plan = make_plan(tmp_path, requeue=True, layout=layout)
    job = JobIdentity(job_id="7", began_at=1.0)
    goes_on = supervisor_main._leave_out_lost_nodes(plan, job, nodes, marker, began_at={"main": 3})
    assert goes_on is requeued
    assert left_out == ["n1"] * (requeued and layout is JobLayout.SINGLE)
