"""The keeper of a lease: with a store in a folder, and with stores that hang, refuse and forget.

Its threads wait for time that the test lets pass, so that a busy machine loses no lease.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import golden
import pytest
from hand_time import HandTime

from realsys.api.errors import LeaseLost, StaleAttempt, StoreUnavailable
from realsys.name_resolve import lease_renewer
from realsys.name_resolve.file.file_store import FileStore
from realsys.name_resolve.lease_renewer import LeaseRenewer
from realsys.name_resolve.lease_validity import LeaseStatus

ROOT = "realsys/v1/site/anna/ppo-math/run1"


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> HandTime:
    """The clock of every keeper."""
    made = HandTime()
    monkeypatch.setattr(lease_renewer, "time", made)
    monkeypatch.setattr(lease_renewer, "threading", made.threading)
    return made


class FakeLease:
    """A lease whose renewal does ``renew``."""

    id = "0123"

    def __init__(self, renew: Callable[[], None] = lambda: None, ttl_s: float = 0.3) -> None:
        self.keep_alive, self.ttl_s, self.is_revoked = renew, ttl_s, False

    def revoke(self) -> None:
        self.is_revoked = True


@contextmanager
def kept(*args, **kwargs) -> Iterator[LeaseRenewer]:
    """A keeper between its start and its stop."""
    keeper = LeaseRenewer(*args, **kwargs).start()
    try:
        yield keeper
    finally:
        keeper.stop()


class Heard:
    """What a keeper says, and when."""

    def __init__(self) -> None:
        self.changes: list[tuple[LeaseStatus, str]] = []

    def __call__(self, lease_status: LeaseStatus, reason: str) -> None:
        self.changes.append((lease_status, reason))

    @property
    def lease_statuses(self) -> list[LeaseStatus]:
        return [lease_status for lease_status, _ in self.changes]


def refuse() -> None:
    raise StoreUnavailable("no answer", where="store", fix="none")


def lose() -> None:
    raise LeaseLost("lease 0123 has ended", where="store", fix="none")


def test_it_keeps_a_lease_and_gives_it_back(tmp_path: Path, hands: HandTime):
    store, heard, renewals = FileStore(tmp_path / "store", clock=hands.monotonic), Heard(), []

    def take():
        lease = store.grant(ttl_s=0.3)
        store.add(f"{ROOT}/a", b"x", lease=lease, replace=True)
        return lease

    told = {"on_change": heard, "on_renewed": lambda *renewal: renewals.append(renewal)}
    with kept(take, name="w/0", **told) as keeper:
        hands.passes(0.8)
        assert store.get(f"{ROOT}/a").value == b"x"
        assert keeper.lease_status is LeaseStatus.VALID
    assert store.find_subtree(ROOT) == []
    assert heard.changes == []
    assert len(renewals) > 5
    assert {ttl_s for _, ttl_s in renewals} == {0.3}
    assert not [t for t in threading.enumerate() if t.name.startswith("lease")]
    store.close()


@pytest.mark.parametrize("how", ["hangs", "refuses"])
def test_a_store_that_is_away_suspends_first(how: str, hands: HandTime):
    heard, lease = Heard(), FakeLease(refuse if how == "refuses" else lambda: hands.sleep(0.6))
    with kept(lambda: lease, name="w/0", on_change=heard, give_up_s=0.8) as keeper:
        hands.passes(0.4)
        assert keeper.lease_status is LeaseStatus.UNCERTAIN
        hands.passes(2.0)
        assert keeper.lease_status is LeaseStatus.EXPIRED
    golden.check(heard.changes[-1][1])
    assert heard.lease_statuses == [LeaseStatus.UNCERTAIN, LeaseStatus.EXPIRED]
    assert not lease.is_revoked, "a lease that is over is left alone"


def test_a_store_that_comes_back_ends_the_suspension(hands: HandTime, caplog):
    caplog.set_level(logging.INFO)
    away, heard = threading.Event(), Heard()
    lease = FakeLease(lambda: refuse() if away.is_set() else None)
    with kept(lambda: lease, name="w/0", on_change=heard):
        away.set()
        hands.passes(0.4)
        away.clear()
        hands.passes(0.3)
        assert heard.lease_statuses == [LeaseStatus.UNCERTAIN, LeaseStatus.VALID]
    assert lease.is_revoked
    told = [
        (r.levelno, "uncertain" in r.message)
        for r in caplog.records
        if " name=w/0 reason=" in r.message
    ]
    assert told == [(logging.ERROR, True), (logging.INFO, False)]


def test_a_lease_that_the_store_forgot_is_taken_anew(hands: HandTime):
    leases = [FakeLease(lose, ttl_s=1.0), FakeLease(ttl_s=0.5)]
    left, heard = iter(leases), Heard()
    with kept(lambda: next(left), name="w/0", on_change=heard) as keeper:
        hands.passes(0.5)
        assert keeper.lease is leases[1]
        assert keeper.lease_status is LeaseStatus.VALID
    assert heard.changes == []
    assert [lease.is_revoked for lease in leases] == [False, True]


def test_taking_it_anew_goes_on_while_the_store_is_away(hands: HandTime):
    answers = iter([FakeLease(lose, ttl_s=2.0), refuse, refuse, FakeLease(ttl_s=2.0)])
    heard = Heard()

    def take():
        answer = next(answers)
        return answer() if callable(answer) else answer

    with kept(take, name="w/0", on_change=heard) as keeper:
        hands.passes(1.2)
        assert keeper.lease_status is LeaseStatus.VALID
    assert next(answers, None) is None


def test_a_lease_that_ended_in_its_own_time_is_taken_anew_too(hands: HandTime):
    """The owner's keys say whether it may: ``take`` has the condition that the attempt is ours."""

    def end_late():
        hands.sleep(0.5)  # longer than the ttl
        lose()

    leases = [FakeLease(end_late), FakeLease(ttl_s=1.0)]
    left, heard = iter(leases), Heard()
    with kept(lambda: next(left), name="w/0", on_change=heard) as keeper:
        hands.passes(0.9)
        assert keeper.lease is leases[1]
        assert keeper.lease_status is LeaseStatus.VALID
    assert heard.lease_statuses == [LeaseStatus.UNCERTAIN, LeaseStatus.VALID]


