"""File roots are found without YAML only where YAML would find the same."""

from __future__ import annotations

import os
from pathlib import Path

import golden
import pytest
import yaml

from launcher.sites import places
from launcher.trials.find_trials import file_roots
from realsys.api.errors import ConfigError

SPECS = (
    "",
    "name: x\n",
    "file_root: /a/b\n",
    "file_root: /a b/c   # why\n",
    "file_root:    '~/runs'\n",
    'file_root: "/a"\nslurm: {partition: p}\n',
    "# file_root: /no\nfile_root: /yes\n",
    "file_root: /a/#b\n",
    "file_root: /a # b\n",
    "file_root: ~\n",
    "file_root: ~user\n",
    "file_root: 12\n",
    "file_root: [/a]\n",
    "file_root: &x /a\n",
    "file_root: !!str /a\n",
    "file_root: '/it''s'\n",
    'file_root: "/a\\tb"\n',
    "file_root: |\n  /a\n",
    "file_root: /a\n  b\n",
    "{file_root: /a}\n",
    "'file_root': /a\n",
    "file_root : /a\n",
    "? file_root\n: /a\n",
    "slurm:\n  file_root: /a\n",
    "file_root: /a\nfile_root: /b\n",
    "file_root: /a: b\n",
    "setup:\n- |\n  # file_root: /x\n",
)


@pytest.mark.parametrize("text", SPECS)
def test_what_is_plain_to_see_is_what_yaml_says(text: str, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(text)
    if (plain := places.plain_file_root(str(spec))) is not None:
        assert plain == (yaml.safe_load(text) or {}).get("file_root", places.DEFAULT_FILE_ROOT)


def test_most_specs_are_plain(tmp_path: Path) -> None:
    plain = []
    for text in SPECS:
        (tmp_path / "spec.yaml").write_text(text)
        plain.append(places.plain_file_root(str(tmp_path / "spec.yaml")))
    assert plain[:7] == [
        *([places.DEFAULT_FILE_ROOT] * 2),
        *("/a/b", "/a b/c", "~/runs", "/a", "/yes"),
    ]
    for path in places.spec_files(examples=True).values():
        assert places.plain_file_root(path)


@pytest.mark.timeout(120)
def test_a_pipe_is_no_spec(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "spec.yaml")
    assert places.plain_file_root(str(tmp_path / "spec.yaml")) is None
    assert places.plain_file_root(str(tmp_path / "none.yaml")) is None


def test_a_spec_with_other_mistakes_does_not_hide_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REALSYS_FILE_ROOT", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "realsys" / "clusters"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("file_root: /mine\nno_such_option: 1\n")
    assert "/mine" in file_roots()
    monkeypatch.setenv("REALSYS_CLUSTER", "mine")
    assert file_roots() == ["/mine"]
    with golden.raises(ConfigError):  # it is asked about
        file_roots("mine")
    monkeypatch.setenv("REALSYS_CLUSTER", "none")
    with golden.raises(ConfigError):
        file_roots()
