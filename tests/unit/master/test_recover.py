"""Recovery checkpoints: whole or not at all, and the newest whole one is taken."""

import asyncio
import errno
import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import golden
import pytest
from checkpoints import commit

from realsys.api.errors import CheckpointError, ClusterError, StaleAttempt
from realsys.master.build import _take_checkpoint
from realsys.master.checkpoint.outbox import Outbox
from realsys.master.checkpoint.recover import (
    MANIFEST,
    adopt,
    begin,
    lacking_steps,
    newest_whole,
    read_resumed,
)
from realsys.master.master_worker import MasterWorkerLoop, RunFiles
from realsys.observability.events import EventLog
from realsys.observability.jsonl import JsonlAppender
from realsys.transport.worker_requests import RecoverSaved
from realsys.trial.lineage import Lineage
from realsys.trial.records import PhaseFiles, Resumed, TrialFiles, write_record

WORKERS = ("model_worker/0", "model_worker/1")
EVERYTHING = Lineage({})


def lineage(*links: tuple[int, int, int]) -> Lineage:
    """Of attempts that each went on from (attempt, its step, whose checkpoint it was)."""
    return Lineage.of(
        {n: Resumed(attempt=n, phase="main", step=step, of_attempt=of) for n, step, of in links}
    )


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


def checkpoint(
    root: Path, step: int, *, attempt=1, keep=2, workers=WORKERS, lineage=EVERYTHING
) -> Path:
    folder = begin(root, step=step, attempt=attempt)
    saved = write_states(folder, step, workers)
    return commit(folder, step=step, attempt=attempt, saved=saved, keep=keep, lineage=lineage)


def newest(root: Path, workers=WORKERS, lineage=EVERYTHING):
    return newest_whole(root, workers=workers, lineage=lineage)


def newest_step(root: Path, workers=WORKERS, lineage=EVERYTHING) -> int | None:
    found = newest(root, workers, lineage)
    return None if found is None else found.step


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# ---- whole ones -----------------------------------------------------------------------------------


def test_what_was_written_is_found_with_its_files(tmp_path):
    final = checkpoint(tmp_path, 100, attempt=3)
    found = newest(tmp_path)
    assert final == tmp_path / "step-000100.3"
    assert (found.folder, found.step, found.attempt) == (final, 100, 3)
    assert set(found.files) == set(WORKERS)
    assert found.files["model_worker/1"].read_bytes().startswith(b"model_worker/1 after 100")


def test_without_a_checkpoint_there_is_none(tmp_path):
    assert newest(tmp_path / "never made") is None
    assert newest(tmp_path) is None


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
    assert names(tmp_path) == [f"step-{step:06d}.1" for step in range(5 - keep, 5)]


def test_a_folder_of_another_name_is_left_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-000001.1").write_text("a file")
    (tmp_path / "step-000009.1.old").mkdir()
    checkpoint(tmp_path, 2, keep=1)
    assert (tmp_path / "step-000009.1.old").is_dir()
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
    assert "step-000002.1" in told


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
    golden.check(caplog.text)


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
            commit(folder, step=2, attempt=1, saved=saved, keep=keep, lineage=EVERYTHING)
        except Crash:
            pass
    assert newest_step(tmp_path) in (1, 2)
    checkpoint(tmp_path, 3, attempt=2, keep=keep)  # the next attempt goes on
    assert newest_step(tmp_path) == 3


@pytest.mark.parametrize("attempt", [1, 2], ids=["by the same attempt", "by the next one"])
@pytest.mark.parametrize("place", range(6))
def test_a_crash_while_the_same_step_is_written_again_leaves_one(
    tmp_path, monkeypatch, place, attempt
):
    """Step 5 once more, and keep is 1."""
    checkpoint(tmp_path, 5, attempt=1, keep=1)
    folder = begin(tmp_path, step=5, attempt=attempt)
    saved = write_states(folder, 5)
    with monkeypatch.context() as dying:
        crash_at(dying, place)
        try:
            commit(folder, step=5, attempt=attempt, saved=saved, keep=1, lineage=EVERYTHING)
        except Crash:
            pass
    assert newest_step(tmp_path) == 5


@pytest.mark.parametrize("place", range(6))
def test_a_crash_while_one_is_adopted_leaves_it(tmp_path, monkeypatch, place):
    checkpoint(tmp_path, 5, attempt=1)
    found = newest(tmp_path)
    with monkeypatch.context() as dying:
        crash_at(dying, place)
        try:
            adopt(found, attempt=2)
        except Crash:
            pass
    assert newest_step(tmp_path) == 5
    assert adopt(newest(tmp_path), attempt=3).attempt == 3


