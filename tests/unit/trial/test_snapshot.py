"""The copy of the code in a trial's folder: what git knows, as it is now, whatever happens later."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from stand_in_slurm import make_plan

from realsys.trial.records import TrialFiles, TrialRecord, read_record, write_record
from realsys.trial.snapshot import (
    CodeSnapshot,
    _sources_digest,
    changed_code_warning,
    code_digest,
    code_that_made,
    provenance,
    provenance_warning,
    resolved_imports,
    revision,
    revision_meanwhile,
    snapshot_imports,
    take_snapshot,
)

RECORD = TrialRecord(
    experiment_name="e", trial_name="t", user="u", cluster="c", plan_hash="h", created_at=1.0,
    launch_host="h",
)  # fmt: skip


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "my checkout"
    (root / "realsys").mkdir(parents=True)
    (root / "realsys" / "a.py").write_text("A = 1\n")
    (root / "realsys" / "gone.py").write_text("")
    (root / ".gitignore").write_text("*.ckpt\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    return root


@pytest.fixture
def files(tmp_path: Path) -> TrialFiles:
    (tmp_path / "trial").mkdir()
    return TrialFiles(tmp_path / "trial")


def test_a_clean_checkout_is_its_revision(checkout, files):
    taken = take_snapshot(files, [], root=checkout)
    assert revision(checkout) == taken.revision
    assert len(taken.revision) == 12
    assert (taken.changed, taken.files) == (False, 3)
    assert not (files.root / "dirty.diff").exists()
    assert read_record(CodeSnapshot, files.snapshot) == taken


def test_changes_new_files_and_deletions_are_in_the_copy_and_ignored_files_are_not(checkout, files):
    (checkout / "realsys" / "a.py").write_text("A = 2\n")
    (checkout / "realsys" / "new.py").write_text("")
    (checkout / "realsys" / "gone.py").unlink()
    (checkout / "big.ckpt").write_text("weights")
    (files.code / "of_an_earlier_copy").mkdir(parents=True)
    taken = take_snapshot(files, [], root=checkout)
    assert not (files.code / "of_an_earlier_copy").exists()
    assert files.code.stat().st_mode & 0o777 == 0o700
    copied = sorted(str(p.relative_to(files.code)) for p in files.code.rglob("*.*") if p.is_file())
    copied = [name for name in copied if not name.endswith(".pyc")]
    assert copied == [".gitignore", "realsys/a.py", "realsys/new.py"]
    assert (files.code / "realsys" / "a.py").read_text() == "A = 2\n"
    assert taken.changed
    assert revision(checkout).endswith("+")
    assert "-A = 1\n+A = 2\n" in (files.root / "dirty.diff").read_text()


def test_editing_the_checkout_later_changes_nothing(checkout, files):
    take_snapshot(files, [], root=checkout)
    (checkout / "realsys" / "a.py").write_text("A = 3\n")
    assert (files.code / "realsys" / "a.py").read_text() == "A = 1\n"


def test_byte_code_of_the_checkout_is_taken_over_unless_its_source_is_newer(checkout, files):
    sources = [checkout / "realsys" / name for name in ("a.py", "gone.py")]
    for source in sources:
        py_compile.compile(str(source))
    mine, old = (Path(importlib.util.cache_from_source(str(source))) for source in sources)
    stale = old.read_bytes()
    sources[1].write_text("B = 2\n")
    os.utime(sources[1], (time.time() + 5,) * 2)  # byte code knows whole seconds
    take_snapshot(files, [], root=checkout)
    copies = [
        Path(importlib.util.cache_from_source(str(files.code / "realsys" / s.name)))
        for s in sources
    ]
    assert copies[0].read_bytes() == mine.read_bytes()
    assert copies[1].read_bytes() != stale
    python = [sys.executable, "-v", "-c", "import realsys.gone as m; print(m.B, m.__file__)"]
    done = subprocess.run(python, cwd=files.code, capture_output=True, text=True, check=True)
    assert done.stdout == f"2 {files.code}/realsys/gone.py\n"
    assert "wrote" not in "".join(line for line in done.stderr.splitlines() if "gone" in line)


def test_an_import_file_is_copied_and_the_plan_names_the_copy(checkout, files, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("X = 1\n")
    take_snapshot(files, [str(mine), "some.module"], root=checkout)
    assert snapshot_imports([str(mine), "some.module"], files.root) == (
        str(files.code / "imports" / "mine.py"),
        "some.module",
    )
    assert (files.code / "imports" / "mine.py").read_text() == "X = 1\n"


def test_import_files_of_one_name_are_copied_each(checkout, files, tmp_path, monkeypatch):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"X = {folder!r}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    again = str(tmp_path / "b" / ".." / "a" / "mine.py")
    given = [str(tmp_path / "a" / "mine.py"), again, "~/b/mine.py"]
    take_snapshot(files, given, root=checkout)
    copies = snapshot_imports(resolved_imports(given), files.root)
    assert [Path(copy).read_text() for copy in copies] == ["X = 'a'\n", "X = 'b'\n"]
    assert snapshot_imports(copies, files.root) == copies  # as a resume with changes has them


def test_too_large_files_are_left_out_and_named(checkout, files, monkeypatch):
    monkeypatch.setattr("realsys.trial.snapshot.MAX_FILE_BYTES", 6)
    (checkout / ".gitignore").write_text("1234567")
    taken = take_snapshot(files, [], root=checkout)
    assert taken.left_out == (".gitignore",)
    assert taken.files == 2  # one of just that size


def test_without_git_the_packages_sources_are_copied(tmp_path, files):
    root = tmp_path / "site-packages"
    (root / "realsys" / "api").mkdir(parents=True)
    (root / "realsys" / "api" / "x.py").write_text("")
    (root / "realsys" / "x.so").write_text("")
    (root / "numpy").mkdir()
    (root / "numpy" / "n.py").write_text("")
    taken = take_snapshot(files, [], root=root)
    sources = [p for p in files.code.rglob("*.*") if p.suffix != ".pyc"]
    assert [str(p.relative_to(files.code)) for p in sources] == ["realsys/api/x.py"]
    assert list(files.code.rglob("*.pyc"))  # compiled once, for all tasks
    assert (taken.revision, taken.changed, taken.problem) == ("", None, "")  # nothing to know


def test_a_checkout_that_git_refuses_to_speak_of_is_not_called_unchanged(
    checkout, files, tmp_path, monkeypatch
):
    """As git does with another user's checkout ("detected dubious ownership"): by its own words."""
    (checkout / "realsys" / "a.py").write_text("A = 2\n")
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    words = "fatal: detected dubious ownership in repository at '/x'"
    program.write_text(f'#!/bin/sh\necho "{words}" >&2\necho "To add an exception" >&2\nexit 128\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    taken = take_snapshot(files, [], root=checkout)
    assert (taken.revision, taken.changed) == ("", None)
    assert taken.problem == f"git rev-parse: {words}"
    assert read_record(CodeSnapshot, files.snapshot) == taken
    assert (files.code / "realsys" / "a.py").exists()  # the code is there all the same
    assert words in provenance_warning(files)
    assert revision(checkout) == ""
    for shell, told in (
        (f"printf '\\n  {'x' * 301}  \\n' >&2; exit 1", "x" * 300),
        ("exit 3", "exit 3"),
    ):
        program.write_text(f"#!/bin/sh\n{shell}\n")
        assert provenance(checkout).problem == f"git rev-parse: {told}"
    program.chmod(0o644)
    monkeypatch.setenv("PATH", str(program.parent))
    assert provenance(checkout).problem.startswith("git rev-parse fails: ")
    monkeypatch.setenv("PATH", str(files.root))
    assert provenance(checkout).problem.endswith(" git")


def test_a_status_that_fails_leaves_the_revision_and_does_not_call_it_clean(
    checkout, files, tmp_path, monkeypatch
):
    real = shutil.which("git")
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    refuses = 'case "$*" in *" status "*) echo "fatal: index file corrupt" >&2; exit 128;; esac'
    program.write_text(f'#!/bin/sh\n{refuses}\nexec {real} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    taken = take_snapshot(files, [], root=checkout)
    assert len(taken.revision) == 12
    assert taken.changed is None
    assert "index file corrupt" in taken.problem
    assert revision(checkout) == f"{taken.revision}?"
    program.write_text(program.read_text().replace(" status ", " diff "))
    (checkout / "realsys" / "a.py").write_text("A = 2\n")
    taken = take_snapshot(files, [], root=checkout)
    assert (taken.changed, taken.problem.partition(": fatal")[0]) == (True, "git diff")
    assert not (files.root / "dirty.diff").exists()


def test_what_git_knows_needs_no_remark(checkout, files):
    assert provenance_warning(files) == ""
    take_snapshot(files, [], root=checkout)
    assert provenance_warning(files) == ""


def test_the_digest_is_of_the_code_and_the_imports(checkout, tmp_path):
    def digest(*imports: str) -> str:
        _sources_digest.cache_clear()
        return code_digest(imports, checkout)

    before = digest()
    assert len(before) == 16
    (checkout / "realsys" / "notes.txt").write_text("not code")
    (checkout / "launcher").mkdir()
    (checkout / "launcher" / "x.py").write_text("")  # does not run in a trial
    assert digest() == before
    mine = tmp_path / "mine.py"
    mine.write_text("X = 1\n")
    with_import = digest(str(mine))
    assert with_import != before
    mine.write_text("X = 2\n")
    assert digest(str(mine)) != with_import
    assert digest(str(tmp_path / "none.py"), "some.module") == before
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    assert digest(shutil.copy(mine, elsewhere)) == digest(str(mine))  # by its name and what it says
    (checkout / "realsys" / "a.py").write_text("A = 2\n")
    assert digest() != before


@pytest.mark.parametrize(
    ("version", "revision", "made_by", "words"),
    [
        ("1.2", "9fce+", "realsys 1.2, revision 9fce", "git checkout 9fce,"),
        ("1.2", "9fce?", "realsys 1.2, revision 9fce", "git checkout 9fce"),
        ("1.2", "9fce", "realsys 1.2, revision 9fce", "git checkout 9fce"),
        ("1.2", "", "realsys 1.2 on 1970-", "pip install realsys==1.2,"),
        ("", "", "realsys (version unknown) on 1970-", "pip install realsys==VERSION,"),
    ],
)
def test_how_to_get_the_code_that_made_a_trial(version, revision, made_by, words):
    record = replace(RECORD, realsys_version=version, created_at=200_000.0)
    found, fix = code_that_made(record, revision)
    assert found.startswith(made_by)
    assert ("uncommitted" in found) == revision.endswith("+")
    assert fix.startswith(words)
    assert fix.endswith(words) == (revision in ("9fce", "9fce?"))
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(200_000.0))
    assert (day in found) == (day in fix) == (not revision)


def test_the_revision_is_found_meanwhile(monkeypatch):
    go = threading.Event()
    monkeypatch.setattr("realsys.trial.snapshot.revision", lambda: go.wait(60) and "9fce")
    wait = revision_meanwhile()
    threads = [t for t in threading.enumerate() if t.name == "revision"]
    assert [t.daemon for t in threads] == [True]
    go.set()
    assert wait() == "9fce"


@pytest.mark.parametrize(
    ("code", "copied", "warned"),
    [("then", False, True), ("now", False, False), ("then", True, False), ("", False, False)],
)
def test_a_resume_with_other_code_is_warned_about(
    tmp_path, files, monkeypatch, code, copied, warned
):
    monkeypatch.setattr("realsys.trial.snapshot.code_digest", lambda imports: "now")
    plan = replace(make_plan(tmp_path), snapshot=copied)
    assert changed_code_warning(files, plan) == ""  # no record
    write_record(files.record, replace(RECORD, code=code))
    assert bool(changed_code_warning(files, plan)) == warned


def test_a_copy_has_the_permissions_and_times_of_its_source(checkout, files):
    script = checkout / "realsys" / "a.py"
    script.chmod(0o640)
    os.utime(script, ns=(1_700_000_000_123_456_789, 1_600_000_000_987_654_321))
    (checkout / "linked.py").symlink_to(script)
    os.mkfifo(checkout / "pipe")  # git lists none, and nothing waits for a writer
    taken = take_snapshot(files, [], root=checkout)
    for name in ("realsys/a.py", "linked.py"):
        copy = files.code / name
        assert not copy.is_symlink()
        assert copy.stat().st_mode & 0o7777 == 0o640
        assert copy.stat().st_mtime_ns == 1_600_000_000_987_654_321
        assert copy.read_text() == "A = 1\n"
    assert (taken.files, taken.changed) == (4, True)


def test_byte_code_of_a_source_of_another_size_is_made_anew(checkout, files):
    source = checkout / "realsys" / "a.py"
    py_compile.compile(str(source))
    then = source.stat().st_mtime_ns
    source.write_text("A = 1000\n")
    os.utime(source, ns=(then, then))
    take_snapshot(files, [], root=checkout)
    copy = Path(importlib.util.cache_from_source(str(files.code / "realsys" / "a.py")))
    assert int.from_bytes(copy.read_bytes()[12:16], "little") == len("A = 1000\n")
