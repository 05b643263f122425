"""What an audit reads from a trial's folder, and how the verb ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from stand_in_slurm import make_plan, write_plan

from experiments.ppo_math import ppo_math, ppo_math_async
from launcher.audit.audit_checks import audit_run
from launcher.audit.audit_reader import AuditReader
from launcher.audit.audited_run import AuditedRun, FindingKind, TicketRecord, TrainedStep
from launcher.audit.ticket_fates import TicketIndex, TicketState, ticket_fates
from launcher.cli import command_line
from realsys.api.worker_configs import CurriculumControl
from realsys.data.rollout_dump import DumpWriter
from realsys.data.sequence_sample import SequenceSample
from realsys.trial.dump_records import SUFFIX, SampledVersions, dump_records, sampled_versions
from realsys.trial.episode_records import EpisodeState
from realsys.trial.records import (
    RUN_FILE,
    ExitMarker,
    PlanChange,
    Result,
    Resumed,
    TrialFiles,
    TrialRecord,
    write_record,
)

Row = Mapping[str, Any]


def write_rows(path: Path, *rows: Row) -> None:
    """Writes a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def granted(id: str, tries: int = 0) -> Row:
    return {"state": "granted", "id": id, "tries": tries}


def delivered(id: str, tries: int = 0, version: int = 0) -> Row:
    ends = {"version": version, "oldest": 0, "newest": 0, "tokens": 2, "sequences": [[2]]}
    return {"state": "delivered", "id": id, "tries": tries, **ends}


def started(pid: int) -> Row:
    return {"state": "started", "pid": pid}


@pytest.fixture
def files(tmp_path: Path) -> TrialFiles:
    """A trial of one step of two questions: one worker was killed, the run is completed."""
    made = TrialFiles(tmp_path)
    made.plan.write_text("{}")
    attempt = made.attempt(1)
    write_record(attempt.resumed("main"), Resumed(attempt=1, phase="main", step=0))
    end = ExitMarker(result=Result.COMPLETED, attempt=1, ended_at=9.0, phase="main", step=1)
    write_record(attempt.exit, end)
    rows = made.phase(made.root).rows_of(1)
    write_rows(rows.ledger, {"step": 1, "ids": ["0-0", "0-1"], "samples": ["0-0", "0-1.1"]})
    write_rows(
        rows.episodes / "0.jsonl",
        *(started(7), granted("0-0"), granted("0-1"), delivered("0-0"), started(8)),
        *(granted("0-1", 1), delivered("0-1", 1)),
    )
    return made


def dump_sample(files: TrialFiles, name: str, versions: list[int]) -> Path:
    """Dumps a datapoint as rollout worker 0 of attempt 1 does."""
    path = files.phase(files.root).rollout_dump / f"0001-0000-7{SUFFIX}"
    sample = SequenceSample.from_tensors(
        [name],
        {"packed_input_ids": [[len(versions)]], "packed_versions": [[len(versions)]]},
        {
            "packed_input_ids": torch.zeros(len(versions), dtype=torch.int64),
            "packed_versions": torch.tensor(versions, dtype=torch.int64),
        },
    )
    with DumpWriter(path) as writer:
        writer.append(sample)
    return path


def test_tickets_are_read_with_their_places(files: TrialFiles) -> None:
    run = AuditReader(files).read()
    assert [(t.sample, t.granted, t.ended, t.is_lost) for t in run.tickets] == [
        ("0-0", "rows/0001/episodes/0.jsonl:2", "rows/0001/episodes/0.jsonl:4", False),
        ("0-1", "rows/0001/episodes/0.jsonl:3", "", True),
        ("0-1.1", "rows/0001/episodes/0.jsonl:6", "rows/0001/episodes/0.jsonl:7", False),
    ]
    assert (run.limits, run.is_completed, run.is_live) == ({1: None}, True, False)
    (row,) = run.steps
    assert (row.samples, row.where) == (("0-0", "0-1.1"), "rows/0001/ledger.jsonl:1")
    assert audit_run(run).findings == ()


