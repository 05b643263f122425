"""experiments/README.md tells the lengths that plans at the defaults have."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.known_results import KnownResult
from experiments.preferences.pair_training import PairTraining
from launcher.submit.planning import default_experiment
from realsys.api import registry
from realsys.api.experiment import ExperimentConfig

PAGE = Path(__file__).parents[3] / "experiments/README.md"
TABLE = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.read_text().partition("At their defaults")[2].splitlines()
    if line.startswith("| `")
]


def lengths(config: ExperimentConfig) -> tuple[int, int, int]:
    """Steps, questions a step, held-out questions, as the workers are told them."""
    data = next(
        dataset
        for worker in (*config.rollout_worker, *config.model_worker)
        for dataset in worker.datasets
    )
    questions, control = config.model_rpcs[0].n_seqs, config.exp_ctrl
    steps = data.args["train_size"] * control.total_train_epochs // questions
    return min(steps, control.benchmark_steps or steps), questions, data.args["eval_size"]


def row_of(name: str) -> list[str]:
    """The row that the page should have."""
    experiment = default_experiment(name)
    after, answers = "", ""
    for preparation in experiment.preparations():
        steps, questions, _ = lengths(preparation.experiment.initial_setup())
        after = f"{steps} of {questions}"
        experiment = experiment.with_prepared(preparation.name, "/a/policy")
        answers = str(experiment.group_size)
    steps, questions, held_out = lengths(experiment.initial_setup())
    return [f"`{name}`", str(steps), str(questions), answers, str(held_out), after]


def test_every_experiment_has_a_row():
    assert {row[0].strip("`") for row in TABLE} == {
        name
        for name in registry.names("experiment")  # other tests may have added theirs
        if default_experiment(name).__module__.startswith("experiments.")
        and not isinstance(  # as long as the data that they are given
            default_experiment(name), KnownResult | PairTraining
        )
    }


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0].strip("`"))
def test_the_lengths_on_the_page_are_those_of_the_plan(row):
    assert row == row_of(row[0].strip("`"))
