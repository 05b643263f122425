"""Which failures of the newest episodes let a run go on, wait or end."""

from __future__ import annotations

import random

import golden
import pytest

from realsys.master.rollouts.recent_episodes import RecentEpisodes
from realsys.transport.rollout_messages import EpisodeTry, TryFault

FAILED, AWAY, SERVERS = TryFault.FAILED, TryFault.AWAY, TryFault.SERVERS


def good(record: str, ago_s: float = 1.0) -> EpisodeTry:
    return EpisodeTry(id=record, ago_s=ago_s)


def bad(
    record: str,
    failures: int = 3,
    *,
    ago_s: float = 5.0,
    fault: TryFault = FAILED,
    why: str = "429",
) -> EpisodeTry:
    return EpisodeTry(id=record, ago_s=ago_s, failures=failures, fault=fault, why=why)


def play(recent: RecentEpisodes, share: float, *, episodes: int = 500, seed: int = 1) -> int | None:
    """Plays episodes whose tries fail at random; returns after how many the run ends, if it does."""
    draw, now_s = random.Random(seed), 0.0
    for number in range(episodes):
        now_s += 0.1
        record, failures = f"0-{number // 8}", 0
        while failures < 5 and draw.random() < share:
            failures += 1
            recent.note("w", [bad(record, failures, ago_s=0.0)], now_s=now_s)
        if failures < 5:
            recent.note("w", [good(record, ago_s=0.0)], now_s=now_s)
        if number % 5 == 0 and recent.fault(now_s=now_s):
            return number
    return None


@pytest.mark.parametrize(
    ("share", "limit", "ends"),
    [
        (0.0, 0.1, False),
        (0.1, 0.1, False),
        (0.14, 0.1, False),
        (0.25, 0.1, False),
        (0.6, 0.1, True),
        (0.9, 0.1, True),
        (0.6, 0.5, False),
        (0.1, 0.0, True),
    ],
)
def test_the_share_that_fails_three_times_in_a_row_ends_a_run(
    share: float, limit: float, ends: bool
) -> None:
    for seed in range(2):
        after = play(RecentEpisodes(failed_share=limit, batch_size=64), share, seed=seed)
        assert (after is not None) is ends
        if share >= 0.6 and ends:
            assert after is not None
            assert after < 200


def test_the_error_names_the_most_frequent_failure() -> None:
    recent = RecentEpisodes(batch_size=64)
    for number in range(60):
        record, whys = f"0-{number}", ("no box", f"429 for 0-{number}", f"429 for 0-{number}")
        tries = [bad(record, why=whys[number % 3], ago_s=0.0), good(f"1-{number}", ago_s=0.0)]
        recent.note("w", tries, now_s=float(number))
    error = recent.fault(now_s=61.0)
    assert error is not None
    golden.check(error)
    assert "schedule.failed_share" in error.fix


def test_an_outage_counts_for_nothing_however_many_fail() -> None:
    """Those that began before it end well in it, and the others fail; when it is over all is well."""
    recent = RecentEpisodes(batch_size=64, wait_limit_s=1800.0)
    for number in range(100):
        recent.note("w", [good(f"0-{number}", ago_s=0.0)], now_s=float(number))
    for second in range(100, 400, 5):
        failing = [bad(f"1-{n}", 3 + second % 3, ago_s=second - 100.0) for n in range(64)]
        late = [good(f"2-{second}", ago_s=second - 99.0)] if second < 150 else []
        recent.note("w", [*failing, *late], now_s=float(second))
        assert recent.fault(now_s=float(second)) is None
    assert recent.nothing_succeeds
    golden.check(recent.waits(now_s=400.0))
    after = [good(f"1-{n}", ago_s=1.0) for n in range(64)]
    recent.note("w", after, now_s=410.0)
    assert not recent.nothing_succeeds
    assert not recent.waits(now_s=410.0)
    assert recent.fault(now_s=410.0) is None
    assert recent.share() == 0


def test_an_outage_at_one_workers_node_is_its_own() -> None:
    recent = RecentEpisodes(batch_size=16)
    for second in range(0, 300, 5):
        failing = [bad(f"1-{n}", 3, ago_s=3.0) for n in range(8)]
        recent.note("here", failing, now_s=float(second))
        recent.note("there", [good(f"0-{second}-{n}") for n in range(8)], now_s=float(second))
    assert recent.nothing_succeeds_at("here")
    assert not recent.nothing_succeeds_at("there") or recent.nothing_succeeds
    recent.note("here", [good("2-1", ago_s=1.0)], now_s=301.0)
    assert not recent.nothing_succeeds_at("here")
    assert recent.fault(now_s=301.0) is None
    recent.note("here", [bad(f"3-{n}", ago_s=0.5) for n in range(8)], now_s=302.0)
    assert recent.nothing_succeeds_at("here")
    recent.lost("here")
    assert not recent.nothing_succeeds_at("here")


