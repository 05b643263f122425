"""How a lease's holder stands: played on a clock of the test's own."""

import random

import golden
import pytest

from realsys.name_resolve.lease_validity import (
    GIVE_UP_S,
    MANY_TTL_S,
    RENEWALS_PER_TTL,
    SUSPEND_AT,
    TTL_S,
    LeaseStatus,
    LeaseValidity,
    ProcessPauses,
    lease_ttl_s,
)


def test_a_lease_is_held_suspended_over():
    judge = LeaseValidity(10.0, granted_s=100.0, give_up_s=60.0)
    assert judge.lease_status(107.9) is LeaseStatus.VALID
    assert judge.lease_status(108.0) is LeaseStatus.UNCERTAIN
    assert judge.lease_status(159.0) is LeaseStatus.UNCERTAIN
    assert judge.lease_status(160.1) is LeaseStatus.EXPIRED
    golden.check(judge.reason)


def test_a_renewal_counts_from_when_it_was_sent_and_ends_a_suspension():
    judge = LeaseValidity(10.0, granted_s=100.0)
    assert judge.lease_status(120.0) is LeaseStatus.UNCERTAIN
    judge.renewed(119.0)
    assert judge.lease_status(120.0) is LeaseStatus.VALID
    judge.renewed(105.0)  # the answer to an older one, late
    assert judge.renewed_s == 119.0


def test_over_is_for_good():
    judge = LeaseValidity(10.0, granted_s=100.0)
    judge.end("attempt 2 has taken over")
    judge.renewed(101.0)
    judge.replaced(10.0, granted_s=101.0)
    assert judge.lease_status(101.0) is LeaseStatus.EXPIRED
    golden.check(judge.reason)


def test_a_lease_taken_anew_counts_with_its_own_time_however_late():
    judge = LeaseValidity(10.0, granted_s=100.0)
    assert judge.lease_status(150.0) is LeaseStatus.UNCERTAIN
    judge.replaced(20.0, granted_s=150.0)
    assert judge.lease_status(150.0 + SUSPEND_AT * 20 - 0.1) is LeaseStatus.VALID
    assert judge.lease_status(150.0 + SUSPEND_AT * 20) is LeaseStatus.UNCERTAIN


def test_a_store_that_lost_the_lease_ends_nobody_but_one_that_is_silent_does():
    judge = LeaseValidity(10.0, granted_s=100.0, give_up_s=60.0)
    assert judge.lease_status(159.9) is LeaseStatus.UNCERTAIN
    assert judge.lease_status(160.1) is LeaseStatus.EXPIRED
    judge.replaced(10.0, granted_s=160.1)  # its answer, too late
    assert judge.lease_status(160.2) is LeaseStatus.EXPIRED


def test_the_next_change_is_when_the_standing_changes():
    judge = LeaseValidity(10.0, granted_s=100.0, give_up_s=60.0)
    assert judge.next_change_s(100.0) == pytest.approx(8.0)
    assert judge.next_change_s(108.0) == pytest.approx(52.0)
    assert judge.next_change_s(160.0) == 0.0


def test_it_is_never_given_up_before_the_ttl():
    assert LeaseValidity(300.0, granted_s=0.0, give_up_s=60.0).give_up_s == 300.0
    assert LeaseValidity(15.0, granted_s=0.0).give_up_s == GIVE_UP_S


def test_a_large_trial_renews_less_often():
    assert (lease_ttl_s(1), lease_ttl_s(1000), lease_ttl_s(1001)) == (TTL_S, TTL_S, MANY_TTL_S)


def test_whoever_is_held_holds_a_lease_that_lives_whatever_the_network_does():
    """Renewals are sent, arrive, are answered late or are lost. The store counts from the arrival."""
    for seed in range(300):
        chance = random.Random(seed)
        judge, ends_s = LeaseValidity(TTL_S, granted_s=0.0), TTL_S
        answers: list[tuple[float, float]] = []
        now_s = next_s = 0.0
        while now_s < 200.0:
            now_s += 0.25
            for sent_s, back_s in list(answers):
                if back_s <= now_s:
                    judge.renewed(sent_s)
                    answers.remove((sent_s, back_s))
            if now_s >= next_s:
                next_s = now_s + TTL_S / RENEWALS_PER_TTL
                there_s = now_s + chance.expovariate(0.5)
                if there_s < ends_s and chance.random() < 0.6:
                    ends_s = there_s + TTL_S
                    if chance.random() < 0.8:
                        answers.append((now_s, there_s + chance.expovariate(0.5)))
            if judge.lease_status(now_s) is LeaseStatus.VALID:
                assert now_s < ends_s, f"seed {seed}"


def test_who_stood_still_has_not_asked_in_vain():
    """A job that Slurm suspends for an hour: nothing may be published after it before a renewal, but
    nobody has been refused anything."""
    judge, naps = (
        LeaseValidity(TTL_S, granted_s=0.0, give_up_s=120.0),
        ProcessPauses(0.0, every_s=1.0),
    )
    for now_s in (1.0, 2.0, 3600.0):
        naps.awake(now_s)
    assert judge.lease_status(3600.0, paused_s=naps.since(judge.renewed_s)) is LeaseStatus.UNCERTAIN
    for second in range(1, 118):
        naps.awake(3600.0 + second)
    assert judge.lease_status(3717.0, paused_s=naps.since(0.0)) is LeaseStatus.UNCERTAIN
    assert (
        judge.lease_status(3724.0, paused_s=naps.since(0.0)) is LeaseStatus.EXPIRED
    )  # awake for 120 s
    golden.check(judge.reason)


def test_a_nap_before_the_last_renewal_does_not_count():
    naps = ProcessPauses(500.0, every_s=1.0)
    naps.awake(1000.0)
    naps.awake(1010.0)
    assert naps.since(999.0) == 11.0  # the rest of it was before
    assert naps.since(1000.0) == 10.0
    naps = ProcessPauses(500.0, every_s=1.0)
    naps.awake(1000.0)
    assert naps.since(1000.0) == 0.0
    judge = LeaseValidity(TTL_S, granted_s=1000.5)
    assert (
        judge.lease_status(1000.5 + GIVE_UP_S + 1, paused_s=naps.since(1000.5))
        is LeaseStatus.EXPIRED
    )


def test_looks_that_come_a_little_late_are_no_nap():
    naps = ProcessPauses(0.0, every_s=1.0)
    for now_s in range(0, 300, 6):
        naps.awake(float(now_s))
    assert naps.since(0.0) == 0.0
