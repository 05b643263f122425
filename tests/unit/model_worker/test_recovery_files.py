"""A worker's file of a checkpoint: hashed while it is written, read once by whoever wrote it."""

import hashlib
import os
from pathlib import Path

import pytest
import torch

from realsys.model_worker import recovery


def test_a_state_is_hashed_while_it_is_written(tmp_path, monkeypatch):
    opened = []
    fdopen = os.fdopen
    monkeypatch.setattr(recovery.os, "fdopen", lambda *a: opened.append(a) or fdopen(*a))
    monkeypatch.setattr(Path, "open", lambda *a, **k: pytest.fail("the file is read again"))
    state = {"x": torch.randn(70_000), "y": [torch.ones(3).bfloat16(), torch.tensor(2)], "n": 1}
    digest, num_bytes = recovery.save_state(state, tmp_path / "s.pt")
    monkeypatch.undo()
    data = (tmp_path / "s.pt").read_bytes()
    assert (digest, num_bytes) == (hashlib.sha256(data).hexdigest(), len(data))
    assert len(opened) == 1
    again = recovery.load_state(tmp_path / "s.pt")
    assert torch.equal(again["x"], state["x"])
    assert recovery.hash_file(tmp_path / "s.pt") == (digest, "")
    assert recovery.hash_file(tmp_path / "gone.pt") == ("", "no file")
