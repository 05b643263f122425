"""Settings that name data on a hub: found at every depth, replaced by local paths, or told as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest

from experiments.preferences.reward_training import RewardTraining
from experiments.recipes import grpo
from experiments.sft import SFTExperiment
from experiments.task import FileTask, MathTask, Task
from experiments.tasks.mixture import Mixture
from experiments.tasks.preferences import PreferencesTask
from launcher.hub.hub_data import DataHub
from launcher.hub.hub_names import HubListing, HubName
from launcher.hub.hub_settings import with_local_data
from realsys.api.errors import ConfigError
from realsys.api.experiment import Experiment
from realsys.config import extras
from realsys.config.option_tree import value_at

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MANY = "data/train-?????-of-00002.csv"


class KnownHub(DataHub):
    """A hub with one data set, of which some files are kept."""

    def __init__(self, folder: Path, *, keeps_all: bool) -> None:
        super().__init__(folder, None)
        self._keeps_all = keeps_all

    def listing(self, name: HubName, *, where: str) -> HubListing:
        if name.repo != "lab/set":
            raise ConfigError("no such data set", where=where, fix="another")
        files = ("test.csv", *(f"data/train-0000{i}-of-00002.csv" for i in range(2)))
        return HubListing(COMMIT, dict.fromkeys(files, 1 << 20))

    def missing(self, name: HubName, files: Sequence[str]) -> list[str]:
        return [] if self._keeps_all else list(files)


def run_on(task: Task) -> Any:
    """A run on the task, whose starting policy is fine-tuned on made questions."""
    return replace(grpo(MathTask()), task=task)


def located(experiment: Experiment, folder: Path, *, keeps_all: bool = True) -> Any:
    return with_local_data(experiment, KnownHub(folder, keeps_all=keeps_all))


@pytest.mark.parametrize(
    ("experiment", "setting"),
    [
        (run_on(MathTask(path="hf:lab/set")), "task.path"),
        (run_on(FileTask(path="hf:lab/set")), "task.path"),
        (SFTExperiment(task=MathTask(path="hf:lab/set")), "task.path"),
        (RewardTraining(task=PreferencesTask(path="hf:lab/set")), "task.path"),
        (run_on(Mixture(sources={"a": FileTask(path="hf:lab/set")})), "task.sources.a.path"),
    ],
)
def test_every_setting_of_files_may_name_them_on_a_hub(
    experiment: Experiment, setting: str, tmp_path: Path
) -> None:
    found = located(experiment, tmp_path)
    assert (found.problems, found.warnings, found.is_complete) == ([], [], True)
    path = str(tmp_path / "lab/set" / COMMIT / MANY)
    assert value_at(found.experiment, setting) == path
    (chosen,) = found.chosen
    assert (chosen.path, chosen.value) == (setting, f"hf:lab/set@{COMMIT}/{MANY}")
    golden.check(chosen.why)
    local = [value for value in str(found.experiment).split("'") if value.startswith("hf:")]
    assert local == []


def test_the_settings_of_fine_tuning_before_a_run_too(tmp_path: Path) -> None:
    experiment = run_on(MathTask(path="hf:lab/set", eval_path="hf:lab/set/test.csv"))
    sft = SFTExperiment(task=MathTask(path="hf:lab/set/data"))
    found = located(replace(experiment, sft=sft), tmp_path)
    assert [one.path for one in found.chosen] == ["task.path", "task.eval_path", "sft.task.path"]
    assert found.experiment.task.eval_path == str(tmp_path / "lab/set" / COMMIT / "test.csv")


def test_held_out_records_must_be_named_among_several_files(tmp_path: Path) -> None:
    experiment = run_on(MathTask(path="hf:lab/set", eval_path="hf:lab/set"))
    (problem,) = located(experiment, tmp_path).problems
    assert (problem.where, "could mean" in problem.what) == ("task.eval_path", True)


def test_files_that_are_not_here_keep_their_name_and_are_not_read(tmp_path: Path) -> None:
    experiment = run_on(MathTask(path="hf:lab/set"))
    found = located(experiment, tmp_path, keeps_all=False)
    name = f"hf:lab/set@{COMMIT}/{MANY}"
    assert found.experiment.task.path == name
    assert not found.is_complete
    (warning,) = found.warnings
    golden.check(warning)
    task = found.experiment.task
    assert list(task.problems(batch_size=8, tokenizer_dir=None)) == []
    assert list(task.remarks(None)) == []
    assert task.measured("nowhere") is None
    assert task.data_args()["path"] == name


def test_what_fails_is_a_problem_and_leaves_the_name(tmp_path: Path) -> None:
    sources = {name: FileTask(path=f"hf:lab/{name}") for name in ("set", "none", "gone")}
    found = located(run_on(Mixture(sources=sources)), tmp_path)
    assert [problem.where for problem in found.problems] == [
        *("task.sources.none.path", "task.sources.gone.path")
    ]
    assert value_at(found.experiment, "task.sources.none.path") == "hf:lab/none"


def test_without_names_on_a_hub_nothing_changes_and_nothing_is_asked(tmp_path: Path) -> None:
    experiment = run_on(MathTask(path="./hf:lab/set"))
    assert located(experiment, tmp_path).experiment is experiment


def test_without_huggingface_hub_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    found = with_local_data(run_on(MathTask(path="hf:lab/set")), DataHub(tmp_path, None))
    (problem,) = found.problems
    golden.check(problem)
    assert problem.fix == "pip install 'realsys[data]'"
