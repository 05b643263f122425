"""What the master shows: only while its attempt is the newest, and a line of history for each."""

import asyncio
import json
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import golden
import pytest
from checkpoints import commit
from history_check import read_history

from realsys.api.errors import StaleAttempt, StoreUnavailable
from realsys.master.build import _resume
from realsys.master.checkpoint import recover
from realsys.master.checkpoint.publication import WRITER, Publisher
from realsys.master.checkpoint.recover import MANIFEST, RecoverCheckpoint, begin, newest_whole
from realsys.master.graph.master_state import MasterState
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.observability.history import Op
from realsys.trial.records import (
    AttemptFiles,
    AttemptRecord,
    PhaseFiles,
    Resumed,
    TrialFiles,
    dumps,
    read_record,
    replace_symlink,
    write_record,
)

KEYS = TrialKeys(cluster="local", user="anna", experiment="ppo-math", trial="run1")


@dataclass
class FakeRunner:
    """As much of a WorkerRunner as publishing needs."""

    trial_files: TrialFiles
    attempt: AttemptRecord
    store: object
    phase: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(name="main"))
    name: str = "master_worker/0"
    keys: TrialKeys = KEYS
    patience_s: float = 1.0

    @property
    def phase_files(self) -> PhaseFiles:
        return TrialFiles.phase(self.trial_files.root)

    @property
    def attempt_files(self) -> AttemptFiles:
        return self.trial_files.attempt(self.attempt.number)


@dataclass
class Trial:
    """A trial's folder and store; attempts begin here."""

    files: TrialFiles
    store: object
    publishers: list[Publisher] = field(default_factory=list)

    def record(self, number: int) -> AttemptRecord:
        return AttemptRecord(
            number=number, token=f"token {number}", host=f"n{number}", supervisor_pid=7,
            supervisor_start=9, started_at=1.0,
        )  # fmt: skip

    def begin(self, number: int, *, store=None, phase: str = "main") -> Publisher:
        """Attempt ``number`` takes over: the folder, the key, its master's publisher."""
        record = self.record(number)
        attempt = self.files.attempt(number)
        attempt.root.mkdir(parents=True, exist_ok=True)
        write_record(attempt.record, record)
        self.store.add(KEYS.attempt, dumps(record), replace=True)
        runner = FakeRunner(self.files, record, store or self.store, SimpleNamespace(name=phase))
        publisher = Publisher(runner)
        publisher.runner = runner  # for the tests to look at
        self.publishers.append(publisher)
        return publisher

    def history(self, attempt: int) -> list[tuple[str, int]]:
        return [
            (r["op"], r["step"]) for r in read_history(self.files.root) if r["attempt"] == attempt
        ]

    def told(self, key: str) -> dict:
        return json.loads(self.store.get(key).value)


@pytest.fixture
def trial(tmp_path):
    store = open_store(f"memory://{tmp_path}")
    trial = Trial(TrialFiles(tmp_path / "run1"), store)
    yield trial
    for publisher in trial.publishers:
        publisher.close()
    store.close()


def write_ledger(publisher: Publisher, steps: int) -> None:
    runner = publisher.runner
    ledger = runner.phase_files.rows_of(runner.attempt.number).ledger
    ledger.parent.mkdir(parents=True, exist_ok=True)
    ledger.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)))


def checkpoint(recover: Path, step: int, publisher: Publisher) -> Path:
    """As the master writes one, behind its steps' rows."""
    attempt = publisher.runner.attempt.number
    write_ledger(publisher, step)
    folder = begin(recover, step=step, attempt=attempt)
    return commit(
        folder,
        step=step,
        attempt=attempt,
        saved={},
        keep=2,
        lineage=publisher.lineage,
        allow=partial(publisher.allow_checkpoint, step),
    )


# ---- checkpoints ----------------------------------------------------------------------------------


def test_a_checkpoint_of_the_newest_attempt_is_allowed_and_noted(trial, tmp_path):
    publisher = trial.begin(1)
    final = checkpoint(tmp_path / "recover", 10, publisher)
    assert (final / MANIFEST).exists()
    assert trial.told(KEYS.checkpoint("main")) == {"step": 10, "attempt": 1, "token": "token 1"}
    (row,) = read_history(trial.files.root)
    assert (row["op"], row["step"], row["worker"]) == (Op.CHECKPOINT, 10, "master_worker/0")
    assert (row["token"], row["phase"]) == ("token 1", "main")
    assert row["began"] <= row["at"]


