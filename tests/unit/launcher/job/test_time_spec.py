"""--time, --begin and --deadline as Slurm reads them, echoed in words, with its traps told."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import datetime

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_time_table import BEGINS, NOW, TIME_LIMITS

from launcher.job.time_spec import (
    deadline_problem,
    limit_text,
    longest,
    minutes_words,
    parse_begin,
    parse_deadline,
    parse_time_limit,
)
from realsys.api.errors import ConfigError


@pytest.mark.parametrize(("text", "normal"), TIME_LIMITS, ids=[repr(t) for t, _ in TIME_LIMITS])
def test_a_time_limit_is_read_as_slurm_reads_it(text, normal):
    if normal is None:
        with golden.raises(ConfigError) as caught:
            parse_time_limit(text)
        assert caught.value.fix
    else:
        assert parse_time_limit(text).text == normal


@pytest.mark.parametrize(("text", "normal"), BEGINS, ids=[repr(t) for t, _ in BEGINS])
def test_a_moment_is_read_as_slurm_reads_it(text, normal):
    if normal is None:
        with golden.raises(ConfigError):
            parse_begin(text, now=NOW)
    else:
        assert parse_begin(text, now=NOW).text == normal


def test_minutes_and_seconds_are_warned_of_where_hours_were_probably_meant():
    limit = parse_time_limit("1:30")
    golden.check(limit.warning)
    assert parse_time_limit("59:30").warning
    assert parse_time_limit("60:00").warning is None
    assert parse_time_limit("1:30:00").warning is None


@pytest.mark.parametrize(
    "text",
    [
        "2H",
        "2h",
        "3600s",
        "90s",
        "30m",
        "1d",
    ],
)
def test_a_unit_gets_the_right_spelling(text):
    with golden.raises(ConfigError):
        parse_time_limit(text)


@pytest.mark.parametrize("text", ["99999-0", "35791394", "24855-03:14:00", "4294967295"])
def test_a_limit_that_slurm_would_wrap_round_is_refused(text):
    with golden.raises(ConfigError):
        parse_time_limit(text)
    assert parse_time_limit("35791393").text == "24855-03:13:00"


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 5000 + "h", "1-" + "9" * 5000])
def test_a_limit_of_thousands_of_digits_is_a_config_error(text):
    with golden.raises(ConfigError):
        parse_time_limit(text)


def test_words():
    golden.check([minutes_words(m) for m in (1, 60, 90, 1_440, 2_970)])
    assert parse_time_limit("unlimited").words == "no limit"


@given(st.integers(min_value=1, max_value=10**6))
def test_the_normal_form_is_read_back(minutes):
    assert parse_time_limit(limit_text(minutes)).minutes == minutes


@given(st.text(alphabet="0123456789:-.hm nowd+TZ/amp", max_size=16))
def test_any_text_is_a_value_or_a_config_error(text):
    for parse in (parse_time_limit, lambda t: parse_begin(t, now=NOW)):
        with suppress(ConfigError):  # which can't be made without a fix
            assert parse(text).text


def test_the_longest_limit_and_no_limit():
    limits = [parse_time_limit(t) for t in ("10", "2:00:00", "30")]
    assert longest(limits) == limits[1]
    assert longest([*limits, parse_time_limit("infinite")]).minutes is None
    assert longest([]) is None


def test_a_begin_in_the_past_starts_at_once_and_says_so():
    golden.check(parse_begin("2026-11-20", now=NOW).warning)
    assert parse_begin("now", now=NOW).warning is None


def test_a_past_deadline_is_refused_in_words():
    with golden.raises(ConfigError):
        parse_deadline("2026-11-20", now=NOW)


def test_a_day_with_its_year_is_not_taken_for_next_years():
    """ "today" says which; a month and a day alone are the next ones."""
    for text in ("today", "2026-11-21", "today 09:00"):
        with pytest.raises(ConfigError):
            parse_deadline(text, now=NOW)
    assert parse_deadline("11/20", now=NOW).at == datetime(2027, 11, 20)


def test_a_deadline_that_no_job_can_meet_is_told_before_slurm_removes_it():
    deadline = parse_deadline("now+1hour", now=NOW)
    assert deadline_problem(deadline, None, parse_time_limit("60"), now=NOW) is None
    late = deadline_problem(deadline, None, parse_time_limit("61"), now=NOW)
    assert late is not None
    golden.check(late)
    begin = parse_begin("now+30minutes", now=NOW)
    assert deadline_problem(deadline, begin, parse_time_limit("31"), now=NOW) is not None
    without = deadline_problem(deadline, None, None, now=NOW)
    assert without is not None
    golden.check(without)


@pytest.mark.parametrize(
    "text",
    [
        "02/29",  # read in 2028, after that day: 2029 has none
        "uts99999999999999",
        "now+999999999999",
        "now+99999999999999weeks",
        "now+" + "9" * 5000,
    ],
    ids=lambda text: text[:24],
)
def test_moments_that_do_not_exist_are_told_as_such(text):
    with golden.raises(ConfigError):
        parse_begin(text, now=datetime(2028, 3, 1))


def test_a_year_00_is_no_year():
    assert parse_begin("12/24/00", now=NOW).text == "2026-12-24T00:00:00"


def test_an_absolute_time_in_seconds_of_the_epoch():
    at = datetime(2030, 3, 17, 17, 46, 40)
    assert parse_begin(f"uts{int(at.timestamp())}", now=NOW).at == at


@pytest.fixture
def berlin(monkeypatch):
    """Clocks go forward on 2026-03-29 at 02:00 and back on 2026-10-25 at 03:00."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("now", "text", "at"),
    [
        (datetime(2026, 3, 29, 1, 30), "now+2hours", datetime(2026, 3, 29, 4, 30)),
        (datetime(2026, 10, 25, 0, 30), "now+4hours", datetime(2026, 10, 25, 3, 30)),
        (datetime(2026, 3, 29, 4, 30), "now-2hours", datetime(2026, 3, 29, 1, 30)),
        (datetime(2026, 6, 1, 12, 0), "now+2hours", datetime(2026, 6, 1, 14, 0)),
    ],
)
def test_an_offset_counts_seconds_also_when_clocks_change(berlin, now, text, at):
    """Slurm adds seconds: sbatch --begin=now+2hours starts the job in two hours."""
    assert parse_begin(text, now=now).at == at


def test_a_deadline_counts_seconds_also_when_clocks_change(berlin):
    """From 01:30 to 04:30 there are two hours in spring, and four from 00:30 to 03:30 in autumn."""
    spring, autumn = datetime(2026, 3, 29, 1, 30), datetime(2026, 10, 25, 0, 30)
    deadline = parse_deadline("2026-03-29T04:30", now=spring)
    assert deadline_problem(deadline, None, parse_time_limit("120"), now=spring) is None
    assert deadline_problem(deadline, None, parse_time_limit("121"), now=spring) is not None
    deadline = parse_deadline("2026-10-25T03:30", now=autumn)
    assert deadline_problem(deadline, None, parse_time_limit("240"), now=autumn) is None
