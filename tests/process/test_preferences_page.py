"""The commands and the loss of docs/preferences.md, as a user launches them, on a tiny model: held-out
accuracy rises from chance.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from doc_pages import DocPage, in_folder
from near import near
from real_trials import Trials, explain, metrics_of

from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.trial.trial_state import State

PAGE = DocPage("preferences.md")
SMALL = (
    "exp_ctrl.total_train_epochs=3",
    "train_bs_n_seqs=16",
    "task.eval_size=32",
    "model.optimizer.lr=3e-3",
    "scheduling.model_worker.cpu=1",
    "tensorboard=false",
)
SIZES = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
CHANCE = 0.5


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random policy, pairs as on the page, and the page's loss."""
    folder = tmp_path_factory.mktemp("start")
    problems = arithmetic_word_problems(num_problems=300, seed=0, split="train")
    corpus = [problem["prompt"] + problem["answer"] for problem in problems]
    build_tiny_llama(folder / "POLICY", seed=1, corpus=corpus, vocab_size=320, **SIZES)
    record = json.loads(PAGE.blocks("json")[0])
    assert list(record) == ["prompt", "chosen", "rejected"]
    with (folder / "pairs.jsonl").open("w") as file:
        for n in range(192):  # the worse answer has the same tokens in another order
            a, b = n % 9, n % 7
            pair = (f"What is {a} + {b}?", f"{a} + {b} = {a + b}", f"{a + b} = {a} + {b}")
            file.write(json.dumps(dict(zip(record, pair, strict=True))) + "\n")
    PAGE.write_code(folder, "slic.py")
    return folder


@pytest.mark.parametrize("number", range(3))
def test_the_page_runs_as_written(module_trials: Trials, start: Path, number: int) -> None:
    launches = PAGE.commands("launch")
    assert len(launches) == 3
    experiment, *words = launches[number]
    rows = _rows_of(module_trials, f"page{number}", experiment, *in_folder(start, words))
    before, after = rows[0], rows[-1]
    if number == 0:  # dpo: policy and reference are one model
        assert before["eval/accuracy"] == CHANCE
        assert before["eval/loss"] == near(0.6931, rel=1e-4)
    assert float(str(after["eval/accuracy"])) >= CHANCE + 0.3
    assert float(str(after["eval/loss"])) < float(str(before["eval/loss"]))


@pytest.mark.parametrize("loss", ["ipo", "kto"])
def test_the_other_losses_learn_too(module_trials: Trials, start: Path, loss: str) -> None:
    given = in_folder(start, ["model.path=POLICY", "task.path=pairs.jsonl", f"loss={loss}"])
    rows = _rows_of(module_trials, loss, "dpo", *given)
    assert rows[0]["eval/accuracy"] == CHANCE
    assert float(str(rows[-1]["eval/accuracy"])) >= CHANCE + 0.3
    assert ("eval/kl_estimate" in rows[-1]) == (loss == "kto")


def _rows_of(trials: Trials, name: str, experiment: str, *words: str) -> list[dict[str, object]]:
    """Launches a small run; returns its rows with an evaluation."""
    files = trials.launch(experiment, name, *words, *SMALL)
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    product = files.root / "checkpoints" / "model" / "latest"
    assert re.search("LlamaForCausalLM", (product / "config.json").read_text())
    return [row for row in metrics_of(files) if "eval/accuracy" in row]
