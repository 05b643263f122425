"""Metrics and event files: exact rows, resumed runs, full disks, damaged files, optional sinks."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import golden
import pytest

from realsys.api.errors import ClusterError, ConfigError, DataError
from realsys.api.options import WandbOptions
from realsys.observability.events import EventLog, MfcEvent, PeriodicEvent, StepEvent, read_events
from realsys.observability.jsonl import JsonlAppender, copy_rows, read_jsonl
from realsys.observability.metrics import (
    MetricsWriter,
    deterministic,
    point_to_newest,
    read_metrics,
    start_from,
)
from realsys.trial.records import PhaseFiles


def turn(name: Path, attempt: int) -> None:
    """Has one of the phase's names point to an attempt's own rows."""
    name.unlink()
    name.symlink_to(Path("rows") / f"{attempt:04d}" / name.name)


def writer(
    root: Path,
    *,
    attempt: int = 1,
    resume: int | None = None,
    former: tuple[int, ...] = (),
    tensorboard: bool = False,
    wandb: str = "disabled",
) -> MetricsWriter:
    return MetricsWriter(
        PhaseFiles(root),
        tensorboard=tensorboard,
        wandb=WandbOptions(mode=wandb),
        run_name="ppo-math/run1",
        config={"seed": 1},
        attempt=attempt,
        resume_step=resume,
        former=former,
    )


def row(step: int) -> dict[str, float]:
    return {"loss": 1 / (step + 3), "time/step": 0.5 * step}


# ---- rows -----------------------------------------------------------------------------------


def test_row_is_one_line_with_sorted_keys_and_exact_floats(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        metrics.write(3, {"b": 0.1 + 0.2, "a": 7, "note": "schön"})
    text = PhaseFiles(tmp_path).metrics.read_text()
    assert text == '{"a": 7, "b": 0.30000000000000004, "note": "schön", "step": 3}\n'
    assert read_metrics(PhaseFiles(tmp_path).metrics)[0]["b"] == 0.1 + 0.2


def test_row_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        metrics.write(1, {"a": 1.0})
        assert read_metrics(PhaseFiles(tmp_path).metrics) == [{"a": 1.0, "step": 1}]


def test_values_that_are_no_number_become_text_with_a_warning_that_names_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with writer(tmp_path) as metrics:
        metrics.write(2, {"kl": math.nan, "up": math.inf, "down": -math.inf, "fine": 1.0})
    line = PhaseFiles(tmp_path).metrics.read_text()
    assert json.loads(line) == {"down": "-inf", "fine": 1.0, "kl": "nan", "step": 2, "up": "inf"}
    assert [r.levelname for r in caplog.records] == ["WARNING"] * 3
    golden.check(caplog.text)
    assert "fine" not in caplog.text


def test_numbers_of_other_libraries_are_written_as_floats(tmp_path: Path) -> None:
    class Scalar:  # as a numpy or torch scalar: it only converts
        def __float__(self) -> float:
            return 0.25

    with writer(tmp_path) as metrics:
        metrics.write(1, {"a": Scalar()})  # type: ignore[dict-item]
    assert read_metrics(PhaseFiles(tmp_path).metrics) == [{"a": 0.25, "step": 1}]


def test_comparison_leaves_out_what_a_clock_measured() -> None:
    found = deterministic({"step": 1, "loss": 0.5, "time/step": 2.0, "perf/tokens_per_second": 9})
    assert found == {"step": 1, "loss": 0.5}


# ---- a run that goes on ---------------------------------------------------------------------


def test_resumed_run_has_the_same_metrics_file_byte_for_byte(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with writer(whole) as metrics:
        for step in range(1, 8):
            metrics.write(step, row(step))
    with writer(parts) as metrics:
        for step in range(1, 6):
            metrics.write(step, row(step))
    with PhaseFiles(parts).metrics.open("ab") as file:
        file.write(b'{"loss": 0.1, "st')  # the process died here
    with writer(parts, attempt=2, resume=3, former=(1,)) as metrics:
        for step in range(4, 8):
            metrics.write(step, row(step))
    assert PhaseFiles(parts).metrics.read_bytes() == PhaseFiles(whole).metrics.read_bytes()


def steps_in(path: Path) -> list[int]:
    return [r["step"] for r in read_jsonl(path)]


def rows(path: Path, *steps: int) -> None:
    with JsonlAppender(path) as file:
        for step in steps:
            file.append({"step": step})


KINDS = ("metrics", "ledger", "samples", "events")


def test_resume_takes_over_ledger_samples_and_events_too(tmp_path: Path) -> None:
    files = PhaseFiles(tmp_path)
    for kind in KINDS:
        rows(getattr(files.rows_of(1), kind), 0, 1, 2, 2, 3)
    writer(tmp_path, attempt=2, resume=2, former=(1,)).close()
    for kind in KINDS:
        assert steps_in(getattr(files, kind)) == [0, 1, 2, 2]


def test_fresh_start_in_a_used_folder_starts_from_nothing(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        metrics.write(0, {"eval/accuracy": 0.5})
        metrics.write(1, row(1))
    with writer(tmp_path, attempt=2, resume=None) as metrics:
        metrics.write(1, row(1))
    assert steps_in(PhaseFiles(tmp_path).metrics) == [1]


def test_copied_rows_are_the_same_bytes_and_leave_no_temporary_file(tmp_path: Path) -> None:
    path, target = tmp_path / "x.jsonl", tmp_path / "rows" / "x.jsonl"
    content = b'{"step":1,  "z":1.50}\n{"step": 2}\n{"step": 3}'  # last line lacks its end
    path.write_bytes(content)
    assert copy_rows(path, target, last_step=3) == 3
    assert target.read_bytes() == content + b"\n"
    assert copy_rows(path, target, last_step=1) == 1
    assert target.read_bytes() == b'{"step":1,  "z":1.50}\n'
    assert path.read_bytes() == content
    assert os.listdir(target.parent) == ["x.jsonl"]


def test_no_rows_make_an_empty_file(tmp_path: Path) -> None:
    assert copy_rows(tmp_path / "none.jsonl", tmp_path / "x.jsonl", last_step=5) == 0
    assert (tmp_path / "x.jsonl").read_bytes() == b""
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize(
    "content",
    [
        b'{"step": 1}\n\0\0\0\n{"step": 2}\n',
        b'{"step": 1}\n[1]\n{"step": 2}\n',
        b'{"step": 1}\n{"stop": 2}\n',
    ],
)
def test_damaged_rows_are_not_copied(tmp_path: Path, content: bytes) -> None:
    path, target = tmp_path / "ledger.jsonl", tmp_path / "target.jsonl"
    path.write_bytes(content)
    with golden.raises(DataError) as refused:
        copy_rows(path, target, last_step=1)
    assert str(path) in refused.value.where
    assert path.read_bytes() == content
    assert not target.exists()


def test_rows_that_can_t_be_copied_leave_both_files_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, target = tmp_path / "x.jsonl", tmp_path / "y.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    target.write_bytes(b'{"step": 7}\n')

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with golden.raises(ClusterError):
        copy_rows(path, target, last_step=1)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert target.read_bytes() == b'{"step": 7}\n'
    assert sorted(os.listdir(tmp_path)) == ["x.jsonl", "y.jsonl"]


# ---- each attempt its own files ---------------------------------------------------------------------


def test_the_phase_s_names_are_links_to_the_newest_attempt_s_files(tmp_path: Path) -> None:
    files = PhaseFiles(tmp_path)
    for attempt in (1, 2):
        own = writer(tmp_path, attempt=attempt).own
        assert own == files.rows_of(attempt)
        for kind in KINDS:
            name = getattr(files, kind)
            assert os.readlink(name) == f"rows/{attempt:04d}/{name.name}"
            assert name.exists()
    assert sorted(os.listdir(tmp_path)) == sorted([*(f"{kind}.jsonl" for kind in KINDS), "rows"])


def test_a_trial_that_was_moved_keeps_its_rows(tmp_path: Path) -> None:
    with writer(tmp_path / "here") as metrics:
        metrics.write(1, {"a": 1.0})
    (tmp_path / "here").rename(tmp_path / "there")
    assert steps_in(PhaseFiles(tmp_path / "there").metrics) == [1]


def test_who_was_cut_off_writes_where_nobody_looks(tmp_path: Path) -> None:
    late = writer(tmp_path)
    late.write(1, {"a": 1.0})
    with writer(tmp_path, attempt=2, resume=1, former=(1,)) as metrics:
        late.write(2, {"a": -2.0})
        metrics.write(2, {"a": 2.0})
    late.write(3, {"a": -3.0})
    late.close()
    assert [r["a"] for r in read_metrics(PhaseFiles(tmp_path).metrics)] == [1.0, 2.0]


def test_an_older_attempt_s_link_is_put_right_and_its_rows_are_not_taken_over(
    tmp_path: Path,
) -> None:
    files = PhaseFiles(tmp_path)
    with writer(tmp_path) as metrics:
        metrics.write(1, {"a": 1.0})
    with writer(tmp_path, attempt=2, resume=1, former=(1,)) as metrics:
        metrics.write(2, {"a": 2.0})
        turn(files.metrics, 1)  # attempt 1 woke up in the middle of turning it
        assert steps_in(files.metrics) == [1]
        point_to_newest(
            files
        )  # whoever does it: attempt 1 itself, when it looks again, or attempt 2
        assert steps_in(files.metrics) == [1, 2]
    turn(files.metrics, 1)  # and again, before the next attempt looks
    start_from(files, 3, 2, former=(2, 1))
    assert steps_in(files.metrics) == [1, 2]


def test_rows_come_from_the_newest_attempt_that_got_so_far_as_to_have_them(tmp_path: Path) -> None:
    """Attempt 2 was killed after it had taken over its metrics; 3 before it had taken over any."""
    files = PhaseFiles(tmp_path)
    for kind in KINDS:
        rows(getattr(files.rows_of(1), kind), 1, 2, 3)
    rows(files.rows_of(2).metrics, 1, 2)
    start_from(files, 4, 2, former=(3, 2, 1))
    for kind in KINDS:
        assert steps_in(getattr(files, kind)) == [1, 2]


def test_rows_of_a_version_without_files_of_each_attempt_are_taken_over(tmp_path: Path) -> None:
    files = PhaseFiles(tmp_path)
    rows(files.metrics, 1, 2, 3)
    start_from(files, 2, 2, former=(1,))
    assert files.metrics.is_symlink()
    assert steps_in(files.metrics) == [1, 2]


def test_a_link_that_can_t_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    rows(PhaseFiles(tmp_path).rows_of(1).metrics, 1)
    with golden.raises(ClusterError):
        point_to_newest(PhaseFiles(tmp_path))


def test_a_step_s_rows_cost_a_write_each_a_listing_and_a_reading_of_each_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are on a file system that all share, and a run makes thousands of steps."""
    files, made = PhaseFiles(tmp_path), []

    def count(name: str) -> None:
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, **more: made.append(name) or real(*args, **more)
        )

    with writer(tmp_path, attempt=2) as metrics:
        metrics.write(1, {"a": 1.0})
        for name in ("listdir", "scandir", "stat", "lstat", "fstat", "readlink", "open", "write"):
            count(name)
        metrics.write(2, {"a": 2.0})
        point_to_newest(files)
        monkeypatch.undo()
    assert sorted(made) == ["listdir", *["readlink"] * 4, "write"]