def test_a_checkpoint_of_an_older_attempt_is_refused_before_it_has_a_name(trial, tmp_path):
    older, _ = trial.begin(1), trial.begin(2)
    with golden.raises(StaleAttempt):
        checkpoint(tmp_path / "recover", 10, older)
    assert newest_whole(tmp_path / "recover", workers=(), lineage=older.lineage) is None
    assert trial.store.find_subtree(KEYS.checkpoint("main")) == []
    (row,) = read_history(trial.files.root)
    assert (row["op"], row["what"], row["step"]) == (Op.REFUSED, "checkpoint", 10)


def test_the_store_refuses_where_the_folder_does_not_yet_show_the_newer_one(trial, tmp_path):
    """A file server may show it late."""
    older = trial.begin(1)
    trial.store.add(KEYS.attempt, dumps(trial.record(2)), replace=True)
    with golden.raises(StaleAttempt):
        older.allow_checkpoint(10)
    assert trial.history(1) == [("refused", 10)]


def test_the_folder_refuses_where_each_attempt_has_a_store_of_its_own(trial, tmp_path):
    older = trial.begin(1, store=(own := open_store(f"memory://{tmp_path}/own")))
    own.add(KEYS.attempt, dumps(trial.record(1)))
    older.allow_checkpoint(10)
    trial.begin(2)
    with golden.raises(StaleAttempt):
        older.allow_checkpoint(20)
    assert json.loads(own.get(KEYS.checkpoint("main")).value)["step"] == 10
    assert trial.history(1) == [("checkpoint", 10), ("refused", 20)]


def test_a_publication_that_the_store_does_not_answer_can_be_made_again(
    trial, tmp_path, monkeypatch
):
    publisher = trial.begin(1)
    folder = begin(tmp_path / "recover", step=10, attempt=1)
    recover.complete(folder, step=10, attempt=1, saved={})
    about = {"step": 10, "attempt": 1, "keep": 2, "lineage": publisher.lineage}
    allow = partial(publisher.allow_checkpoint, 10)

    def write(puts, *, deletes=()):
        raise StoreUnavailable("no route to host", where="etcd", fix="start it")

    with monkeypatch.context() as away:
        away.setattr(publisher._fence, "write", write)
        with pytest.raises(StoreUnavailable):
            recover.publish(folder, **about, allow=allow)
    assert trial.history(1) == []  # nobody knows whether it happened
    assert newest_whole(tmp_path / "recover", workers=(), lineage=publisher.lineage) is None
    assert recover.publish(folder, **about, allow=allow).name == "step-000010.1"
    assert trial.history(1) == [("checkpoint", 10)]


def test_a_checkpoint_that_waited_removes_nothing_of_the_next_one_in_the_making(trial, tmp_path):
    publisher, folder = trial.begin(2), tmp_path / "recover"
    left = [begin(folder, step=step, attempt=number) for step, number in ((30, 1), (5, 2))]
    waited = begin(folder, step=10, attempt=2)
    recover.complete(waited, step=10, attempt=2, saved={})
    next_one = begin(folder, step=20, attempt=2)
    recover.publish(waited, step=10, attempt=2, keep=2, lineage=publisher.lineage)
    assert next_one.is_dir(), "it was being written"
    assert not any(path.exists() for path in left), "nobody will end these"


# ---- models ---------------------------------------------------------------------------------------


def written(trial: Trial, publisher: Publisher, step: int) -> Path:
    """A model as workers leave it for the master."""
    number = publisher.runner.attempt.number
    folder = trial.files.root / "checkpoints" / "actor" / f".step-{step:06d}.{number}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(f"weights of attempt {number}")
    return folder


def save(trial: Trial, publisher: Publisher, step: int) -> Path:
    return publisher.model("actor", step, written=written(trial, publisher, step))


