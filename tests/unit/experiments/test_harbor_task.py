"""Task ``harbor``: which tasks are asked and held out, what a plan finds wrong, what fine-tuning learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest
from harbor_tasks import FILES, write_task

from experiments.tasks.benchmarks import held_out_warnings
from experiments.tasks.harbor import HarborTask
from realsys.api import registry
from realsys.api.errors import DataError
from realsys.api.plain import from_plain
from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.rewards.harbor.harbor_rule import SHELLS
from realsys.rewards.programs.code_tests import last_code_block


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    for number in range(12):
        write_task(tmp_path / f"tasks/t{number:02}")
    return tmp_path / "tasks"


@pytest.fixture
def model(tmp_path: Path) -> str:
    build_tiny_llama(
        tmp_path / "model", seed=1, corpus=["hello world, one bash script and more"] * 9,
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, vocab_size=270,
    )  # fmt: skip
    return str(tmp_path / "model")


def names(task: HarborTask, split: str) -> list[str]:
    """Names of a split's tasks, as a worker reads them."""
    made = from_plain(HarborTask, task.data_args()["task"])
    return [record["task"] for record in made.records(split, seed=3)]


def problems(task: HarborTask, batch_size: int = 4, model: str | None = None) -> list[str]:
    return [p.what for p in task.problems(batch_size=batch_size, tokenizer_dir=model)]


def test_a_prompt_is_the_instruction_and_a_demand_for_a_script(tasks: Path) -> None:
    write_task(tasks / "t00", environment__Dockerfile="FROM a\nWORKDIR /data/x\n")
    (record, *_) = HarborTask(path=str(tasks / "t00"), eval_size=0).records("train", seed=1)
    golden.check(record["prompt"])
    assert record["task_directory"] == str(tasks / "t00")
    own = HarborTask(path=str(tasks / "t00"), eval_size=0, instruction="Bash, in {workdir}!")
    assert own.records("train", seed=1)[0]["prompt"].endswith(".txt.\n\nBash, in /data/x!")


@pytest.mark.parametrize("agent", HarborTask.own_agents)
def test_an_agent_in_the_box_is_asked_the_instruction_alone(tasks: Path, agent: str) -> None:
    asked = HarborTask(path=str(tasks), eval_size=1)
    own = replace(asked, agent=agent, env="never-used")
    (prompt,) = {record["prompt"] for record in own.records("train", seed=1)}
    (longer,) = {record["prompt"] for record in asked.records("train", seed=1)}
    assert prompt == FILES["instruction.md"].strip()
    assert longer.startswith(prompt + "\n\n")
    (warning,) = held_out_warnings(own, auto_eval=False)
    assert repr(agent) in warning
    assert "never-used" not in warning


def test_some_are_held_out_the_same_ones_always(tasks: Path) -> None:
    task = HarborTask(path=str(tasks), eval_size=4)
    train, test = names(task, "train"), names(task, "test")
    assert sorted(train + test) == [f"t{n:02}" for n in range(12)]
    assert (len(test), train) == (4, sorted(train))
    everything = sorted(train + test)
    assert set(test) not in (set(everything[:4]), set(everything[-4:]))  # by a hash of their names
    write_task(tasks / "another")
    assert len(set(names(task, "test")) - set(test)) <= 1
    assert names(replace(task, eval_size=0), "test") == []
    apart = HarborTask(path=str(tasks), eval_path=str(tasks / "t03"), eval_size=4)
    assert (len(names(apart, "train")), names(apart, "test")) == (13, ["t03"])


def test_the_rule_is_told_the_folders_to_check(tasks: Path) -> None:
    task = HarborTask(path=str(tasks), eval_path=str(tasks / "t03"))
    folders = [str(tasks), str(tasks / "t03")]
    assert task.reward_rule == {"reward": "harbor", "reward_args": {"harbor": {"tasks": folders}}}
    args: dict[str, Any] = {"harbor": {"disk": 64}, "judge": {"url": "x"}}
    given = replace(task, reward="harbor + 0.1*judge", reward_args=args).reward_rule["reward_args"]
    assert given == {"harbor": {"tasks": folders, "disk": 64}, "judge": {"url": "x"}}
    assert replace(task, reward="judge").reward_rule == {"reward": "judge"}
    assert task.reward_keys == ("record",)
    made: Any = registry.make_reward("harbor", **task.reward_rule["reward_args"]["harbor"])
    assert made.tasks == tuple(folders)