def test_each_kind_of_line_is_read_whole(files: TrialFiles) -> None:
    """Whatever a line may say or leave out of a ticket's end."""
    path = files.phase(files.root).rows_of(1).episodes / "0.jsonl"
    tries = [{"id": "0-0", "tries": n} for n in range(6)]
    write_rows(
        path,
        started(7),
        *(granted("0-0", n) for n in (0, 1, 2, 3)),
        {"state": "delivered", **tries[0], "version": 3, "oldest": 1, "newest": 2, "tokens": 5},
        {"state": "filtered", **tries[1], "closed": True, "version": 0, "why": "below"},
        {"state": "refused", **tries[2], "closed": False, "why": "superseded"},
        {"state": "failed", **tries[4]},
        granted("0-0", 3),
        granted("0-0", 5),
        started(8),
    )
    (files.root / "rows/0001/episodes/10.jsonl").write_text("")
    ticket = TicketRecord(attempt=1, worker="rollout_worker/0", id="0-0", try_number=0)
    where = "rows/0001/episodes/0.jsonl:"
    run = AuditReader(files).read()
    assert run.tickets == (
        replace(
            ticket,
            granted=f"{where}2",
            ended=f"{where}6",
            end=EpisodeState.DELIVERED,
            version=3,
            oldest=1,
            num_tokens=5,
        ),
        replace(
            ticket,
            try_number=1,
            granted=f"{where}3",
            ended=f"{where}7",
            end=EpisodeState.FILTERED,
            why="below",
            closed=True,
            version=0,
        ),
        replace(
            ticket,
            try_number=2,
            granted=f"{where}4",
            ended=f"{where}8",
            end=EpisodeState.REFUSED,
            why="superseded",
        ),
        replace(ticket, try_number=4, ended=f"{where}9", end=EpisodeState.FAILED),
        replace(ticket, try_number=3, granted=f"{where}5"),  # granted twice
        replace(ticket, try_number=3, granted=f"{where}10", is_lost=True),
        replace(ticket, try_number=5, granted=f"{where}11", is_lost=True),
    )
    assert run.unreadable == ()


def test_all_that_an_audit_judges_is_read(files: TrialFiles) -> None:
    dump = files.phase(files.root).rollout_dump
    dump.mkdir(parents=True)
    (dump / RUN_FILE).write_text('{"dataset_size": 7}')
    rows = files.phase(files.root).rows_of(1)
    write_rows(rows.ledger, {"step": 1, "ids": ["0-0"], "filtered": ["0-5"]})
    write_rows(rows.episodes / "0.jsonl", granted("0-0"), delivered("0-0"))
    where = "rows/0001/episodes/0.jsonl"
    reader = AuditReader(files)
    assert reader.read() == AuditedRun(
        limits={1: None},
        tickets=(
            TicketRecord(
                attempt=1,
                worker="rollout_worker/0",
                id="0-0",
                try_number=0,
                granted=f"{where}:1",
                ended=f"{where}:2",
                end=EpisodeState.DELIVERED,
                version=0,
                oldest=0,
                num_tokens=2,
            ),
        ),
        steps=(
            TrainedStep(
                step=1,
                ids=("0-0",),
                samples=("0-0",),
                filtered=("0-5",),
                where="rows/0001/ledger.jsonl:1",
            ),
        ),
        has_tickets=True,
        complete_rows=frozenset({1}),
        max_staleness=None,
        drops_stale=True,  # what a policy that is not known may do
        dataset_size=7,
        in_epochs=True,
        in_order=False,
        is_shortened=False,
        is_completed=True,
        is_live=False,
    )
    assert len(reader.notes) == 2  # its plan can't be read, and what is not checked therefore


@pytest.mark.parametrize("size", ['{"dataset_size": "many"}', "[7]", "{}", "7", '{"datas'])
def test_a_size_that_is_not_recorded_is_not_known(files: TrialFiles, size: str) -> None:
    dump = files.phase(files.root).rollout_dump
    dump.mkdir(parents=True)
    (dump / RUN_FILE).write_text(size)
    assert AuditReader(files).read().dataset_size is None


def test_an_open_ticket_of_a_live_run_is_running(files: TrialFiles) -> None:
    """Joining and being refused are no ends of a worker."""
    files.attempt(1).exit.unlink()
    write_rows(files.phase(files.root).rows_of(1).episodes / "1.jsonl", started(21), granted("0-2"))
    worker = "rollout_worker/1"
    write_rows(
        files.attempt(1).scaling,
        {"event": "joined", "worker": worker},
        {"event": "refused", "worker": worker},
    )
    run = AuditReader(files).read()
    assert (run.is_live, run.is_completed) == (True, False)
    assert ticket_fates(TicketIndex(run))[-1].state is TicketState.RUNNING


