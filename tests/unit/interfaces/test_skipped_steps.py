"""A single optimizer step that was left out: what fine-tuning and pairs tell of it, and its batch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from realsys.api.data import MicroBatchSpec
from realsys.api.errors import GradientNotFinite
from realsys.api.model import ModelInterface, ProcessTopology, StepInfo
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.preferences.direct_preference import DirectPreferenceInterface
from realsys.interfaces.preferences.preference_training import PreferenceInterface
from realsys.interfaces.supervised import SFTInterface
from realsys.model_worker import model_worker
from realsys.model_worker.model_worker import ModelWorkerLoop
from realsys.model_worker.recovery import load_state
from realsys.model_worker.skipped_batches import MOST_KEPT, keep_batch

MB = MicroBatchSpec()
SKIPPED = {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5, "skipped_steps": 1.0}


def batch() -> SequenceSample:
    keys = dict.fromkeys(("packed_input_ids", "prompt_mask", "packed_ref_logprobs"), [[2, 3]] * 2)
    tensors = {
        "packed_input_ids": torch.arange(10),
        "prompt_mask": torch.tensor([True, False, True, False, False] * 2),
        "packed_ref_logprobs": torch.zeros(10),
    }
    return SequenceSample.from_tensors(["a", "b"], keys, tensors, metadata={"answer": ["4", "5"]})


@pytest.mark.parametrize(
    "does", [SFTInterface(), PreferenceInterface(), DirectPreferenceInterface()]
)
def test_what_is_no_number_is_not_told(does: ModelInterface) -> None:
    engine = SimpleNamespace(train_batch=lambda **_: dict(SKIPPED))
    version = StepInfo()
    model: Any = SimpleNamespace(
        module=engine,
        version=version,
        device="cpu",
        topology=ProcessTopology(),
        groups=SimpleNamespace(data=None, copy=None),
        inc_version=lambda: setattr(version, "global_step", 1),
    )
    stats = does.train_step(model, batch(), MB)
    assert (stats["skipped_steps"], stats["lr"], version.global_step) == (1.0, 0.5, 1)
    assert all(math.isfinite(value) for value in stats.values())
    assert "grad_norm" not in stats


def run_call(folder: Path, compute: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(model_worker, "_compute", compute)
    call = SimpleNamespace(input_keys=(), input_key_remap={})
    model = SimpleNamespace(module=None, device="cpu", rank=0, topology=ProcessTopology())
    loop: Any = SimpleNamespace(
        shards=SimpleNamespace(call=lambda _: (call, model, None)),
        tensors=SimpleNamespace(get=lambda _: batch()),
        runner=SimpleNamespace(
            name="model_worker/3", phase_files=SimpleNamespace(skipped_batches=folder)
        ),
        _fetch_from_peers=lambda _: None,
    )
    loop._keep_batch = lambda *args: ModelWorkerLoop._keep_batch(loop, *args)
    request: Any = SimpleNamespace(call="actor_train", step=7, meta=batch().meta)
    return ModelWorkerLoop._run_call(loop, request)


def ended(*_: Any) -> Any:
    raise GradientNotFinite("nan", where="here", fix="look")


@pytest.mark.parametrize("ends", [False, True])
def test_its_batch_is_kept(ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_call(tmp_path, lambda *_: ({"loss": 1.0}, None), monkeypatch).stats == {"loss": 1.0}
    assert list(tmp_path.iterdir()) == []
    if ends:
        with pytest.raises(GradientNotFinite):
            run_call(tmp_path, ended, monkeypatch)
    else:
        run_call(tmp_path, lambda *_: (SKIPPED, None), monkeypatch)
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(r"actor_train-step-0*7-model_worker-3\.pt", file.name)
    assert file.stat().st_mode & 0o777 == 0o600
    kept, given = load_state(file), batch()
    assert (kept["call"], kept["step"], kept["ids"]) == ("actor_train", 7, ["a", "b"])
    assert kept["lengths"]["packed_input_ids"] == [[2, 3], [2, 3]]
    assert kept["metadata"] == {"answer": ["4", "5"]}
    assert kept["tensors"].keys() == given.data.keys()
    for key, x in given.data.items():
        assert torch.equal(kept["tensors"][key], x)


def test_a_run_that_skips_often_fills_no_disk(tmp_path: Path) -> None:
    for step in [*range(MOST_KEPT + 5), 3]:  # a resumed run writes the same again
        keep_batch(tmp_path, batch(), call="dpo_train", step=step, worker="model_worker/0")
    assert len(list(tmp_path.iterdir())) == MOST_KEPT
    other = keep_batch(tmp_path, batch(), call="dpo_train", step=3, worker="model_worker/1")
    assert other is not None
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert keep_batch(blocked, batch(), call="x", step=1, worker="model_worker/0") is None
