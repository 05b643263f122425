"""Does a worker get on: judged from ticks and steps, nothing else."""

import pytest

from realsys.heartbeat.stall import FACTOR, FLOOR_S, STOPPED_S, UNKNOWN_S, StallDetector


class Worker:
    """A judge, and the clock of the test."""

    def __init__(self, **limits):
        self.judge, self.now_s, self.ticks = StallDetector(**limits), 1000.0, 0
        self.stalled_s = 0.0

    def told(self, *, busy=True, step=0, **limits):
        self.judge.on_status(busy=busy, step=step, now_s=self.now_s, **limits)

    def passes(self, seconds, *, ticking=False):
        """Looks twice a second, as the heartbeat process does."""
        for _ in range(round(seconds * 2)):
            self.now_s += 0.5
            self.ticks += ticking
            self.stalled_s = self.judge.check(self.ticks, now_s=self.now_s)

    def steps(self, *durations_s):
        for step, duration_s in enumerate(durations_s, 1):
            self.told(step=step)
            self.passes(duration_s, ticking=True)
        self.told(step=len(durations_s) + 1)


@pytest.fixture
def worker():
    made = Worker()
    made.passes(1)
    return made


def test_before_three_steps_are_known_it_has_minutes(worker):
    assert UNKNOWN_S <= 600
    worker.steps(1, 1)
    worker.passes(UNKNOWN_S - 1)
    assert worker.stalled_s == 0
    worker.passes(2)
    assert worker.stalled_s > UNKNOWN_S


def test_one_without_steps_is_judged_by_how_often_it_ticks(worker):
    worker.told(ticks_within_s=120.0)
    worker.passes(300, ticking=True)
    worker.passes(119)
    assert worker.stalled_s == 0
    worker.passes(2)
    assert worker.stalled_s > 120
    worker.passes(1, ticking=True)
    assert worker.stalled_s == 0


def test_often_is_never_judged_below_the_floor(worker):
    worker.told(ticks_within_s=1.0)
    worker.passes(FLOOR_S)
    assert worker.stalled_s == 0
    worker.passes(1)
    assert worker.stalled_s > FLOOR_S


def test_short_steps_are_judged_by_the_floor(worker):
    worker.steps(1, 1, 1)
    worker.passes(FLOOR_S)
    assert worker.stalled_s == 0
    worker.passes(1)
    assert worker.stalled_s > FLOOR_S


def test_long_steps_are_judged_before_three_of_them_are_over(worker):
    worker.steps(60, 300, 60, 60)  # one of them an evaluation: the median counts
    worker.passes(60 * FACTOR)
    assert worker.stalled_s == 0
    worker.passes(0.2 * 60)
    assert 0 < worker.stalled_s < 3 * 60


def test_it_is_taken_back_when_it_ticks(worker):
    worker.steps(1, 1, 1)
    worker.passes(FLOOR_S + 5)
    assert worker.stalled_s > 0
    worker.passes(0.5, ticking=True)
    assert worker.stalled_s == 0


def test_who_does_not_compute_can_t_stall(worker):
    worker.steps(1, 1, 1)
    worker.told(busy=False, step=4)
    worker.passes(10_000)
    assert worker.stalled_s == 0


def test_what_is_known_to_be_slow_has_its_own_time(worker):
    worker.steps(1, 1, 1)
    worker.told(step=4, may_take_s=600)
    worker.passes(600)
    assert worker.stalled_s == 0
    worker.passes(1)
    assert worker.stalled_s > 0
    worker.told(step=4)
    worker.passes(FLOOR_S + 1)
    assert worker.stalled_s > 0


def test_the_time_in_which_the_looker_stood_still_does_not_count(worker):
    worker.steps(1, 1, 1)
    worker.passes(FLOOR_S - 5)
    worker.now_s += 1000
    worker.passes(4)
    assert worker.stalled_s == 0
    worker.passes(3)
    assert worker.stalled_s > 0


def test_a_pause_is_no_part_of_a_step(worker):
    worker.steps(1, 1)
    worker.judge.paused()
    worker.passes(5000)
    worker.told(step=4)
    worker.passes(1)
    assert worker.judge.limit_s == UNKNOWN_S  # two steps are known
    worker.told(step=5)
    assert worker.judge.limit_s == FLOOR_S


def test_steps_that_were_not_told_share_their_time(worker):
    for step in (1, 11, 21, 31):
        worker.told(step=step)
        worker.passes(100 * 10, ticking=True)
    assert worker.judge.limit_s == FACTOR * 100


def test_its_limits_can_be_others():
    worker = Worker(floor_s=2.0, unknown_s=50.0)
    worker.passes(1)
    assert worker.judge.limit_s == 50
    worker.steps(0.5, 0.5, 0.5)
    worker.passes(3)
    assert worker.stalled_s > 2


def test_one_that_is_stopped_while_it_waits_for_work_is_stalled_too():
    judge = StallDetector(floor_s=10.0, unknown_s=10.0)
    judge.on_status(busy=False, step=0, now_s=0.0)
    assert judge.check(1, now_s=1.0) == 0.0
    for now_s in range(2, 40):
        assert judge.check(1, now_s=float(now_s)) == 0.0  # idle: nobody expects it to tick
    assert judge.check(1, now_s=41.0, stopped_s=9.0) == 0.0
    assert judge.check(1, now_s=44.0, stopped_s=12.0) == 12.0
    assert judge.check(1, now_s=45.0) == 0.0


def test_one_that_is_stopped_in_its_first_steps_is_noticed_sooner(worker):
    worker.told(step=1)
    for second in range(1, 1000):
        worker.now_s += 1.0
        if worker.judge.check(0, now_s=worker.now_s, stopped_s=float(second)):
            break
    assert STOPPED_S < second <= STOPPED_S + 1


def test_a_site_with_slow_first_steps_can_raise_their_limit():
    slow = Worker(floor_s=2 * UNKNOWN_S)
    slow.passes(1)
    slow.told(step=1)
    slow.passes(2 * UNKNOWN_S)
    assert slow.stalled_s == 0
    slow.passes(1)
    assert slow.stalled_s > 2 * UNKNOWN_S
