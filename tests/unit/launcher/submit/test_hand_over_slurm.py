"""A trial is handed over to Slurm whole or not at all, and who has it is noted down.

sbatch is a script that numbers jobs from 41 and leaves its environment behind.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import socket
import sys
from dataclasses import replace
from pathlib import Path

import golden
import pytest
from stand_in_slurm import SUBMITTED, calls, make_plan, program, queue_row

from launcher.slurm.script import comment
from launcher.submit import dispatch_job as module
from launcher.submit.dispatch_job import Element, cancel_submission, dispatch, dispatch_array
from launcher.submit.executors import slurm_executor
from launcher.submit.submit import submit
from launcher.trials.submission import JobMemory, Submission, read_submission
from realsys.api.errors import ClusterError, TrialError
from realsys.api.plan import JobLayout, LaunchPlan, plan_hash, plan_text
from realsys.supervisor import job_entry
from realsys.trial.records import TrialFiles, write_record
from realsys.worker.environment import read_exports

REFUSED = "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1"
WHY = "Slurm refused the job: Batch job submission failed: Invalid account"


class Site:
    """A plan's trial folder and fake client programs."""

    def __init__(self, root: Path) -> None:
        self.root, self.bin = root, root / "bin"
        self.sbatch()
        program(self.bin, "scancel", "true")
        program(self.bin, "squeue", "true")

    def sbatch(self, *, refuses_from: int = 99) -> None:
        """Numbers jobs from 41; the n-th call is refused."""
        count = f'n=$(wc -l < "{self.bin}/sbatch.calls")'
        keep = f'env > "{self.bin}/env"; for last; do :; done; cp "$last" "{self.bin}/script.$n"'
        refuse = f"if [ $n -ge {refuses_from} ]; then {REFUSED}; fi"
        program(
            self.bin,
            "sbatch",
            f'{count}; {keep}; {refuse}; echo "$((40 + n))"',
        )

    def trial(self, plan: LaunchPlan) -> TrialFiles:
        files = TrialFiles(Path(plan.trial_dir))
        files.root.mkdir()
        return files

    def script(self, number: int) -> str:
        return (self.bin / f"script.{number}").read_text()

    def sbatch_environment(self) -> dict[str, str]:
        lines = (self.bin / "env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return Site(tmp_path)


def test_a_hand_over_is_one_job_and_is_noted(site):
    plan = make_plan(site.root)
    files = site.trial(plan)
    found = dispatch(files, plan, "hash")
    assert found == Submission(
        job_id="41",
        scheduler="slurm",
        job_ids=("41",),
        host=socket.gethostname(),
        after_attempt=0,
        at=found.at,
        cluster="",
        job=JobMemory(comment=comment(plan, 1)),
    )
    assert read_submission(files) == found
    (call,) = calls(site.bin, "sbatch")
    script = call.split()[-1]
    assert call == (
        f"--parsable --output={files.submitit}/%j_0_log.out --error={files.submitit}/%j_0_log.err "
        f"--chdir={files.submitit} {script}"
    )
    assert sorted(path.name for path in files.submitit.iterdir()) == [
        "41_submission.sh",
        "submission.json",
    ]
    assert (files.submitit / "41_submission.sh").read_text() == site.script(1)
    python = shlex.quote(sys.executable)
    last = site.script(1).splitlines()[-1]
    called = "-u -P -m realsys.supervisor.job_entry realsys.supervisor.supervisor_main:supervise"
    assert last == f"exec {python} {called} {shlex.quote(str(files.root))} hash"


def test_a_resume_notes_the_attempt_that_it_comes_after(site):
    plan = make_plan(site.root)
    files = site.trial(plan)
    for number in (1, 2):
        files.attempt(number).root.mkdir(parents=True)
    assert dispatch(files, plan, "hash").after_attempt == 2


def test_a_split_trial_is_a_job_for_each_component(site):
    plan = make_plan(site.root, layout=JobLayout.SPLIT)
    files = site.trial(plan)
    found = dispatch(files, plan, "hash")
    assert (found.job_id, found.job_ids) == ("41", ("41", "42"))
    assert "#SBATCH --nodes=1" in site.script(1).splitlines()
    assert "#SBATCH --nodes=2" in site.script(2).splitlines()


def test_what_each_job_of_a_split_trial_calls_stands_in_its_script(site, monkeypatch):
    plan = make_plan(site.root, layout=JobLayout.SPLIT)
    files = site.trial(plan)
    files.attempt(1).root.mkdir(parents=True)
    dispatch(files, plan, "hash")
    called = [shlex.split(site.script(n).splitlines()[-1])[6:] for n in (1, 2)]
    assert called == [
        ["realsys.supervisor.supervisor_main:supervise", str(files.root), "hash"],
        ["realsys.supervisor.component_agent:run_component", str(files.root), "hash", "1", "2"],
    ]
    assert not list(files.root.rglob("*.pkl"))
    monkeypatch.setattr(sys, "argv", ["entry", *called[1]])
    args = job_entry._parse()
    assert (args.trial, args.plan_hash, args.numbers) == (str(files.root), "hash", [1, 2])


def test_a_first_job_that_is_left_is_named(site, capsys):
    site.sbatch(refuses_from=2)
    program(site.bin, "scancel", "echo 'scancel: error: no' >&2; exit 1")
    plan = make_plan(site.root, layout=JobLayout.SPLIT)
    with pytest.raises(ClusterError):
        dispatch(site.trial(plan), plan, "hash")
    assert "scancel 41" in capsys.readouterr().err


def test_a_refusal_of_the_second_job_cancels_the_first(site):
    site.sbatch(refuses_from=2)
    plan = make_plan(site.root, layout=JobLayout.SPLIT)
    files = site.trial(plan)
    with pytest.raises(ClusterError) as caught:
        dispatch(files, plan, "hash")
    assert caught.value.what == WHY
    assert calls(site.bin, "scancel") == ["41"]
    assert read_submission(files) is None


def test_a_cancellation_that_fails_too_does_not_hide_the_refusal(site):
    site.sbatch(refuses_from=2)
    program(site.bin, "scancel", "echo 'scancel: error: no' >&2; exit 1")
    plan = make_plan(site.root, layout=JobLayout.SPLIT)
    with pytest.raises(ClusterError) as caught:
        dispatch(site.trial(plan), plan, "hash")
    assert caught.value.what == WHY


def test_a_refused_launch_leaves_no_folder(site):
    site.sbatch(refuses_from=1)
    plan = make_plan(site.root)
    with golden.raises(ClusterError) as caught:
        submit(plan)
    assert caught.value.what == WHY
    assert caught.value.where == f"sbatch of {plan.trial_dir}"
    assert not Path(plan.trial_dir).exists()
    assert calls(site.bin, "scancel") == []


def test_a_login_node_without_slurm_leaves_no_folder(site, monkeypatch):
    plan = make_plan(site.root)
    monkeypatch.setenv("PATH", str(site.root / "nothing"))
    with golden.raises(ClusterError):
        submit(plan)
    assert not Path(plan.trial_dir).exists()


def test_a_job_that_can_not_be_noted_down_is_taken_back(site, monkeypatch):
    def full(path: Path, record: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    plan = make_plan(site.root)
    files = site.trial(plan)
    monkeypatch.setattr(module, "write_record", full)
    with golden.raises(OSError):
        dispatch(files, plan, "hash")
    assert calls(site.bin, "scancel") == ["41"]


def test_what_was_handed_over_is_taken_back_with_all_its_jobs(site):
    plan = make_plan(site.root, layout=JobLayout.SPLIT)
    cancel_submission(dispatch(site.trial(plan), plan, "hash"))
    assert calls(site.bin, "scancel") == ["41 42"]


def test_a_users_own_options_do_not_reach_sbatch(site, monkeypatch):
    for name in ("SBATCH_PARTITION", "SBATCH_EXPORT", "SLURM_JOB_ID", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    plan = make_plan(site.root)
    dispatch(site.trial(plan), plan, "hash")
    seen = site.sbatch_environment()
    assert {name: seen[name] for name in seen if name.startswith(("SBATCH_", "SLURM_"))} == {
        "SLURM_CONF": "/etc/slurm/slurm.conf"
    }


def test_a_launch_leaves_the_jobs_environment_in_files_of_its_owner_alone(site, monkeypatch):
    monkeypatch.setenv("API_KEY", "s3cret")
    plan = make_plan(site.root, secrets=("API_KEY",), env_vars={"SITE": "x"})
    files = submit(plan)
    assert read_submission(files).job_ids == ("41",)
    for path in (files.host_environment, files.task_environment):
        assert path.stat().st_mode & 0o777 == 0o600
    task = read_exports(files.task_environment)
    assert (task["API_KEY"], task["SITE"]) == ("s3cret", "x")
    assert "s3cret" not in site.script(1) + files.plan.read_text()


# ---- arrays ----------------------------------------------------------------------------------------


def elements(site: Site) -> list[Element]:
    found = []
    for index in range(2):
        plan = make_plan(site.root)
        folder = site.root / f"trial{index}"
        plan = replace(plan, trial_name=f"trial{index}", trial_dir=str(folder))
        files = site.trial(plan)
        hash_of_plan = plan_hash(plan_text(plan))
        found.append(Element(index=index, files=files, plan=plan, plan_hash=hash_of_plan))
    return found


def test_an_array_is_one_job_and_each_trial_notes_its_element(site, monkeypatch):
    both = elements(site)
    found = dispatch_array(both, name="sweep1", array="0-1%1")
    folder = both[0].files.submitit
    assert [(s.job_id, s.job_ids, s.folder) for s in found] == [
        ("41_0", ("41_0",), ""),
        ("41_1", ("41_1",), str(folder)),
    ]
    assert [read_submission(element.files) for element in both] == found
    assert "#SBATCH --array=0-1%1" in site.script(1).splitlines()
    assert len(calls(site.bin, "sbatch")) == 1
    assert not list(folder.glob("*.pkl"))
    listed = (folder / "elements.json").read_bytes()
    assert (folder / "elements.json").stat().st_mode & 0o777 == 0o600
    last = shlex.split(site.script(1).splitlines()[-1])
    sha256 = hashlib.sha256(listed).hexdigest()
    assert last[-2:] == [f"--elements={folder}/elements.json", f"--sha256={sha256}"]
    monkeypatch.setattr(sys, "argv", last[5:])
    args = job_entry._parse()
    assert (args.function, args.trial) == ("realsys.supervisor.supervisor_main:supervise", None)
    assert (args.elements, args.sha256) == (folder / "elements.json", sha256)
    for one in both:
        mine = {"SLURM_ARRAY_TASK_ID": str(one.index)}
        assert job_entry.element(listed, sha256, mine) == (str(one.files.root), one.plan_hash)
    with golden.raises(TrialError):
        job_entry.element(
            listed.replace(b"trial1", b"other1"), sha256, {"SLURM_ARRAY_TASK_ID": "1"}
        )


def test_a_refused_array_leaves_nothing_behind(site):
    site.sbatch(refuses_from=1)
    both = elements(site)
    with pytest.raises(ClusterError) as caught:
        dispatch_array(both, name="sweep1", array="0-1")
    assert caught.value.what == WHY
    assert list(both[0].files.submitit.iterdir()) == []
    assert [read_submission(element.files) for element in both] == [None, None]


@pytest.mark.parametrize("is_refused", [False, True])
def test_an_array_that_can_not_be_noted_down_is_cancelled(site, monkeypatch, capsys, is_refused):
    def write(path: Path, record: object) -> None:
        if path.name == "array.json":
            raise OSError(28, "No space left on device", str(path))
        write_record(path, record)

    monkeypatch.setattr(module, "write_record", write)
    both = elements(site)
    if is_refused:
        program(site.bin, "scancel", "echo 'scancel: error: no' >&2; exit 1")
    with golden.raises(OSError):
        dispatch_array(both, name="sweep1", array="0-1")
    assert calls(site.bin, "scancel") == ["41"]
    assert not any(element.files.submission.exists() for element in both)
    assert ("scancel 41" in capsys.readouterr().err) is is_refused


def test_an_element_is_known_before_it_can_run(site):
    """Slurm starts it within milliseconds; a thousand notes written after sbatch would take seconds."""
    both = elements(site)
    notes = " ".join(f'"{element.files.submission}"' for element in both)
    program(site.bin, "sbatch", f"cat {notes} >{site.bin}/seen && echo 'Submitted batch job 41'")
    dispatch_array(both, name="sweep1", array="0-1")
    assert (site.bin / "seen").read_text().count('"index"') == 2
    (both[0].files.submitit / "array.json").unlink()  # as while sbatch has not answered
    assert [read_submission(element.files) for element in both] == [None, None]


# ---- an sbatch that hears no answer ------------------------------------------------------------------


AWAY = "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1"


def unanswered(site: Site, squeue: str) -> None:
    """sbatch keeps the script's name and hears nothing; squeue says ``$script`` of it."""
    program(site.bin, "sbatch", f'for last; do :; done; echo "$last" >{site.bin}/name; {AWAY}')
    program(site.bin, "squeue", f"script=$(cat {site.bin}/name); {squeue}")


def test_a_job_that_slurm_took_without_an_answer_is_adopted(site):
    unanswered(site, 'echo "40|/else/where.sh"; echo "43|$script"')
    plan = make_plan(site.root)
    files = site.trial(plan)
    assert dispatch(files, plan, "hash").job_id == "43"
    assert read_submission(files).job_ids == ("43",)
    assert (files.submitit / "43_submission.sh").exists()


def test_a_job_that_slurm_did_not_take_is_refused(site):
    unanswered(site, 'echo "40|/else/where.sh"')
    plan = make_plan(site.root)
    files = site.trial(plan)
    with golden.raises(ClusterError):
        dispatch(files, plan, "hash")
    assert list(files.submitit.iterdir()) == []


def test_when_nobody_can_say_whether_slurm_took_it_the_user_is_told_to_look(site, monkeypatch):
    monkeypatch.setattr(slurm_executor, "RECHECK_PAUSES_S", (0.01,))
    unanswered(site, AWAY)
    plan = make_plan(site.root)
    with golden.raises(ClusterError) as caught:
        dispatch(site.trial(plan), plan, "hash")
    assert "scancel" in caught.value.fix
    assert len(calls(site.bin, "squeue")) == 2


# ---- an answer in other words, and Ctrl-C before there is one ----------------------------------------


@pytest.mark.parametrize(
    ("said", "job_id", "cluster"),
    [
        ("41", "41", ""),
        ("41;egret", "41", "egret"),
        ("site: this is job 4 of 100 of your group today\n41", "41", ""),
        ("41;egret\nsee http://site/jobs?id=4", "41", "egret"),
        ("Submitted batch job 41 on cluster egret", "41", "egret"),  # a wrapper dropped --parsable
    ],
)
def test_the_id_is_a_line_of_its_own_and_its_cluster_is_kept(site, said, job_id, cluster):
    program(site.bin, "sbatch", f"printf '%s\\n' {shlex.quote(said)}")
    plan = make_plan(site.root)
    files = site.trial(plan)
    found = dispatch(files, plan, "hash")
    assert (found.job_id, found.cluster) == (job_id, cluster)
    assert (files.submitit / "41_submission.sh").exists()
    cancel_submission(found)
    option = [f"--clusters={cluster}"] if cluster else []
    assert calls(site.bin, "scancel") == [" ".join([*option, "41"])]


@pytest.mark.parametrize("said", ["", "job 4 of today", "4 jobs"])
def test_a_job_whose_id_was_not_printed_is_looked_for_by_its_script(site, said):
    program(
        site.bin, "sbatch", f'for last; do :; done; echo "$last" >{site.bin}/name; echo "{said}"'
    )
    program(site.bin, "squeue", f'echo "43|$(cat {site.bin}/name)"')
    plan = make_plan(site.root)
    assert dispatch(site.trial(plan), plan, "hash").job_id == "43"
    program(site.bin, "squeue", "true")
    with golden.raises(ClusterError):
        dispatch(site.trial(replace(plan, trial_dir=str(site.root / "b"))), plan, "hash")


def test_what_slurm_shows_of_the_job_is_what_is_remembered(site):
    row = queue_row("41", "PENDING", comment="project=a realsys ppo-math/run1 attempt 1")
    program(site.bin, "squeue", f"printf '%s' {shlex.quote(row)}")
    plan = make_plan(site.root)
    files = site.trial(plan)
    found = dispatch(files, plan, "hash")
    assert found.job == JobMemory(
        comment="project=a realsys ppo-math/run1 attempt 1",
        submitted={"41": float(SUBMITTED)},
        cluster_name="lab",
    )
    assert read_submission(files) == found


@pytest.fixture
def interrupts(site: Site) -> None:
    """sbatch sends Ctrl-C to the launch and answers then, as a busy slurmctld does."""
    program(site.bin, "sbatch", f"kill -INT {os.getpid()}; echo 41")


def test_ctrl_c_before_slurm_has_answered_cancels_the_job(site, interrupts, capsys):
    plan = make_plan(site.root)
    with golden.raises(KeyboardInterrupt):
        submit(plan)
    assert calls(site.bin, "scancel") == ["41"]
    assert not Path(plan.trial_dir).exists()
    told = capsys.readouterr().err
    golden.check(told)
    assert "41; cancelled" in told


def test_ctrl_c_in_a_resume_leaves_the_former_submission(site, interrupts):
    plan = make_plan(site.root)
    files = site.trial(plan)
    former = Submission(job_id="9", scheduler="slurm", host="h", after_attempt=0, at=1.0)
    write_record(files.submission, former)
    before = files.submission.read_bytes()
    with golden.raises(KeyboardInterrupt):
        dispatch(files, plan, "hash")
    assert calls(site.bin, "scancel") == ["41"]
    assert files.submission.read_bytes() == before


FAILING_SCANCEL = pytest.mark.parametrize(
    "fails",
    [
        "echo 'scancel: error: Socket timed out' >&2; exit 1",
        "kill -INT $PPID; sleep 600",  # Ctrl-C again, while it is cancelled
    ],
    ids=["refused", "interrupted"],
)


@FAILING_SCANCEL
def test_a_job_that_can_t_be_cancelled_after_ctrl_c_keeps_its_trial(
    site, interrupts, capsys, fails
):
    program(site.bin, "scancel", fails)
    plan = make_plan(site.root)
    with golden.raises(KeyboardInterrupt):
        submit(plan)
    assert "cancelled: " in capsys.readouterr().err
    found = read_submission(TrialFiles(Path(plan.trial_dir)))
    assert found is not None
    assert found.job_ids == ("41",)


def test_a_second_ctrl_c_does_not_wait_and_says_where_to_look(site, monkeypatch):
    told = site.bin / "told"
    monkeypatch.setattr(module.output, "say", lambda *lines: told.touch())
    first_seen = f"until [ -e {told} ]; do sleep 0.01; done"
    again = f"kill -INT {os.getpid()}"
    program(site.bin, "sbatch", f"{again}; {first_seen}; {again}; sleep 600")
    plan = make_plan(site.root)
    with golden.raises(KeyboardInterrupt):
        submit(plan)
    assert not Path(plan.trial_dir).exists()


def test_ctrl_c_while_an_array_is_submitted_cancels_it_whole(site, interrupts):
    both = elements(site)
    with golden.raises(KeyboardInterrupt):
        dispatch_array(both, name="sweep1", array="0-1")
    assert calls(site.bin, "scancel") == ["41"]
    assert [read_submission(element.files) for element in both] == [None, None]
    assert not list(both[0].files.submitit.glob("array.json"))


@FAILING_SCANCEL
def test_an_array_that_can_t_be_cancelled_after_ctrl_c_keeps_its_records(
    site, interrupts, capsys, fails
):
    """They were removed, and the job was told as cancelled before Slurm was asked."""
    program(site.bin, "scancel", fails)
    both = elements(site)
    with golden.raises(KeyboardInterrupt):
        dispatch_array(both, name="sweep1", array="0-1")
    assert "41; cancelled" not in capsys.readouterr().err
    found = [read_submission(element.files) for element in both]
    assert [one.job_ids for one in found if one is not None] == [("41_0",), ("41_1",)]