def test_a_half_removed_checkpoint_is_no_checkpoint(tmp_path, caplog):
    """A crash inside the removal of an old one leaves some of its files."""
    lose_a_file(checkpoint(tmp_path, 1, keep=9))
    checkpoint(tmp_path, 2, keep=9)
    assert newest_step(tmp_path) == 2


def test_the_same_step_of_another_attempt_lies_beside_it(tmp_path):
    checkpoint(tmp_path, 5, attempt=1)
    checkpoint(tmp_path, 5, attempt=2)
    assert names(tmp_path) == ["step-000005.1", "step-000005.2"]
    assert newest(tmp_path).attempt == 2


def test_an_attempt_may_write_a_step_again(tmp_path):
    checkpoint(tmp_path, 5)
    assert checkpoint(tmp_path, 5) == tmp_path / "step-000005.1"
    assert names(tmp_path) == ["step-000005.1"]
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
    assert names(tmp_path) == ["step-000012.3"]


def test_what_is_being_written_is_not_taken(tmp_path):
    checkpoint(tmp_path, 1)
    write_states(begin(tmp_path, step=2, attempt=1), 2)
    assert newest_step(tmp_path) == 1


# ---- names of attempts ------------------------------------------------------------------------------


def test_a_checkpoint_of_a_version_whose_names_told_no_attempt_is_taken(tmp_path):
    checkpoint(tmp_path, 7).rename(tmp_path / "step-000007")
    found = newest(tmp_path)
    assert (found.step, found.attempt) == (7, 0)
    ours = adopt(found, attempt=2)
    assert names(tmp_path) == ["step-000007", "step-000007.2"]
    head = lineage((2, 7, 0))
    assert newest(tmp_path, lineage=head).folder == ours.folder
    checkpoint(tmp_path, 9, attempt=2, keep=1, lineage=head)
    assert names(tmp_path) == ["step-000009.2"]


def test_an_adopted_checkpoint_outlives_the_one_that_it_was(tmp_path):
    theirs = checkpoint(tmp_path, 5, attempt=1)
    ours = adopt(newest(tmp_path), attempt=2)
    assert (ours.folder, ours.step, ours.attempt) == (tmp_path / "step-000005.2", 5, 2)
    assert os.path.samefile(ours.files["model_worker/0"], theirs / "model_worker-0.pt")
    assert json.loads((ours.folder / MANIFEST).read_text())["attempt"] == 2
    shutil.rmtree(theirs)  # attempt 1 woke up and tidies
    found = newest(tmp_path, lineage=lineage((1, 0, 0), (2, 5, 1)))
    assert (found.folder, found.files) == (ours.folder, ours.files)


def test_one_s_own_checkpoint_is_adopted_already(tmp_path):
    checkpoint(tmp_path, 5)
    found = newest(tmp_path)
    assert adopt(found, attempt=1) is found


def test_the_step_that_was_adopted_may_be_written_again(tmp_path):
    checkpoint(tmp_path, 5, attempt=1, keep=1)
    adopt(newest(tmp_path), attempt=2)
    head = lineage((1, 0, 0), (2, 5, 1))
    checkpoint(tmp_path, 5, attempt=2, keep=1, lineage=head)
    assert names(tmp_path) == ["step-000005.2"]
    assert newest_step(tmp_path, lineage=head) == 5


def test_where_no_file_can_be_linked_the_other_s_is_used(tmp_path, monkeypatch, caplog):
    checkpoint(tmp_path, 5)
    found = newest(tmp_path)
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    with caplog.at_level(logging.WARNING):
        assert adopt(found, attempt=2) is found
    assert "checkpoint not adopted" in caplog.text
    assert names(tmp_path) == ["step-000005.1"]


# ---- who was cut off writes no more -----------------------------------------------------------------


def test_what_an_older_attempt_wrote_after_a_newer_one_went_on_is_not_taken(tmp_path, caplog):
    checkpoint(tmp_path, 10, attempt=1)
    checkpoint(tmp_path, 12, attempt=1, keep=9)  # late: attempt 2 had gone on from step 10
    assert newest_step(tmp_path) == 12
    with caplog.at_level(logging.WARNING):
        assert newest_step(tmp_path, lineage=lineage((1, 0, 0), (2, 10, 1))) == 10
    golden.check(caplog.text)


def test_what_the_newer_one_wrote_is_taken(tmp_path):
    checkpoint(tmp_path, 10, attempt=1)
    checkpoint(tmp_path, 14, attempt=2, keep=9)
    assert newest_step(tmp_path, lineage=lineage((1, 0, 0), (2, 10, 1))) == 14


