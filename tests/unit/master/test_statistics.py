"""A step's report as rows of numbers."""

import json
from dataclasses import replace

import pytest

from realsys.api.data import SequenceMeta
from realsys.api.dataflow import MFCDef, build_graph
from realsys.api.model import ModelInterfaceAbstraction, ModelInterfaceType, ModelName
from realsys.master.graph.function_executor import StepReport
from realsys.master.graph.model_function_call import CallReport
from realsys.master.statistics import headline, metrics_row, success_rates
from realsys.transport.worker_requests import CallDone


def call(name, reads, makes=()):
    return MFCDef(
        name=name,
        n_seqs=1,
        interface_type=ModelInterfaceType.INFERENCE,
        interface_impl=ModelInterfaceAbstraction("test"),
        model_name=ModelName(name),
        input_keys=reads,
        output_keys=makes,
    )


GRAPH = build_graph([call("gen", ("p",), ("x",)), call("train", ("x",))], dataset_keys=["p"])
REPORT = StepReport(
    step=3,
    started=100.0,
    ended=104.0,
    calls={
        "gen": CallReport(
            name="gen",
            queued=100.0,
            replies={0: CallDone(compute_s=1.0, tokens=30), 1: CallDone(compute_s=2.0, tokens=10)},
            stats={},
            ids=("a",),
        ),
        "train": CallReport(
            name="train",
            queued=102.0,
            replies={0: CallDone(compute_s=1.0, tokens=40)},
            stats={"loss": 0.25, "kl_ref/per_sequence": 0.5},
            ids=("a",),
        ),
    },
    ids=("a",),
)


def test_a_row_has_every_calls_statistics_and_times():
    assert metrics_row(REPORT, GRAPH, epoch=2) == {
        "epoch": 2,
        "train/loss": 0.25,
        "train/kl_ref/per_sequence": 0.5,
        "time/gen_s": 2.0,  # the slower worker's
        "time/train_s": 1.0,
        "time/step_s": 4.0,
        "perf/compute_ratio": 0.75,  # (2 + 1) / 4
        "perf/tokens_per_s": 10.0,  # (30 + 10) / 4: tokens of the first call
    }


def test_what_is_not_time_or_speed_does_not_depend_on_the_clock():
    def seeded(report):
        row = metrics_row(report, GRAPH, epoch=2)
        return {k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))}

    slow = StepReport(step=3, started=0.0, ended=9.0, calls=REPORT.calls, ids=REPORT.ids)
    assert seeded(REPORT) == seeded(slow)


def test_a_clock_that_was_set_back_does_not_end_the_run():
    at_once = StepReport(step=3, started=5.0, ended=5.0, calls=REPORT.calls, ids=REPORT.ids)
    assert metrics_row(at_once, GRAPH, epoch=0)["time/step_s"] == 0.0


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"rew_inf/reward/mean": 0.5}, {"reward": 0.5}),
        ({"actor/kl_ref/per_sequence": 0.1, "x": 1.0}, {"kl": 0.1}),
        ({"eval/accuracy": 0.75}, {"accuracy": 0.75}),
        ({"sft_train/loss": 2.0}, {"loss": 2.0}),
        ({"x": 1.0}, {}),
    ],
)
def test_the_headline_is_what_a_person_looks_at_first(row, expected):
    assert headline(row, {}) == expected


def test_the_headline_keeps_what_a_step_does_not_have():
    last = {"accuracy": 0.5, "reward": 0.1}
    assert headline({"rew_inf/reward/mean": 0.2}, last) == {"accuracy": 0.5, "reward": 0.2}
    assert last == {"accuracy": 0.5, "reward": 0.1}


def test_a_report_counts_tokens_over_ranks_and_seconds_of_the_slowest():
    assert REPORT.calls["gen"].tokens == 40
    assert REPORT.calls["gen"].compute_s == 2.0
    assert REPORT.wall_s == 4.0


def test_success_rates_are_of_each_datapoint_by_its_source():
    def scored(**answers):
        meta = SequenceMeta(
            ids=tuple(answers),
            seqlens={"rewards": ((1, 1),) * len(answers)},
            dtypes={"rewards": "float32"},
            trailing_shapes={"rewards": ()},
            metadata={"reward_parts": tuple(map(json.dumps, answers.values()))},
        )
        return CallDone(meta=meta)

    right, wrong = {"s/correct": 1.0, "s": 2.0}, {"s/correct": 0.0, "s": 0.0}
    replies = {
        0: scored(x=[right, wrong], y=[{"t/correct": 1.0}] * 2),
        1: scored(z=[], w=[right, right, wrong]),  # z was set aside
        2: CallDone(is_head=False),
    }
    calls = {"rew": CallReport(name="rew", queued=0.0, replies=replies, stats={}, ids=())}
    found = success_rates(replace(REPORT, calls={**REPORT.calls, **calls}), lambda id: "s")
    assert found == {"x": 0.5, "w": 2 / 3}
