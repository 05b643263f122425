"""When a server is sick, when it is looked at again, how it comes back. Virtual time."""

import golden
import pytest

from realsys.generation.manager.quarantine import Condition, Quarantine, Rules

RULES = Rules(failures=3, within_s=60, check_every_s=5, first_pause_s=1, max_pause_s=8)


@pytest.fixture
def quarantine() -> Quarantine:
    """Server 0 is well since second 0."""
    made = Quarantine(RULES)
    made.joined(0, now_s=0.0)
    made.passed(0, now_s=0.0)
    return made


def test_one_that_comes_is_checked_at_once_and_is_not_well_before():
    made = Quarantine(RULES)
    made.joined(4, now_s=7.0)
    assert made.due(now_s=7.0) == [4]
    golden.check(made.sick)
    assert made.passed(4, now_s=8.0) is Condition.JOINING
    assert made.sick == {}
    assert made.next_due_s() == 13.0


def test_a_failed_check_makes_it_sick(quarantine):
    assert quarantine.failed(0, "no answer", now_s=5.0)
    assert quarantine.sick == {0: "no answer"}
    assert not quarantine.failed(0, "still none", now_s=6.0)  # it was already


def test_requests_that_break_in_a_row_make_it_sick(quarantine):
    broke = [quarantine.request_broke(0, "connection cut", now_s=s) for s in (1.0, 2.0, 3.0)]
    assert broke == [False, False, True]
    golden.check(quarantine.sick)


def test_one_that_breaks_makes_it_due_at_once(quarantine):
    quarantine.request_broke(0, "connection cut", now_s=1.0)
    assert quarantine.due(now_s=1.0) == [0]


def test_one_that_ends_well_between_them_clears_the_count(quarantine):
    quarantine.request_broke(0, "x", now_s=1.0)
    quarantine.request_broke(0, "x", now_s=2.0)
    quarantine.request_ended(0)
    assert not quarantine.request_broke(0, "x", now_s=3.0)


def test_old_breaks_count_no_more(quarantine):
    quarantine.request_broke(0, "x", now_s=0.0)
    quarantine.request_broke(0, "x", now_s=1.0)
    assert not quarantine.request_broke(0, "x", now_s=61.5)


def test_pauses_double_up_to_the_longest_and_it_comes_back(quarantine):
    now_s, pauses = 100.0, []
    quarantine.failed(0, "no answer", now_s=now_s)
    for _ in range(5):
        due_s = quarantine.next_due_s()
        pauses.append(due_s - now_s)
        now_s = due_s
        quarantine.failed(0, "no answer", now_s=now_s)
    assert pauses == [1, 2, 4, 8, 8]
    assert quarantine.passed(0, now_s=now_s) is Condition.SICK
    assert quarantine.sick == {}


def test_one_that_comes_and_goes_is_looked_at_ever_more_rarely(quarantine):
    now_s, pauses = 100.0, []
    for _ in range(4):  # well for a second each time
        quarantine.failed(0, "no answer", now_s=now_s)
        pauses.append(quarantine.next_due_s() - now_s)
        quarantine.passed(0, now_s=now_s + 1)
        now_s += 2
    assert pauses == [1, 2, 4, 8]
    quarantine.failed(0, "no answer", now_s=now_s + RULES.max_pause_s)  # well for long enough
    assert quarantine.next_due_s() - (now_s + RULES.max_pause_s) == 1


def test_a_new_process_has_no_past(quarantine):
    for s in (1.0, 2.0, 3.0):
        quarantine.failed(0, "no answer", now_s=s)
    quarantine.joined(0, now_s=4.0)
    assert quarantine.due(now_s=4.0) == [0]
    quarantine.failed(0, "no answer", now_s=4.0)
    assert quarantine.next_due_s() == 5.0


def test_breaks_of_a_sick_one_change_nothing(quarantine):
    quarantine.failed(0, "no answer", now_s=10.0)
    assert not quarantine.request_broke(0, "cut", now_s=10.1)
    assert quarantine.due(now_s=10.5) == []


def test_the_longest_overdue_is_first():
    made = Quarantine(RULES)
    for server, joined_s in ((0, 3.0), (1, 1.0), (2, 9.0)):
        made.joined(server, now_s=joined_s)
    assert made.due(now_s=5.0) == [1, 0]
