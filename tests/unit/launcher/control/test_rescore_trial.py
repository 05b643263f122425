"""Which trials can be rescored, and the rule that a rescoring makes of settings."""

from __future__ import annotations

from pathlib import Path

import golden
import pytest

from launcher.cli.verbs import data_verbs
from launcher.control.rescore_trial import ALL, RescoredSums, stored_rollouts
from launcher.plan.resolve import resolve
from launcher.submit.planning import default_experiment
from launcher.terminal.exit_codes import ExitCode
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ConfigError, TrialError
from realsys.api.plan import plan_text
from realsys.config.overrides import with_settings
from realsys.evaluator.rescore import RescoredDatapoint
from realsys.trial.records import PhaseFiles, TrialFiles


def trial(root: Path, name: str, *words: str, stored: bool = True) -> TrialFiles:
    """A trial's folder with its plan, and a dump that holds nothing."""
    plan = resolve(
        name,
        with_settings(default_experiment(name), words=words),
        cluster=ClusterSpec(file_root=str(root), name_resolve=f"file://{root}/names"),
        trial_name="run1",
        user="u",
    )
    files = TrialFiles(Path(plan.trial_dir))
    files.root.mkdir(parents=True)
    files.plan.write_text(plan_text(plan))
    if stored:
        folder = PhaseFiles(files.root).rollout_dump
        folder.mkdir()
        (folder / "0.rollouts").touch()
    return files


@pytest.mark.parametrize(
    ("name", "words", "stored"),
    [
        ("grpo-math", (), True),
        ("grpo-math-async", ("schedule.dump=false",), False),
        ("grpo-math-async", (), False),
        ("grpo-math-async", ("task.env=calculator",), True),
    ],
)
def test_trials_without_answers_or_with_other_rewards_are_refused_in_words(
    tmp_path: Path, name: str, words: tuple[str, ...], stored: bool
) -> None:
    files = trial(tmp_path, name, *words, stored=stored)
    with golden.raises(TrialError) as caught:
        stored_rollouts(files, reward="math_verify", words=(), imports=())
    assert "schedule=async" in caught.value.fix


def test_a_wrong_rule_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    files = trial(tmp_path, "grpo-math-async")
    for reward, words, what in (
        ("math_verify + ", (), "no weighted rule"),
        ("math_verify", ("task.reward=judge",), "no argument of a rule"),
        ("math_verify", ("task.reward_args.judge.url=http://x",), "'judge', which is not used"),
        ("code_tests", ("task.reward_args.code_tests.wall_s=soon",), "wall_s"),
    ):
        with pytest.raises(ConfigError) as caught:
            stored_rollouts(files, reward=reward, words=words, imports=())
        assert what in f"{caught.value.what} {caught.value.where}"


def test_whether_nothing_has_a_score() -> None:
    sums = RescoredSums()
    assert not sums.is_unscored
    sums.add(RescoredDatapoint(id="1-1", version=9, old=(0.0,), problem="why"))
    assert sums.is_unscored
    sums.add(RescoredDatapoint(id="1-0", version=10, old=(0.0,), new=(1.0,), correct=(True,)))
    assert not sums.is_unscored


def test_a_rule_that_scores_nothing_ends_with_an_error_and_its_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stored(list[RescoredDatapoint]):
        reward, reward_args = "mine", {}

    made = Stored(RescoredDatapoint(id=f"1-{i}", version=9, old=(0.0,), problem="x") for i in "ab")
    monkeypatch.setattr("launcher.trials.find_trials.find_trial", lambda *_, **__: None)
    monkeypatch.setattr("launcher.control.rescore_trial.stored_rollouts", lambda *_, **__: made)
    assert data_verbs.rescore("a/b") == ExitCode.RUN_FAILED
    told = capsys.readouterr()
    golden.check(told.err)
    assert told.out.splitlines()[-1].split()[:4] == ["all", "2", "2", "0"]
    made.append(RescoredDatapoint(id="1-c", version=9, old=(0.0,), new=(1.0,), correct=(True,)))
    assert data_verbs.rescore("a/b") == ExitCode.OK


def test_means_count_answers_with_a_score_alone() -> None:
    sums = RescoredSums()
    assert sums.rows() == {}
    old = {"old": (0.0, 1.0)}
    more = {"new": (1.0, 2.0), "correct": (False, True), "parts": ({"a": 1.0}, {"a": 3.0})}
    sums.add(RescoredDatapoint(id="1-0", version=10, **old, **more))
    sums.add(RescoredDatapoint(id="1-1", version=9, **old, problem="why"))
    rows = sums.rows()
    assert list(rows) == ["9", "10", ALL]
    assert rows["9"] == {
        "datapoints": 1, "unscored": 1, "answers": 0, "old": None, "new": None, "correct": None,
        "parts": {},
    }  # fmt: skip
    assert rows[ALL] == {
        "datapoints": 2, "unscored": 1, "answers": 2, "old": 0.5, "new": 1.5, "correct": 0.5,
        "parts": {"a": 2.0},
    }  # fmt: skip
    assert sums.problem == "why"
