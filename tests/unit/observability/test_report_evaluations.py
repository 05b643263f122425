"""Evaluations of saved checkpoints in the report and in `status`: figures, reasons, curves, headline."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.compose import RLExperiment
from experiments.ppo_math import ppo_math, ppo_math_async
from launcher.cli.tables import evaluation_text
from launcher.trials.status import trial_view
from realsys.api.scheduling import WorkerType
from realsys.api.worker_configs import ExperimentSaveEvalControl
from realsys.observability.report.report import report_html
from realsys.observability.report.trial_report import read_trial_report
from realsys.trial.records import PhaseFiles, TrialFiles

ROWS: list[dict[str, Any]] = [
    {"step": 6, "role": "actor", "result": "done", "figures": {"accuracy": 0.25}, "tries": 1},
    {"step": 12, "role": "actor", "result": "done", "figures": {"accuracy": 0.75}, "seconds": 61},
    {"step": 18, "role": "actor", "result": "failed", "figures": {}, "error": "half <written>"},
]


@pytest.fixture
def trial(tmp_path: Path) -> TrialFiles:
    """A folder with evaluations, and metrics without held-out accuracy."""
    phase = PhaseFiles(tmp_path)
    phase.metrics.write_text('{"step": 18, "actor_train/loss": 0.5}\n')
    lines = [*map(json.dumps, ROWS), '{"step": 24, "ro']  # the last one is just being written
    phase.evaluations.write_text("\n".join(lines))
    return TrialFiles(tmp_path)


def test_the_report_has_a_row_for_each_and_the_reasons_of_failed_ones(trial: TrialFiles) -> None:
    html = report_html(read_trial_report(trial.root))
    assert "3 saved checkpoints" in html
    assert "half &lt;written&gt;" in html
    assert "1 min 01 s" in html


def test_the_report_draws_their_accuracy_and_tells_its_change(trial: TrialFiles) -> None:
    html = report_html(read_trial_report(trial.root))
    assert "saved checkpoints" in html
    assert "auto_eval/accuracy 75" in html
    assert "held-out accuracy, +50.0 points from 25.0 %" in html


def test_the_trainers_own_accuracy_comes_first(trial: TrialFiles) -> None:
    rows = ({"step": 0, "eval/accuracy": 0.5}, {"step": 18, "eval/accuracy": 0.6})
    metrics = PhaseFiles(trial.root).metrics
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = report_html(read_trial_report(trial.root))
    assert "held-out accuracy, +10.0 points from 50.0 %" in html
    assert "Held-out accuracy</h3>" in html


def test_without_evaluations_nothing_is_said_of_them(trial: TrialFiles) -> None:
    PhaseFiles(trial.root).evaluations.unlink()
    html = report_html(read_trial_report(trial.root))
    assert "Saved checkpoints</h2>" not in html
    view = trial_view(trial)
    assert evaluation_text(view.metrics) == ""
    assert not [note for note in view.notes if "evaluations.jsonl" in note]


def test_status_tells_the_newest_figures(trial: TrialFiles) -> None:
    metrics = trial_view(trial).metrics
    assert metrics == {
        "step": 18,
        "actor/loss": 0.5,
        "auto_eval/step": 12,
        "auto_eval/accuracy": 0.75,
    }
    assert evaluation_text(metrics) == "step 12: accuracy 0.75"


@pytest.mark.parametrize("recipe", [ppo_math, ppo_math_async])
def test_an_experiment_asks_for_its_evaluator(recipe: Callable[[], RLExperiment]) -> None:
    experiment = replace(
        recipe(), auto_eval=True, exp_ctrl=ExperimentSaveEvalControl(save_freq_steps=5), seed=3
    )
    assert [p for p in experiment.problems() if "auto_eval" in p.where] == []
    config = experiment.with_prepared("sft", "/models/start").initial_setup().lazy_init()
    (evaluator,) = config.set_worker_information("ppo-math", "run1").evaluator
    assert (evaluator.base_seed, evaluator.role, evaluator.gconfig.greedy) == (3, "actor", True)
    shards = [s.eval_dataset for w in config.model_worker for s in w.shards]
    (shard,) = [dataset for dataset in shards if dataset is not None]
    (asked,) = evaluator.benchmarks.values()
    assert asked.dataset == shard  # the trainer's own questions
    assert evaluator.worker_info.watch_keys == ()  # it outlives the master
    assert list(experiment.scheduling_setup().groups())[-1] is WorkerType.EVALUATOR
    plain = recipe().with_prepared("sft", "/models/start")
    assert plain.initial_setup().evaluator == ()
    assert WorkerType.EVALUATOR not in plain.scheduling_setup().groups()


def test_status_tells_each_benchmarks_accuracy() -> None:
    figures = {"step": 4, "hard/accuracy": 0.25, "hard/num_problems": 8, "accuracy": 0.5}
    metrics = {f"auto_eval/{name}": value for name, value in figures.items()}
    assert evaluation_text(metrics) == "step 4: accuracy 0.5   hard/accuracy 0.25"
    failed = evaluation_text({**metrics, "auto_eval/error": "easy: no judge"})
    assert failed == "step 4: accuracy 0.5   hard/accuracy 0.25   failed: easy: no judge"
    del metrics["auto_eval/accuracy"]
    assert evaluation_text(metrics) == "step 4: hard/accuracy 0.25"
