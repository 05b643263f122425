"""The user story of docs/your_data.md, as written, on both schedules."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from doc_pages import DocPage, in_folder
from real_trials import Trials, explain, metrics_of

from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.trial.trial_state import State

PAGE = DocPage("your_data.md")
STEPS = 3
SMALL = (
    "scheduling.model_worker.cpu=1",
    "task.eval_size=8",
    "train_bs_n_seqs=8",
    "group_size=4",
    "gen.max_new_tokens=6",
    f"exp_ctrl.benchmark_steps={STEPS}",
)
WORDS = [f"{a}{b}{c}" for a in "abcdef" for b in "abcd" for c in "abc"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, its data in larger numbers, and a model."""
    folder = tmp_path_factory.mktemp("data")
    PAGE.write_code(folder, "words.py")
    (example,) = PAGE.blocks("json")
    text = json.dumps(json.loads(example))
    records = []
    for number, word in enumerate(WORDS):
        made = re.sub(r"\bbac\b", word[::-1], re.sub(r"\bcab\b", word, text))
        records.append(made.replace('"level": 1', f'"level": {number % 4}'))
    (folder / "words.jsonl").write_text("\n".join(records))
    build_tiny_llama(
        folder / "MODEL", seed=1, corpus=records, hidden_size=32, num_layers=1, num_heads=2,
        num_kv_heads=1, vocab_size=300,
    )  # fmt: skip
    return folder


def test_the_page_shows_its_records(module_trials: Trials, folder: Path) -> None:
    """`realsys data show` of the page, run as a user would."""
    (words,) = PAGE.commands("data")
    given = in_folder(folder, words)
    done = module_trials.run("data", *given, "task.eval_size=8")
    assert done.returncode == 0, done.stderr
    assert "Write it backwards: aab\n\nknown answer: baa" in done.stdout
    done = module_trials.run("data", *given)  # fewer than are held out
    assert "dropped (see eval_size" in done.stdout


def test_the_story_runs_as_written_on_both_schedules(module_trials: Trials, folder: Path) -> None:
    found = PAGE.commands("launch", "grpo-words")
    assert ["schedule=async" in words for words in found] == [False, True]
    for number, (experiment, *words) in enumerate(found):
        given = in_folder(folder, words)
        files = module_trials.launch(experiment, f"run{number}", *given, *SMALL)
        view = module_trials.wait(files)
        assert view.state is State.COMPLETED, explain(files, view)
        rows = [row for row in metrics_of(files) if "critic/score/mean" in row]
        assert len(rows) == STEPS, words
        assert all(0 <= float(str(row["critic/score/mean"])) <= 1 for row in rows)
