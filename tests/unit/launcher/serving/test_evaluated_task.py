"""Which task ``realsys eval`` asks, and what it says of a task whose agent it does without."""

from __future__ import annotations

import getpass
import shlex
from pathlib import Path

import pytest

from experiments.task import Task
from launcher.serving.model_evaluation import task_settings
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


@pytest.fixture
def of_agents(file_root: Path, tmp_path: Path) -> SavedModel:
    """The checkpoint of a trial of arithmetic with a function as its agent."""
    agent = tmp_path / "my agent.py"
    agent.write_text("def solve(): ...")
    words = (
        "task.eval_size=7",
        "task.agent=python",
        f"task.agent_args.function={agent}:solve",
        "task.env_args={turns: 2}",
    )
    plan = make_plan("grpo-math-async", words, trial="run1")
    folder = file_root / "runs" / getpass.getuser() / "grpo-math-async" / "run1"
    model = folder / "checkpoints/actor/step-000002"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (folder / "plan.json").write_text(plan_text(plan))
    return find_model("grpo-math-async/run1")


def only(error: ConfigError) -> ConfigError:
    (problem,) = error.problems if isinstance(error, ConfigErrors) else [error]
    return problem


def test_a_trial_of_an_agent_is_told_the_command_that_evaluates_without_it(
    of_agents: SavedModel,
) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(of_agents, "task.max_prompt_len=99")
    problem = only(refused.value)
    assert "asks each question once, without agent 'python' and environment" in problem.what
    command = shlex.split(problem.fix.removeprefix("say so: "))
    assert command == [
        *("realsys", "eval", "grpo-math-async/run1", "task.max_prompt_len=99"),
        *("task.agent=math_single_step", "task.agent_args={}", "task.env_args={}"),
    ]
    task = settings(of_agents, *command[3:])
    assert (task.eval_size, task.max_prompt_len, task.agent, task.env_args) == (
        *(7, 99, "math_single_step"),
        {},
    )


def test_a_named_task_stays_in_the_command(of_agents: SavedModel) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(of_agents, "task.agent=chat", "task.train_size=9", kind="math")
    command = shlex.split(only(refused.value).fix.removeprefix("say so: "))
    assert command[3:] == ["--task", "math", "task.train_size=9", "task.agent=math_single_step"]
    assert settings(of_agents, *command[5:], kind="math").agent == "math_single_step"


def test_what_an_environment_alone_can_score_is_not_evaluated(
    of_agents: SavedModel, tmp_path: Path
) -> None:
    records = tmp_path / "train.jsonl"
    records.write_text('{"prompt": "?", "number": 0, "verifiers": {"prompt": []}}\n')
    with pytest.raises(ConfigError) as refused:
        settings(of_agents, f"task.path={records}", "task.eval_size=0", kind="verifiers")
    problem = only(refused.value)
    assert "without agent 'verifiers', which alone can score task verifiers" in problem.what
    assert "--task math" in problem.fix


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
    plan = make_plan("ppo-math", words, trial="run1")
    folder = file_root / "runs" / getpass.getuser() / "ppo-math" / "run1"
    model = folder / "checkpoints/actor/step-000002"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (folder / "plan.json").write_text(plan_text(plan))
    files = TrialFiles(folder)
    record = TrialRecord(
        experiment_name="ppo-math",
        trial_name="run1",
        user=getpass.getuser(),
        cluster="local",
        plan_hash="",
        created_at=0.0,
        launch_host="",
        folder=str(launched),
    )
    write_record(files.record, record)
    monkeypatch.chdir(elsewhere)
    return find_model("ppo-math/run1")


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