def weights(trial: Trial, name: str = "latest") -> str:
    return (trial.files.root / "checkpoints" / "actor" / name / "model.safetensors").read_text()


def test_a_model_gets_its_name_its_writer_and_the_link(trial):
    publisher = trial.begin(1)
    final = save(trial, publisher, 10)
    assert final.name == "step-000010"
    assert json.loads((final / WRITER).read_text()) == {"attempt": 1, "step": 10}
    assert os.readlink(final.parent / "latest") == "step-000010"
    assert sorted(os.listdir(final.parent)) == ["latest", "step-000010"]
    assert trial.told(KEYS.saved_model("actor"))["step"] == 10
    (row,) = read_history(trial.files.root)
    assert (row["op"], row["role"], row["step"]) == (Op.SAVE, "actor", 10)
    save(trial, publisher, 20)
    assert os.readlink(final.parent / "latest") == "step-000020"


def no_writer(final: Path) -> None:
    (final / WRITER).unlink()


def torn_writer(final: Path) -> None:
    (final / WRITER).write_text('{"att')


def another_writer(final: Path) -> None:
    (final / WRITER).write_text('{"attempt": "many"}')


@pytest.mark.parametrize(
    "damage", [lambda final: None, no_writer, torn_writer, another_writer],
    ids=["whole", "of a version that did not tell", "torn", "damaged"],
)  # fmt: skip
def test_a_resumed_run_replaces_what_an_older_attempt_saved(trial, damage):
    damage(save(trial, trial.begin(1), 10))
    save(trial, trial.begin(2), 10)
    assert weights(trial) == "weights of attempt 2"


def test_the_same_attempt_may_save_a_step_again(trial):
    publisher = trial.begin(1)
    for _ in range(2):
        save(trial, publisher, 10)
    assert weights(trial) == "weights of attempt 1"


def test_a_model_of_an_older_attempt_is_refused(trial):
    older, newer = trial.begin(1), trial.begin(2)
    save(trial, newer, 10)
    for step in (10, 20):
        with golden.raises(StaleAttempt):
            save(trial, older, step)
    assert weights(trial, "step-000010") == weights(trial) == "weights of attempt 2"
    assert not (trial.files.root / "checkpoints/actor/step-000020").exists()
    assert trial.history(1) == [("refused", 10), ("refused", 20)]


def test_who_stood_still_after_it_was_allowed_replaces_nothing_of_a_newer_attempt(
    trial, monkeypatch
):
    older = trial.begin(1)
    folder = written(trial, older, 10)
    write = older._fence.write

    def stand_still(*args, **kwargs):
        write(*args, **kwargs)
        save(trial, trial.begin(2), 10)

    monkeypatch.setattr(older._fence, "write", stand_still)
    with golden.raises(StaleAttempt):
        older.model("actor", 10, written=folder)
    assert weights(trial) == weights(trial, "step-000010") == "weights of attempt 2"


# ---- done -----------------------------------------------------------------------------------------


def test_the_end_is_marked_with_the_attempt_s_token(trial):
    trial.begin(1, phase="sft").done(200)
    marker = json.loads(trial.files.attempt(1).done("sft").read_text())
    assert marker == {"token": "token 1", "step": 200}
    assert trial.told(KEYS.done)["step"] == 200
    assert not trial.files.attempt(1).done("main").exists()
    assert trial.history(1) == [("done", 200)]


def test_an_older_attempt_is_never_done(trial):
    older, _ = trial.begin(1), trial.begin(2)
    with pytest.raises(StaleAttempt):
        older.done(200)
    assert not trial.files.attempt(1).done("main").exists()
    assert trial.store.find_subtree(KEYS.done) == []
    assert trial.history(1) == [("refused", 200)]


def test_a_done_mark_of_an_earlier_attempt_is_not_ours(trial):
    """An attempt that was ended after its mark, before its supervisor saw it."""
    trial.begin(1).done(200)
    trial.begin(2)
    assert not trial.files.attempt(2).done("main").exists()


# ---- steps, and where an attempt goes on ------------------------------------------------------------


def found(step: int, attempt: int) -> RecoverCheckpoint:
    return RecoverCheckpoint(Path(f"step-{step:06d}.{attempt}"), step, attempt, {})


