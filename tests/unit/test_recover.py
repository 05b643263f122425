"""Recovery checkpoints: whole or not at all, and the newest whole one is taken."""

import errno
import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from realsys.api.errors import ClusterError, StaleAttempt
from realsys.api.trial import TrialFiles
from realsys.master.recover import (
    MANIFEST,
    begin,
    commit,
    dead_after,
    newest_whole,
    read_resumed,
    write_resumed,
)
from realsys.transport.requests import RecoverSaved

WORKERS = ("model_worker/0", "model_worker/1")


def write_states(folder: Path, step: int, workers=WORKERS) -> dict[str, RecoverSaved]:
    """What the workers do: a file each, and its hash to the master."""
    saved = {}
    for worker in workers:
        data = f"{worker} after {step}".encode() * 50
        name = worker.replace("/", "-") + ".pt"
        (folder / name).write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        saved[worker] = RecoverSaved(file=name, sha256=digest, num_bytes=len(data))
    return saved


def checkpoint(root: Path, step: int, *, attempt=1, keep=2, workers=WORKERS, resumed=0) -> Path:
    folder = begin(root, step=step, attempt=attempt)
    saved = write_states(folder, step, workers)
    return commit(folder, step=step, attempt=attempt, saved=saved, keep=keep, resumed_step=resumed)


def newest_step(root: Path, workers=WORKERS) -> int | None:
    found = newest_whole(root, workers=workers)
    return None if found is None else found.step


# ---- whole ones -----------------------------------------------------------------------------------


def test_what_was_written_is_found_with_its_files(tmp_path):
    final = checkpoint(tmp_path, 100)
    found = newest_whole(tmp_path, workers=WORKERS)
    assert final == tmp_path / "step-000100"
    assert (found.folder, found.step) == (final, 100)
    assert set(found.files) == set(WORKERS)
    assert found.files["model_worker/1"].read_bytes().startswith(b"model_worker/1 after 100")


def test_without_a_checkpoint_there_is_none(tmp_path):
    assert newest_whole(tmp_path / "never made", workers=WORKERS) is None
    assert newest_whole(tmp_path, workers=WORKERS) is None


def test_the_newest_is_taken_whatever_their_order_on_disk(tmp_path):
    for step in (20, 100, 9):
        checkpoint(tmp_path, step, keep=9)
    assert newest_step(tmp_path) == 100


def test_a_step_of_seven_digits_is_newer_than_one_of_six(tmp_path):
    checkpoint(tmp_path, 999_999, keep=1)
    checkpoint(tmp_path, 1_000_000, keep=1)
    assert newest_step(tmp_path) == 1_000_000


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_ones_stay(tmp_path, keep):
    for step in (1, 2, 3, 4):
        checkpoint(tmp_path, step, keep=keep)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"step-{step:06d}" for step in range(5 - keep, 5)
    ]


def test_a_folder_of_another_name_is_left_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-000001").write_text("a file")
    checkpoint(tmp_path, 2, keep=1)
    assert (tmp_path / "notes").is_dir()
    assert newest_step(tmp_path) == 2


# ---- damaged ones ---------------------------------------------------------------------------------


def tear_manifest(folder):
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes()[:40])


def empty_manifest(folder):
    (folder / MANIFEST).write_bytes(b"")


def no_manifest(folder):
    (folder / MANIFEST).unlink()


def truncate_file(folder):
    os.truncate(folder / "model_worker-1.pt", 10)


def flip_a_byte(folder):
    path = folder / "model_worker-0.pt"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


def lose_a_file(folder):
    (folder / "model_worker-0.pt").unlink()


def edit(**changes):
    def damage(folder):
        path = folder / MANIFEST
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