# ---- appending ------------------------------------------------------------------------------


LONG = b'{"text": "' + b"x" * (3 << 16) + b'"}'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"step": 1}\n{"st', b'{"step": 1}\n{"step": 2}\n'),  # torn: removed
        (b'{"step": 1}', b'{"step": 1}\n{"step": 2}\n'),  # whole but for its end: kept
        (b'{"st', b'{"step": 2}\n'),
        (b"", b'{"step": 2}\n'),
        (b"\n", b'\n{"step": 2}\n'),
        (LONG, LONG + b'\n{"step": 2}\n'),  # longer than what is read at a time
        (b'{"step": 1}\n' + LONG[:-1], b'{"step": 1}\n{"step": 2}\n'),
        (LONG + b"\n" + LONG[:-2], LONG + b'\n{"step": 2}\n'),
    ],
    ids=range(8),
)
def test_appender_mends_a_torn_end(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(before)
    with JsonlAppender(path) as file:
        file.append({"step": 2})
    assert path.read_bytes() == after


def test_an_appender_reads_a_large_files_end_alone(tmp_path: Path) -> None:
    """Of 64 GiB of which nothing is on the disk."""
    path = tmp_path / "x.jsonl"
    with path.open("wb") as file:
        file.seek(1 << 36)
        file.write(b'\n{"step": 1}\n{"st')
    with JsonlAppender(path) as made:
        made.append({"step": 2})
    with path.open("rb") as file:
        file.seek(1 << 36)
        assert file.read() == b'\n{"step": 1}\n{"step": 2}\n'


def test_full_disk_is_an_error_with_a_way_out_and_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = writer(tmp_path)
    metrics.write(1, {"a": 1.0})
    before = PhaseFiles(tmp_path).metrics.read_bytes()
    real_write = os.write

    def half(handle: int, data: bytes) -> int:  # what a nearly full disk does
        return real_write(handle, data[:5])

    monkeypatch.setattr(os, "write", half)
    with golden.raises(ClusterError) as caught:
        metrics.write(2, {"a": 2.0})
    monkeypatch.undo()
    metrics.close()
    assert caught.value.where == str(PhaseFiles(tmp_path).rows_of(1).metrics)
    assert "resume" in caught.value.fix
    assert PhaseFiles(tmp_path).metrics.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_device_that_is_really_full() -> None:
    with _on("/dev/full") as file, golden.raises(ClusterError):
        file.append({"step": 1})


def _on(path: str) -> JsonlAppender:
    """An appender on a device: opening one the usual way would read it for ever."""
    file = JsonlAppender.__new__(JsonlAppender)
    file.path, file._handle = Path(path), os.open(path, os.O_WRONLY)
    return file


def test_no_permission_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()  # a folder in its place: refused for root as well
    with golden.raises(ClusterError):
        JsonlAppender(tmp_path / "metrics.jsonl")


# ---- events ---------------------------------------------------------------------------------


def test_events_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    times = {"queued": 1.25, "start": 1.5, "end": 2.75, "compute_s": 1.1}
    events = [
        MfcEvent(step=1, name="actor_gen", worker="model_worker/0", **times, tokens=640),
        StepEvent(step=1, start=1.0, end=3.0),
        PeriodicEvent(kind="save", step=1, start=3.0, end=3.5),
    ]
    for event in events:
        log.note(event)
    log.close()
    assert read_events(path) == events
    assert path.read_text().splitlines()[1] == (
        '{"event": "step", "step": 1, "start": 1.0, "end": 3.0}'
    )


def test_event_reader_forgives_a_torn_end_and_names_other_damage(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    good = '{"event": "step", "step": 1, "start": 1.0, "end": 2.0}\n'
    path.write_text(good + good[:20])
    assert read_events(path) == [StepEvent(step=1, start=1.0, end=2.0)]
    path.write_text(good + "garbage\n" + good)
    with golden.raises(DataError):
        read_events(path)
    path.write_text(good + '{"event": "step", "step": "1", "start": 1.0, "end": 2.0}\n')
    with golden.raises(DataError):
        read_events(path)
    assert read_events(tmp_path / "none.jsonl") == []


# ---- TensorBoard ----------------------------------------------------------------------------


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder))
    shown.Reload()
    found = {}
    for tag in shown.Tags()["tensors"] + shown.Tags()["scalars"]:
        found[tag] = [(e.step, e.value) for e in shown.Scalars(tag)]
    return found