def test_the_first_attempt_goes_on_from_nothing(trial):
    publisher = trial.begin(1)
    publisher.resumed(None)
    record = read_record(Resumed, trial.files.attempt(1).resumed("main"))
    assert record == Resumed(attempt=1, phase="main", step=0, of_attempt=0)
    assert publisher.lineage.limits == {1: None}
    assert trial.history(1) == [("resumed", 0)]


def test_a_later_one_says_whose_checkpoint_it_took_before_it_counts(trial):
    trial.begin(1).resumed(None)
    publisher = trial.begin(2)
    assert publisher.lineage.limits == {}
    publisher.resumed(found(10, 1))
    record = read_record(Resumed, trial.files.attempt(2).resumed("main"))
    assert record == Resumed(attempt=2, phase="main", step=10, of_attempt=1)
    assert publisher.lineage.limits == {2: None, 1: 10}


def test_who_is_overtaken_before_it_goes_on_says_nothing(trial):
    older, newer = trial.begin(1), trial.begin(2)
    newer.resumed(None)
    with pytest.raises(StaleAttempt):
        older.resumed(None)
    assert not trial.files.attempt(1).resumed("main").exists()


def test_one_s_lineage_knows_nothing_of_newer_attempts(trial):
    """Who has been overtaken without knowing it must not tidy up in a newer one's name."""
    trial.begin(1).resumed(None)
    older, newer = trial.begin(2), trial.begin(3)
    newer.resumed(found(4, 1))
    trial.store.add(KEYS.attempt, dumps(trial.record(2)), replace=True)
    older.resumed(found(10, 1))
    assert older.lineage.limits == {2: None, 1: 10}


def test_phases_go_on_by_themselves(trial):
    trial.begin(1, phase="sft").resumed(found(7, 1))
    publisher = trial.begin(2)
    publisher.resumed(None)
    assert publisher.lineage.limits == {2: None}


class NoWorkers:
    """What a resume tells the model workers, of which there are none."""

    records = ()

    async def call(self, requests, *, timeout_s, what):
        self.told = what


def resume(publisher: Publisher) -> int | None:
    """As a master does when it starts."""
    step, state = asyncio.run(_resume(publisher.runner, NoWorkers(), publisher))
    assert state == MasterState()
    return step


def test_a_resume_links_the_checkpoint_under_its_own_name_and_says_whose_it_was(trial):
    first = trial.begin(1)
    assert resume(first) is None
    folder = checkpoint(first.runner.phase_files.recover, 10, first)
    second = trial.begin(2)
    assert resume(second) == 10
    assert sorted(os.listdir(folder.parent)) == ["step-000010.1", "step-000010.2"]
    assert second.lineage.limits == {2: None, 1: 10}
    third = trial.begin(3)
    assert resume(third) == 10
    assert third.lineage.limits == {3: None, 2: 10, 1: 10}


def test_who_dies_while_it_adopts_has_said_nothing(trial, monkeypatch):
    """Said first, the other's newer checkpoint would be dead, and the one adopted perhaps tidied away."""
    first = trial.begin(1)
    resume(first)
    checkpoint(first.runner.phase_files.recover, 10, first)
    second = trial.begin(2)
    with monkeypatch.context() as dying:
        dying.setattr(recover, "adopt", lambda found, *, attempt: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            resume(second)
    write_ledger(first, 12)
    late = begin(first.runner.phase_files.recover, step=12, attempt=1)  # allowed before
    commit(late, step=12, attempt=1, saved={}, keep=1, lineage=first.lineage)
    assert resume(trial.begin(3)) == 12


# ---- the link -------------------------------------------------------------------------------------


def test_the_link_is_replaced_in_one_step(tmp_path, monkeypatch):
    link, seen = tmp_path / "latest", []
    replace_symlink(link, "step-000001")
    swap = os.replace

    def look(source, target):
        seen.append(os.readlink(link))
        swap(source, target)

    monkeypatch.setattr(os, "replace", look)
    replace_symlink(link, "step-000002")
    assert seen == ["step-000001"]
    assert os.readlink(link) == "step-000002"
    assert os.listdir(tmp_path) == ["latest"]
