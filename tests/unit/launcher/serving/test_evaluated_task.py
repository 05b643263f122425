"""Which task ``realsys eval`` asks, and who plays it."""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import golden
import pytest

from experiments.task import Task
from launcher.serving.model_evaluation import agents_logs, task_settings
from launcher.serving.saved_models import SavedModel, find_model
from launcher.submit.planning import make_plan
from realsys.api.errors import ConfigError, ConfigErrors
from realsys.api.plan import plan_text
from realsys.trial.records import TrialFiles, TrialRecord, write_record


def settings(
    model: SavedModel, *words: str, kind: str | None = None, benchmark: str | None = None
) -> Task:
    return task_settings(
        model,
        kind,
        words,
        benchmark=benchmark,
        imports=(),
        limit=None,
        cluster=None,
        report=lambda line: None,
    )


def trial_of(
    experiment: str, words: Sequence[str], *, launched: Path, file_root: Path
) -> SavedModel:
    """The checkpoint of a trial that was launched in ``launched``, the present folder."""
    plan = make_plan(experiment, words, trial="run1")
    folder = file_root / "runs" / getpass.getuser() / experiment / "run1"
    model = folder / "checkpoints/actor/step-000002"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (folder / "plan.json").write_text(plan_text(plan))
    record = TrialRecord(
        experiment_name=experiment,
        trial_name="run1",
        user=getpass.getuser(),
        cluster="local",
        plan_hash="",
        created_at=0.0,
        launch_host="",
        folder=str(launched),
    )
    write_record(TrialFiles(folder).record, record)
    return find_model(f"{experiment}/run1")


@pytest.fixture
def of_agents(file_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SavedModel:
    """The checkpoint of a trial of arithmetic with a function as its agent."""
    (tmp_path / "my agent.py").write_text("def solve(): ...")
    monkeypatch.chdir(tmp_path)
    words = (
        "task.eval_size=7",
        "task.agent=python",
        "task.agent_args.function=my agent.py:solve",
        "task.env_args={turns: 2}",
    )
    return trial_of("grpo-math-async", words, launched=tmp_path, file_root=file_root)


def only(error: ConfigError) -> ConfigError:
    (problem,) = error.problems if isinstance(error, ConfigErrors) else [error]
    return problem


def test_a_trials_agent_is_found_from_anywhere(
    of_agents: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    task = settings(of_agents, "task.max_prompt_len=99")
    assert (task.eval_size, task.max_prompt_len) == (7, 99)
    worker = task.player("test")
    assert (worker.agent, worker.env_args["turns"]) == ("python", 2)
    assert worker.agent_args["function"] == f"{tmp_path}/my agent.py:solve"
    assert task.is_played


@pytest.mark.parametrize(
    ("words", "is_played"),
    [
        ((), False),
        (("task.agent=chat",), True),
        (("task.env=calculator",), True),
        (("task.env_args.turns=2",), True),
    ],
)
def test_an_agent_or_an_environment_plays_the_questions(
    of_agents: SavedModel, words: tuple[str, ...], is_played: bool
) -> None:
    assert settings(of_agents, *words, kind="math").is_played is is_played


def test_clients_from_outside_are_told_what_to_ask(of_agents: SavedModel) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(of_agents, "task.agent=external", "task.agent_args={}", "task.env_args={}")
    problem = only(refused.value)
    golden.check(problem)
    assert "realsys serve grpo-math-async/run1" in problem.fix


@pytest.fixture
def of_files(
    file_root: Path, tmp_path: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> SavedModel:
    """The checkpoint of a trial whose files were named from the folder that it was launched in."""
    launched, elsewhere = tmp_path / "launched", tmp_path / "elsewhere"
    for folder in (launched, elsewhere):
        folder.mkdir()
    rows = [f'{{"prompt": "What is {n} and {n}?", "answer": "{2 * n}"}}\n' for n in range(30)]
    (launched / "train.jsonl").write_text("".join(rows))
    (launched / "hard.jsonl").write_text("".join(rows[:5]))
    monkeypatch.chdir(launched)
    words = (
        *(f"actor.path={tiny_policy}", "task.path=train.jsonl", "task.eval_size=9"),
        "train_bs_n_seqs=8",
        *("auto_eval=true", "exp_ctrl.save_freq_steps=2"),
        *("benchmarks.hard=math", "benchmarks.hard.path=hard.jsonl"),
    )
    found = trial_of("ppo-math", words, launched=launched, file_root=file_root)
    monkeypatch.chdir(elsewhere)
    return found


def test_a_trials_files_are_found_from_any_folder(of_files: SavedModel, tmp_path: Path) -> None:
    args = settings(of_files).prompts("test").args
    assert args["path"] == str(tmp_path / "launched" / "train.jsonl")
    assert args["eval_size"] == 9


def test_a_trials_benchmark_is_asked_whole(of_files: SavedModel, tmp_path: Path) -> None:
    args = settings(of_files, benchmark="hard").prompts("test").args
    assert args["eval_path"] == str(tmp_path / "launched" / "hard.jsonl")
    assert args["eval_size"] == 5
    few = settings(of_files, "task.eval_size=2", benchmark="hard")
    assert few.prompts("test").args["eval_size"] == 2


@pytest.mark.parametrize(
    ("benchmark", "kind", "fix"),
    [("hrd", None, "did you mean 'hard'?"), ("hard", "math", "leave one of them out")],
)
def test_a_benchmark_that_is_not_there_is_refused(
    of_files: SavedModel, benchmark: str, kind: str | None, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(of_files, benchmark=benchmark, kind=kind)
    assert only(refused.value).fix == fix


@pytest.mark.parametrize(
    ("ends", "writes", "stays"),
    [
        (None, True, False),
        (ValueError, True, True),
        (ValueError, False, False),
        (KeyboardInterrupt, True, False),
    ],
)
def test_what_programs_wrote_stays_after_a_failure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: type[BaseException] | None,
    writes: bool,
    stays: bool,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with suppress(ValueError, KeyboardInterrupt), agents_logs(None) as logs:
        if writes:
            (logs / "host-0.log").write_text("no such tool")
        if ends is not None:
            raise ends
    assert logs.exists() is stays
    with agents_logs(tmp_path / "out.json") as beside:
        assert beside == tmp_path / "out.agents"