def test_a_plan_finds_everything_that_is_wrong(tasks: Path) -> None:
    assert problems(HarborTask(path=str(tasks), eval_size=4)) == []
    golden.check(problems(HarborTask()))
    golden.check(problems(HarborTask(path=str(tasks / "none"))))
    few = "12 tasks are too few: 4 per batch and 9 held out"
    assert problems(HarborTask(path=str(tasks), eval_size=9)) == [few]
    apart = HarborTask(path=str(tasks), eval_path=str(tasks / "t03"), eval_size=1)
    assert problems(apart, batch_size=12) == []
    few = "13 tasks are too few: 12 per batch and 2 held out"
    assert problems(replace(apart, eval_size=2), batch_size=12) == [few]
    write_task(tasks / "t01", **{"task.toml": "[environment]\ngpus = 1\n[[steps]]\n"})
    write_task(tasks / "t02", environment__Dockerfile="FROM a\nFROM b\n")
    found = problems(HarborTask(path=str(tasks), eval_path=str(tasks / "gone")))
    golden.check(found)
    with golden.raises(DataError) as raised:
        HarborTask(path=str(tasks)).records("train", seed=1)
    assert raised.value.where.endswith("t01/task.toml:3")


def test_a_long_instruction_is_found_before_anything_starts(tasks: Path, model: str) -> None:
    write_task(tasks / "t05", **{"instruction.md": "count " * 900})
    task = HarborTask(path=str(tasks), eval_size=4)
    (problem,) = task.problems(batch_size=4, tokenizer_dir=model)
    golden.check(problem)
    length = int(problem.what.split()[-1])
    assert problem.fix.startswith(f"raise task.max_prompt_len to {length},")
    assert problems(replace(task, max_prompt_len=length), model=model) == []
    measured = task.measured(model)
    assert measured is not None
    assert (measured.longest, measured.total, measured.held_out) == (length, 12, None)
    measured = replace(task, eval_path=str(tasks / "t00")).measured(model)
    assert measured is not None
    assert (measured.total, measured.held_out) == (12, 1)


def test_fine_tuning_learns_the_solutions_as_answers(tasks: Path) -> None:
    task = HarborTask(path=str(tasks), eval_size=4)
    assert list(task.answer_problems()) == []
    script = FILES["solution/solve.sh"]
    (record, *_) = task.records("train", seed=1)
    assert record["answer"] == f"```bash\n{script}```"
    assert last_code_block(record["answer"], SHELLS) == script
    whole = replace(task, reward_args={"harbor": {"fenced": False}})
    assert whole.records("train", seed=1)[0]["answer"] == script
    fences = "cat > x <<'E'\n```python\n```\nE\n"
    fenced = write_task(tasks / "t07", **{"solution/solve.sh": fences})
    (one,) = HarborTask(path=str(fenced), eval_size=0).records("train", seed=1)
    assert last_code_block(one["answer"], SHELLS) == fences
    (tasks / "t08/solution/solve.sh").unlink()
    (tasks / "t09/solution/data.txt").write_text("x")
    (problem,) = task.answer_problems()
    golden.check(problem)
    assert {"t08", "t09"} == set(problem.what.rpartition(": ")[2].split(", "))


def test_warnings_of_what_this_node_lacks(tasks: Path) -> None:
    task = HarborTask(path=str(tasks), eval_size=4)
    golden.check(list(task.remarks(None)))
    docker = "FROM python:3.12\nRUN apt-get install -y no-such-program\n"
    test = FILES["tests/test.sh"] + "curl http://x\n"
    write_task(tasks / "t01", **{"environment/Dockerfile": docker, "tests/test.sh": test})
    golden.check(list(task.remarks(None)))
    args = {"harbor": {"assume": ["no-such-program"], "images": ["t01=/x.sif"]}}
    assert len(list(replace(task, reward_args=args).remarks(None))) == 2


def test_a_product_depends_on_all_files_of_the_tasks(tasks: Path) -> None:
    files = HarborTask(path=str(tasks), eval_size=4).input_files()
    assert len(files) == 12 * len(FILES)
    assert str(tasks / "t05/tests/test.sh") in files
