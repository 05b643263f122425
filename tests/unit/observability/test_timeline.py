"""Timings of steps from events: values by hand, the Perfetto trace, the picture of a step."""

from __future__ import annotations

import json
from pathlib import Path

import golden

from realsys.api.errors import ClusterError, DataError
from realsys.observability.events import Event, MfcEvent, PeriodicEvent, StepEvent
from realsys.observability.pictures.step_picture import step_figure, step_png
from realsys.observability.timeline import (
    MfcTiming,
    finished_steps,
    mean_ratio,
    mfc_summary,
    overhead,
    perfetto_trace,
    role_of,
    step_rows,
    typical_step,
    write_perfetto,
)


def call(
    name: str, start: float, end: float, *, compute: float, step: int = 1, worker: int = 0,
    queued: float | None = None, tokens: int = 0,
) -> MfcEvent:  # fmt: skip
    return MfcEvent(
        step=step,
        name=name,
        worker=f"model_worker/{worker}",
        queued=start if queued is None else queued,
        start=start,
        end=end,
        compute_s=compute,
        tokens=tokens,
    )


def one_step() -> list[Event]:
    """10 s: 4 s of generation on two workers, then 3 s and 2 s at the same time, then saving."""
    return [
        call("actor_gen", 100.5, 104.0, compute=3.0, queued=100.0, tokens=300),
        call("actor_gen", 100.5, 105.0, compute=4.0, queued=100.0, tokens=500, worker=1),
        call("actor_train", 105.0, 108.5, compute=3.0, queued=105.0),
        call("critic_train", 105.0, 107.5, compute=2.0, queued=104.0, worker=1),
        PeriodicEvent(kind="save", step=1, start=109.0, end=109.5),
        StepEvent(step=1, start=100.0, end=110.0),
    ]


def test_overhead_of_a_step_by_hand() -> None:
    timing = overhead(one_step(), 1)
    assert timing.wall_s == 10.0
    assert timing.compute_s == 9.0  # the slower of the two generations, 4, and 3 and 2
    assert timing.ratio == 0.9
    assert timing.per_mfc == {
        "actor_gen": MfcTiming(wait_s=0.5, wall_s=4.5, compute_s=4.0, tokens=800),
        "actor_train": MfcTiming(wait_s=0.0, wall_s=3.5, compute_s=3.0, tokens=0),
        "critic_train": MfcTiming(wait_s=1.0, wall_s=2.5, compute_s=2.0, tokens=0),
    }


def test_overhead_of_a_step_that_has_not_finished_is_refused() -> None:
    with golden.raises(DataError):
        overhead([*one_step(), call("actor_gen", 110.0, 111.0, compute=1.0, step=2)], 2)
    with golden.raises(DataError):
        overhead([], 1)


def test_step_of_no_length_has_ratio_zero() -> None:
    assert overhead([StepEvent(step=1, start=5.0, end=5.0)], 1).ratio == 0.0


def test_rows_are_per_finished_step() -> None:
    events = [*one_step(), call("actor_gen", 110.0, 111.0, compute=1.0, step=2)]
    assert finished_steps(events) == [1]
    assert step_rows(events) == [
        {
            "step": 1, "wall_s": 10.0, "compute_s": 9.0, "ratio": 0.9,
            "actor_gen_s": 4.0, "actor_train_s": 3.0, "critic_train_s": 2.0,
        }
    ]  # fmt: skip


def test_summary_is_over_all_finished_steps() -> None:
    second: list[Event] = [
        call("actor_gen", 110.0, 116.0, compute=6.0, step=2, tokens=200),
        StepEvent(step=2, start=110.0, end=120.0),
    ]
    generation, train, _ = mfc_summary(one_step() + second)
    assert (generation.name, generation.steps) == ("actor_gen", 2)
    assert generation.mean_s == 5.0  # (4 + 6) / 2
    assert generation.share == 0.5  # 10 of 20 s
    assert generation.wait_s == 0.25
    assert generation.tokens_per_s == 100.0  # 1000 tokens in 10 s
    assert (train.steps, train.mean_s, train.share) == (1, 3.0, 0.15)
    assert mean_ratio(one_step() + second) == 0.75  # (9 + 6) / 20


def test_nothing_yet() -> None:
    assert (step_rows([]), mfc_summary([]), mean_ratio([]), typical_step([])) == (
        [],
        [],
        None,
        None,
    )


def test_typical_step_is_the_median_one_without_the_warm_up() -> None:
    events: list[Event] = []
    for step, wall in enumerate((9.0, 2.0, 3.0, 8.0), 1):
        begin = 100.0 * step
        events.append(call("a", begin, begin + 1, compute=1.0, step=step))
        events.append(StepEvent(step=step, start=begin, end=begin + wall))
    assert typical_step(events) == 3  # of 2, 3 and 8 s
    assert typical_step(events[:2]) == 1


def test_role_comes_from_the_plan_or_the_name() -> None:
    assert role_of("rew_inf", {"rew_inf": "reward"}) == "reward"
    assert role_of("actor_train") == "actor"
    assert role_of("sft") == "sft"


def test_trace_has_a_process_per_worker_and_a_thread_per_role() -> None:
    trace = perfetto_trace(one_step(), roles={"actor_gen": "policy"})["traceEvents"]
    names = {
        (e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["ph"] == "M"
    }  # fmt: skip
    assert names == {
        ("process_name", 0, 0): "master",
        ("thread_name", 0, 0): "steps",
        ("thread_name", 0, 1): "periodic",
        ("process_name", 1, 0): "model_worker/0",
        ("thread_name", 1, 0): "policy",
        ("thread_name", 1, 1): "actor",
        ("process_name", 2, 0): "model_worker/1",
        ("thread_name", 2, 0): "policy",
        ("thread_name", 2, 1): "critic",
    }
    spans = [e for e in trace if e["ph"] == "X"]
    assert spans[1] == {
        "ph": "X", "name": "actor_gen", "cat": "policy", "pid": 2, "tid": 0,
        "ts": 500_000, "dur": 4_500_000,
        "args": {"step": 1, "compute_s": 4.0, "waited_s": 0.5, "tokens": 500},
    }  # fmt: skip
    assert [(e["name"], e["pid"], e["tid"]) for e in spans[-2:]] == [
        ("save", 0, 1),
        ("step 1", 0, 0),
    ]


def test_trace_file_is_json(tmp_path: Path) -> None:
    write_perfetto(one_step(), tmp_path / "timeline.json")
    assert (
        len(json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]) == 14
    )  # 6 events, 8 names
    with golden.raises(ClusterError):
        write_perfetto(one_step(), tmp_path / "no folder" / "timeline.json")


def test_picture_has_a_lane_per_worker_and_call() -> None:
    (axes,) = step_figure(one_step(), 1).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "model_worker/0   actor_gen",
        "actor_train",
        "model_worker/1   actor_gen",
        "critic_train",
        "master   save",
    ]
    assert axes.get_title(loc="left") == "Step 1, 10.00 s"


def test_picture_is_a_png() -> None:
    assert step_png(one_step(), 1).startswith(b"\x89PNG")


def test_picture_of_a_step_without_calls_is_refused() -> None:
    with golden.raises(DataError):
        step_png(one_step(), 7)
