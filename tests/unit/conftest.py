"""Fixtures of the fast tier."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def file_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a file root of our own, and no colours."""
    for name in ("REALSYS_CLUSTER", "FORCE_COLOR", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("REALSYS_FILE_ROOT", str(tmp_path / "root"))
    return tmp_path / "root"
