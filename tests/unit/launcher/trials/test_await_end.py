"""Waiting for a trial's end: what is asked, how often, what is said, and when it is given up."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import golden
import pytest

from launcher.terminal import output
from launcher.terminal.exit_codes import ExitCode
from launcher.trials import await_end, render
from launcher.trials.await_end import views_until_over
from launcher.trials.merged_logs import LogLine
from launcher.trials.trial_view import TrialView
from realsys.api.errors import WaitTimeout
from realsys.trial.liveness import Liveness
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

UNKNOWN, RUNNING, DONE = State.UNKNOWN, State.RUNNING, State.COMPLETED
FILES = TrialFiles(Path("/none"))


class Seen:
    """A trial whose views and supervisor are a list, read on a clock that only sleeping moves."""

    def __init__(self, *states: State | tuple[State, str], alive: int = 0) -> None:
        self.now_s, self.alive = 1000.0, alive
        self.calls, self.slept = list[str](), list[float]()
        self.left: Iterator[State | tuple[State, str]] = iter(states)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept.append(seconds)

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s

    def view(self) -> TrialView:
        self.calls.append("view")
        return self._view()

    def brief_view(self) -> TrialView:
        self.calls.append("brief")
        return self._view()

    def _view(self) -> TrialView:
        state = next(self.left)
        state, reason = state if isinstance(state, tuple) else (state, "")
        jobs = ("7",) if reason else ()
        return TrialView(
            trial="e/run",
            state=state,
            reason=reason,
            folder="/x",
            job_ids=jobs,
            step=len(self.calls),
        )

    def last_attempt(self) -> SimpleNamespace | None:
        self.alive -= 1
        alive = self.alive >= 0
        return SimpleNamespace(supervisor=Liveness.ALIVE if alive else Liveness.DEAD)

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch):
    def seen(*states: State | tuple[State, str], alive: int = 0) -> Seen:
        made = Seen(*states, alive=alive)
        for module in (await_end, render):
            monkeypatch.setattr(module, "time", made)
            monkeypatch.setattr(module, "StatusReader", lambda files: made)
        monkeypatch.setattr(await_end, "TrialReader", lambda files: made)
        monkeypatch.setattr(
            await_end, "views_until_over", partial(views_until_over, sleep=made.sleep)
        )
        return made

    return seen


@pytest.mark.parametrize(
    ("options", "slept"),
    [
        ({}, [0.5, 0.5, 0.5]),
        ({"pause_s": 0.0}, [0.0] * 3),
        ({"timeout_s": 0.5}, [0.5, 0.5]),
        ({"timeout_s": 0.0}, [0.5]),
        ({"timeout_s": 9.0, "pause_s": 2.0}, [2.0] * 3),
    ],
)
def test_a_trial_is_looked_at_until_it_is_over_or_the_time_is(see, options, slept) -> None:
    seen = see(RUNNING, RUNNING, RUNNING, DONE)
    views = list(views_until_over(seen, sleep=seen.sleep, **options))
    assert seen.slept == slept
    assert [view.step for view in views] == list(range(1, len(slept) + 2))
    assert seen.calls == ["view"] * len(views)


def test_the_end_is_awaited_briefly_and_then_read_whole(see) -> None:
    seen = see(
        *[RUNNING, (UNKNOWN, "no store"), (UNKNOWN, "no store"), (UNKNOWN, "no Slurm"), RUNNING],
        *[(UNKNOWN, "no store"), DONE, DONE],
        alive=3,
    )
    warned = list[str]()
    assert await_end.await_end(FILES, warn=warned.append).step == 8
    assert seen.calls == [*["brief"] * 7, "view", "close"]
    assert seen.slept == [*[0.5] * 6, *[0.1] * 3]  # the supervisor still writes
    golden.check(warned)
    assert len(warned) == 3
    seen = see(DONE, RUNNING)  # resumed meanwhile
    assert await_end.await_end(FILES).state is DONE
    seen = see(UNKNOWN, UNKNOWN)  # over, where nothing more can be learned
    assert await_end.await_end(FILES, warn=pytest.fail).state is UNKNOWN
    seen = see(RUNNING, RUNNING, RUNNING)
    with golden.raises(WaitTimeout):
        await_end.await_end(FILES, timeout_s=0.75)
    assert seen.calls == ["brief"] * 3 + ["close"]


def test_a_supervisor_that_does_not_exit_is_left_after_a_while(see, monkeypatch) -> None:
    seen = see(alive=1000)
    await_end.wait_for_supervisor_exit(FILES)
    assert (len(seen.slept), set(seen.slept)) == (301, {0.1})
    monkeypatch.setattr(Seen, "last_attempt", lambda self: None)
    await_end.wait_for_supervisor_exit(FILES)
    assert len(seen.slept) == 301


def test_a_pipe_is_told_every_state_and_then_how_it_ended(see, monkeypatch) -> None:
    seen, said = see(State.QUEUED, State.QUEUED, RUNNING, RUNNING, DONE, alive=2), list[str]()
    pipe = io.StringIO()
    view = render.follow(FILES, pipe, sleep=seen.sleep)
    assert (view.state, view.step, seen.calls[-1]) == (DONE, 5, "close")
    assert pipe.getvalue() == "e/run | queued\ne/run | running\ne/run | completed\n"
    monkeypatch.setattr(render, "follow", lambda files, stream: view)
    monkeypatch.setattr(output, "say", lambda *lines: said.extend(lines))
    seen.slept.clear()
    assert render.watch_until_over(FILES, "e/run") == ExitCode.OK
    assert (seen.slept, said[0]) == ([0.1, 0.1], "e/run completed")
    monkeypatch.setattr(
        render, "follow", lambda files, stream: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    said.clear()
    assert render.watch_until_over(FILES, "e/run") == ExitCode.INTERRUPTED
    golden.check(said)


def test_a_screen_shows_each_view(see, monkeypatch) -> None:
    seen, shown = see(State.QUEUED, RUNNING, DONE), list[tuple[State, int]]()
    lines = [LogLine(number, "w/0", "warning") for number in (1, 2)]
    monkeypatch.setattr(render, "TrialLogs", lambda files, grep: SimpleNamespace(read=lines.copy))
    submission = SimpleNamespace(after_attempt=1)
    monkeypatch.setattr(render, "known_submission", lambda files: submission)
    monkeypatch.setattr(output, "can_draw", lambda stream: True)
    monkeypatch.setattr(
        render, "picture", lambda view, told: shown.append((view.state, len(told))) or ""
    )
    view = render.follow(FILES, io.StringIO(), sleep=seen.sleep)
    assert (view.state, shown) == (DONE, [(State.QUEUED, 1), (RUNNING, 2), (DONE, 2)])
    seen, submission = see(DONE), None  # not known: of any attempt, and three at most
    lines *= 2
    render.follow(FILES, io.StringIO(), sleep=seen.sleep)
    assert shown[3:] == [(DONE, 3)]
