"""docs/harbor.md as written: its task, tried and learned on both schedules, each answer run in a box."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from doc_pages import DocPage, in_folder
from real_trials import Trials, explain, metrics_of, small_ppo

from realsys.data.harbor.task_directory import read_task
from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.rewards.harbor import try_tasks
from realsys.rewards.harbor.harbor_rule import HarborTests
from realsys.trial.trial_state import State

PAGE = DocPage("harbor.md")
STEPS = 2
# The tiny policy writes no fenced block: all of what it writes is run.
SMALL = (
    *(
        w
        for w in small_ppo("gen.max_new_tokens=8")
        if not w.startswith(("task.train", "task.eval"))
    ),
    "task.eval_size=2",
    "task.reward_args.harbor.fenced=false",
    f"exp_ctrl.benchmark_steps={STEPS}",
)


def write_tasks(folder: Path, names: tuple[str, ...]) -> Path:
    """Writes the page's task under several names, into ``tasks``."""
    task = folder / "tasks" / names[0]
    test, solution = PAGE.blocks("sh")
    files = {
        "task.toml": PAGE.blocks("toml")[0],
        "instruction.md": PAGE.blocks("text")[0],
        "environment/Dockerfile": PAGE.blocks("dockerfile")[0],
        "environment/poem.txt": "one\ntwo\nthree\n",
        "tests/test.sh": test,
        "tests/check.py": PAGE.blocks("python")[0],
        "solution/solve.sh": solution,
    }
    for name, text in files.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    for name in names[1:]:
        shutil.copytree(task, task.parent / name)
    return task


def test_the_pages_own_solution_gets_1_and_a_wrong_one_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_tasks(tmp_path, ("count-lines",))
    assert try_tasks.main([str(task.parent), "disk=64"]) == 0
    assert capsys.readouterr().out == PAGE.blocks("text")[1]
    rule = HarborTests(disk=64)
    for script, rewards in {
        str(read_task(task).answer): {"written": 1.0, "right": 1.0},
        "echo 4 > lines.txt": {"written": 1.0, "right": 0.0},
        "cat lines.txt": {"written": 0.0, "right": 0.0},
    }.items():
        assert rule.verdict(script, task).rewards == rewards, script
    assert rule._sandbox is not None
    rule._sandbox._sandbox.close()


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_the_page_runs_as_written(module_trials: Trials, tmp_path: Path, schedule: str) -> None:
    write_tasks(tmp_path, tuple(f"count-lines-{number}" for number in range(18)))
    build_tiny_llama(
        tmp_path / "MODEL", seed=1, corpus=[PAGE.text], hidden_size=32, num_layers=1, num_heads=2,
        num_kv_heads=1, vocab_size=300,
    )  # fmt: skip
    commands = [c for c in PAGE.commands("launch", "task=harbor") if "task.agent=harbor" not in c]
    found = dict(zip(("sync", "async"), commands, strict=True))
    experiment, *words = found[schedule]
    assert ("schedule=async" in words) == (schedule == "async")
    files = module_trials.launch(experiment, schedule, *in_folder(tmp_path, words), *SMALL)
    view = module_trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    rows = [row for row in metrics_of(files) if "critic/score/mean" in row]
    assert len(rows) == STEPS
    where = "rollout/reward/" if schedule == "async" else "rew_inf/reward/"
    for row in rows:
        named = {name: float(str(row[where + name])) for name in ("written", "right", "no_verdict")}
        assert named == {"written": 0.0, "right": 0.0, "no_verdict": 0.0}
        assert float(str(row["critic/score/mean"])) == 0.0
    assert "answers_set_aside" not in " ".join(rows[0])