def test_what_fails_at_one_worker_is_no_outage_of_all_while_others_succeed() -> None:
    recent = RecentEpisodes(batch_size=4)
    recent.note("here", [bad(f"1-{n}", ago_s=3.0) for n in range(3)], now_s=10.0)
    assert recent.nothing_succeeds, "nothing has, so far"
    recent.note("there", [good("0-0", ago_s=2.0)], now_s=11.0)
    assert not recent.nothing_succeeds
    assert recent.nothing_succeeds_at("here")
    assert not recent.nothing_succeeds_at("there")
    recent.note("there", [bad(f"2-{n}", ago_s=1.0) for n in range(3)], now_s=12.0)
    assert recent.nothing_succeeds, "at two workers, and none has succeeded since"


def test_servers_that_do_not_answer_are_no_share_of_the_episodes() -> None:
    recent = RecentEpisodes(batch_size=64)
    for number in range(100):
        tries = [bad(f"0-{number}", fault=SERVERS, ago_s=0.0), good(f"1-{number}", ago_s=0.0)]
        recent.note("w", tries, now_s=float(number))
    assert recent.fault(now_s=100.0) is None
    assert recent.share() == 0


def test_few_records_that_fail_last_of_a_step_are_no_outage() -> None:
    recent = RecentEpisodes(batch_size=64)
    recent.note("w", [good(f"0-{n}", ago_s=9.0) for n in range(60)], now_s=10.0)
    recent.note("w", [bad(f"0-{n}", 5, ago_s=8.0) for n in range(60, 64)], now_s=95.0)
    assert not recent.nothing_succeeds
    recent.note("w", [bad(f"0-{n}", 5, ago_s=8.0) for n in range(53, 60)], now_s=96.0)
    assert recent.nothing_succeeds


@pytest.mark.parametrize(("at_once", "least"), [(0, 7), (1, 3), (3, 3), (5, 5), (64, 7)])
def test_all_that_are_played_at_a_time_are_an_outage(at_once: int, least: int) -> None:
    """With few at a time a step's share would be stuck after several rounds of giving up only."""
    for stuck in range(1, 9):
        recent = RecentEpisodes(batch_size=64, at_once=at_once)
        recent.note("w", [good("0-9", ago_s=9.0)], now_s=10.0)
        recent.note("w", [bad(f"1-{n}", fault=SERVERS) for n in range(stuck)], now_s=40.0)
        assert recent.nothing_succeeds is (stuck >= least), stuck
        assert bool(recent.waits(now_s=50.0)) is (stuck >= least)


def test_the_patience_ends_with_nothing_and_with_next_to_nothing() -> None:
    nothing = RecentEpisodes(batch_size=4, wait_limit_s=600.0)
    nothing.note("w", [good("0-0")], now_s=0.0)
    nothing.note("w", [bad(f"0-{n}", fault=AWAY) for n in range(4)], now_s=100.0)
    assert nothing.fault(now_s=699.0) is None
    error = nothing.fault(now_s=701.0)
    assert error is not None
    golden.check(error)
    rarely = RecentEpisodes(batch_size=4, wait_limit_s=600.0, failed_share=1.0)
    for second in range(0, 700, 20):
        tries = [bad(f"0-{n}", ago_s=0.5) for n in range(8)] + [good("0-9", ago_s=0.1)]
        rarely.note("w", tries, now_s=float(second))
        assert (rarely.fault(now_s=float(second)) is None) is (second <= 600)


def test_the_patience_begins_when_a_step_waits() -> None:
    """After a train step of 40 min, with nothing to play in it, the next step's wait ended the run."""
    recent = RecentEpisodes(batch_size=1, wait_limit_s=600.0)
    recent.note("w", [good("0-0"), *(bad(f"0-{n}", ago_s=0.5) for n in (1, 2, 3))], now_s=0.0)
    assert recent.fault(now_s=2400.0, is_awaited=False) is None
    recent.begin_to_wait(now_s=2400.0)
    assert recent.fault(now_s=2999.0) is None
    error = recent.fault(now_s=3001.0)
    assert error is not None
    assert "no episode" in error.what
    recent.note("w", [good("0-0", ago_s=0.0)], now_s=3002.0)
    recent.begin_to_wait(now_s=4000.0)
    assert recent.fault(now_s=9000.0) is None, "nothing fails"