DAMAGES = {
    "a torn manifest": tear_manifest,
    "an empty manifest": empty_manifest,
    "no manifest": no_manifest,
    "a truncated file": truncate_file,
    "a flipped bit": flip_a_byte,
    "a missing file": lose_a_file,
    "another version": edit(version=99),
    "a manifest without files": edit(files=None),
    "an entry without a hash": edit(files={w: {"file": "x"} for w in WORKERS}),
    "an entry that is none": edit(files=dict.fromkeys(WORKERS)),
    "no step": edit(step=None),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_not_whole_is_refused_and_the_one_before_is_taken(tmp_path, damage, caplog):
    checkpoint(tmp_path, 1)
    damage(checkpoint(tmp_path, 2))
    with caplog.at_level(logging.WARNING):
        assert newest_step(tmp_path) == 1
    (told,) = caplog.messages
    assert "step-000002" in told


def test_the_log_says_which_file_has_which_hash(tmp_path, caplog):
    flip_a_byte(checkpoint(tmp_path, 2))
    with caplog.at_level(logging.WARNING):
        assert newest_step(tmp_path) is None
    assert "model_worker-0.pt has hash" in caplog.text


def test_a_disk_that_can_t_read_a_file_is_no_reason_to_stop(tmp_path, monkeypatch, caplog):
    checkpoint(tmp_path, 1)
    checkpoint(tmp_path, 2)
    read = hashlib.file_digest

    def broken(file, digest):
        if "step-000002" in str(file.name):
            raise OSError(errno.EIO, "Input/output error")
        return read(file, digest)

    monkeypatch.setattr(hashlib, "file_digest", broken)
    with caplog.at_level(logging.WARNING):
        assert newest_step(tmp_path) == 1
    assert "Input/output error" in caplog.text


@pytest.mark.parametrize("workers", [WORKERS[:1], (*WORKERS, "model_worker/2")])
def test_a_checkpoint_of_other_workers_is_refused(tmp_path, workers, caplog):
    checkpoint(tmp_path, 1)
    with caplog.at_level(logging.WARNING):
        assert newest_step(tmp_path, workers) is None
    assert "it is of workers ['model_worker/0', 'model_worker/1'], not" in caplog.text


# ---- a crash between two steps of a commit --------------------------------------------------------


class Crash(BaseException):
    """The process is gone: nothing after it runs."""


def crash_at(monkeypatch, place: int) -> None:
    """The machine dies just before the ``place``-th call that changes the disk."""
    calls = {"count": 0}

    def dying(function):
        def call(*args, **kwargs):
            if calls["count"] == place:
                raise Crash
            calls["count"] += 1
            return function(*args, **kwargs)

        return call

    for module, name in ((os, "fsync"), (shutil, "rmtree"), (os, "rename"), (os, "replace")):
        monkeypatch.setattr(module, name, dying(getattr(module, name)))


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("place", range(6))
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(tmp_path, monkeypatch, place, keep):
    checkpoint(tmp_path, 1, keep=keep)
    folder = begin(tmp_path, step=2, attempt=1)
    saved = write_states(folder, 2)
    with monkeypatch.context() as dying:
        crash_at(dying, place)
        try:
            commit(folder, step=2, attempt=1, saved=saved, keep=keep)
        except Crash:
            pass
    assert newest_step(tmp_path) in (1, 2)
    checkpoint(tmp_path, 3, attempt=2, keep=keep)  # the next attempt goes on
    assert newest_step(tmp_path) == 3


@pytest.mark.parametrize("place", range(6))
def test_a_crash_while_the_same_step_is_written_again_leaves_one(tmp_path, monkeypatch, place):
    """A run resumed from step 5 and stopped at once checkpoints step 5 again; keep is 1."""
    checkpoint(tmp_path, 5, attempt=1, keep=1)
    folder = begin(tmp_path, step=5, attempt=2)
    saved = write_states(folder, 5)
    with monkeypatch.context() as dying:
        crash_at(dying, place)
        try:
            commit(folder, step=5, attempt=2, saved=saved, keep=1, resumed_step=5)
        except Crash:
            pass
    assert newest_step(tmp_path) == 5


def test_a_half_removed_checkpoint_is_no_checkpoint(tmp_path, caplog):
    """A crash inside the removal of an old one leaves some of its files."""
    lose_a_file(checkpoint(tmp_path, 1, keep=9))
    checkpoint(tmp_path, 2, keep=9)
    assert newest_step(tmp_path) == 2


def test_the_same_step_can_be_written_again(tmp_path):
    checkpoint(tmp_path, 5, attempt=1)
    checkpoint(tmp_path, 5, attempt=2)
    assert newest_step(tmp_path) == 5


def test_a_folder_left_by_a_crash_is_begun_anew(tmp_path):
    folder = begin(tmp_path, step=2, attempt=1)
    (folder / "half.pt").write_bytes(b"half")
    assert begin(tmp_path, step=2, attempt=1) == folder
    assert list(folder.iterdir()) == []


def test_folders_left_by_crashes_do_not_fill_the_disk(tmp_path):
    """Each holds all weights and moments: a run that crashes now and then must not pile them up."""
    for attempt, step in ((1, 7), (2, 9)):
        write_states(begin(tmp_path, step=step, attempt=attempt), step)
    checkpoint(tmp_path, 12, attempt=3)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000012"]


def test_what_is_being_written_is_not_taken(tmp_path):
    checkpoint(tmp_path, 1)
    write_states(begin(tmp_path, step=2, attempt=1), 2)
    assert newest_step(tmp_path) == 1


# ---- who was cut off writes no more -----------------------------------------------------------------


def test_what_an_older_attempt_wrote_after_a_newer_one_went_on_is_not_taken(tmp_path):
    checkpoint(tmp_path, 10, attempt=1)
    checkpoint(tmp_path, 12, attempt=1, keep=9)  # late: attempt 2 had gone on from step 10
    assert newest_step(tmp_path) == 12
    assert newest_whole(tmp_path, workers=WORKERS, resumed={1: 0, 2: 10}).step == 10


def test_what_the_newer_one_wrote_is_taken(tmp_path):
    checkpoint(tmp_path, 10, attempt=1)
    checkpoint(tmp_path, 14, attempt=2, keep=9)
    assert newest_whole(tmp_path, workers=WORKERS, resumed={1: 0, 2: 10}).step == 14


@pytest.mark.parametrize(
    ("attempt", "resumed", "last"),
    [
        (1, {}, None),
        (1, {1: 0}, None),
        (1, {1: 0, 2: 10}, 10),
        (1, {2: 10, 3: 4}, 4),  # the checkpoint of step 10 was torn when attempt 3 looked
        (2, {2: 10, 3: 14}, 14),
        (0, {1: 0}, 0),
    ],
)
def test_the_last_step_that_counts(attempt, resumed, last):
    assert dead_after(attempt, resumed) == last


def test_a_dead_branch_in_the_way_is_replaced(tmp_path):
    checkpoint(tmp_path, 12, attempt=1)
    checkpoint(tmp_path, 12, attempt=2, resumed=10)
    found = newest_whole(tmp_path, workers=WORKERS, resumed={1: 0, 2: 10})
    assert (found.step, found.folder.name) == (12, "step-000012")


def test_a_checkpoint_that_is_not_allowed_is_none(tmp_path):
    checkpoint(tmp_path, 1)
    folder = begin(tmp_path, step=2, attempt=1)

    def refuse():
        raise StaleAttempt("attempt 2 has taken over", where="here", fix="exit")

    with pytest.raises(StaleAttempt):
        commit(folder, step=2, attempt=1, saved=write_states(folder, 2), keep=2, allow=refuse)
    assert newest_step(tmp_path) == 1


def test_where_each_attempt_went_on_is_written_down(tmp_path):
    files = TrialFiles(tmp_path)
    for number in (1, 2, 3):
        files.attempt(number).root.mkdir(parents=True)
    write_resumed(files.attempt(1), "main", 0)
    write_resumed(files.attempt(3), "main", 7)
    write_resumed(files.attempt(3), "sft", 2)
    assert read_resumed(files, "main") == {1: 0, 3: 7}


# ---- a disk that refuses --------------------------------------------------------------------------


def refusing(number):
    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_full_disk_is_told_and_the_older_one_stays(tmp_path, monkeypatch, call):
    checkpoint(tmp_path, 1)
    folder = begin(tmp_path, step=2, attempt=1)
    saved = write_states(folder, 2)
    monkeypatch.setattr(os, call, refusing(errno.ENOSPC))
    with pytest.raises(ClusterError) as full:
        commit(folder, step=2, attempt=1, saved=saved, keep=2)
    assert "No space left on device" in full.value.what
    assert full.value.where == str(tmp_path / "step-000002")
    assert "resume" in full.value.fix
    assert newest_step(tmp_path) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_folder_that_can_t_be_made_is_told(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "mkdir", refusing(number))
    with pytest.raises(ClusterError, match="folder can't be made") as refused:
        begin(tmp_path, step=2, attempt=1)
    assert os.strerror(number) in refused.value.what


def test_a_file_in_the_folders_place_is_told(tmp_path):
    (tmp_path / "recover").write_text("a file")
    with pytest.raises(ClusterError):
        begin(tmp_path / "recover", step=2, attempt=1)