def test_of_one_step_the_one_that_counts_is_taken(tmp_path):
    checkpoint(tmp_path, 12, attempt=1)
    checkpoint(tmp_path, 12, attempt=2)
    checkpoint(tmp_path, 12, attempt=3)  # cut off before it had said from where it goes on
    found = newest(tmp_path, lineage=lineage((1, 0, 0), (2, 10, 1)))
    assert found.folder.name == "step-000012.2"


def test_dead_branches_are_removed_and_do_not_push_out_what_counts(tmp_path):
    checkpoint(tmp_path, 10, attempt=1)
    checkpoint(tmp_path, 20, attempt=1, keep=9)
    checkpoint(tmp_path, 30, attempt=1, keep=9)
    checkpoint(tmp_path, 12, attempt=2, keep=2, lineage=lineage((1, 0, 0), (2, 10, 1)))
    assert names(tmp_path) == ["step-000010.1", "step-000012.2"]


def test_who_wakes_up_late_removes_nothing_of_a_newer_attempt(tmp_path):
    """Not even what is older, nor what is being written, nor the last one of all."""
    checkpoint(tmp_path, 10, attempt=1)
    adopt(newest(tmp_path), attempt=2)
    being_written = begin(tmp_path, step=11, attempt=2)
    checkpoint(tmp_path, 40, attempt=1, keep=1, lineage=lineage((1, 0, 0)))
    assert names(tmp_path) == [being_written.name, "step-000010.2", "step-000040.1"]


def test_a_checkpoint_that_is_not_allowed_is_none(tmp_path):
    checkpoint(tmp_path, 1)
    folder = begin(tmp_path, step=2, attempt=1)
    saved = write_states(folder, 2)

    def refuse():
        raise StaleAttempt("attempt 2 has taken over", where="here", fix="exit")

    with pytest.raises(StaleAttempt):
        commit(folder, step=2, attempt=1, saved=saved, keep=2, lineage=EVERYTHING, allow=refuse)
    assert newest_step(tmp_path) == 1


def test_what_each_attempt_said_is_read_back(tmp_path):
    files = TrialFiles(tmp_path)
    for number in (1, 2, 3):
        files.attempt(number).root.mkdir(parents=True)
    told = [
        Resumed(attempt=1, phase="main", step=0),
        Resumed(attempt=3, phase="main", step=7, of_attempt=1),
        Resumed(attempt=3, phase="sft", step=2, of_attempt=2),
    ]
    for record in told:
        write_record(files.attempt(record.attempt).resumed(record.phase), record)
    assert read_resumed(files, "main") == {1: told[0], 3: told[1]}
    assert read_resumed(files, "sft") == {3: told[2]}


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
    with golden.raises(ClusterError) as full:
        commit(folder, step=2, attempt=1, saved=saved, keep=2, lineage=EVERYTHING)
    assert full.value.where == str(tmp_path / "step-000002.1")
    assert "resume" in full.value.fix
    assert newest_step(tmp_path) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_folder_that_can_t_be_made_is_told(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "mkdir", refusing(number))
    with golden.raises(ClusterError) as refused:
        begin(tmp_path, step=2, attempt=1)
    assert os.strerror(number) in refused.value.what


def test_a_file_in_the_folders_place_is_told(tmp_path):
    (tmp_path / "recover").write_text("a file")
    with pytest.raises(ClusterError):
        begin(tmp_path / "recover", step=2, attempt=1)


# ---- the ledger -------------------------------------------------------------------------------------


def write_ledger(path: Path, steps) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"step": step, "ids": ["0-1"]}) + "\n" for step in steps))


def test_the_steps_that_a_ledger_lacks():
    rows = [{"step": step} for step in (1, 2, 2, 4, 6)]
    assert lacking_steps(rows, 5) == [2, 3, 5]
    assert lacking_steps(rows[:2], 2) == []
    assert lacking_steps([], 0) == []


def test_a_checkpoint_that_the_ledger_does_not_cover_is_passed_over(tmp_path, caplog):
    root, ledger = tmp_path / "recover", tmp_path / "ledger.jsonl"
    for step in (50, 100):
        checkpoint(root, step)
    asked = []

    def look():
        def ledger_of(attempt: int, step: int) -> Path:
            asked.append((attempt, step))
            return ledger

        return newest_whole(root, workers=WORKERS, lineage=EVERYTHING, ledger_of=ledger_of)

    write_ledger(ledger, range(1, 101))
    assert look().step == 100
    write_ledger(ledger, range(1, 98))  # its end is lost
    assert look().step == 50
    assert asked == [(1, 100), (1, 100), (1, 50)]
    golden.check(caplog.text)
    write_ledger(ledger, range(1, 11))
    with golden.raises(CheckpointError) as caught:
        look()
    assert str(ledger) in caught.value.where
    ledger.unlink()
    with golden.raises(CheckpointError):
        look()


