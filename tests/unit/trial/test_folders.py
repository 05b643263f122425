"""Who could exchange a folder: the decision on facts, and the folders that are made.

What two users really do is in tests/process/test_two_users.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import golden
import pytest

from launcher.cli.completion import _runs_folders
from launcher.sites.clusters import check_store
from launcher.sites.places import user_name
from launcher.slurm.doctor.doctor import folder_findings
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ClusterError, ConfigError
from realsys.trial import folders
from realsys.trial.folders import (
    ANYBODY,
    OWN_PREFIX,
    FolderFacts,
    above,
    absolute_root,
    check_folders,
    check_ours,
    check_trial,
    is_shared,
    make_folders,
    make_trial_folder,
    own_root,
    restrict_umask,
    root_of,
    top_of,
    weakness,
    write_private,
)
from realsys.trial.records import TrialFiles, trial_dir

ME, ROOT, HER, UNKNOWN = 1001, 0, 1002, 4_000_000_001
MINE = FolderFacts(path="/x/y", kind="folder", owner=ME, open_to="", sticky=False)


@pytest.mark.parametrize(
    ("changes", "shared", "what"),
    [
        ({}, False, ""),
        ({"owner": ROOT}, False, ""),
        ({"owner": HER}, True, "belongs to"),
        ({"owner": HER, "sticky": True, "open_to": ANYBODY}, True, "belongs to"),
        ({"open_to": ANYBODY}, True, "can be written by anybody"),
        ({"open_to": "group lab"}, True, "can be written by group lab"),
        ({"open_to": ANYBODY, "sticky": True}, True, ""),
        ({"open_to": ANYBODY, "sticky": True, "owner": ROOT}, True, ""),
        ({"open_to": ANYBODY, "sticky": True}, False, "can be written by anybody"),
        ({"kind": "link"}, True, "is not a folder but a link of yours"),
        ({"kind": "link", "owner": HER}, True, "is not a folder but a link that belongs to"),
        ({"kind": "file"}, True, "is not a folder but a file of yours"),
    ],
)
def test_who_could_exchange_what_lies_in_a_folder(
    changes: dict[str, object], shared: bool, what: str
) -> None:
    found, fix = weakness(replace(MINE, **changes), uid=ME, shared=shared)  # type: ignore[arg-type]
    assert (what in found) if what else not found
    assert bool(found) == bool(fix)


def test_the_owner_of_an_open_folder_is_told_to_close_it() -> None:
    open_to = {"open_to": ANYBODY, "sticky": True}
    for owner, words in ((ME, "run: chmod go-w"), (ROOT, "ask root for: chmod go-w")):
        _, fix = weakness(replace(MINE, owner=owner, **open_to), uid=ME, shared=False)  # type: ignore[arg-type]
        assert fix.startswith(words)


@pytest.mark.parametrize("root", ["", " ", "/a\0b", "/a\udcff"])
def test_a_root_that_cannot_be_a_path_is_refused(root: str) -> None:
    with pytest.raises(ConfigError) as refused:
        absolute_root(root)
    assert refused.value.where == "file_root"


@pytest.mark.parametrize(
    ("owner", "mode", "shared"),
    [
        (ME, 0o755, False),
        (ME, 0o777, False),  # refused, with what to do
        (ME, 0o1777, True),
        (ME, 0o1775, True),
        (ME, 0o1755, False),
        (ROOT, 0o1777, True),
        (ROOT, 0o755, True),
        (HER, 0o700, True),
    ],
)
def test_a_root_is_shared_if_it_is_anothers_or_open_on_purpose(
    owner: int, mode: int, shared: bool
) -> None:
    found = os.stat_result((stat.S_IFDIR | mode, 1, 1, 1, owner, 0, 0, 0, 0, 0))
    assert is_shared(found, ME) is shared


def test_a_shared_root_holds_a_folder_for_each_user(tmp_path: Path) -> None:
    assert own_root(str(tmp_path / "none yet"), "anna") == str(tmp_path / "none yet")
    assert own_root(str(tmp_path), "anna") == str(tmp_path)
    tmp_path.chmod(0o1777)
    own = own_root(str(tmp_path), "anna")
    assert own == f"{tmp_path}/{OWN_PREFIX}anna"
    assert (top_of(Path(own)), top_of(tmp_path)) == (tmp_path, tmp_path)
    make_folders(Path(own), root=Path(own))
    assert own_root(own, "anna") == own


def test_completion_knows_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REALSYS_FILE_ROOT", str(tmp_path))
    tmp_path.chmod(0o1777)
    own = own_root(str(tmp_path), user_name())
    assert os.path.join(own, "runs", user_name()) in _runs_folders()


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_folders_are_made_with_modes_of_their_own(tmp_path: Path, umask: int) -> None:
    root = tmp_path / "a" / "root"
    files = TrialFiles(trial_dir(root, "anna", "ppo", "run1"))
    make_trial_folder(files, root=root)
    readable = 0o755 & ~umask | 0o700
    before = len(os.listdir("/proc/self/fd"))
    for folder in (root.parent, root, *files.root.parents[:3], files.root):
        assert stat.S_IMODE(folder.stat().st_mode) == readable, folder
    for folder in (files.secrets, files.submitit):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.raises(FileExistsError):
        make_trial_folder(files, root=root)
    check_trial(files)
    check_ours(files)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_of_ours_is_followed_where_nobody_else_can_have_put_it(tmp_path: Path) -> None:
    """A user's own, to a larger disk; and what it leads to is looked at as well."""
    disk, root = tmp_path / "disk", tmp_path / "root"
    disk.mkdir()
    root.mkdir()
    (root / "runs").symlink_to(disk)
    files = TrialFiles(trial_dir(root, "anna", "ppo", "run1"))
    before = len(os.listdir("/proc/self/fd"))
    make_trial_folder(files, root=root)
    check_trial(files)
    assert len(os.listdir("/proc/self/fd")) == before
    disk.chmod(0o777)
    with golden.raises(ClusterError):
        check_trial(files)
    disk.chmod(0o755)
    root.chmod(0o1777)
    with golden.raises(ClusterError):
        check_trial(files)
    root.chmod(0o755)
    disk.rename(tmp_path / "gone")
    with pytest.raises(ClusterError) as dangling:
        check_trial(files)
    assert dangling.value.where == str(root / "runs")