def test_a_worker_that_has_not_come_back_is_lost(files: TrialFiles) -> None:
    path = files.phase(files.root).rows_of(1).episodes / "1.jsonl"
    write_rows(path, started(21), granted("0-2"))
    assert not AuditReader(files).read().tickets[-1].is_lost
    write_rows(files.attempt(1).restarts, {"worker": "rollout_worker/1", "pid": 20})
    assert not AuditReader(files).read().tickets[-1].is_lost  # that was the process before
    write_rows(files.attempt(1).restarts, {"worker": "rollout_worker/1", "pid": 21})
    assert AuditReader(files).read().tickets[-1].is_lost
    files.attempt(1).restarts.unlink()
    write_rows(files.attempt(1).scaling, {"event": "left", "worker": "rollout_worker/1"})
    assert AuditReader(files).read().tickets[-1].is_lost


def test_older_attempts_count_up_to_their_checkpoint(files: TrialFiles) -> None:
    second = files.attempt(2)
    write_record(second.resumed("main"), Resumed(attempt=2, phase="main", step=1, of_attempt=1))
    run = AuditReader(files).read()
    assert run.limits == {2: None, 1: 1}
    assert (run.trainer(1), run.trainer(2)) == (1, 2)
    assert (run.is_completed, run.is_live) == (False, True), "as the newest is"


def test_versions_are_read_from_the_dump(files: TrialFiles) -> None:
    path = dump_sample(files, "0-0", [-1, -1, 3, 2, -1, 3])
    (record,) = dump_records(path)
    assert sampled_versions(path, record) == SampledVersions(oldest=2, newest=3, num_tokens=3)
    dump_sample(files, "0-9", [0])  # was not trained
    assert AuditReader(files).read().dumped == {
        (1, "0", "0-0"): SampledVersions(oldest=2, newest=3, num_tokens=3)
    }


def test_a_torn_last_line_is_left_out_and_a_damaged_one_is_found(files: TrialFiles) -> None:
    path = files.phase(files.root).rows_of(1).episodes / "0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"state": "gran')
    assert audit_run(AuditReader(files).read()).findings == ()
    path.write_bytes(whole + b'{"state": "gran\n{"state": "granted"}\n')
    found = audit_run(AuditReader(files).read()).findings
    assert [(f.kind, f.where) for f in found] == [
        (FindingKind.UNREADABLE, "rows/0001/episodes/0.jsonl:8"),
        (FindingKind.UNREADABLE, "rows/0001/episodes/0.jsonl:9"),
    ]


def test_lines_of_the_ledger_that_say_no_step_are_found_and_left_out(files: TrialFiles) -> None:
    ledger = files.phase(files.root).rows_of(1).ledger
    write_rows(
        ledger,
        {"step": 1},
        {"ids": ["0-0"]},
        {"step": "1", "ids": ["0-0"]},
        {"step": 1, "ids": "0-0"},
        {"step": 1, "ids": ["0-0", "0-1"], "samples": ["0-0"]},
        {"step": 1, "ids": ["0-0", "0-1"], "samples": ["0-0", "0-1.1"]},
    )
    run = AuditReader(files).read()
    assert [row.where for row in run.steps] == ["rows/0001/ledger.jsonl:6"]
    assert [f.where for f in audit_run(run).findings] == [
        f"rows/0001/ledger.jsonl:{number}" for number in range(1, 6)
    ]


def test_a_damaged_dump_is_found(files: TrialFiles) -> None:
    path = dump_sample(files, "0-0", [-1] * 50 + [3])
    data = path.read_bytes()
    path.write_bytes(data[:-12] + b"\0" * 12)
    (finding,) = audit_run(AuditReader(files).read()).findings
    assert finding.kind is FindingKind.UNREADABLE
    golden.check(finding)


def test_a_trial_that_wrote_ends_only_is_audited_by_them(files: TrialFiles) -> None:
    rows = files.phase(files.root).rows_of(1)
    (rows.episodes / "0.jsonl").unlink()
    rows.episodes.rmdir()
    kept = {"outcome": "kept", "oldest": 0, "newest": 0, "answer_lengths": [2, 3]}
    write_rows(
        rows.rollouts / "0.jsonl",
        *({"id": "0-0", "tries": 0, **kept}, {"id": "0-1", "tries": 1, **kept}),
    )
    reader = AuditReader(files)
    run = reader.read()
    assert [(t.sample, t.num_tokens) for t in run.tickets] == [("0-0", 5), ("0-1.1", 5)]
    assert run.complete_rows == frozenset()
    assert audit_run(run).findings == ()
    golden.check(reader.notes)


