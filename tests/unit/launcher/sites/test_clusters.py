"""Which cluster spec is used, what is wrong with one, and whether trials can be written there."""

from __future__ import annotations

import os
from pathlib import Path

import golden
import pytest

from launcher.sites import clusters, places
from launcher.sites.clusters import check_writable, find_cluster
from launcher.trials.find_trials import file_roots
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ClusterError, ConfigError, ConfigErrors, UnknownName
from realsys.name_resolve.open import open_store


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, with no realsys variable set."""
    for name in ("REALSYS_CLUSTER", "REALSYS_FILE_ROOT", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def user_spec(home: Path, name: str, text: str) -> Path:
    folder = home / ".config" / "realsys" / "clusters"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(text)
    return folder / f"{name}.yaml"


def test_local_is_the_default_and_lies_in_the_home(home: Path) -> None:
    spec = find_cluster()
    assert (spec.name, spec.scheduler) == ("local", "local")
    assert spec.file_root == f"{home}/.local/share/realsys"
    assert spec.name_resolve == f"file://{home}/.local/share/realsys/name_resolve"


def test_the_quick_default_equals_the_specs() -> None:
    assert ClusterSpec().file_root == places.DEFAULT_FILE_ROOT


def test_order_option_then_variable_then_local(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    user_spec(home, "mine", "file_root: /mine\n")
    user_spec(home, "other", "file_root: /other\n")
    monkeypatch.setenv("REALSYS_CLUSTER", "mine")
    assert find_cluster().file_root == "/mine"
    assert find_cluster().name == "mine"
    assert find_cluster("other").file_root == "/other"
    path = tmp_path / "elsewhere.yml"
    path.write_text("file_root: /elsewhere\n")
    assert find_cluster(str(path)).name == "elsewhere"


def test_the_users_own_spec_wins_over_the_shipped_one(home: Path) -> None:
    user_spec(home, "local", "file_root: /big/disk\n")
    assert find_cluster("local").file_root == "/big/disk"


def test_the_variable_overrides_the_file_root(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("REALSYS_FILE_ROOT", "~/elsewhere")
    assert find_cluster().file_root == f"{home}/elsewhere"
    assert places.guess_file_roots() == [f"{home}/elsewhere"]


def test_an_unknown_name_gets_the_nearest(home: Path) -> None:
    user_spec(home, "mysite", "")
    with golden.raises(UnknownName):
        find_cluster("mysit")


def test_all_mistakes_of_a_spec_with_their_lines(home: Path) -> None:
    path = user_spec(home, "bad", "file_rot: /x\nscheduler: pbs\nname: [1]\n")
    with pytest.raises(ConfigErrors) as caught:
        find_cluster("bad")
    whats = {p.what: p for p in caught.value.problems}
    golden.check(whats["no option called 'file_rot'"])
    assert whats["scheduler is 'pbs'"].where == f"scheduler, {path}:2"
    assert len(whats) == 3


def test_a_missing_file() -> None:
    with golden.raises(ConfigError):
        find_cluster("./nope.yaml")


@pytest.mark.parametrize(
    "name", ["with space", "per%cent", "line\nbreak", "ünïcode ☂", "q'uo\"te", "a?b#c", "e%20f"]
)
def test_the_store_lies_in_the_file_root_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    root = tmp_path / name
    monkeypatch.setenv("REALSYS_FILE_ROOT", str(root))
    spec = find_cluster()
    assert spec.file_root == str(root)
    store = open_store(spec.name_resolve or "")
    store.add("realsys/v1/a/b/c/d/x", b"1")
    store.close()
    assert (root / "name_resolve").is_dir()


@pytest.mark.parametrize("root", ["", " ", "a\0b", "a\udcff"])
def test_roots_that_are_no_paths(root: str) -> None:
    with pytest.raises(ConfigError):
        clusters.absolute_root(root)


def test_a_root_that_can_be_made_later_is_writable(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "a" / "b"))
    assert not (tmp_path / "a").exists()


def test_no_permission_is_told_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with golden.raises(ClusterError) as caught:
        check_writable(str(tmp_path / "a"))
    assert "REALSYS_FILE_ROOT" in caught.value.fix


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with golden.raises(ClusterError):
        check_writable(str(tmp_path / "file" / "root"))


def test_trials_are_looked_for_in_all_known_roots(home: Path) -> None:
    user_spec(home, "mine", "file_root: /mine  # fast disk\n")
    user_spec(home, "broken", "file_root: [\n")
    places.remember_file_root("/far\naway")
    places.remember_file_root("/far\naway")
    default = f"{home}/.local/share/realsys"
    assert sorted(file_roots()) == sorted(["/mine", default, "/far\naway"])
    assert {"/mine", default, "/far\naway"} <= set(places.guess_file_roots())
    assert file_roots("mine") == ["/mine"]


def test_launches_at_once_forget_none_of_their_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    places.remember_file_root("/old")
    read, seen = places.remembered_file_roots, []

    def read_then_another_launch_writes() -> list[str]:
        seen.append(found := read())
        if len(seen) == 1:
            places.remember_file_root("/second")
        return found

    monkeypatch.setattr(places, "remembered_file_roots", read_then_another_launch_writes)
    places.remember_file_root("/first")
    assert read() == ["/old", "/second", "/first"]
