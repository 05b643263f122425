"""The user story of docs/chat_data.md: fine-tuning on conversations, then GRPO, on both schedules."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from doc_pages import DocPage, in_folder
from real_trials import Trials, explain, metrics_of

from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.trial.trial_state import State

PAGE = DocPage("chat_data.md")
STEPS = 3
SMALL = (
    "scheduling.model_worker.cpu=1",
    "task.eval_size=8",
    "train_bs_n_seqs=8",
    "group_size=4",
    "gen.max_new_tokens=6",
    f"exp_ctrl.benchmark_steps={STEPS}",
    "sft.train_bs_n_seqs=8",
    "sft.scheduling.model_worker.cpu=1",
    "sft.exp_ctrl.benchmark_steps=6",
)
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = [f"{a}{b}{c}" for a in "abcdef" for b in "abcd" for c in "abc"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, its data in larger numbers, and a model with a chat template."""
    folder = tmp_path_factory.mktemp("data")
    PAGE.write_code(folder, "chats.py")
    (example,) = PAGE.blocks("json")
    text = json.dumps(json.loads(example))
    records = [re.sub(r"\bbac\b", w[::-1], re.sub(r"\bcab\b", w, text)) for w in WORDS]
    (folder / "chats.jsonl").write_text("\n".join(records))
    build_tiny_llama(
        folder / "MODEL", seed=1, corpus=[*records, TEMPLATE], hidden_size=32, num_layers=1,
        num_heads=2, num_kv_heads=1, vocab_size=300,
    )  # fmt: skip
    config = folder / "MODEL" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return folder


def test_the_story_runs_as_written_on_both_schedules(module_trials: Trials, folder: Path) -> None:
    found = PAGE.commands("launch", "grpo-chats")
    assert ["schedule=async" in words for words in found] == [False, True]
    for number, (experiment, *words) in enumerate(found):
        given = in_folder(folder, words)
        files = module_trials.launch(experiment, f"run{number}", *given, *SMALL)
        view = module_trials.wait(files)
        assert view.state is State.COMPLETED, explain(files, view)
        rows = [row for row in metrics_of(files) if "critic/score/mean" in row]
        assert len(rows) == STEPS, words
        assert all(0 <= float(str(row["critic/score/mean"])) <= 1 for row in rows)


def test_what_is_asked_has_the_system_prompt(module_trials: Trials, folder: Path) -> None:
    (words, _) = PAGE.commands("launch", "grpo-chats")
    given = (*in_folder(folder, words[1:]), "task.eval_size=8")
    shown = module_trials.run("data", "show", words[0], *given)
    assert shown.returncode == 0, shown.stderr
    assert "tokenizer's chat template" in shown.stdout
    asked = "<|system|>You write words backwards.<eos>\n<|user|>Backwards: aab<eos>\n<|assistant|>"
    assert f"{asked}\nknown answer: baa" in shown.stdout
