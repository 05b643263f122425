"""After a node failed: who says so, what a resume offers, and how a requeued job comes to take others."""

from __future__ import annotations

import logging
from dataclasses import replace

import golden
import pytest
from stand_in_slurm import calls, make_plan, program
from test_slurm_trial_state import ATTEMPT, job, running

from launcher.submit.node_exclusion import exclusion_hints, with_excluded_nodes
from launcher.trials.trial_view import view_of
from realsys.api.cluster import PartitionSpec
from realsys.api.errors import ConfigError
from realsys.slurm.lost_nodes import lost_nodes, without_lost
from realsys.supervisor import signals
from realsys.supervisor.signals import leave_out
from realsys.trial.records import ExitMarker, Failure, Result, TrialFiles, write_record
from realsys.trial.trial_state import JobState, State

SILENT = "its lease has ended: its node is lost or cut off, or it hangs"


def failure(worker: str, host: str, why: str) -> Failure:
    return Failure(worker=worker, host=host, pid=1, why=why, at=1.0)


def marker(*failures: Failure) -> ExitMarker:
    first, *others = failures
    return ExitMarker(
        result=Result.FAILED,
        attempt=1,
        ended_at=2.0,
        phase="main",
        first_failure=first,
        other_failures=tuple(others),
    )


LOST_N2 = marker(
    failure("model_worker/0", "n1", "RuntimeError: a peer has gone"),
    failure("model_worker/1", "n2.site.edu", SILENT),
)


def test_a_node_is_lost_when_its_workers_fell_silent_and_not_when_one_failed():
    assert lost_nodes(LOST_N2, "n[1-2]") == {"n2": f"model_worker/1 there: {SILENT}"}
    assert lost_nodes(marker(failure("m/0", "n1", "ValueError: no")), "n[1-2]") == {}
    broken = marker(
        failure("m/1", "n2", "RuntimeError: CUDA error: uncorrectable ECC error encountered")
    )
    assert list(lost_nodes(broken, "n[1-2]")) == ["n2"]
    full = marker(failure("m/1", "n2", "torch.OutOfMemoryError: CUDA out of memory"))
    assert lost_nodes(full, "n[1-2]") == {}
    assert lost_nodes(LOST_N2, "") == {}  # on one machine
    assert lost_nodes(LOST_N2, "n[5-6]") == {}
    assert lost_nodes(None, "n[1-2]") == {}


@pytest.mark.parametrize(
    ("excluded", "pinned", "of_partition", "needed", "found"),
    [
        ("", "", 4, 2, "n2"),
        ("n4", "", 4, 2, "n[2,4]"),
        ("n2", "", 4, 2, "n2"),
        ("", "", 2, 2, None),  # nothing else is there
        ("n4", "", 4, 3, None),
        ("", "n[1-2]", 4, 2, None),  # it was told to run there
        ("", "n[3-4]", 4, 2, "n2"),
    ],
)
def test_a_job_does_without_a_lost_node_if_it_can(excluded, pinned, of_partition, needed, found):
    told = without_lost(
        ["n2"], excluded=excluded, pinned=pinned, of_partition=of_partition, needed=needed
    )
    assert told == found


# ---- a requeue takes the others ---------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(signals, "TRY_EVERY_S", 0.01)
    caplog.set_level(logging.INFO, logger=signals.__name__)
    program(tmp_path / "bin", "sinfo", "echo 3; echo 1")
    return tmp_path / "bin"


def test_a_requeued_job_is_told_to_leave_the_lost_node_out(slurm, caplog):
    """Slurm refuses while the job runs, and takes it once the job is on its way back to the queue."""
    program(
        slurm,
        "scontrol",
        'if [ "$1" = show ]; then\n'
        '  echo "JobId=7 Partition=main ReqNodeList=(null) ExcNodeList=n4 NodeList=n[1-2]"\n'
        f"elif [ ! -e {slurm}/asked ]; then\n"
        f"  touch {slurm}/asked; echo 'Job is no longer pending execution' >&2; exit 1\n"
        "fi",
    )
    leave_out("7", {"n2": "model_worker/1 there: silent"}, 2).join(240)
    told = calls(slurm, "scontrol")
    golden.check(told[0])
    assert told[1:] == ["update JobId=7 ExcNodeList=n[2,4]"] * 2
    golden.check(caplog.messages)


def test_a_job_that_needs_the_lost_node_keeps_it(slurm, caplog):
    program(
        slurm, "scontrol", 'echo "JobId=7 Partition=main ReqNodeList=n[1-2] ExcNodeList=(null)"'
    )
    leave_out("7", {"n2": "silent"}, 2).join(240)
    assert calls(slurm, "scontrol") == ["show job --oneliner 7"]
    assert "reason=job needs them" in caplog.text


def test_a_slurm_that_does_not_answer_keeps_nobody(slurm, caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    leave_out("7", {"n2": "silent"}, 2).join(240)
    golden.check(caplog.text)


# ---- a resume offers them -----------------------------------------------------------------------


def test_status_and_explain_offer_the_others():
    view = view_of(running(exit=LOST_N2, job=job(JobState.FAILED)))
    assert view.state is State.FAILED
    golden.check(view)


def test_a_resume_offers_the_others_with_the_evidence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    program(
        tmp_path / "bin", "sinfo", "echo 'n1|drained|gpu 3 fell off the bus|2026-11-23T03:05:20'"
    )
    files = TrialFiles(tmp_path)
    assert list(exclusion_hints(files, "t/r")) == []
    attempt = files.attempt(1)
    attempt.root.mkdir(parents=True)
    write_record(attempt.record, ATTEMPT)
    write_record(attempt.exit, LOST_N2)
    (told,) = exclusion_hints(files, "t/r")
    golden.check(told)
    write_record(attempt.record, replace(ATTEMPT, nodes=""))  # on one machine
    assert list(exclusion_hints(files, "t/r")) == []


def plan_of(tmp_path, *, nodelist=None, exclude=None, nodes="n[1-4]"):
    plan = make_plan(tmp_path, partitions={"p": PartitionSpec(nodes=4, nodelist=nodes)})
    parts = tuple(
        replace(c, partition="p", nodelist=nodelist, exclude=exclude) for c in plan.job.components
    )
    return replace(plan, job=replace(plan.job, components=parts))


def test_a_resume_leaves_nodes_out_of_its_job(tmp_path):
    (found,) = with_excluded_nodes(plan_of(tmp_path, exclude="n4"), "n2").job.components
    assert (found.exclude, found.nodelist) == ("n[2,4]", None)
    (found,) = with_excluded_nodes(plan_of(tmp_path, nodelist="n[1-3]"), "n2").job.components
    assert (found.exclude, found.nodelist) == ("n2", "n[1,3]")


@pytest.mark.parametrize(
    ("plan", "hosts"),
    [
        ({"exclude": "n4"}, "n[2-3]"),
        ({"nodelist": "n[1-2]"}, "n2"),
        ({}, "n9"),
        ({}, "n[2-1]"),
    ],
)
def test_what_a_resume_can_not_leave_out(tmp_path, plan, hosts):
    with golden.raises(ConfigError):
        with_excluded_nodes(plan_of(tmp_path, **plan), hosts)
    with golden.raises(ConfigError):
        with_excluded_nodes(replace(plan_of(tmp_path), job=None), "n2")
