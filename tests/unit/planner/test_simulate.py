"""Steps in virtual time against timelines worked out by hand, and rules that hold for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.api.errors import InternalError
from realsys.planner.time.figures import critical_path, figures
from realsys.planner.time.simulate_steps import simulate
from realsys.planner.time.simulated_timeline import CallWork, MovementWork, Overheads, Timeline

PPO = {
    "gen": frozenset[str](),
    "rew": frozenset({"gen"}),
    "ref": frozenset({"gen"}),
    "critic": frozenset({"gen"}),
    "actor_train": frozenset({"rew", "ref", "critic"}),
    "critic_train": frozenset({"rew", "ref", "critic"}),
}
SECONDS = {"gen": 5, "rew": 1, "ref": 2, "critic": 2, "actor_train": 4, "critic_train": 3}
RIGHT = ("rew", "critic", "critic_train")


def shared() -> list[CallWork]:
    return [CallWork(call=c, workers=(0,), seconds=s) for c, s in SECONDS.items()]


def split() -> list[CallWork]:
    return [CallWork(call=c, workers=(int(c in RIGHT),), seconds=s) for c, s in SECONDS.items()]


def spans_of(timeline: Timeline, call: str, step: int = 1) -> list[tuple[int, float, float]]:
    return [(s.worker, s.start, s.end) for s in timeline.spans if s.name == call and s.step == step]


# ---- worked out by hand ---------------------------------------------------------------------------


def test_one_worker_runs_everything_one_after_the_other() -> None:
    timeline = simulate(shared(), PPO, num_workers=1)
    assert timeline.step_ends == (17.0,)
    assert spans_of(timeline, "ref") == [(0, 6.0, 8.0)]  # after gen 0-5 and rew 5-6: graph order
    assert figures(timeline).idle == (0.0,)


def test_halves_overlap_preparation_and_training() -> None:
    # left: gen 0-5, ref 5-7, actor_train 8-12; right: rew 5-6, critic 6-8, critic_train 8-11
    timeline = simulate(split(), PPO, num_workers=2)
    assert spans_of(timeline, "actor_train") == [(0, 8.0, 12.0)]
    assert spans_of(timeline, "critic_train") == [(1, 8.0, 11.0)]
    assert timeline.step_ends == (12.0,)
    found = figures(timeline)
    assert found.idle == pytest.approx((1 / 12, 6 / 12))
    assert [p.name for p in found.path] == ["gen", "rew", "critic", "actor_train"]
    assert sum(p.seconds for p in found.path) == 12.0


def test_generation_a_step_ahead_fills_the_left_half() -> None:
    # gen 0-5, gen' 5-10; ref waits for gen': 10-12, actor_train 12-16; right: rew 5-6, critic 6-8,
    # critic_train 12-15. Then, from 16 on, each step: gen'' 5, ref 2, actor_train 4 on the left.
    timeline = simulate(split(), PPO, num_workers=2, steps=4, ahead=("gen",))
    assert spans_of(timeline, "gen", step=2) == [(0, 5.0, 10.0)]
    assert spans_of(timeline, "ref") == [(0, 10.0, 12.0)]
    assert timeline.step_ends[:3] == (16.0, 27.0, 38.0)
    assert timeline.step_ends[3] == 38.0 + 3 + 4  # no step follows: rew and critic, actor_train
    assert timeline.step_s == 11.0


def test_generation_ahead_on_its_own_worker_hides_behind_the_rest() -> None:
    works = [CallWork(call=c, workers=(int(c != "gen"),), seconds=s) for c, s in SECONDS.items()]
    timeline = simulate(works, PPO, num_workers=2, steps=5, ahead=("gen",))
    assert timeline.step_s == 12.0  # 1 + 2 + 2 + 4 + 3 on the other
    strict = simulate(works, PPO, num_workers=2, steps=5)
    assert strict.step_s == 17.0


def test_collective_call_waits_for_its_last_worker() -> None:
    parents = {"a": frozenset[str](), "b": frozenset[str]()}
    both = CallWork(call="b", workers=(0, 1), seconds=2)
    works = [CallWork(call="a", workers=(0,), seconds=3), both]
    timeline = simulate(works, parents, num_workers=2)
    assert spans_of(timeline, "b") == [(0, 3.0, 5.0), (1, 0.0, 5.0)]
    assert figures(timeline).idle == (0.0, 3.0 / 5.0)  # worker 1 sits in the call for 3 s
    alone = CallWork(call="b", workers=(0, 1), seconds=2, together=False)
    timeline = simulate([works[0], alone], parents, num_workers=2)
    assert spans_of(timeline, "b") == [(0, 3.0, 5.0), (1, 0.0, 2.0)]


def test_weights_occupy_both_copies_and_move_once_per_update() -> None:
    # train on 0, generation on 1: gen gets weights (1 s on 0 and 1), 2 s; a second call on that copy
    # finds them there; train 3 s.
    parents = {"gen": frozenset[str](), "again": frozenset({"gen"}), "train": frozenset({"again"})}
    move = MovementWork(name="actor → 1", workers=(0, 1), seconds=1, role="actor")
    works = [
        CallWork(call="gen", workers=(1,), seconds=2, before=(move,)),
        CallWork(call="again", workers=(1,), seconds=2, before=(move,)),
        CallWork(call="train", workers=(0,), seconds=3, trains="actor"),
    ]
    timeline = simulate(works, parents, num_workers=2, steps=2)
    moves = [(s.step, s.worker, s.start, s.end) for s in timeline.spans if s.kind == "realloc"]
    assert moves == [(1, 0, 0, 1), (1, 1, 0, 1), (2, 0, 8, 9), (2, 1, 8, 9)]
    assert timeline.step_ends == (8.0, 16.0)


def test_weights_behind_a_call_delay_the_step_not_the_reply_of_others() -> None:
    parents = {"train": frozenset[str]()}
    ema = MovementWork(name="ema", workers=(0, 1), seconds=2)
    works = [CallWork(call="train", workers=(0,), seconds=3, after=(ema,))]
    timeline = simulate(works, parents, num_workers=2, steps=2)
    assert timeline.step_ends == (5.0, 10.0)


def test_overheads_and_loading() -> None:
    # load 0.5, call 0.2 in all (half before, half after), step 1: chain of gen 5 and train 4
    parents = {"gen": frozenset[str](), "train": frozenset({"gen"})}
    works = [
        CallWork(call="gen", workers=(0,), seconds=5),
        CallWork(call="train", workers=(0,), seconds=4, fetch_s=0.25, release_s=0.25),
    ]
    overheads = Overheads(call_s=0.2, step_s=1, load_s=0.5)
    timeline = simulate(works, parents, num_workers=1, steps=2, overheads=overheads)
    assert timeline.step_ends[0] == pytest.approx(0.5 + 5.2 + 4.7)
    assert timeline.step_starts[1] == pytest.approx(11.4)
    assert timeline.step_s == pytest.approx(11.4)


def test_calls_ready_together_are_issued_in_the_order_of_the_graph() -> None:
    parents = {name: frozenset[str]() for name in "cab"}
    works = [CallWork(call=name, workers=(0,), seconds=1) for name in "cab"]
    timeline = simulate(works, parents, num_workers=1)
    assert [s.name for s in timeline.spans] == ["c", "a", "b"]


def test_a_call_that_can_never_start_is_an_error_of_ours() -> None:
    with golden.raises(InternalError):
        simulate(
            [CallWork(call="a", workers=(0,), seconds=1)], {"a": frozenset({"a"})}, num_workers=1
        )
    with golden.raises(InternalError):
        simulate([CallWork(call="a", workers=(1,), seconds=1)], {"a": frozenset()}, num_workers=1)


# ---- for all graphs -------------------------------------------------------------------------------

Case = tuple[list[CallWork], dict[str, frozenset[str]], int]


@st.composite
def cases(draw: st.DrawFn, *, own_workers: bool = False) -> Case:
    """A graph of up to six calls, each with parents among those before it, on up to four workers."""
    count = draw(st.integers(1, 6))
    num_workers = count if own_workers else draw(st.integers(1, 4))
    works, parents = [], {}
    for i in range(count):
        name = f"c{i}"
        parents[name] = frozenset(f"c{j}" for j in range(i) if draw(st.booleans()))
        some = {i} if own_workers else draw(st.sets(st.integers(0, num_workers - 1), min_size=1))
        works.append(
            CallWork(
                call=name,
                workers=tuple(sorted(some)),
                seconds=draw(st.integers(1, 20)),
                together=draw(st.booleans()),
            )
        )
    return works, parents, num_workers


def busy_s(works: list[CallWork]) -> dict[int, float]:
    busy: dict[int, float] = {}
    for work in works:
        for worker in work.workers:
            busy[worker] = busy.get(worker, 0.0) + work.seconds
    return busy


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(cases())
def test_a_step_is_no_shorter_than_its_chain_and_busiest_worker_and_no_longer_than_all(
    case: Case,
) -> None:
    works, parents, num_workers = case
    end = simulate(works, parents, num_workers=num_workers).step_ends[0]
    assert end >= longest_chain(works, parents)
    assert end >= max(busy_s(works).values())
    assert end <= sum(w.seconds for w in works)


@settings(max_examples=200, deadline=None)
@given(cases(own_workers=True), st.integers(0, 5))
def test_with_a_worker_a_call_the_step_is_the_longest_chain_and_grows_with_any_call(
    case: Case, which: int
) -> None:
    works, parents, num_workers = case
    end = simulate(works, parents, num_workers=num_workers).step_ends[0]
    assert end == longest_chain(works, parents)
    slow = works[which % len(works)]
    slower = [
        CallWork(call=w.call, workers=w.workers, seconds=w.seconds + 3 * (w is slow)) for w in works
    ]
    later = simulate(slower, parents, num_workers=num_workers).step_ends[0]
    assert end <= later <= end + 3


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(1, 3), st.booleans())
def test_no_worker_does_two_things_and_none_starts_before_its_inputs(
    case: Case, steps: int, runs_ahead: bool
) -> None:
    works, parents, num_workers = case
    ahead = ("c0",) if runs_ahead else ()
    timeline = simulate(works, parents, num_workers=num_workers, steps=steps, ahead=ahead)
    assert len(timeline.spans) == steps * sum(len(w.workers) for w in works)
    for worker in range(num_workers):
        own = sorted((s.start, s.end) for s in timeline.spans if s.worker == worker)
        assert all(before[1] <= after[0] for before, after in pairwise(own))
    ends = {}
    for span in timeline.spans:
        ends[span.step, span.name] = max(ends.get((span.step, span.name), 0.0), span.end)
    for span in timeline.spans:
        assert all(ends[span.step, p] <= span.start for p in parents[span.name])


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(cases())
def test_the_critical_path_fills_the_step_without_a_gap(case: Case) -> None:
    works, parents, num_workers = case
    timeline = simulate(works, parents, num_workers=num_workers, steps=2)
    path = critical_path(timeline)
    length = timeline.step_ends[1] - timeline.step_starts[1]
    # Where a collective waited for a worker, the path goes on through what that worker did.
    assert sum(p.seconds for p in path) == pytest.approx(length)


def longest_chain(works: Sequence[CallWork], parents: Mapping[str, frozenset[str]]) -> float:
    """Seconds of the graph's longest chain: a step's least time, were there workers without end."""
    ends: dict[str, float] = {}
    for work in works:  # the graph's order is not always topological
        _chain_end(work.call, {w.call: w for w in works}, parents, ends)
    return max(ends.values())


def _chain_end(
    name: str,
    works: Mapping[str, CallWork],
    parents: Mapping[str, frozenset[str]],
    ends: dict[str, float],
) -> float:
    if name not in ends:
        work = works[name]
        moves = sum(m.seconds for m in (*work.before, *work.after))
        starts = [_chain_end(p, works, parents, ends) for p in parents[name]]
        ends[name] = max(starts, default=0.0) + work.own_s + moves
    return ends[name]
