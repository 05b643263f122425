"""When to save, checkpoint and evaluate: any of three periods, time as a number."""

import pytest

from realsys.master.periodic import Periodic


def due_steps(period, steps, *, epochs_done=lambda step: 0, seconds_a_step=1.0):
    return [
        step
        for step in steps
        if period.due(step=step, epochs_done=epochs_done(step), now_s=step * seconds_a_step)
    ]


def started(**periods):
    period = Periodic(**{"epochs": None, "steps": None, "seconds": None, **periods})
    period.start(now_s=0.0, epochs_done=0)
    return period


def test_without_periods_it_is_never_due():
    period = started()
    assert due_steps(period, range(1, 50), epochs_done=lambda step: step) == []


def test_by_steps():
    assert due_steps(started(steps=3), range(1, 11)) == [3, 6, 9]


def test_by_epochs_when_an_epoch_ends():
    # 5 steps an epoch: epochs 1, 2, 3 and 4 end after steps 5, 10, 15 and 20
    period = started(epochs=2)
    assert due_steps(period, range(1, 21), epochs_done=lambda step: step // 5) == [10, 20]


def test_by_seconds_since_it_was_last_done():
    # 4 s a step: 12 s pass at step 3, then at 6, 9
    assert due_steps(started(seconds=12.0), range(1, 10), seconds_a_step=4.0) == [3, 6, 9]
    # 5 s a step: 15 s at step 3; late by 3 s, so the next is 12 s after *that*
    assert due_steps(started(seconds=12.0), range(1, 10), seconds_a_step=5.0) == [3, 6, 9]


def test_any_of_several_periods_is_enough():
    period = started(steps=4, seconds=6.0)
    # step 4; at step 6 only 2 s have passed since; step 8 by steps; so seconds never come first
    assert due_steps(period, range(1, 13)) == [4, 8, 12]
    # 3 s a step: 6 s at step 2, by steps at 4, again 6 s at 6, …
    period = started(steps=4, seconds=6.0)
    assert due_steps(period, range(1, 9), seconds_a_step=3.0) == [2, 4, 6, 8]


def test_before_the_start_seconds_do_not_count():
    period = Periodic(None, None, 5.0)
    assert not period.due(step=1, epochs_done=0, now_s=1e9)


def test_an_attempt_starts_its_own_clock():
    period = Periodic(None, None, 10.0)
    period.start(now_s=500.0, epochs_done=0)
    assert not period.due(step=7, epochs_done=0, now_s=509.0)
    assert period.due(step=8, epochs_done=0, now_s=510.0)


@pytest.mark.parametrize("resumed_after", [3, 5, 7, 12])
@pytest.mark.parametrize("periods", [{"steps": 3}, {"epochs": 2}, {"epochs": 3, "steps": 7}])
def test_a_resumed_run_is_due_at_the_same_steps(periods, resumed_after):
    """Else its evaluations, and so its metrics, are not the uninterrupted run's."""

    def epochs(step):
        return step // 5

    whole = due_steps(started(**periods), range(1, 41), epochs_done=epochs)
    period = Periodic(**{"epochs": None, "steps": None, "seconds": None, **periods})
    period.start(now_s=0.0, epochs_done=epochs(resumed_after))
    rest = due_steps(period, range(resumed_after + 1, 41), epochs_done=epochs)
    assert rest == [step for step in whole if step > resumed_after]