def test_a_resume_looks_at_the_ledger_that_it_would_go_on_with(tmp_path):
    """That of the attempt whose checkpoint it is, or of the one that that one went on from."""
    phase, files = PhaseFiles(tmp_path), TrialFiles(tmp_path)
    runner = SimpleNamespace(
        attempt=SimpleNamespace(number=3), phase=SimpleNamespace(name="main"),
        phase_files=phase, trial_files=files,
    )  # fmt: skip
    checkpoint(phase.recover, 10, attempt=1)
    files.attempt(1).root.mkdir(parents=True)
    resumed = Resumed(attempt=2, phase="main", step=10, of_attempt=1)
    files.attempt(2).root.mkdir()
    write_record(files.attempt(2).resumed("main"), resumed)
    checkpoint(phase.recover, 20, attempt=2)
    write_ledger(phase.rows_of(1).ledger, range(1, 15))
    write_ledger(phase.rows_of(2).ledger, range(1, 20))  # cut by a row
    found, ours = _take_checkpoint(runner, list(WORKERS))
    assert (found.step, found.attempt, ours.attempt) == (10, 1, 3)
    write_ledger(phase.rows_of(2).ledger, range(1, 21))
    found, ours = _take_checkpoint(runner, list(WORKERS))
    assert (found.step, found.attempt, ours.attempt) == (20, 2, 3)


def test_rows_are_on_the_disk_before_the_checkpoint_that_counts_on_them(tmp_path, monkeypatch):
    done = []

    def synced(fd: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    def renamed(source, target) -> None:
        done.append(f"{Path(target).name} in place")

    phase = PhaseFiles(tmp_path)
    files = RunFiles(
        JsonlAppender(phase.metrics),
        EventLog(phase.events),
        JsonlAppender(phase.ledger),
        JsonlAppender(phase.samples),
    )
    loop = object.__new__(MasterWorkerLoop)
    loop.files, loop.rollouts, loop.curriculum, loop.sampling = files, None, None, None
    loop.step, loop.ckpt_keep = 7, 2
    loop.outbox = Outbox(may_publish=lambda: True, patience_s=1.0)
    loop.progress = SimpleNamespace(publish=lambda what: None)
    loop.executor = SimpleNamespace(prefetched=returns(None))
    loop.workers = SimpleNamespace(records=[], call_all=returns([]))
    loop.publisher = SimpleNamespace(lineage=EVERYTHING, allow_checkpoint=lambda step: None)
    loop.runner = SimpleNamespace(phase_files=phase, attempt=SimpleNamespace(number=1))
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    asyncio.run(loop.checkpoint())
    at = done.index("step-000007.1 in place")
    assert {"ledger.jsonl", "metrics.jsonl", "samples.jsonl", "events.jsonl"} <= set(done[:at])
    files.close()


def returns(value):
    async def call(*_, **__):
        return value

    return call


def test_workers_read_their_own_files_of_a_checkpoint(tmp_path):
    """All are asked at once, of the newest checkpoint first; the master reads its own file only."""
    for step in (1, 2):
        checkpoint(tmp_path, step)
    asked = []

    def hashes_of(files):
        asked.append({worker: str(file.relative_to(tmp_path)) for worker, file in files.items()})
        found = {w: (hashlib.sha256(f.read_bytes()).hexdigest(), "") for w, f in files.items()}
        return found if len(asked) > 1 else {**found, WORKERS[1]: ("0" * 64, "")}

    found = newest_whole(tmp_path, workers=WORKERS, lineage=EVERYTHING, hashes_of=hashes_of)
    assert found.step == 1
    assert [set(files) for files in asked] == [set(WORKERS)] * 2
    assert [next(iter(f.values())).split("/")[0] for f in asked] == [
        f"step-00000{n}.1" for n in (2, 1)
    ]


@pytest.mark.parametrize(
    ("why", "told"), [("no file", "has hash no file"), ("I/O", "be read: I/O")]
)
def test_a_file_that_its_worker_cannot_read_is_refused(tmp_path, caplog, why, told):
    checkpoint(tmp_path, 1)
    found = newest_whole(
        tmp_path,
        workers=WORKERS,
        lineage=EVERYTHING,
        hashes_of=lambda files: dict.fromkeys(files, ("", why)),
    )
    assert found is None
    assert told in caplog.text
