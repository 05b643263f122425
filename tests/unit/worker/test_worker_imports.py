"""What a worker does before its role runs."""

from __future__ import annotations

import gc
from pathlib import Path

import golden
import pytest

from realsys.api.errors import ConfigError
from realsys.worker.main import import_role


@pytest.fixture(autouse=True)
def thaw():
    yield
    gc.unfreeze()


def test_garbage_is_collected_again_once_all_is_imported(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        f"import gc, pathlib\npathlib.Path({str(tmp_path / 'seen')!r}).write_text(str(gc.isenabled()))\n"
    )
    run = import_role("master_worker", [str(plugin)])
    assert run.__module__ == "realsys.master.build"
    assert (tmp_path / "seen").read_text() == "False"
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_garbage_is_collected_again_after_a_plugin_that_fails(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text("raise OSError('no such thing')\n")
    with golden.raises(ConfigError):
        import_role("master_worker", [str(plugin)])
    assert gc.isenabled()
