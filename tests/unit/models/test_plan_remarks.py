"""A plan says what it has counted."""

from __future__ import annotations

import json
from pathlib import Path

import golden
import pytest
from test_whole_models import CONFIG, shapes, write

from experiments.parts import question_files
from realsys.data.sources.dataset_arguments import MathRecordsArguments


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path, CONFIG, shapes())


def test_a_plan_says_how_many_questions_it_has_counted(model, tmp_path, monkeypatch):
    path = tmp_path / "q.jsonl"
    path.write_text(
        json.dumps({"prompt": "a a a", "answer": "1"})
        + "\n"
        + '{"prompt": "a", "answer": "1"}\n' * 9
    )
    data = MathRecordsArguments(split="train", path=str(path))
    assert not list(question_files.sampled_warnings(data, str(model)))
    monkeypatch.setattr(question_files, "MAX_SAMPLED_QUESTIONS", 4)
    (told,) = question_files.sampled_warnings(data, str(model))
    golden.check(told)
    assert not list(question_files.sampled_warnings(data, None))  # a made model: counted by workers
