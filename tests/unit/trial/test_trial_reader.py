"""All that look at a trial read the same of its folder, whatever is wrong with a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import golden
import pytest
from old_trials.unpack import manifest, unpack

from launcher.trials.status import trial_view
from realsys.api.plan import read_plan
from realsys.observability.report.report import report_html
from realsys.observability.report.trial_report import read_trial_report
from realsys.trial.last_lines import last_lines
from realsys.trial.liveness import Liveness
from realsys.trial.plan_summary import PlanSummary, read_plan_summary
from realsys.trial.records import TrialFiles, TrialRecord
from realsys.trial.trial_reader import TrialReader
from realsys.trial.trial_state import State

KINDS = manifest()


@pytest.fixture
def ended(file_root: Path) -> TrialFiles:
    return TrialFiles(unpack("finished", file_root)[0])


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def shown(plan: Any) -> dict[str, Any]:
    """All that those who look at a trial use of its plan."""
    groups = [{str(k): g.count for k, g in p.scheduling.groups().items()} for p in plan.phases]
    return {
        "trial": (plan.trial, plan.user, plan.trial_dir, plan.name_resolve_url),
        "phases": [(p.name, p.folder, p.publish) for p in plan.phases],
        "groups": groups,
        "order": [list(g) for g in groups],
        "cluster": (plan.cluster.name, plan.cluster.file_root, plan.cluster.etcd),
        "slurm": (plan.cluster.slurm.grace_seconds, plan.cluster.slurm.accounting),
        "job": plan.job and (plan.job.requeue, plan.job.after),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_summary_of_a_plan_says_what_the_plan_says(kind: str, file_root: Path) -> None:
    for trial in unpack(kind, file_root):
        summary = read_plan_summary(trial / "plan.json")
        assert isinstance(summary, PlanSummary)
        assert shown(summary) == shown(read_plan(trial / "plan.json"))


def test_the_summary_of_a_plan_for_slurm(ended: TrialFiles) -> None:
    plan = json.loads(ended.plan.read_text())
    plan["job"] = {"layout": "single", "components": [], "requeue": True}
    plan["cluster"]["etcd"]["user"] = "me"
    ended.plan.write_text(json.dumps(plan))
    assert read_plan_summary(ended.plan) is None  # only the whole plan has a default for "after"
    assert shown(TrialReader(ended).summary) == shown(read_plan(ended.plan))
    plan["job"]["after"] = "a/b:ok"
    ended.plan.write_text(json.dumps(plan))
    summary = read_plan_summary(ended.plan)
    assert shown(summary) == shown(read_plan(ended.plan))
    assert summary is not None
    assert summary.cluster.etcd.user == "me"
    phase, site = summary.phases[0], summary.cluster
    for part in (summary, phase, phase.scheduling, site, site.slurm, summary.job,
                 phase.scheduling.master_worker):  # fmt: skip
        with pytest.raises(AttributeError):  # what was read is not changed
            setattr(part, part.__struct_fields__[0], None)


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 3}', '{"version": 1}', "[" * 100_000, ""])
def test_a_plan_that_can_not_be_read_is_one_note(text: str, ended: TrialFiles) -> None:
    ended.plan.write_text(text)
    readers = TrialReader(ended), TrialReader(ended)
    assert readers[0].plan is None
    assert readers[1].summary is None
    assert readers[0].notes == readers[1].notes
    assert len(readers[0].notes) == 1
    assert "can't be read" in readers[1].unread


@pytest.mark.parametrize("kind", KINDS)
def test_status_and_report_agree_on_the_state(kind: str, file_root: Path) -> None:
    for trial in unpack(kind, file_root):
        assert trial_view(TrialFiles(trial)).state is read_trial_report(trial).state


def test_a_damaged_attempt_record_does_not_hide_how_the_attempt_ended(ended: TrialFiles) -> None:
    record = ended.all_attempts()[-1].record
    record.unlink()
    assert trial_view(ended).state is read_trial_report(ended.root).state is State.COMPLETED
    record.write_text("nul")
    view, report = trial_view(ended), read_trial_report(ended.root)
    assert view.state is report.state is State.COMPLETED
    assert view.attempt == 1
    assert any("attempt.json" in note for note in view.notes)
    assert any("attempt.json" in note for note in report.notes)


def test_an_older_attempt_does_not_stand_in_for_a_newer_one(ended: TrialFiles) -> None:
    newer = ended.attempt(2)
    newer.root.mkdir()
    newer.record.write_text("nul")
    assert trial_view(ended).state is read_trial_report(ended.root).state is State.UNKNOWN


def test_before_its_record_is_written_an_attempt_has_no_supervisor(ended: TrialFiles) -> None:
    ended.attempt(2).root.mkdir()
    last = TrialReader(ended).last_attempt()
    assert last is not None
    assert (last.record, last.supervisor, last.marker) == (None, Liveness.NONE, None)


@pytest.mark.timeout(60)
def test_pipes_are_noted_and_not_waited_for(ended: TrialFiles) -> None:
    attempt = ended.all_attempts()[-1]
    log = attempt.log("master_worker/0")
    phase = ended.phase(ended.root)
    phase.evaluations.touch()
    attempt.restarts.touch()
    records = (ended.record, ended.submission, attempt.exit)
    for path in (*records, log, phase.evaluations, attempt.restarts):
        pipe(path)
    pipe(phase.metrics.resolve())
    view, report = trial_view(ended), read_trial_report(ended.root)
    for notes in (view.notes, report.notes):
        assert sum("no regular file" in note for note in notes) >= 2
    assert last_lines(log) == []
    assert "</html>" in report_html(report)


@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_the_plan(ended: TrialFiles) -> None:
    pipe(ended.plan)
    golden.check(trial_view(ended).notes)
    golden.check(read_trial_report(ended.root).notes)


def test_a_record_larger_than_any_is_not_read(
    ended: TrialFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = ended.record.stat().st_size
    monkeypatch.setattr("realsys.trial.trial_reader.MAX_RECORD_BYTES", size)
    assert TrialReader(ended).record(TrialRecord, ended.record) is not None
    monkeypatch.setattr("realsys.trial.trial_reader.MAX_RECORD_BYTES", size - 1)
    reader = TrialReader(ended)
    assert reader.record(TrialRecord, ended.record) is None
    assert [f"{size - 1:,} bytes" in note for note in reader.notes] == [True]
