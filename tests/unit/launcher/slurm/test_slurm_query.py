"""What Slurm says of jobs is told truly, whatever it prints, and asked for once.

squeue, sacct and the others are scripts on PATH that print recorded output (slurm_outputs/, whose
headers say what is recorded and what is built from Slurm's sources) and write down how they were called.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from dataclasses import replace
from pathlib import Path

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.slurm.query import answer_cache
from launcher.slurm.query.job_query import SQUEUE_FORMAT, query_jobs
from launcher.slurm.query.job_rows import SQUEUE_FIELDS, JobInfo, read_sacct, read_squeue
from launcher.slurm.slurm_commands import run_slurm, scancel, scrubbed
from realsys.api.errors import ClusterError
from realsys.trial.trial_state import JobState

NO_CONTROLLER = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
NO_DATABASE = "sacct: error: Problem talking to the database: Connection refused"
NO_JOB = "slurm_load_jobs error: Invalid job id specified"
DISABLED = "Slurm accounting storage is disabled"


def recorded(name):
    text = Path(__file__).parents[2].joinpath("slurm_outputs", f"{name}.txt").read_text()
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("# "))


def queue_row(job_id, state="RUNNING", reason="None", exit_code="0:0", comment="(null)"):
    times = ["1795254691", "1795254690", "1795258290"]
    row = [job_id, job_id.partition("_")[0], state, reason, "n1", *times, "1:00:00", "0", exit_code]
    return "\x1f".join([*row, "lab", comment]) + "\x1e\n"


def account_row(job_id, state="COMPLETED", code="0:0"):
    times = ["1795254691", "1795254690", "1795258290"]
    return "\x1f".join([job_id, job_id, state, "None", "n1", *times, "60", code, ""]) + "\n"


class Slurm:
    """Fake client programs in a folder that PATH names first."""

    def __init__(self, folder):
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.log = folder / "calls"

    def says(self, program, stdout="", stderr="", code=0, then=""):
        out = self.bin / f"{program}.out"
        out.write_bytes(stdout if isinstance(stdout, bytes) else stdout.encode())
        script = self.bin / program
        script.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "{program} $(echo "$*" | tr -d "\\037\\036")" >> {self.log}\n'
            f"{then}\ncat {out}\n"
            + (f"printf '%s\\n' {shlex.quote(stderr)} >&2\n" if stderr else "")
            + f"exit {code}\n"
        )
        script.chmod(0o755)

    @property
    def calls(self):
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def programs(self):
        return [call.split()[0] for call in self.calls]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SQUEUE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fake = Slurm(tmp_path)
    monkeypatch.setenv("PATH", f"{fake.bin}:/usr/bin:/bin")
    fake.says("squeue")
    fake.says("sacct", stderr=DISABLED, code=1)
    return fake


# --- reading ---------------------------------------------------------------------------------------


def test_every_job_of_a_recorded_queue_is_read():
    rows = read_squeue(recorded("squeue_22_05"))
    assert rows.unreadable == 0
    states = {name: rows.jobs[name].state.value for name in rows.jobs}
    assert states == {
        "2340000": "running",
        "2340001": "failed",
        "2340002": "failed",
        "2340003": "done",
        "2340004": "stopped",
        "2340005": "running",
        "2340006": "held",
        "2340007": "waiting",
        "2340008": "waiting",
        "2340009": "waiting",
        "2340010": "running",  # the array is as far as its furthest task
        "2340010_0": "running",
        "2340020": "running",
        "2340010_1": "running",
        "2340021": "running",
        "2340010_2": "waiting",
        "2340010_3": "waiting",
        "2340011": "running",  # the leader is component 0
        "2340011+0": "running",
        "2340011+1": "running",
        "2340012": "running",
        "2340013": "running",
        "2340014": "waiting",
        "2340015": "infra_failure",
        "2340016": "finishing",
        "2340017": "running",
        "2340018": "finishing",
        "2340019": "running",
        "2340022": "waiting",
        "2340023": "waiting",
        "2340024": "waiting",
        "2340025": "done",
        "2340026": "waiting",
    }


def test_a_running_jobs_fields_are_read_whatever_its_comment_holds():
    assert read_squeue(recorded("squeue_22_05")).jobs["2340005"] == JobInfo(
        job_id="2340005",
        state=JobState.RUNNING,
        slurm_state="RUNNING",
        submitted_at=1795254690.0,
        started_at=1795254691.0,
        time_limit_s=600,
        nodes="n1",
        restarts=0,
        comment="realsys a|b c, d \x1f x\nline2",
        source="squeue",
        cluster="lab",
    )


def test_a_waiting_jobs_expected_start_is_no_start():
    assert read_squeue(recorded("squeue_22_05")).jobs["2340009"] == JobInfo(
        job_id="2340009",
        state=JobState.WAITING,
        slurm_state="PENDING",
        reason="BeginTime",
        reason_words="its begin time has not come",
        expected_start=1795258290.0,
        submitted_at=1795254690.0,
        time_limit_s=26 * 3600 + 3 * 60,
        restarts=0,
        source="squeue",
        cluster="lab",
    )


@pytest.mark.parametrize(
    ("name", "job_id", "state", "code", "signal"),
    [
        ("squeue_22_05", "2340001", JobState.FAILED, 3, None),  # 768
        ("squeue_22_05", "2340002", JobState.FAILED, None, 9),
        ("squeue_22_05", "2340003", JobState.DONE, 0, None),
        ("squeue_22_05", "2340004", JobState.STOPPED, None, 15),
        ("squeue_22_05", "2340005", JobState.RUNNING, None, None),
        ("squeue_22_05_later", "2340000", JobState.FAILED, None, 15),  # its time was up
        ("squeue_22_05_later", "2340001", JobState.WAITING, None, None),  # requeued after exit 3
        ("squeue_23_11", "503", JobState.FAILED, 3, None),  # 3:0
        ("squeue_23_11", "504", JobState.FAILED, None, 125),
    ],
)
def test_an_exit_code_is_of_a_job_that_ended_and_zero_of_one_that_completed(
    name, job_id, state, code, signal
):
    info = read_squeue(recorded(name)).jobs[job_id]
    assert (info.state, info.exit_code, info.signal) == (state, code, signal)


def test_a_requeued_job_says_how_often_and_whether_it_is_held():
    jobs = read_squeue(recorded("squeue_22_05_later")).jobs
    again = jobs["2340001"]
    assert (again.restarts, again.expected_start, again.ended_at) == (1, 1795254755.0, None)
    golden.check(again.reason_words)
    held = jobs["2340017"]
    assert (held.state, held.restarts, held.expected_start) == (JobState.HELD, 1, None)
    assert jobs["2340013"].state is JobState.PAUSED


def test_the_shapes_of_later_releases_are_read():
    jobs = {}
    for name in ("squeue_23_11", "squeue_24_05", "squeue_25_05"):
        rows = read_squeue(recorded(name))
        assert rows.unreadable == 0
        jobs |= rows.jobs
    told = {name: (info.state.value, info.reason) for name, info in jobs.items()}
    assert told == {
        "501": ("running", ""),
        "502": ("waiting", "QOSMaxGRESPerUser"),
        "503": ("failed", "NonZeroExitCode"),
        "504": ("failed", "OutOfMemory"),
        "601": ("waiting", ""),
        "601+0": ("waiting", ""),
        "601+1": ("waiting", ""),
        "602": ("waiting", ""),
        "603": ("waiting", "MaxGRESRunMinsPerUser"),
        "701": ("waiting", ""),
        "702": ("held", "JobHoldMaxRequeue"),
        "703": ("waiting", "NvidiaImexChannels"),
    }
    assert jobs["603"].expected_start is not None  # an ISO time, where SLURM_TIME_FORMAT is ignored


def test_of_a_jobs_rows_in_accounting_the_latest_counts_and_the_others_are_restarts():
    rows = read_sacct(recorded("sacct_22_05"))
    assert rows.unreadable == 0
    told = {
        name: (rows.jobs[name].slurm_state, rows.jobs[name].restarts, rows.jobs[name].nodes)
        for name in ("2340001", "2340016", "2340019", "2340004", "2340011", "2340012", "2340000")
    }
    assert told == {
        "2340001": ("REQUEUED", 1, ""),  # requeued a moment ago, its next row is not there yet
        "2340016": ("PENDING", 1, ""),
        "2340019": ("RUNNING", 0, "n2"),  # lost a node and went on: RESIZING is no restart
        "2340004": ("CANCELLED by 0", 0, "n1"),
        "2340011": ("RUNNING", 0, "n1"),
        "2340012": ("RUNNING", 0, "n2"),
        "2340000": ("TIMEOUT", 0, "n1"),
    }
    failed = rows.jobs["2340002"]
    assert (failed.exit_code, failed.signal, failed.time_limit_s) == (None, 9, 525600 * 60)
    assert rows.jobs["2340010_[2-3%2]"].state is JobState.WAITING


def test_accounting_of_later_releases_with_a_comment_of_two_lines():
    rows = read_sacct(recorded("sacct_25_05"))
    assert (rows.unreadable, sorted(rows.jobs)) == (
        0,
        ["801", "802", "803", "803+0", "803+1", "804"],
    )
    assert rows.jobs["801"].comment == "one\ntwo lines"
    assert (rows.jobs["801"].state, rows.jobs["801"].signal) == (JobState.STOPPED, 15)
    assert rows.jobs["804"].state is JobState.INFRA_FAILURE


@pytest.mark.parametrize("read", [read_squeue, read_sacct])
@given(raw=st.binary())
def test_any_bytes_are_read_without_an_exception(read, raw):
    read(raw.decode(errors="replace"))


@given(values=st.lists(st.text(max_size=8), max_size=14))
def test_any_values_between_the_separators_are_read_without_an_exception(values):
    row = "\x1f".join(["12", *values])
    assert len(read_squeue(row + "\x1e\n").jobs) <= 1
    read_sacct(row)


def test_1400_jobs_are_read_in_a_moment():
    text = "".join(queue_row(str(job_id)) for job_id in range(1000, 2400))
    began = time.thread_time()  # of computing: others may have the machine meanwhile
    assert len(read_squeue(text).jobs) == 1400
    assert time.thread_time() - began < 1.0


# --- asking ----------------------------------------------------------------------------------------


def test_a_hundred_jobs_are_one_squeue_of_all_of_mine(slurm):
    ids = [str(job_id) for job_id in range(1000, 1100)]
    slurm.says("squeue", "".join(queue_row(job_id) for job_id in ids))
    answer = query_jobs(ids, accounting=None)
    assert list(answer.jobs) == ids
    assert {info.state for info in answer.jobs.values()} == {JobState.RUNNING}
    assert answer.problems == ()
    assert slurm.programs == ["squeue"]
    assert slurm.calls[0].startswith("squeue --me --all --noheader --array --states=all --Format=")


def test_one_job_is_asked_for_by_its_id(slurm):
    slurm.says("squeue", queue_row("12"))
    assert query_jobs(["12;alpha"], accounting=None).jobs["12;alpha"].state is JobState.RUNNING
    assert slurm.calls[0].startswith("squeue --clusters=alpha --jobs=12 --all")


def test_no_job_is_no_question(slurm):
    assert query_jobs([], accounting=None).jobs == {}
    assert slurm.calls == []


def test_the_format_asks_for_every_field_in_full_and_the_free_text_last():
    assert SQUEUE_FORMAT.count("\x1f,") == len(SQUEUE_FIELDS) - 1
    assert SQUEUE_FORMAT.endswith(",Comment:\x1e")


def test_an_array_and_a_het_job_come_with_their_parts(slurm):
    slurm.says("squeue", recorded("squeue_22_05"))
    answer = query_jobs(["2340010", "2340011"], accounting=None)
    assert list(answer.jobs) == [
        *("2340010", "2340010_2", "2340010_3", "2340010_0", "2340010_1"),
        *("2340011", "2340011+0", "2340011+1"),
    ]
    assert answer.jobs["2340011"].job_id == "2340011+0"


def test_a_job_that_has_left_the_queue_is_looked_up_in_accounting(slurm):
    slurm.says("squeue", queue_row("11"))
    slurm.says("sacct", account_row("12", "OUT_OF_MEMORY", "0:125"))
    answer = query_jobs(["11", "12"], accounting=None)
    assert answer.jobs["11"].source == "squeue"
    assert (answer.jobs["12"].state, answer.jobs["12"].signal) == (JobState.FAILED, 125)
    assert slurm.programs == ["squeue", "sacct"]
    assert slurm.calls[1].endswith("--jobs=12")


@pytest.mark.parametrize("accounting", [None, False])
def test_without_accounting_a_job_that_left_is_gone(slurm, accounting):
    slurm.says("squeue", stderr=NO_JOB, code=1)
    answer = query_jobs(["12"], accounting=accounting)
    assert answer.jobs["12"].state is JobState.GONE
    golden.check(answer.jobs["12"].reason_words)
    assert answer.problems == ()
    assert answer.accounting_off is (accounting is None)
    assert slurm.programs == (["squeue", "sacct"] if accounting is None else ["squeue"])


def test_accounting_that_the_spec_promises_and_the_cluster_lacks_is_a_problem(slurm):
    answer = query_jobs(["12"], accounting=True)
    golden.check(answer.problems)


def test_another_users_job_is_asked_for_by_id_and_not_called_gone(slurm):
    slurm.says(
        "squeue", queue_row("11"), then=f'case "$*" in *--jobs*) cat {slurm.bin}/other;; esac'
    )
    slurm.bin.joinpath("other").write_text(queue_row("77"))
    answer = query_jobs(["11", "77", "78"], accounting=False)
    assert [info.state.value for info in answer.jobs.values()] == ["running", "running", "gone"]
    assert slurm.programs == ["squeue", "squeue"]
    assert "--jobs=77,78 " in slurm.calls[1]


def test_a_job_that_only_accounting_believes_to_run_is_gone(slurm):
    slurm.says("squeue", stderr=NO_JOB, code=1)
    slurm.says("sacct", account_row("12", "RUNNING"))
    info = query_jobs(["12"], accounting=True).jobs["12"]
    assert (info.state, info.slurm_state, info.source) == (JobState.GONE, "RUNNING", "sacct")
    golden.check(info.reason_words)


def test_when_the_controller_is_silent_no_job_is_called_gone(slurm):
    slurm.says("squeue", stderr=NO_CONTROLLER, code=1)
    slurm.says("sacct", account_row("12", "RUNNING"))
    answer = query_jobs(["12", "13"], accounting=True)
    assert not answer.reached
    assert answer.jobs["12"].state is JobState.RUNNING  # the best there is
    assert answer.jobs["13"].state is JobState.UNKNOWN
    golden.check(answer.problems)
    assert slurm.programs == ["squeue", "sacct"]


def test_both_silent_are_two_problems(slurm):
    slurm.says("squeue", stderr=NO_CONTROLLER, code=1)
    slurm.says("sacct", stderr=NO_DATABASE, code=1)
    answer = query_jobs(["12"], accounting=None)
    golden.check([problem.partition(":")[0] for problem in answer.problems])


def test_a_squeue_that_hangs_is_ended_with_all_it_started(slurm):
    slurm.says("squeue", then=f"sleep 250 & echo $! > {slurm.bin}/started; wait")
    began = time.monotonic()
    while not slurm.bin.joinpath("started").exists():  # else it was ended before it could hang
        answer = query_jobs(["12"], accounting=False, timeout_s=0.5)
    assert time.monotonic() - began < 100
    golden.check(answer.problems)
    assert answer.jobs["12"].state is JobState.UNKNOWN
    child = slurm.bin.joinpath("started").read_text().strip()
    deadline = time.monotonic() + 240
    while (state := _state_of(child)) not in ("", "Z") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert state in ("", "Z")


def _state_of(pid):
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.parametrize(
    "stdout",
    [
        b"squeue: something new in 2030\n",
        b"\xff\xfe\x00\x1f\x1e\x1e\n\x1f",
        b"12              RUNNING   n1\n",
        queue_row("12").replace("\x1f", "|").encode(),
        queue_row("12").encode()[:40],
    ],
)
def test_output_that_cannot_be_read_is_a_problem_and_the_job_unknown(slurm, stdout):
    slurm.says("squeue", stdout)
    answer = query_jobs(["12"], accounting=False)
    assert answer.jobs["12"].state is JobState.UNKNOWN
    assert len(answer.problems) == 1
    assert answer.problems[0].startswith("squeue printed ")


def test_a_bad_row_does_not_hide_the_good_ones(slurm):
    slurm.says("squeue", "garbage\x1e\n" + queue_row("12") + queue_row("13"))
    answer = query_jobs(["12", "13"], accounting=False)
    assert {info.state for info in answer.jobs.values()} == {JobState.RUNNING}
    golden.check(answer.problems)


def test_a_squeue_that_fails_otherwise_is_a_problem_in_its_own_words(slurm):
    slurm.says(
        "squeue", stderr="squeue: error: Invalid job format specification: exit_code", code=1
    )
    answer = query_jobs(["12"], accounting=False)
    golden.check(answer.problems)
    assert answer.jobs["12"].state is JobState.UNKNOWN


def test_an_id_that_is_none_never_reaches_slurm(slurm):
    slurm.says("squeue", queue_row("12"))
    answer = query_jobs(["12", "--help", "abc", ""], accounting=False)
    assert answer.jobs["12"].state is JobState.RUNNING
    assert {answer.jobs[name].state for name in ("--help", "abc", "")} == {JobState.UNKNOWN}
    assert len(answer.problems) == 3
    assert len(slurm.calls) == 1
    assert "--jobs=12 " in slurm.calls[0]


def test_without_slurm_the_answer_says_where_to_go(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = query_jobs(["12"], accounting=None)
    assert answer.jobs["12"].state is JobState.UNKNOWN
    golden.check(answer.problems)


# --- the kept answer -------------------------------------------------------------------------------


def test_several_watches_ask_once(slurm):
    slurm.says("squeue", queue_row("12") + queue_row("13"), then="sleep 0.3")
    answers = []

    def watch(job_id):
        answers.append(query_jobs([job_id], accounting=None, max_age_s=60))

    watches = [
        threading.Thread(target=watch, args=(job_id,)) for job_id in ("12", "13", "12", "13")
    ]
    for one in watches:
        one.start()
    for one in watches:
        one.join()
    assert slurm.programs == ["squeue"]
    assert "--me" in slurm.calls[0]
    assert {tuple(answer.jobs) for answer in answers} == {("12",), ("13",)}
    assert len({answer.asked_at for answer in answers}) == 1


def test_a_job_that_the_kept_answer_lacks_costs_no_second_question_about_the_rest(slurm):
    slurm.says("squeue", queue_row("12"))
    slurm.says("sacct", account_row("13"))
    query_jobs(["12"], accounting=True, max_age_s=60)
    assert query_jobs(["12", "13"], accounting=True, max_age_s=60).jobs["13"].state is JobState.DONE
    assert query_jobs(["13"], accounting=True, max_age_s=60).jobs["13"].state is JobState.DONE
    assert slurm.programs == ["squeue", "sacct"]


def test_a_job_submitted_after_the_kept_answer_is_found(slurm):
    slurm.says("squeue", queue_row("12"))
    query_jobs(["12"], accounting=None, max_age_s=60)
    slurm.says("squeue", queue_row("14", "PENDING", "Priority"))
    assert query_jobs(["14"], accounting=None, max_age_s=60).jobs["14"].state is JobState.WAITING
    assert "--jobs=14 " in slurm.calls[-1]


def test_an_old_a_foreign_and_a_future_answer_are_not_used(slurm):
    slurm.says("squeue", queue_row("12"))
    query_jobs(["12"], accounting=None, max_age_s=60)
    path = answer_cache.cache_file()
    kept = answer_cache.load(path, max_age_s=60)
    assert kept
    for asked_at in (time.time() - 61, time.time() + 3600):
        answer_cache.save(path, replace(kept, asked_at=asked_at))
        assert answer_cache.load(path, max_age_s=60) is None
    for text in ("", "{", "[]", "7", '{"format": 1}', json.dumps({"format": 2}), "\0\xff"):
        path.write_text(text)
        assert answer_cache.load(path, max_age_s=60) is None
        assert (
            query_jobs(["12"], accounting=None, max_age_s=60).jobs["12"].state is JobState.RUNNING
        )


def test_an_answer_survives_being_kept(tmp_path):
    jobs = {
        **read_squeue(recorded("squeue_22_05")).jobs,
        **read_sacct(recorded("sacct_25_05")).jobs,
    }
    answer = answer_cache.CachedAnswer(
        jobs=jobs, asked_at=time.time(), problems=("ü",), reached=False, accounting_off=True
    )
    answer_cache.save(tmp_path / "a" / "b.json", answer)
    assert answer_cache.load(tmp_path / "a" / "b.json", max_age_s=60) == answer
    assert os.listdir(tmp_path / "a") == ["b.json"]


def test_a_state_home_that_cannot_be_written_costs_nothing_but_the_saving(
    slurm, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    slurm.says("squeue", queue_row("12"))
    for _ in range(2):
        assert (
            query_jobs(["12"], accounting=None, max_age_s=60).jobs["12"].state is JobState.RUNNING
        )
    assert slurm.programs == ["squeue", "squeue"]


def test_a_failed_answer_is_kept_too(slurm):
    slurm.says("squeue", stderr=NO_CONTROLLER, code=1)
    for _ in range(2):
        answer = query_jobs(["12"], accounting=False, max_age_s=60)
        assert (answer.jobs["12"].state, len(answer.problems)) == (JobState.UNKNOWN, 1)
    assert slurm.programs == ["squeue"]


def test_clusters_and_configurations_do_not_share_a_file(slurm, monkeypatch):
    places = {answer_cache.cache_file()}
    for variable, value in (("SLURM_CONF", "/elsewhere/slurm.conf"), ("SLURM_CLUSTERS", "alpha")):
        monkeypatch.setenv(variable, value)
        places.add(answer_cache.cache_file())
    assert len(places) == 3
    assert len({path.parent for path in places}) == 1


# --- the programs ----------------------------------------------------------------------------------


def test_what_a_user_set_for_squeue_does_not_reach_it(slurm, monkeypatch):
    odd = {
        "SQUEUE_FORMAT": "%i", "SQUEUE_SORT": "S", "SLURM_TIME_FORMAT": "relative", "SLURM_JOB_ID": "7",
        "SBATCH_PARTITION": "x", "SACCT_FORMAT": "x", "SCANCEL_STATE": "PD", "LC_ALL": "de_DE",
    }  # fmt: skip
    kept = {"SLURM_CONF": "/etc/x", "SLURM_CLUSTERS": "alpha", "SLURM_JWT": "t", "HOME": "/h"}
    assert scrubbed(odd | kept) == kept | {"LC_ALL": "de_DE"}
    for name, value in (odd | kept).items():
        monkeypatch.setenv(name, value)
    slurm.says("squeue", queue_row("12"), then=f"env > {slurm.bin}/env")
    query_jobs(["12"], accounting=False)
    seen = dict(line.split("=", 1) for line in slurm.bin.joinpath("env").read_text().splitlines())
    wanted = kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
    assert {name: seen[name] for name in seen if name in odd | kept} == wanted


@pytest.mark.parametrize(
    ("stderr", "what"),
    [
        (NO_CONTROLLER, "slurmctld does not answer: Unable to contact slurm controller"),
        (
            "squeue: error: Socket timed out on send/recv operation",
            "slurmctld does not answer: Socket",
        ),
        ("Unexpected message received for job 5", "slurmctld does not answer: Unexpected"),
        (NO_DATABASE, "slurmdbd does not answer: Problem talking to the database"),
        (
            "squeue: fatal: Unable to process configuration file",
            "squeue found no Slurm configuration",
        ),
    ],
)
def test_silence_is_told_from_refusal(slurm, stderr, what):
    slurm.says("squeue", stderr=stderr, code=1)
    with pytest.raises(ClusterError) as caught:
        run_slurm(["squeue"])
    assert caught.value.what.startswith(what)
    assert caught.value.fix


def test_a_program_that_cannot_be_started_is_a_cluster_error(slurm, monkeypatch):
    slurm.bin.joinpath("squeue").write_text("no program")
    monkeypatch.setenv("PATH", str(slurm.bin))
    with golden.raises(ClusterError):
        run_slurm(["squeue"])
    monkeypatch.setenv("PATH", str(slurm.bin / "none"))
    with golden.raises(ClusterError):
        run_slurm(["squeue"])


def test_cancelling_names_all_jobs_at_once_and_an_ended_one_is_no_error(slurm):
    slurm.says(
        "scancel",
        stderr="scancel: error: Kill job error on job id 12: Invalid job id specified",
        code=1,
    )
    scancel(["12", "13"])
    scancel(["12"], signal="USR2")
    scancel([])
    assert slurm.calls == ["scancel 12 13", "scancel --batch --signal=USR2 12"]


def test_a_refused_cancel_says_why(slurm):
    slurm.says(
        "scancel",
        stderr="scancel: error: Kill job error on job id 12: Access/permission denied",
        code=1,
    )
    with golden.raises(ClusterError):
        scancel(["12"])
