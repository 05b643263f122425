"""PYTHONPATH without the empty entries that Python reads as the current folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.cli.current_folder import leave_current_folder
from launcher.slurm.login_environment import host_variables
from realsys.runtime.child_processes.python_path import named_folders


@pytest.mark.parametrize(
    ("given", "kept"),
    [("/x", "/x"), (":/x", "/x"), ("/x:", "/x"), ("/x::/y", "/x:/y"), ("", None), ("::", None)],
)
def test_empty_entries_are_dropped_and_the_others_keep_their_order(
    given: str, kept: str | None
) -> None:
    environ = {"PYTHONPATH": given, "LANG": "C"}
    assert named_folders(environ).get("PYTHONPATH") == kept
    assert named_folders(environ)["LANG"] == "C"
    assert host_variables(environ).get("PYTHONPATH") == kept  # of jobs
    path = ["/bin"]
    leave_current_folder(environ, path)  # type: ignore[arg-type]
    assert environ.get("PYTHONPATH") == kept


def test_the_current_folder_is_left_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here, library = str(tmp_path), "/usr/lib/python"
    path = ["/bin", here, "/x", library]
    leave_current_folder({"PYTHONPATH": ":/x"}, path)
    assert path == ["/bin", "/x", library]
    path = ["/bin", here, library]
    leave_current_folder({"PYTHONPATH": f":{here}"}, path)
    assert path == ["/bin", here, library]
    path = ["/bin", here, library]
    leave_current_folder({"PYTHONPATH": "/y"}, path)  # not by an empty entry: somebody's wish
    assert path == ["/bin", here, library]
    assert os.getcwd() == here