def test_what_is_not_there_is_not_refused(tmp_path: Path) -> None:
    check_folders(tmp_path / "a" / "b", root=tmp_path / "a")
    check_folders(tmp_path / "a" / "b", root=tmp_path)
    assert not (tmp_path / "a").exists()


def test_a_private_file_is_new_and_no_link(tmp_path: Path, umask: int) -> None:
    write_private(tmp_path / "a", b"data")
    assert (tmp_path / "a").read_bytes() == b"data"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("a", "link"):
        with pytest.raises(FileExistsError):
            write_private(tmp_path / name, b"other")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("gid", "name", "members", "private"),
    [
        (5, "anna", [], True),
        (5, "anna", ["anna"], True),
        (5, "anna", ["anna", "eva"], False),
        (5, "lab", [], False),
        (6, "anna", [], False),  # of that name, and not her first group
        (7, "", [], False),
    ],
)
def test_a_group_for_each_user_has_the_users_name_and_nobody_else(
    gid: int, name: str, members: list[str], private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = {ME: SimpleNamespace(pw_gid=5, pw_name="anna")}
    groups = {gid: SimpleNamespace(gr_name=name, gr_mem=members)} if name else {}
    monkeypatch.setattr("pwd.getpwuid", users.__getitem__)
    monkeypatch.setattr("grp.getgrgid", groups.__getitem__)
    assert folders.is_private_group(gid, ME) is private
    assert not folders.is_private_group(gid, HER)  # whom the system does not know
    assert folders._group_of(gid) == (name or "7")
    assert (folders.user_of(ME), folders.user_of(HER)) == ("anna", f"uid {HER}")


@pytest.mark.parametrize(
    ("made", "mode"),
    [
        (0o777, 0o755),
        (0o720, 0o700),
        (0o702, 0o700),
        (0o711, 0o711),
        (0o600, 0o700),
        (0o055, 0o755),
    ],
)
def test_what_an_inherited_list_opens_is_closed(
    made: int, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir
    monkeypatch.setattr(os, "mkdir", lambda *args, **more: (mkdir(*args, **more), tmp_path.joinpath(
        "new").chmod(made)))  # fmt: skip
    make_folders(tmp_path / "new", root=tmp_path)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == mode


def test_what_somebody_puts_in_the_place_of_a_new_folder_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "another").mkdir()
    (tmp_path / "another").chmod(0o777)
    monkeypatch.setattr(os, "mkdir", lambda *_, **more: (tmp_path / "new").symlink_to("another"))
    with pytest.raises(OSError, match="new"):
        make_folders(tmp_path / "new", root=tmp_path)
    assert (tmp_path / "another").stat().st_mode & 0o777 == 0o777


def test_a_folder_that_another_process_makes_first_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = list[str](), folders._make

    def slower(name: str, above: int, mode: int) -> None:
        made.append(name)
        if len(made) in (1, 3):  # the other's is there then
            make(name, above, 0o777 if len(made) == 1 else mode)
        raise FileExistsError

    monkeypatch.setattr(folders, "_make", slower)
    make_folders(tmp_path / "a", root=tmp_path)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o755
    make_folders(tmp_path / "b", root=tmp_path)  # gone when it is looked for once
    made[:] = ["from here on"] * 3
    with pytest.raises(ClusterError) as refused:
        make_folders(tmp_path / "c", root=tmp_path)
    assert refused.value.where == str(tmp_path / "c")
    assert len(made) == 6


def test_which_folders_may_be_shared(tmp_path: Path) -> None:
    """Above a trial all may, but not a user's own in a shared root."""
    root = tmp_path / "root"
    files = TrialFiles(trial_dir(root, "anna", "ppo", "run1"))
    make_trial_folder(files, root=root)
    for folder in (root, *files.root.parents[:3]):
        folder.chmod(0o1777)
        check_folders(files.root, root=root)
    files.root.chmod(0o1777)
    with pytest.raises(ClusterError) as refused:
        check_folders(files.root, root=root)
    assert refused.value.where == str(files.root)
    own = Path(own_root(str(root), "anna"))
    make_folders(own / "runs", root=own)
    (own / "runs").chmod(0o1777)
    with pytest.raises(ClusterError):
        check_folders(own / "runs", root=own)
    assert (root_of(files.root), root_of(Path("/a/b"))) == (root, Path("/"))
    assert absolute_root("~/a/../b") == os.path.expanduser("~/b")


def test_records_of_anothers_trial_are_not_acted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TrialFiles(tmp_path / "run1")
    check_ours(files)  # nothing is there
    files.attempt(1).root.mkdir(parents=True)
    check_ours(files)
    files.attempt(1).root.chmod(0o777)
    with pytest.raises(ClusterError) as refused:
        check_ours(files)
    assert refused.value.where == str(files.attempt(1).root)
    facts = folders._facts_at
    monkeypatch.setattr(folders, "_facts_at", lambda path, flags: replace(
        facts(path, flags), owner=UNKNOWN if path == files.attempts else os.getuid()))  # fmt: skip
    with golden.raises(ClusterError):
        check_ours(files)


def test_a_record_that_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    files = TrialFiles(trial_dir(tmp_path, "anna", "ppo", "run1"))
    make_trial_folder(files, root=tmp_path)
    for record in (files.plan, files.record):
        record.symlink_to("/dev/null")
        with pytest.raises(ClusterError) as refused:
            check_trial(files)
        assert refused.value.where == str(record)
        record.unlink()
        record.write_text("{}")
        check_trial(files)


def test_folders_above_that_cannot_be_looked_at_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def facts(path: Path, flags: int) -> FolderFacts:
        if path == tmp_path / "a":
            raise PermissionError
        open_to = {"b": ANYBODY, tmp_path.name: "group lab"}.get(path.name, "")
        owner = UNKNOWN if path.name == "b" else ROOT
        return FolderFacts(path=path.name, kind="folder", owner=owner, open_to=open_to,
                           sticky=path == tmp_path.parent)  # fmt: skip

    monkeypatch.setattr(folders, "_facts_at", facts)
    monkeypatch.setattr(os, "getuid", lambda: ME)
    found = above(tmp_path / "a" / "b" / "root")
    assert [is_any for _, is_any in found] == [False, True, False]
    golden.check([words.replace(tmp_path.name, "TOP") for words, _ in found])


def test_a_umask_closes_files_to_others_and_to_nobody_else(umask: int) -> None:
    restrict_umask()
    assert os.umask(0) == umask & 0o077 | 0o022


def test_a_users_own_group_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """umask 002 with a group for each user, as many systems have it, is no open door."""
    tmp_path.chmod(0o775)
    monkeypatch.setattr(folders, "is_private_group", lambda gid, uid: True)
    check_folders(tmp_path, root=tmp_path)
    monkeypatch.setattr(folders, "_has_acl", lambda fd: True)  # then the bits mean others
    with golden.raises(ClusterError):
        check_folders(tmp_path, root=tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(folders, "is_private_group", lambda gid, uid: False)
    with golden.raises(ClusterError):
        check_folders(tmp_path, root=tmp_path)
    tmp_path.chmod(0o755)
    check_folders(tmp_path, root=tmp_path)


def test_the_doctor_looks_at_trials_and_above_the_root(tmp_path: Path) -> None:
    root = tmp_path / "above" / "root"
    files = [TrialFiles(trial_dir(root, user_name(), "ppo", name)) for name in ("run1", "run2")]
    for one in files:
        make_trial_folder(one, root=root)
        one.plan.write_text("{}")
    assert [(f.name, f.ok) for f in folder_findings(str(root))] == [("folders", True)]
    files[0].secrets.chmod(0o777)
    files[1].root.chmod(0o777)
    (finding,) = folder_findings(str(root))
    assert finding.ok is False
    golden.check(finding)
    root.parent.chmod(0o777)
    golden.check(above(root)[0])
    assert [(f.name, f.ok) for f in folder_findings(str(root))][1] == ("folders above", False)


def test_a_store_that_is_not_ours_alone_is_refused(tmp_path: Path) -> None:
    spec = ClusterSpec(file_root=str(tmp_path), name_resolve=f"file://{tmp_path}/a%20store")
    check_store(spec)
    (tmp_path / "a store").mkdir(mode=0o700)
    check_store(spec)
    (tmp_path / "a store").chmod(0o777)
    with golden.raises(ClusterError):
        check_store(spec)
    check_store(replace(spec, name_resolve="etcd://host"))