@pytest.mark.parametrize("early", [0, 20], ids=["from the beginning", "later"])
def test_an_outage_that_was_survived_does_not_end_the_run_afterwards(early: int) -> None:
    """Its failures were more than half of the window for minutes after it."""
    recent = RecentEpisodes(batch_size=64, wait_limit_s=600.0, has_succeeded=True)
    recent.note("w", [good(f"0-{n}", ago_s=9.0) for n in range(early)], now_s=99.0)
    recent.note("w", [bad(f"1-{n}", ago_s=5.0) for n in range(150)], now_s=105.0)
    assert recent.nothing_succeeds
    assert recent.fault(now_s=700.0) is None
    for number in range(20):
        now_s = 710.0 + 10 * number
        two = [bad(f"3-{n}", ago_s=4.0) for n in range(2)] if number == 0 else []
        recent.note("w", [good(f"1-{number}", ago_s=5.0), *two], now_s=now_s)
        assert recent.fault(now_s=now_s) is None
    recent.note("w", [bad(f"2-{n}", ago_s=5.0) for n in range(150)], now_s=1000.0)
    recent.note("w", [good("2-0", ago_s=1.0)], now_s=1590.0)
    assert recent.fault(now_s=1700.0) is None, "another, and the run was well between them"


def test_what_succeeds_next_to_never_is_not_taken_for_outages_that_are_over() -> None:
    recent = RecentEpisodes(batch_size=4, wait_limit_s=600.0, failed_share=1.0)
    for number in range(100):
        now_s = 20.0 * number
        recent.note("w", [bad(f"{number}-{n}", ago_s=1.0) for n in range(8)], now_s=now_s)
        recent.note("w", [good(f"{number}-9", ago_s=0.0)], now_s=now_s + 10)
        if (error := recent.fault(now_s=now_s + 10)) is not None:
            break
    assert error is not None
    assert "more than 50%" in error.what
    assert "429 (" in error.what, "the reason"
    assert 600 < now_s < 1000


def test_a_worker_whose_own_node_is_at_fault_is_not_most_of_the_episodes() -> None:
    recent = RecentEpisodes(batch_size=4, wait_limit_s=600.0)
    for second in range(0, 2000, 10):
        here = [bad(f"{second}-{n}", ago_s=1.0) for n in range(4)]
        recent.note("here", here, now_s=float(second))
        recent.note("there", [good(f"{second}-9", ago_s=0.5)], now_s=float(second))
        assert recent.fault(now_s=float(second)) is None


def test_a_run_in_which_nothing_ever_succeeded_ends_soon_unless_something_is_away() -> None:
    begins, away, resumed = (
        RecentEpisodes(batch_size=2),
        RecentEpisodes(batch_size=2),
        RecentEpisodes(batch_size=2, has_succeeded=True),
    )
    for failures, now_s in ((1, 0.0), (2, 1.0), (3, 5.0)):
        begins.note("w", [bad("0-1", failures), bad("0-2", failures)], now_s=now_s)
        assert begins.fault(now_s=now_s, in_flight={"0-1", "0-2"}) is None
    for recent, fault in ((begins, FAILED), (away, AWAY), (resumed, FAILED)):
        tries = [bad("0-1", 4, fault=fault), bad("0-2", 4, fault=fault)]
        recent.note("w", tries, now_s=21.0)
    assert begins.fault(now_s=21.0, in_flight={"0-1", "0-2", "0-3"}) is None, "one may be slow"
    assert begins.fault(now_s=21.0, in_flight={"0-1", "0-2"}) is not None
    assert away.fault(now_s=21.0, in_flight={"0-1", "0-2"}) is None
    assert resumed.fault(now_s=21.0, in_flight={"0-1", "0-2"}) is None


def test_metrics_are_there_in_steps_with_failed_tries_alone() -> None:
    recent = RecentEpisodes()
    assert recent.metrics() == {}
    tries = [bad("0-1", n, ago_s=3.0 - n) for n in (1, 2, 3)]
    recent.note("w", [*tries, good("0-1", ago_s=0.0), bad("0-2", 1, fault=SERVERS)], now_s=9.0)
    assert recent.metrics() == {
        "failed_tries": 3.0,
        "outage_tries": 1.0,
        "failed_share": pytest.approx(1 / 200),
    }
    assert recent.metrics() == {}


def test_a_worker_that_ends_is_not_waited_for_and_one_that_begins_anew_is() -> None:
    recent = RecentEpisodes(batch_size=2)
    played, tries = ("a", "b", "c"), [bad(record, 4) for record in "abc"]
    recent.joined("w")
    recent.joined("v")
    recent.note("w", tries, now_s=30.0)
    assert recent.is_of_one
    assert recent.fault(now_s=31.0, in_flight=played) is None
    recent.lost("v")
    assert not recent.is_of_one
    assert recent.fault(now_s=31.0, in_flight=played) is not None
    recent.joined("v")
    assert recent.fault(now_s=31.0, in_flight=played) is None
    assert recent.fault(now_s=31.0 + recent.wait_limit_s, in_flight=played) is not None
