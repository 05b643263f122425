"""Who is declared lost, and when nobody is. Times by hand."""

from __future__ import annotations

from types import SimpleNamespace

import golden

from realsys.supervisor.health.failure_detector import LOST_S, SETTLE_S, FailureDetector
from realsys.supervisor.health.late_evidence import MARGIN_S, LateEvidence
from realsys.supervisor.health.worker_leases import WorkerLeases

ALL = {"a": "n1", "b": "n1", "c": "n2", "d": "n2"}


def without(*workers: str) -> dict[str, str]:
    return {worker: host for worker, host in ALL.items() if worker not in workers}


def test_who_is_away_long_enough_is_lost() -> None:
    detector = FailureDetector()
    assert detector.look(ALL, now_s=0.0).lost == ()
    assert detector.look(without("b"), now_s=1.0).lost == ()
    assert detector.look(without("b"), now_s=1.0 + LOST_S).lost == ()
    assert detector.look(without("b"), now_s=1.1 + LOST_S).lost == ("b",)


def test_who_comes_back_in_time_starts_anew() -> None:
    detector = FailureDetector()
    for now_s, present in ((0, ALL), (1, without("b")), (3, ALL), (4, without("b"))):
        detector.look(present, now_s=now_s)
    assert detector.look(without("b"), now_s=6.9).lost == ()
    assert detector.look(without("b"), now_s=7.1).lost == ("b",)


def test_who_was_never_seen_is_not_missed() -> None:
    detector = FailureDetector()
    detector.look(without("d"), now_s=0.0)
    assert detector.look(without("d"), now_s=100.0).lost == ()


def test_who_has_left_is_not_missed() -> None:
    detector = FailureDetector()
    detector.look(ALL, now_s=0.0)
    detector.look(without("b"), now_s=1.0)
    detector.forget("b")
    assert detector.look(without("b"), now_s=100.0).lost == ()


def test_no_answer_says_nothing_about_anybody_until_things_have_settled() -> None:
    detector = FailureDetector()
    detector.look(ALL, now_s=0.0)
    detector.look(without("b"), now_s=1.0)
    golden.check(detector.look(None, now_s=2.0).frozen)
    verdict = detector.look(without("b"), now_s=1.9 + SETTLE_S)
    golden.check((verdict.lost, verdict.frozen))
    assert detector.look(without("b"), now_s=2.1 + SETTLE_S).lost == ("b",)


def test_a_whole_node_is_lost_at_once() -> None:
    detector = FailureDetector()
    detector.look(ALL, now_s=0.0)
    detector.look(without("a", "b"), now_s=1.0)
    assert detector.look(without("a", "b"), now_s=5.0).lost == ("a", "b")
    detector = FailureDetector()  # also where there is no other
    detector.look(without("c", "d"), now_s=0.0)
    assert detector.look({}, now_s=1.0).frozen == ""


def test_many_leases_of_several_hosts_point_to_the_store() -> None:
    detector = FailureDetector()
    detector.look(ALL, now_s=0.0)
    verdict = detector.look(without("a", "b", "c"), now_s=1.0)
    golden.check(verdict.frozen)
    assert detector.look(without("a", "b", "c"), now_s=10.0).lost == ()
    assert detector.look(without("a", "b", "c"), now_s=2.1 + SETTLE_S).lost == ("a", "b", "c")


def test_leases_that_were_taken_anew_between_two_looks_count_as_ended() -> None:
    """Found by the simulation: the store lost all leases, all but one worker had a new one 0.2 s later,
    and that one, which stood still for 4 s, was declared lost."""
    detector = FailureDetector()
    old, new = dict.fromkeys(ALL, "old"), dict.fromkeys(without("d"), "new")
    detector.look(ALL, now_s=0.0, leases=old)
    verdict = detector.look(without("d"), now_s=1.0, leases=new)
    golden.check(verdict.frozen)
    assert detector.look(without("d"), now_s=5.0, leases=new).lost == ()
    assert detector.look(without("d"), now_s=2.1 + SETTLE_S, leases=new).lost == ("d",)


def test_one_lease_taken_anew_freezes_nothing() -> None:
    detector = FailureDetector()
    leases = dict.fromkeys(ALL, "old")
    detector.look(ALL, now_s=0.0, leases=leases)
    leases |= {"a": "new"}
    assert detector.look(without("d"), now_s=1.0, leases=leases).frozen == ""
    assert detector.look(without("d"), now_s=4.1, leases=leases).lost == ("d",)


def test_leases_that_polls_see_end_two_seconds_apart_ended_at_one_moment() -> None:
    """Renewals are spread by ttl / 7.5, which is 1.3 s of the usual 10, and polls are 1 s apart."""
    detector = FailureDetector()
    detector.look(ALL, now_s=0.0)
    assert detector.look(without("a"), now_s=1.0).frozen == ""
    assert detector.look(without("a", "c", "d"), now_s=3.0).frozen
    assert detector.look(without("a", "c", "d"), now_s=10.0).lost == ()
    detector = FailureDetector()  # 3 s apart they are three losses
    detector.look(ALL, now_s=0.0)
    detector.look(without("a"), now_s=1.0)
    assert detector.look(without("a", "c", "d"), now_s=4.0).frozen == ""


def test_a_worker_that_left_and_is_back_under_its_name_has_lost_no_lease() -> None:
    detector = FailureDetector()
    detector.look(ALL, now_s=0.0, leases=dict.fromkeys(ALL, "old"))
    detector.forget("b")
    back = dict.fromkeys(ALL, "old") | {"b": "new"}
    assert detector.look(ALL, now_s=1.0, leases=back).frozen == ""
    assert detector.anew_since_s == {}


def test_who_is_started_anew_is_forgotten_alone() -> None:
    states = {"a": object(), "b": object()}
    leases = SimpleNamespace(
        registered={"a": "old"}, _former={}, statuses=states, detector=FailureDetector()
    )
    WorkerLeases.forget(leases, "a")  # type: ignore[arg-type]
    assert (leases.statuses, leases._former) == ({"b": states["b"]}, {"a": "old"})


def test_evidence_is_waited_for_as_long_as_leases_may_be_in_doubt() -> None:
    leases = SimpleNamespace(detector=FailureDetector(), is_frozen=False)
    evidence = SimpleNamespace(timeout_s=None, leases=leases)
    wait_s = LateEvidence._wait_s(evidence, 8)  # type: ignore[arg-type]
    assert wait_s > LOST_S + MARGIN_S
    leases.is_frozen = True
    frozen_s = LateEvidence._wait_s(evidence, 8)  # type: ignore[arg-type]
    assert frozen_s - wait_s == SETTLE_S + MARGIN_S
    evidence.timeout_s = 0.1
    assert LateEvidence._wait_s(evidence, 8) == 0.1  # type: ignore[arg-type]