def test_the_verb_is_0_for_a_clean_trial_and_1_with_findings(
    files: TrialFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.run(["audit", str(files.root)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "clean"  # as far as it goes without a plan, which it says
    assert "trained    2" in out
    ledger = files.phase(files.root).rows_of(1).ledger
    write_rows(ledger, {"step": 1, "ids": ["0-0", "0-0"]})
    assert command_line.run(["audit", str(files.root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    golden.line(lines, "datapoint")
    assert "    where: rows/0001/ledger.jsonl:1 and rows/0001/ledger.jsonl:1" in lines
    assert command_line.run(["audit", str(files.root), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["clean"], document["tickets"]["trained"]) == (False, 1)
    assert {finding["kind"] for finding in document["findings"]} == {"trained twice", "missing"}


# ---- what the plan says of the run ----------------------------------------------------------------

RULES = ("has_tickets", "max_staleness", "drops_stale", "in_order", "in_epochs")
CURRICULUM = CurriculumControl(weights={"math": 1.0}, floor=0.1, steps=4)


@pytest.mark.parametrize(
    ("rollout", "curriculum", "rules"),
    [
        (None, None, (False, None, False, True, True)),
        ({"policy": "wait", "max_staleness": 0}, None, (True, 0, False, True, True)),
        ({"policy": "window", "max_staleness": 2}, None, (True, 2, False, False, True)),
        ({"policy": "drop", "max_staleness": 3}, CURRICULUM, (True, 3, True, False, False)),
        # Nothing is trained: what was made is never too old.
        ({"policy": "wait", "trains": False}, None, (True, None, False, True, True)),
    ],
    ids=["no rollout workers", "wait", "window", "drop and curriculum", "trains nothing"],
)
def test_the_plan_says_what_the_run_promised(
    tmp_path: Path,
    rollout: Mapping[str, Any] | None,
    curriculum: CurriculumControl | None,
    rules: tuple[Any, ...],
) -> None:
    plan = make_plan(tmp_path)
    (phase,) = plan.phases
    experiment = ppo_math() if rollout is None else ppo_math_async()
    config = experiment.initial_setup().lazy_init()
    if rollout is not None:
        assert config.rollout is not None
        config = replace(config, rollout=replace(config.rollout, **rollout), curriculum=curriculum)
    config = config.set_worker_information("ppo-math", "run1")
    files = write_plan(replace(plan, phases=(replace(phase, config=config),)))
    write_record(files.attempt(1).resumed("main"), Resumed(attempt=1, phase="main", step=0))
    reader = AuditReader(files)
    run = reader.read()
    assert dict(zip(RULES, rules, strict=True)) == {name: getattr(run, name) for name in RULES}
    assert run.complete_rows == frozenset({1}), "without any file nothing was granted"
    assert reader.notes == []


def test_a_trial_that_was_never_started_is_neither_live_nor_completed(tmp_path: Path) -> None:
    files = TrialFiles(tmp_path)
    files.plan.write_text("{}")
    run = AuditReader(files).read()
    assert (run.is_completed, run.is_live, run.limits) == (False, False, {})
    assert (run.newest_attempt, run.trainer(1)) == (0, None)
    assert (run.tickets, run.steps, run.unreadable) == ((), (), ())


def test_a_run_whose_length_a_resume_changed_is_known(files: TrialFiles) -> None:
    for name, is_shortened in (("algorithm.lr", False), ("exp_ctrl.benchmark_steps", True)):
        change = PlanChange(from_attempt=2, plan_hash="h", at=1.0, settings={name: (1, 2)})
        record = TrialRecord(
            experiment_name="ppo-math",
            trial_name="run1",
            user="ada",
            cluster="local",
            plan_hash="g",
            created_at=0.0,
            launch_host="n1",
            changes=(replace(change, settings={"seed": (1, 2)}), change),
        )
        write_record(files.record, record)
        assert AuditReader(files).read().is_shortened is is_shortened