def test_tensorboard_shows_the_numbers_under_their_names(tmp_path: Path) -> None:
    with writer(tmp_path, tensorboard=True) as metrics:
        metrics.write(1, {"actor_train/loss": 0.5, "n": 3, "note": "text"})
        metrics.write(2, {"actor_train/loss": 0.25, "n": 4})
    assert scalars(tmp_path / "tensorboard") == {
        "actor_train/loss": [(1, 0.5), (2, 0.25)],
        "n": [(1, 3.0), (2, 4.0)],
    }


def test_tensorboard_forgets_the_steps_that_a_resumed_run_repeats(tmp_path: Path) -> None:
    with writer(tmp_path, tensorboard=True) as metrics:
        for step in (1, 2, 3):
            metrics.write(step, {"a": float(step)})
    with writer(tmp_path, tensorboard=True, attempt=2, resume=2, former=(1,)) as metrics:
        metrics.write(3, {"a": 30.0})
    assert scalars(tmp_path / "tensorboard") == {"a": [(1, 1.0), (2, 2.0), (3, 30.0)]}


# ---- Weights & Biases -----------------------------------------------------------------------


class FakeWandb(types.ModuleType):
    """Stands for the package: keeps what it was given, fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        super().__init__("wandb")
        self.fails, self.calls = fails, []  # type: ignore[var-annotated]

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        self.calls.append((name, args, kwargs))
        if name == self.fails:
            raise OSError("network is gone\nlong story")

    def init(self, **kwargs: Any) -> FakeWandb:
        self._call("init", **kwargs)
        return self

    def define_metric(self, *args: Any, **kwargs: Any) -> None: ...

    def log(self, values: dict[str, Any]) -> None:
        self._call("log", values)

    def finish(self) -> None:
        self._call("finish")


def test_wandb_gets_the_rows_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with writer(tmp_path, wandb="offline") as metrics:
        metrics.write(1, {"a": 1.5})
    writer(tmp_path, attempt=2, wandb="offline", resume=1, former=(1,)).close()
    names = [name for name, _, _ in fake.calls]
    assert names == ["init", "log", "finish", "init", "finish"]
    first, again = fake.calls[0][2], fake.calls[3][2]
    assert (first["project"], first["name"], first["mode"]) == (
        "ppo-math", "ppo-math/run1", "offline",
    )  # fmt: skip
    assert first["config"] == {"seed": 1}
    assert first["id"] == again["id"]
    assert fake.calls[1][1] == ({"a": 1.5, "train_step": 1},)


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_wandb_trouble_is_one_warning_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fails))
    with writer(tmp_path, wandb="online") as metrics:
        metrics.write(1, {"a": 1.0})
        metrics.write(2, {"a": 2.0})
    assert len(read_metrics(PhaseFiles(tmp_path).metrics)) == 2
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    golden.check(warnings[0].getMessage())


def test_missing_wandb_is_said_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writer(tmp_path) as metrics:
        metrics.write(1, {"a": 1.0})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError) as caught:
        writer(tmp_path, attempt=2, wandb="offline")
    assert "pip install 'realsys[wandb]'" in caught.value.fix
    assert len(read_metrics(PhaseFiles(tmp_path).metrics)) == 1  # nothing was emptied before


@pytest.mark.parametrize("sink", ["tensorboard", "wandb"])
def test_sinks_that_are_off_are_not_imported(tmp_path: Path, sink: str) -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == sink]:
        del sys.modules[name]
    with writer(tmp_path) as metrics:
        metrics.write(1, {"a": 1.0})
    assert sink not in sys.modules
