"""The rules of docs/rewards.md, as a user launches them, in a synchronous and an asynchronous run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_trials import SMALL_PPO, Trials, explain, metrics_of

from realsys.models.tiny_llama import build_tiny_llama
from realsys.trial.trial_state import State

pytestmark = pytest.mark.process

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
STEPS = 3
SHORT = (
    *SMALL_PPO,
    f"exp_ctrl.benchmark_steps={STEPS}",
    "sft.init.hidden_size=32",
    "sft.init.num_layers=1",
    "sft.init.num_heads=2",
    "sft.init.num_kv_heads=1",
    "sft.task.train_size=480",
    "sft.task.eval_size=0",
    "sft.scheduling.model_worker.cpu=1",
)
PARTS = {"worked", "worked/steps", "worked/cut", "worked/correct", "brief", "on_topic"}


@pytest.fixture(scope="module")
def module_trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    """One file root for all: the starting policy is made once."""
    trials = Trials(tmp_path_factory.mktemp("rewards") / "root")
    yield trials
    trials.end_all()


def test_the_page_runs_as_written(module_trials: Trials, tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(block.strip().splitlines()) <= 40
    code = tmp_path / "my_rewards.py"
    code.write_text(block)
    lines = re.findall(r"^realsys launch (.*my_rewards.py.*)$", PAGE, flags=re.MULTILINE)
    assert len(lines) == 3
    for number, line in enumerate(lines):
        words = [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', line)]
        given = [str(code) if word == code.name else word for word in words[1:]]
        files = module_trials.launch(words[0], f"run{number}", *given, *SHORT)
        view = module_trials.wait(files)
        assert view.state is State.COMPLETED, explain(files, view)
        rows = [row for row in metrics_of(files) if "critic/score/mean" in row]
        assert len(rows) == STEPS, line
        where = "rollout/reward/" if "schedule=async" in line else "rew_inf/reward/"
        parts = {"correct", "steps", "cut"} if number == 0 else PARTS
        for row in rows:
            found = {name.removeprefix(where): row[name] for name in row if name.startswith(where)}
            assert set(found) == parts
            assert all(0 <= value <= 1 for value in found.values())
        if number == 1:  # the mean that is trained on is the weighted sum of what is logged
            for row in rows:
                given_mean = (
                    row[f"{where}worked"]
                    + 0.1 * row[f"{where}brief"]
                    + 0.05 * row[f"{where}on_topic"]
                )
                assert row["critic/score/mean"] == pytest.approx(given_mean, abs=1e-5)


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_programs_are_scored_by_their_tests(
    module_trials: Trials, tmp_path: Path, schedule: str
) -> None:
    (records,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(records.splitlines()) == 2
    problems = tmp_path / "problems.jsonl"
    problems.write_text(records * 20)
    (command,) = re.findall(r"realsys launch ([^`]*code_tests[^`]*)```", PAGE)
    model = tmp_path / "MODEL"
    build_tiny_llama(
        model, seed=1, corpus=records.splitlines(), hidden_size=32, num_layers=1, num_heads=2,
        num_kv_heads=1, vocab_size=300,
    )  # fmt: skip
    for name, path in (("problems.jsonl", problems), ("MODEL", model)):
        command = command.replace(name, str(path))
    words = command.replace("\\\n", " ").split()
    given = [word for word in SHORT if not re.match(r"sft\.|task\.", word)]
    files = module_trials.launch(
        words[0], f"code-{schedule}", *words[1:], *given, f"schedule={schedule}"
    )
    view = module_trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    rows = [row for row in metrics_of(files) if "critic/score/mean" in row]
    assert len(rows) == STEPS
    where = "rollout/reward/" if schedule == "async" else "rew_inf/reward/"
    for row in rows:
        assert 0 <= float(str(row[f"{where}tests_passed"])) <= 1
    if schedule == "sync":
        shares = [float(str(row[f"{where}tests_passed"])) for row in rows]
        means = [float(str(row["critic/score/mean"])) for row in rows]
        assert shares == pytest.approx(means, abs=1e-6)
        assert "answers_set_aside" not in " ".join(rows[0])