def test_whoever_stood_still_until_its_attempt_was_ended_is_over(hands: HandTime):
    def ended():
        raise StaleAttempt("attempt 1 was ended by its supervisor", where="attempt", fix="none")

    def end_late():
        hands.sleep(0.5)
        lose()

    answers, heard = iter([lambda: FakeLease(end_late), ended]), Heard()
    with kept(lambda: next(answers)(), name="w/0", on_change=heard):
        hands.passes(1.0)
    golden.check(heard.changes[-1])


def test_keys_that_are_another_attempts_are_not_taken_anew(hands: HandTime):
    def stale():
        raise StaleAttempt("attempt 2 has taken over", where="attempt", fix="none")

    answers, heard = iter([lambda: FakeLease(lose), stale]), Heard()
    with kept(lambda: next(answers)(), name="w/0", on_change=heard):
        hands.passes(1.0)
    golden.check(heard.changes)


def test_a_broken_renewal_is_told(hands: HandTime):
    heard = Heard()
    with kept(lambda: FakeLease(lambda: 1 / 0), name="w/0", on_change=heard):
        hands.passes(1.0)
    assert "ZeroDivisionError" in heard.changes[0][1]


def test_what_can_t_be_taken_is_the_callers_error():
    with pytest.raises(StoreUnavailable):
        LeaseRenewer(refuse, name="w/0", on_change=Heard()).start()


def test_a_job_that_slurm_suspended_for_an_hour_goes_on(hands: HandTime) -> None:
    """Its clock has gone on; the lease has ended, and the store is asked before anybody gives up."""
    began_s, heard = hands.now_s, Heard()

    def renew() -> None:  # the store is slow to answer after the suspension
        if hands.now_s >= began_s + 3600.0:
            hands.sleep(5.0)
            lose()

    leases: list[FakeLease] = []

    def take() -> FakeLease:
        leases.append(FakeLease(renew if not leases else lambda: None, ttl_s=10.0))
        return leases[-1]

    with kept(take, name="w/0", on_change=heard) as keeper:
        hands.jumps(3600.0)
        hands.passes(1.0)
        assert keeper.lease_status is LeaseStatus.UNCERTAIN
        assert (heard.lease_statuses, len(leases)) == ([LeaseStatus.UNCERTAIN], 1)
        hands.passes(6.0)
        assert keeper.lease_status is LeaseStatus.VALID
    assert heard.lease_statuses == [LeaseStatus.UNCERTAIN, LeaseStatus.VALID]
    assert len(leases) == 2
