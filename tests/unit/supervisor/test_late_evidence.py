"""How long the supervisor waits for a cause, and which workers it then calls silent: in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stand_in_slurm import calls, program

from realsys.name_resolve.lease_validity import lease_ttl_s
from realsys.runtime.worker_exit_codes import NOT_STARTED
from realsys.slurm.hostlist import expand
from realsys.supervisor.health import late_evidence
from realsys.supervisor.health.failure_detector import FailureDetector
from realsys.supervisor.health.failure_report import LEASE_ENDED
from realsys.supervisor.health.late_evidence import (
    MARGIN_S,
    NEVER_REGISTERED,
    LateEvidence,
    Silent,
    ask_slurm,
    is_unseen,
)
from realsys.supervisor.health.peer_failures import UNOBSERVED
from realsys.trial.records import WorkerRecord

UNSEEN = f"it ended, {UNOBSERVED}"


@dataclass
class Task:
    """A worker, and how it ended."""

    worker: str
    host: str = ""
    code: int | None = None
    hint: str = ""

    def poll(self) -> int | None:
        return self.code


def registered(host: str, node: str = "") -> WorkerRecord:
    return WorkerRecord(
        worker="", host=host, pid=1, start=1, attempt=1, token="t", control="", node=node
    )


@dataclass
class World:
    """The clock, the leases and Slurm; ``lost`` and ``down`` tell who is silent from when on."""

    now_s: float = 0.0
    lost_s: dict[str, float] = field(default_factory=dict)  # worker → since when
    down: tuple[float, dict[str, str]] = (1e9, {})
    registered: dict[str, WorkerRecord] = field(default_factory=dict)
    is_frozen: bool = False
    detector: FailureDetector = field(default_factory=FailureDetector)
    asked: list[Any] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds == 0.05
        self.now_s += 0.25

    def lost(self, tasks: list[Task], *, unseen: set[str]) -> list[Task]:
        return [
            t for t in tasks if t.worker in unseen and self.lost_s.get(t.worker, 1e9) <= self.now_s
        ]

    def poller(self, ask: Callable[[], Any], *, every_s: float, name: str) -> Any:
        self.asked.append((every_s, name))

        def latest() -> Any:
            return SimpleNamespace(value=ask() if self.now_s >= self.down[0] else {})

        found = SimpleNamespace(latest=latest, stop=lambda: self.asked.append("stopped"))
        return SimpleNamespace(start=lambda: found)

    def ask(self, nodes: str) -> dict[str, str]:
        self.asked.append(nodes)
        return self.down[1]

    def wait(self, tasks: list[Task], *, stops_s: float = 1e9, explained_s: float = 1e9,
             timeout_s: float | None = 10.0) -> list[Silent]:  # fmt: skip
        evidence = LateEvidence(self, self.ask, timeout_s)  # type: ignore[arg-type]
        return evidence.wait(
            lambda: tasks,  # type: ignore[arg-type,return-value]
            is_explained=lambda: self.now_s >= explained_s,
            goes_on=lambda: self.now_s < stops_s,
        )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(late_evidence, "time", made)
    monkeypatch.setattr(late_evidence, "StorePoller", made.poller)
    return made


A, B = Task("a/0", host="n1.site"), Task("b/0", host="n2")
ENDED = replace(A, code=1, hint=UNSEEN)


@pytest.mark.parametrize(
    ("code", "hint", "unseen"),
    [(None, "", True), (1, UNSEEN, True), (1, "it broke", False), (NOT_STARTED, UNSEEN, False)],
)
def test_whose_end_nobody_saw(code: int | None, hint: str, unseen: bool) -> None:
    assert is_unseen(Task("a/0", code=code, hint=hint)) is unseen  # type: ignore[arg-type]


def test_leases_that_end_together_are_one_event(world: World) -> None:
    late, seen = Task("c/0"), Task("d/0", code=1)
    world.lost_s = {"a/0": 2.0, "b/0": 4.75, "c/0": 5.25, "d/0": 0.0}
    assert world.wait([A, B, late, seen]) == [Silent(A), Silent(B)]  # type: ignore[arg-type]
    assert (world.now_s, Silent(A).why) == (5.0, LEASE_ENDED)  # type: ignore[arg-type]
    assert world.asked == [(5.0, "nodes"), "stopped"]


def test_slurms_word_names_nodes_and_those_first_whose_end_nobody_saw(world: World) -> None:
    world.registered = {"c/0": registered("other", node="N1"), "d/0": registered("n1.site")}
    known, seen = Task("c/0"), Task("d/0", code=1)
    world.down = (3.0, {"n1": "down*", "n9": "down"})
    found = world.wait([seen, B, ENDED, known])  # type: ignore[list-item]
    assert [one.task for one in found] == [ENDED, known, seen]
    assert all("down*" in one.why for one in found)
    assert set(expand(world.asked[1])) == {"N1", "n1.site", "n2"}
    hosts = LateEvidence(world).hosts([seen, B, ENDED, known, Task("e/0")])  # type: ignore[arg-type,list-item]
    assert hosts == {"n1", "n2"}


@pytest.mark.parametrize(
    ("limits", "down", "found", "at_s"),
    [
        ({"stops_s": 4.0}, {"n1": "down"}, [A], 4.0),  # asked once more: Slurm ends such jobs
        ({"stops_s": 4.0}, {}, [], 4.0),
        ({"explained_s": 4.0}, {"n1": "down"}, [], 4.0),
        ({}, {}, [], 10.0),
    ],
)
def test_when_there_is_nothing_to_wait_for_any_more(
    world: World, limits: dict[str, float], down: dict[str, str], found: list[Task], at_s: float
) -> None:
    world.down = (1e9, down)
    assert [one.task for one in world.wait([A, B], **limits)] == found
    assert (world.now_s, world.asked[-1]) == (at_s, "stopped")


def test_who_ended_unseen_before_it_registered_is_silent_unless_its_node_was_heard_of(
    world: World,
) -> None:
    ends = [ENDED, replace(ENDED, worker="a/1"), replace(ENDED, worker="b/0", host="n2")]
    world.registered = {"c/0": registered("n2.site")}
    silent = [Silent(task, NEVER_REGISTERED) for task in ends[:2]]  # type: ignore[arg-type]
    assert world.wait([*ends, Task("d/0", host="n3")]) == silent
    seen = Task("e/0", host="n1", code=1)
    assert world.wait([*ends, seen]) == []
    world.registered = {"c/0": registered("other", node="n1")}
    assert [one.task.worker for one in world.wait(ends)] == ["b/0"]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_lease_is_waited_for_until_it_would_be_seen_to_end(world: World, is_frozen: bool) -> None:
    world.is_frozen = is_frozen
    world.wait([A, B], timeout_s=None)
    of_freeze = (world.detector.settle_s + MARGIN_S) * is_frozen
    limit_s = lease_ttl_s(2) + world.detector.lost_s + MARGIN_S + of_freeze
    assert limit_s <= world.now_s < limit_s + 0.25


@pytest.mark.parametrize(
    ("shell", "found"),
    [
        ("echo 'n1|mixed|none'; echo 'n2|down*|gone'", {"n2": "down*: gone"}),
        ("echo 'n2|down*|gone'; exit 1", {}),
        ("exec sleep 9", {}),
        (None, {}),
    ],
)
def test_slurm_is_asked_and_its_silence_says_nothing_of_a_node(
    shell: str | None, found: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if shell else str(tmp_path))
    if shell and "sleep" in shell:
        monkeypatch.setattr(late_evidence, "ANSWER_S", 0.1)
    if shell:
        program(tmp_path, "sinfo", shell)
    assert ask_slurm("n[1-2]") == found
    assert calls(tmp_path, "sinfo") == [
        "--noheader --Node --nodes=n[1-2] --format=%N|%T|%E"
    ] * bool(shell)
