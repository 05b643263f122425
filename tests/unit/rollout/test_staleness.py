"""Staleness by hand: who may begin, who is trained with whom, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import golden
import pytest

from realsys.api.errors import ConfigError, InternalError
from realsys.rollout.staleness.ledger import StalenessLedger


def ledger(**changed: Any) -> StalenessLedger:
    given = {"batch_size": 2, "max_staleness": 1, "policy": "wait", "total_steps": 10}
    return StalenessLedger(**{**given, **changed})


def admit_all(of: StalenessLedger, holder: str = "a") -> list[tuple[int, int, int, int]]:
    """(number, tries, min_version, target_step) of all that may begin now."""
    tickets = []
    while ticket := of.admit(holder):
        tickets.append((ticket.number, ticket.tries, ticket.min_version, ticket.target_step))
    return tickets


def deliver(of: StalenessLedger, *numbers: int, oldest: int = 0, tries: int = 0) -> None:
    for number in numbers:
        assert of.deliver(number, tries, oldest=oldest, newest=oldest).kept


def train(of: StalenessLedger) -> tuple[int, ...]:
    batch = of.next_batch()
    assert batch is not None, of.waits_for()
    of.batch_taken(batch)
    of.trained(batch)
    return batch


# ---- who may begin ------------------------------------------------------------------------------


def test_staleness_0_begins_one_batch_and_the_next_after_the_step() -> None:
    of = ledger(max_staleness=0)
    assert admit_all(of) == [(0, 0, 0, 1), (1, 0, 0, 1)]
    golden.check(of.why_not())
    deliver(of, 1, 0)
    batch = of.next_batch()
    assert batch == (0, 1)
    of.batch_taken(batch)
    assert of.admit("a") is None  # in training is not trained
    of.trained(batch)
    assert admit_all(of) == [(2, 0, 1, 2), (3, 0, 1, 2)]


def test_staleness_2_begins_three_batches() -> None:
    of = ledger(max_staleness=2)
    # Step 3 trains version 2, so version 0 is two steps behind it.
    assert [(n, least, step) for n, _, least, step in admit_all(of)] == [
        *((n, 0, 1) for n in (0, 1)),
        *((n, 0, 2) for n in (2, 3)),
        *((n, 0, 3) for n in (4, 5)),
    ]
    deliver(of, 0, 1)
    train(of)
    assert admit_all(of) == [(6, 0, 1, 4), (7, 0, 1, 4)]


def test_no_more_in_flight_than_allowed() -> None:
    of = ledger(max_in_flight=3)
    assert [ticket[0] for ticket in admit_all(of)] == [0, 1, 2]
    golden.check(of.why_not())
    deliver(of, 1)
    assert [ticket[0] for ticket in admit_all(of)] == [3]


def test_no_prompt_begins_that_the_run_does_not_need() -> None:
    of = ledger(total_steps=1, max_staleness=3)
    assert [ticket[0] for ticket in admit_all(of)] == [0, 1]
    golden.check(of.why_not())
    assert of.give_up(0, 0, filtered=True).kept
    assert [ticket[0] for ticket in admit_all(of)] == [2]
    deliver(of, 1, 2)
    assert train(of) == (1, 2)
    assert of.over
    golden.check(of.why_not())
    assert of.waits_for() == ()


def test_a_filtered_prompts_place_is_taken_by_the_next_ones() -> None:
    of = ledger(max_staleness=0)
    admit_all(of)
    assert of.give_up(0, 0, filtered=True).kept
    assert admit_all(of) == [(2, 0, 0, 1)]  # 1 and 2 are the first step now
    deliver(of, 1, 2)
    assert train(of) == (1, 2)
    assert of.counts() == {
        "in_flight": 0,
        "ready": 0,
        "waiting": 0,
        "trained": 2,
        "filtered": 1,
        "dropped": 0,
        "returned": 0,
    }


def test_returned_ones_begin_again_first_and_in_order() -> None:
    of = ledger(max_staleness=2)
    for number in range(4):
        assert of.admit("b" if number in (1, 2) else "a").number == number  # type: ignore[union-attr]
    assert of.give_up(3, 0, filtered=False).kept
    assert of.lost("b") == (1, 2)
    assert of.lost("b") == ()
    assert [ticket[:2] for ticket in admit_all(of)] == [(1, 1), (2, 1), (3, 1), (4, 0), (5, 0)]
    assert of.counts()["returned"] == 3


# ---- what is refused ----------------------------------------------------------------------------


def test_what_counts_no_more_is_refused_by_name() -> None:
    of = ledger()

    def refused(number: int, tries: int) -> str:
        verdict = of.deliver(number, tries, oldest=0, newest=0)
        assert not verdict.kept
        return verdict.why

    admit_all(of)
    golden.check(refused(17, 0))
    deliver(of, 0)
    golden.check(refused(0, 0))
    of.lost("a")
    golden.check(refused(1, 0))
    assert of.admit("b") is not None
    assert refused(1, 0) == "superseded: prompt 1 is at b now (try 1)"
    deliver(of, 1, tries=1)
    train(of)
    golden.check(refused(1, 1))
    assert not of.give_up(1, 1, filtered=True).kept


@pytest.mark.parametrize("policy", ["wait", "window"])
def test_who_ignores_the_tickets_version_is_told(policy: str) -> None:
    of = ledger(policy=policy, max_staleness=0)
    admit_all(of)
    deliver(of, 0, 1)
    train(of)
    admit_all(of, "rollout_worker/1")
    with golden.raises(InternalError) as wrong:
        of.deliver(2, 0, oldest=0, newest=1)
    assert "rollout_worker/1" in wrong.value.where


def test_versions_that_can_not_be_are_told() -> None:
    of = ledger()
    admit_all(of)
    for oldest, newest in ((0, 1), (-1, 0), (1, 0)):
        with golden.raises(InternalError):
            of.deliver(0, 0, oldest=oldest, newest=newest)
    deliver(of, 0, 1)
    of.batch_taken((0, 1))
    # Servers may have the weights of the step in training before all of the step is done.
    assert of.deliver(2, 0, oldest=0, newest=1).kept


def test_only_a_batch_that_was_taken_is_trained() -> None:
    of = ledger(max_staleness=1)
    admit_all(of)
    deliver(of, 0, 1, 2)
    for wrong in ((0,), (0, 0), (0, 3), (1, 2)):
        with golden.raises(InternalError):
            of.batch_taken(wrong)
    with golden.raises(InternalError):
        of.trained((0, 1))
    of.batch_taken((0, 1))
    with golden.raises(InternalError):
        of.batch_taken((2, 3))
    with golden.raises(InternalError):
        of.trained((1, 2))


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"total_steps": -1}, "total_steps"),
        ({"policy": "windows"}, "policy"),
    ],
)
def test_what_can_not_be_is_refused_at_once(changed: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        ledger(**changed)
    assert wrong.value.where == where


# ---- batches ------------------------------------------------------------------------------------


def test_policy_wait_waits_for_those_whose_turn_it_is() -> None:
    of = ledger()
    assert of.waits_for() == ("prompt 0 and later: nobody asks",)
    admit_all(of)
    deliver(of, 3, 2, 1)
    assert of.next_batch() is None
    assert of.waits_for() == ("prompt 0 at a (try 0)",)
    of.lost("a")
    golden.check(of.waits_for())
    of.admit("b")
    deliver(of, 0, tries=1)
    of.batch_taken((0, 1))
    golden.check(of.waits_for())


def test_policy_window_takes_what_is_finished_first_until_somebody_is_due() -> None:
    of = ledger(policy="window")
    admit_all(of)
    deliver(of, 3, 1)
    assert train(of) == (1, 3)
    # 0 and 2 may be as old as version 0, which step 2 may train and step 3 may not.
    assert admit_all(of) == [(4, 0, 1, 3), (5, 0, 1, 3)]
    deliver(of, 4, 5, oldest=1)
    assert of.next_batch() is None
    assert of.waits_for() == ("prompt 0 at a (try 0)", "prompt 2 at a (try 0)")
    assert of.deliver(2, 0, oldest=1, newest=1).kept  # from newer weights than it had to be
    deliver(of, 0)
    assert train(of) == (0, 4)  # 0 is due; 4 came before 5 and 2
    assert train(of) == (2, 5)


def test_a_returned_prompt_does_not_take_room_that_is_promised() -> None:
    of = ledger(policy="window", batch_size=1, max_staleness=2)
    admit_all(of)  # 0, 1, 2: due at step 3
    deliver(of, 2)
    assert train(of) == (2,)
    assert admit_all(of) == [(3, 0, 1, 4)]
    of.give_up(0, 0, filtered=False)
    deliver(of, 3, oldest=1)
    assert train(of) == (3,)
    # Step 3 belongs to 1, which may be as old as version 0. So 0 must be able to wait for step 4.
    assert of.admit("b").min_version == 1  # type: ignore[union-attr]


def test_policy_drop_never_waits_and_makes_anew_what_is_too_old() -> None:
    of = ledger(policy="drop")
    admit_all(of)
    deliver(of, 3, 1)
    assert train(of) == (1, 3)
    deliver(of, 2)  # still good for step 2
    admit_all(of)
    deliver(of, 4, 5, oldest=1)
    batch = of.next_batch()
    assert batch == (2, 4)
    assert of.batch_taken(batch) == ()
    verdict = of.deliver(0, 0, oldest=0, newest=1)
    golden.check(verdict.why)
    of.trained(batch)
    assert of.admit("b").tries == 1  # type: ignore[union-attr]
    assert of.counts()["dropped"] == 1


def test_policy_drop_throws_out_ready_ones_when_their_last_step_is_taken() -> None:
    of = ledger(policy="drop", batch_size=1)
    admit_all(of)
    deliver(of, 1)
    assert train(of) == (1,)
    admit_all(of)
    deliver(of, 2, oldest=1)
    deliver(of, 0)  # good for step 2, but 2 came first
    assert of.batch_taken((2,)) == (0,)
    of.trained((2,))
    assert admit_all(of) == [(0, 1, 1, 3), (3, 0, 2, 4)]


# ---- checkpoints --------------------------------------------------------------------------------


def test_a_restart_keeps_the_ready_and_gives_out_the_rest_again() -> None:
    of = ledger(max_staleness=1)
    admit_all(of)
    deliver(of, 0, 1, 3)
    of.batch_taken((0, 1))  # not trained: its tensors are in the checkpoint like the others
    again = ledger(max_staleness=1)
    again.restore(json.loads(json.dumps(of.snapshot())))
    assert again.version == 0
    assert again.next_batch() == (0, 1)
    assert again.counts()["ready"] == 3
    assert admit_all(again) == [(2, 1, 0, 2)]
    assert not again.deliver(2, 0, oldest=0, newest=0).kept  # from before the restart
    assert train(again) == (0, 1)


@pytest.mark.parametrize(
    ("changed", "numbers", "others"),
    [
        # Version 0 may be trained by step 2, which has two places for three.
        ({"max_staleness": 1}, (0, 1), (2, 3, 4)),
        ({"max_staleness": 0}, (1, 2), (0,)),  # ... by step 1 alone, whose places are taken
    ],
    ids=["too many are due", "one is late"],
)
def test_a_batch_after_which_others_come_too_late_is_an_error_of_ours(
    changed: dict[str, Any], numbers: tuple[int, ...], others: tuple[int, ...]
) -> None:
    """No ledger gets there by itself: this one was restored."""
    of = ledger(policy="window", **changed)
    ready = [[n, 0, 0, 0] for n in sorted((*numbers, *others))]
    of.restore({**of.snapshot(), "next": len(ready), "ready": ready})
    with pytest.raises(InternalError) as refused:
        of.batch_taken(numbers)
    assert refused.value.where == "StalenessLedger.batch_taken"
    dropping = ledger(policy="drop", **changed)
    dropping.restore({**dropping.snapshot(), "next": len(ready), "ready": ready})
    assert dropping.batch_taken(numbers) == (others if len(others) == 1 else ())


def test_a_restart_with_another_bound_is_refused() -> None:
    saved = ledger().snapshot()
    with golden.raises(ConfigError):
        ledger(max_staleness=2).restore(saved)
    longer = ledger(total_steps=20)
    longer.restore(saved)  # a run may be made longer
    assert longer.counts()["trained"] == 0
