"""tests/by_hand/acceptance/bits.py finds the first bit that differs, on machines of one kind."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

SCRIPT = Path(__file__).parents[2] / "by_hand" / "acceptance" / "bits.py"


@pytest.fixture(scope="module")
def bits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bits", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def reference() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((SCRIPT.parent / "results" / "bits.json").read_text())
    return content


def test_a_record_equals_itself(
    bits: ModuleType, reference: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bits.compare(reference, copy.deepcopy(reference)) == 0
    out = capsys.readouterr().out
    assert "NO" not in out
    assert all(name in out for name in (*bits.RUNS, "resume", "replay"))


def test_the_first_difference_is_named_with_both_values(
    bits: ModuleType, reference: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy.deepcopy(reference)
    run = other["runs"]["megatron"]
    column = run["phases"]["main"]["metrics"]["actor_train/grad_norm"]
    was, column[3] = column[3], column[3] * (1 + 2**-52)
    assert was != column[3]
    run["weights"]["checkpoints/actor/step-000012/model.safetensors"] = "other"
    assert bits.compare(reference, other) == 1
    out = capsys.readouterr().out
    assert f"main, step 3, actor/grad_norm: {was!r} and {column[3]!r}" in out
    assert "checkpoints/actor/step-000012/model.safetensors" in out
    assert out.count("NO") == 2


def test_a_metric_that_was_renamed_is_compared_under_todays_name(
    bits: ModuleType, reference: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy.deepcopy(reference)
    metrics = other["runs"]["grpo-math"]["phases"]["main"]["metrics"]
    metrics["critic/score/mean"] = metrics.pop("actor_train/reward/mean")
    assert bits.compare(reference, other) == 0
    metrics["critic/score/mean"][1] = 9.0
    assert bits.compare(reference, other) == 1
    assert "step 1, critic/score/mean" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["samples", "ledger", "steps"])
def test_samples_ledger_and_steps_count(
    bits: ModuleType, reference: dict[str, Any], what: str
) -> None:
    other = copy.deepcopy(reference)
    other["runs"]["ppo-math"]["phases"]["sft"][what] = "other"
    assert bits.compare(reference, other) == 1


def test_what_a_clock_measured_does_not_count(bits: ModuleType, reference: dict[str, Any]) -> None:
    other = copy.deepcopy(reference)
    metrics = other["runs"]["ppo-math-async"]["phases"]["main"]["metrics"]
    metrics["rollout/seconds"] = metrics["time/step_s"] = [1.0] * 13
    assert bits.compare(reference, other) == 0


@pytest.mark.parametrize("key", ["torch", "vector_instructions", "processor"])
def test_other_machines_are_not_compared(
    bits: ModuleType, reference: dict[str, Any], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy.deepcopy(reference)
    other["machine"][key] = "another"
    assert bits.compare(reference, other) == 2
    assert f"  {key}: {reference['machine'][key]} and another" in capsys.readouterr().out


def test_weights_are_tensors_not_files(bits: ModuleType, tmp_path: Path) -> None:
    x, y = torch.arange(6.0).view(2, 3), torch.ones(4)
    files = [tmp_path / name for name in ("a", "b", "c", "d")]
    save_file({"x": x, "y": y}, files[0])
    save_file({"y": y, "x": x}, files[1], metadata={"format": "pt"})
    save_file({"x": x.view(3, 2), "y": y}, files[2])
    save_file({"x": x, "y": y + 2**-23}, files[3])
    hashes = [bits.tensors_hash(file) for file in files]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_an_older_tree_gets_the_names_that_it_knows(
    bits: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bits, "FORMER_NAMES", {"new.name": "old"})
    assert bits.as_named_in('"path": "new.name",\n"path": "other",', "new.name=3") == "new.name=3"
    assert bits.as_named_in('"path": "old",\n"path": "other",', "new.name=3") == "old=3"
    assert bits.as_named_in("", "other=x=y") == "other=x=y"
