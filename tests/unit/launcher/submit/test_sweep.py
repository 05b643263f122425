"""Sweeps: axes, points and names; mistakes told once; one job array for equal jobs; the table; stop."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest

from launcher.cli.command_line import run
from launcher.cli.tables import sweep_document, sweep_table
from launcher.cli.verbs import sweep_verbs
from launcher.control import stop_several as stopping
from launcher.control.stop_several import stop_several
from launcher.slurm.query.job_query import JobInfo
from launcher.submit.submit import make_trial, record_of
from launcher.submit.submit_sweep import PlannedSweep, make_trials, plan_sweep, submit_jobs
from launcher.submit.sweep import (
    MAX_POINTS,
    Axis,
    Point,
    array_text,
    axis_of,
    job_groups,
    merged_problems,
    points_of,
    split_values,
)
from launcher.terminal.exit_codes import ExitCode
from launcher.trials.find_trials import find_sweep, find_trial, next_free_name, point_of, trial_name
from launcher.trials.submission import Submission, read_submission
from launcher.trials.trial_view import TrialView
from realsys.api.errors import (
    ClusterError,
    ConfigError,
    ConfigErrors,
    NoSuchTrial,
    TrialError,
    UnknownName,
)
from realsys.api.plan import JobComponent, JobLayout, JobPlan
from realsys.api.scheduling import WorkerType
from realsys.trial.records import Progress, TrialFiles, TrialRecord, read_record, write_record
from realsys.trial.trial_state import JobState, State

pytestmark = pytest.mark.usefixtures("file_root")


# ---- axes and points ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,3", ["1", "2", "3"]),
        ("0.1, 0.2", ["0.1", "0.2"]),
        ("1", ["1"]),
        ("", [""]),
        ("[1,2]", ["[1,2]"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{a: 1, b: 2},{a: 3}", ["{a: 1, b: 2}", "{a: 3}"]),
        ("[[1,2],[3]],none", ["[[1,2],[3]]", "none"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ('["a,]",b],c', ['["a,]",b]', "c"]),
        ("don't,do", ["don't", "do"]),
        ("1],2", ["1]", "2"]),
        ("1,,2", ["1", "", "2"]),
        ("1,", ["1", ""]),
    ],
)
def test_values_are_cut_at_commas_outside_brackets_braces_and_quotes(
    text: str, values: list[str]
) -> None:
    assert split_values(text) == values


def test_a_word_with_one_value_or_without_a_name_is_no_axis() -> None:
    assert axis_of("seed=1,2") == Axis("seed", ("1", "2"))
    assert axis_of("seed=1") is None
    assert axis_of("sizes=[1,2]") is None
    assert axis_of("1,2") is None  # no setting at all: told when the plan is made


def test_the_points_are_the_product_in_order_the_last_axis_fastest() -> None:
    points = points_of(["algorithm.loss.eps_clip=0.1,0.2", "steps=9", "seed=1,2,3"], "sweep4")
    assert [str(p) for p in points] == [
        "algorithm.loss.eps_clip=0.1 seed=1",
        "algorithm.loss.eps_clip=0.1 seed=2",
        "algorithm.loss.eps_clip=0.1 seed=3",
        "algorithm.loss.eps_clip=0.2 seed=1",
        "algorithm.loss.eps_clip=0.2 seed=2",
        "algorithm.loss.eps_clip=0.2 seed=3",
    ]
    assert [p.number for p in points] == [0, 1, 2, 3, 4, 5]
    assert points[5] == Point(
        5,
        "sweep4-5",
        {"algorithm.loss.eps_clip": "0.2", "seed": "3"},
        ("algorithm.loss.eps_clip=0.2", "steps=9", "seed=3"),
    )


@pytest.mark.parametrize(
    ("count", "first", "last"), [(2, "s-0", "s-1"), (10, "s-0", "s-9"), (11, "s-00", "s-10")]
)
def test_names_are_padded_so_that_they_sort(count: int, first: str, last: str) -> None:
    points = points_of(["seed=" + ",".join(map(str, range(count)))], "s")
    assert (points[0].trial, points[-1].trial) == (first, last)


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (
            ["seed=1", "sizes=[1,2]"],
            "--sweep without a setting that has several values",
            "write them with commas, e.g. --sweep algorithm.loss.eps_clip=0.1,0.2 seed=1,2,3",
        ),
        ([], "--sweep without a setting that has several values", None),
        (["seed=1,2,1"], "seed has the value '1' twice", None),
        (["seed=1,,2"], "seed has an empty value in '1,,2'", None),
        (["seed=1,"], "seed has an empty value in '1,'", None),
        (["seed=1,2", "seed=3"], "seed is given 2 times", None),
    ],
)
def test_words_that_make_no_sweep(words: list[str], what: str, fix: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        points_of(words, "sweep1")
    assert caught.value.what == what
    assert caught.value.fix == (fix or caught.value.fix)


def test_a_sweep_has_at_most_a_thousand_trials() -> None:
    numbers = ",".join(map(str, range(100)))
    assert len(points_of([f"a={numbers}", "b=1,2,3,4,5,6,7,8,9,0"], "s")) == MAX_POINTS == 1000
    with golden.raises(ConfigError):
        points_of([f"a={numbers}", f"b={numbers}"], "s")


def test_the_next_sweep_name_is_free_for_trials_and_sweeps(tmp_path: Path) -> None:
    assert next_free_name(tmp_path / "none", "sweep") == "sweep1"
    for name in ("run3", "sweep2-0", "sweep2-1", "sweep1", "run12-4", "sweep9-x", "mysweep7-0"):
        (tmp_path / name).mkdir()
    assert next_free_name(tmp_path, "sweep") == "sweep3"
    assert next_free_name(tmp_path) == "run13"


# ---- mistakes -------------------------------------------------------------------------------


def wrong(what: str, where: str = "seed, command line") -> ConfigError:
    return ConfigError(what, where=where, fix="repair it")


def test_a_mistake_of_all_trials_is_told_once_and_plainly() -> None:
    points = points_of(["a=1,2", "b=3,4"], "s")
    problems = {p.number: [wrong("no option called 'sed'")] for p in points}
    (told,) = merged_problems(points, problems)
    golden.check((told.what, told.where))


def test_a_mistake_of_some_trials_names_the_value_they_share() -> None:
    points = points_of(["a=1,2", "b=3,4,5"], "s")
    problems = {n: [wrong("a is too large")] for n in (3, 4, 5)}  # a=2
    problems[1] = [wrong("unlucky")]
    problems[2] = [wrong("odd")]
    problems[3] = [*problems[3], wrong("odd")]
    told = merged_problems(points, problems)
    assert [(p.what, p.where) for p in told] == [
        ("unlucky", "seed, command line, at a=1 b=4"),
        ("odd", "seed, command line, at a=1 b=5 and 1 more"),
        ("a is too large", "seed, command line, at a=2"),
    ]


def test_a_mistake_that_speaks_of_the_trial_is_still_one_and_keeps_its_class() -> None:
    points = points_of(["a=1,2"], "s?")
    problems = {
        p.number: [UnknownName(f"trial name {p.trial!r} is bad", where="name", fix="x")]
        for p in points
    }
    (told,) = merged_problems(points, problems)
    assert type(told) is UnknownName
    golden.check(told)


def test_all_mistakes_of_a_sweep_are_reported_and_nothing_is_written(file_root: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        plan_sweep("ppo-math", ["algorithm.loss.eps_clip=0.1,-1", "seed=1,two", "no.such=1"])
    problems = [(p.what, p.where) for p in caught.value.problems]
    assert len(problems) == 3
    assert any(what.startswith("no option called") for what, _ in problems)
    (seed,) = [where for what, where in problems if "'two'" in what]
    assert seed.endswith(", at seed=two")
    (clip,) = [where for what, where in problems if "eps_clip is -1" in what]
    assert clip.endswith(", at algorithm.loss.eps_clip=-1")
    assert not list(file_root.glob("runs/*/*/*"))


def test_a_taken_name_is_refused(file_root: Path) -> None:
    planned = plan_sweep("ppo-math", ["seed=1,2"], name="mine")
    make_trials(planned, command=(), imports=())
    with golden.raises(TrialError):
        plan_sweep("ppo-math", ["seed=" + ",".join(map(str, range(20)))], name="mine")
    assert plan_sweep("ppo-math", ["seed=1,2"]).name == "sweep1"


def test_one_folder_that_can_not_be_made_takes_all_away(file_root: Path) -> None:
    planned = plan_sweep("ppo-math", ["seed=1,2,3"])
    in_the_way = Path(planned.plans[2].trial_dir)
    in_the_way.mkdir(parents=True)
    with golden.raises(TrialError):
        make_trials(planned, command=(), imports=())
    assert list(in_the_way.parent.iterdir()) == [in_the_way]


# ---- on this machine ------------------------------------------------------------------------


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, int]], list[str]]:
    """Stands in for starting and watching: trials end with the given status, 0 if not named."""
    from launcher.submit import submit as submit_module
    from launcher.trials import render

    started: list[str] = []

    def prepare(ends: dict[str, int]) -> list[str]:
        monkeypatch.setattr(
            submit_module,
            "start_attempt",
            lambda files, plan, hash_: started.append(plan.trial_name),
        )
        monkeypatch.setattr(
            render,
            "watch_until_over",
            lambda files, trial: ExitCode(ends.get(files.root.name, 0)),
        )
        return started

    return prepare


def test_a_local_sweep_runs_its_trials_one_after_the_other(
    views: Callable[[dict[str, int]], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    started = views({"sweep1-1": 1})
    assert run(["launch", "ppo-math", "--sweep", "seed=1,2,3"]) == ExitCode.RUN_FAILED
    assert started == ["sweep1-0", "sweep1-1", "sweep1-2"]  # a failed one does not stop the rest
    out, err = capsys.readouterr()
    assert out == "ppo-math/sweep1\n"
    golden.line(err, " of 3")
    assert "realsys status ppo-math/sweep1" in err


@pytest.mark.parametrize("end", [ExitCode.INTERRUPTED, ExitCode.RUN_STOPPED])
def test_what_was_not_started_is_named_and_can_be_resumed(
    views: Callable[[dict[str, int]], list[str]], capsys: pytest.CaptureFixture[str], end: ExitCode
) -> None:
    started = views({"s-1": end})
    assert run(["launch", "ppo-math", "--sweep", "seed=1,2,3,4", "--trial", "s"]) == end
    assert started == ["s-0", "s-1"]
    golden.line(capsys.readouterr().err, "not started")
    capsys.readouterr()
    assert run(["status", "ppo-math/s", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [(t["point"], t["state"]) for t in content["trials"]] == [
        ({"seed": str(n)}, "planned") for n in (1, 2, 3, 4)
    ]


def test_what_a_laptop_has_no_queue_for_is_refused(
    views: Callable[[dict[str, int]], list[str]],
    capsys: pytest.CaptureFixture[str],
    file_root: Path,
) -> None:
    started = views({})
    sweep = ["launch", "ppo-math", "--sweep", "seed=1,2"]
    assert run([*sweep, "--detach"]) == ExitCode.CONFIG_INVALID
    assert run([*sweep, "--parallel", "2"]) == ExitCode.CONFIG_INVALID
    assert run(["launch", "ppo-math", "--parallel", "2"]) == ExitCode.USAGE
    assert run(["launch", "ppo-math", "--sweep"]) == ExitCode.CONFIG_INVALID
    assert started == []
    assert not list(file_root.glob("runs/*/*/*"))
    assert run([*sweep, "--parallel", "1"]) == ExitCode.OK
    golden.line(capsys.readouterr().err, "one after the other")


# ---- on Slurm -------------------------------------------------------------------------------


def job(*, cpus: int = 4, layout: JobLayout = JobLayout.SINGLE) -> JobPlan:
    component = JobComponent(
        name="all",
        worker_types=(WorkerType.MODEL_WORKER,),
        nodes=1,
        cpus_per_node=cpus,
        memory_mib_per_node=1000,
    )
    return JobPlan(layout=layout, components=(component,))


def test_equal_single_jobs_share_an_array_and_others_do_not() -> None:
    assert job_groups([job(), job(), job()]) == [[0, 1, 2]]
    assert job_groups([job(), job(cpus=8), job(), job(cpus=8)]) == [[0, 2], [1, 3]]
    het = job(layout=JobLayout.HET)
    assert job_groups([het, het, job(layout=JobLayout.SPLIT)]) == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("numbers", "parallel", "text"),
    [
        ([0, 1, 2, 3, 4, 5], None, "0-5"),
        ([0, 1, 2, 3, 4, 5], 2, "0-5%2"),
        ([0, 2, 3, 7], None, "0,2-3,7"),
        ([4], 1, "4%1"),
    ],
)
def test_the_array_option(numbers: list[int], parallel: int | None, text: str) -> None:
    assert array_text(numbers, parallel) == text


SBATCH = """#!/bin/sh
n=$(ls {folder} | wc -l)
[ "$n" -ge {limit} ] && {{ echo "sbatch: error: Job submission limit reached" >&2; exit 1; }}
printf '%s\\n' "$@" > {folder}/$n.args
for script; do :; done
cp "$script" {folder}/script.$n
rm -f {folder}/script.$n.old
mkdir -p {folder}.scripts; mv {folder}/script.$n {folder}.scripts/$n
echo "Submitted batch job $((70 + n))"
"""


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A stand-in for Slurm's programs: job ids from 70 on; its calls are in the folder."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    calls.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    def install(limit: int = 1000) -> Path:
        text = {
            "sbatch": SBATCH.format(folder=calls, limit=limit),
            "squeue": "#!/bin/sh\n",
            "scancel": f'#!/bin/sh\necho "$@" >> {calls}.cancelled\n',
        }
        for name, content in text.items():
            (programs / name).write_text(content)
            (programs / name).chmod(0o755)
        return calls

    return install


def on_slurm(words: list[str], jobs: list[JobPlan], *, snapshot: bool = False) -> PlannedSweep:
    """A planned sweep whose trials have these jobs."""
    planned = plan_sweep("ppo-math", words)
    plans = [
        replace(plan, job=one, snapshot=snapshot)
        for plan, one in zip(planned.plans, jobs, strict=True)
    ]
    return replace(planned, plans=tuple(plans))


def test_equal_jobs_become_one_array_with_a_call_for_each_element(
    sbatch: Callable[..., Path],
) -> None:
    calls = sbatch()
    planned = on_slurm(["seed=1,2,3"], [job()] * 3)
    trials = make_trials(planned, command=("realsys", "launch"), imports=())
    assert submit_jobs(planned, trials, parallel=2) == ["70_[0-2%2]"]
    assert [p.name for p in calls.iterdir()] == ["0.args"]
    first = trials[0].submitit
    args = (calls / "0.args").read_text().splitlines()
    assert args[:3] == [
        "--parsable",
        f"--output={first}/%A_%a_0_log.out",
        f"--error={first}/%A_%a_0_log.err",
    ]
    script = (first / "70_submission.sh").read_text().splitlines()
    assert "#SBATCH --array=0-2%2" in script
    assert "#SBATCH --job-name=ppo-math-sweep1" in script
    assert f". {trials[0].host_environment}" in script
    elements = json.loads((first / "elements.json").read_bytes())
    for i, files in enumerate(trials):
        record = read_record(TrialRecord, files.record)
        assert record is not None
        assert elements[str(i)] == [str(files.root), record.plan_hash]
        assert (record.sweep, record.point) == ("sweep1", {"seed": str(i + 1)})
        submission = read_submission(files)
        assert submission is not None
        assert (submission.job_id, submission.job_ids) == (f"70_{i}", (f"70_{i}",))
        assert submission.folder == ("" if i == 0 else str(first))
        assert stat.S_IMODE(files.task_environment.stat().st_mode) == 0o600


def test_the_trials_run_the_first_ones_copy_of_the_code(file_root: Path) -> None:
    planned = on_slurm(["seed=1,2,3"], [job()] * 3, snapshot=True)
    trials = make_trials(planned, command=(), imports=())
    for files in trials[1:]:
        assert os.readlink(files.code) == "../sweep1-0/code"
        assert (files.code / "launcher" / "submit" / "sweep.py").is_file()
        assert files.snapshot.read_text() == trials[0].snapshot.read_text()


def test_different_jobs_are_submitted_apart_and_keep_their_numbers(
    sbatch: Callable[..., Path],
) -> None:
    sbatch()
    jobs = [job(), job(cpus=8), job(), job(layout=JobLayout.HET), job(cpus=8)]
    planned = on_slurm(["seed=1,2,3,4,5"], jobs)
    trials = make_trials(planned, command=(), imports=())
    assert submit_jobs(planned, trials) == ["70_[0,2]", "71_[1,4]", "72"]
    ids = [s.job_id for files in trials if (s := read_submission(files))]
    assert ids == ["70_0", "71_1", "70_2", "72", "71_4"]


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_refused_job_takes_the_earlier_ones_back(
    sbatch: Callable[..., Path],
    file_root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    is_refused: bool,
) -> None:
    calls = sbatch(limit=1)
    if is_refused:
        scancel = tmp_path / "bin" / "scancel"
        scancel.write_text(scancel.read_text() + "echo 'scancel: error: no' >&2; exit 1\n")
    planned = on_slurm(["seed=1,2,3"], [job(), job(), job(cpus=8)])
    trials = make_trials(planned, command=(), imports=())
    with golden.raises(ClusterError):
        submit_jobs(planned, trials)
    cancelled = Path(f"{calls}.cancelled").read_text()
    assert cancelled == "70_0 70_1\n"  # at once
    # Slurm would run the first two all the same: they can be stopped later.
    left = [files for files in trials if files.root.exists()]
    assert left == (trials[:2] if is_refused else [])
    ids = [s.job_id for files in left if (s := read_submission(files))]
    assert ids == ["70_0", "70_1"][: len(left)]
    assert ("realsys stop ppo-math/sweep1" in capsys.readouterr().err) is is_refused
    assert not is_refused or len(list(file_root.glob("runs/*/*/*"))) == 2


# ---- finding, showing, stopping -------------------------------------------------------------


def make_some(count: int = 3, name: str | None = None) -> list[TrialFiles]:
    words = ["seed=" + ",".join(map(str, range(1, count + 1)))]
    planned = plan_sweep("ppo-math", words, name=name)
    return make_trials(planned, command=(), imports=())


def test_a_sweep_is_found_by_its_name_in_order() -> None:
    trials = make_some(11)
    assert [f.root.name for f in find_sweep("ppo-math/sweep1")] == [
        f"sweep1-{i:02d}" for i in range(11)
    ]
    assert point_of(trials[4]) == {"seed": "5"}
    for name in ("ppo-math", "ppo-math/sweep", "ppo-math/sweep1-04", "sft-math/sweep1", "/tmp"):
        assert find_sweep(name) == []


def test_a_trial_of_that_name_goes_first_and_lookalikes_are_no_sweep() -> None:
    plan = plan_sweep("ppo-math", ["seed=1,2"]).plans[0]
    alone = replace(plan, trial_name="x-1", trial_dir=str(Path(plan.trial_dir).parent / "x-1"))
    make_trial(alone, record_of(alone))
    assert find_sweep("ppo-math/x") == []
    make_some(2, name="y")
    assert len(find_sweep("ppo-math/y")) == 2
    shadow = replace(plan, trial_name="y", trial_dir=str(Path(plan.trial_dir).parent / "y"))
    make_trial(shadow, record_of(shadow))
    assert find_sweep("ppo-math/y") == []


def test_a_verb_of_one_trial_says_what_a_sweeps_name_is() -> None:
    make_some()
    with golden.raises(NoSuchTrial) as caught:
        find_trial("ppo-math/sweep1")
    assert "ppo-math/sweep1-0" in caught.value.fix


def view(name: str, state: State, **more: Any) -> TrialView:
    return TrialView(trial=f"ppo-math/{name}", state=state, folder="/f", **more)


def test_the_table_has_a_column_for_each_setting_that_differs() -> None:
    progress = Progress(attempt=1, phase="main", step=3, total_steps=8, headline={"reward": 0.5})
    rows = [
        ({"lr": "1e-5", "seed": "1"}, view("s-0", State.RUNNING, progress=progress, step=3, total_steps=8)),
        ({"lr": "1e-5", "seed": "2"}, view("s-1", State.QUEUED, reason="waits for resources")),
    ]  # fmt: skip
    columns, cells = sweep_table(rows)
    assert columns == ("trial", "lr", "seed", "state", "step", "last metrics", "reason")
    assert cells == [
        ("ppo-math/s-0", "1e-5", "1", "running", "3/8", "reward 0.5", ""),
        ("ppo-math/s-1", "1e-5", "2", "queued", "", "", "waits for resources"),
    ]
    document = sweep_document(rows)
    assert document[1]["point"] == {"lr": "1e-5", "seed": "2"}
    assert document[1]["state"] == "queued"


def test_status_of_a_sweep_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    make_some()
    assert run(["status", "ppo-math/sweep1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["trial", "seed", "state", "step", "last", "metrics", "reason"]
    assert lines[2].split() == ["ppo-math/sweep1-1", "2", "planned"]


class Stops:
    """Stands in for the query and for stop: which trials run, and which were stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, states: dict[str, State]) -> None:
        self.stopped: list[str] = []
        self.states = states
        monkeypatch.setattr(stopping, "trial_views", self._views)
        monkeypatch.setattr(stopping, "stop", self._stop)

    def _views(self, trials: list[TrialFiles]) -> list[TrialView]:
        return [view(f.root.name, self.states.get(f.root.name, State.COMPLETED)) for f in trials]

    def _stop(self, files: TrialFiles, **_: Any) -> Any:
        from launcher.control.stop import StopReport

        name = files.root.name
        if name == "a-1":
            raise TrialError("it runs elsewhere", where="here", fix="go there")
        self.stopped.append(name)
        return StopReport(view(name, State.STOPPED))


def test_stop_all_names_my_trials_and_needs_a_yes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_some(name="a")
    make_some(name="b")
    stops = Stops(monkeypatch, {"a-0": State.RUNNING, "b-2": State.QUEUED, "b-0": State.UNKNOWN})
    assert run(["stop", "--all"]) == ExitCode.USAGE  # pytest's stdin is no terminal
    err = capsys.readouterr().err
    for line in (
        "running and queued trials: 3",
        "ppo-math/a-0  running",
        "ppo-math/b-2  queued",
        "--yes",
    ):
        assert line in err
    assert "b-1" not in err
    assert stops.stopped == []
    monkeypatch.setattr(sweep_verbs, "is_confirmed", lambda doing, question: False)
    assert run(["stop", "--all"]) == 0
    assert stops.stopped == []
    assert "nothing was done" in capsys.readouterr().err
    assert run(["stop", "--all", "-y"]) == 0
    assert sorted(stops.stopped) == ["a-0", "b-0", "b-2"]


def test_stop_of_a_sweep_stops_its_own_trials_and_tells_what_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_some(name="a")
    make_some(name="b")
    stops = Stops(monkeypatch, {f"{s}-{i}": State.RUNNING for s in "ab" for i in range(3)})
    assert run(["stop", "ppo-math/a", "--yes"]) == ExitCode.RUN_FAILED
    assert sorted(stops.stopped) == ["a-0", "a-2"]
    err = capsys.readouterr().err
    assert "it runs elsewhere" in err
    golden.line(err, "stopped")


def test_stop_needs_a_trial_or_all_and_nothing_to_stop_is_fine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_some()
    Stops(monkeypatch, {})
    assert run(["stop"]) == ExitCode.USAGE
    assert run(["stop", "ppo-math/sweep1", "--all"]) == ExitCode.USAGE
    capsys.readouterr()
    assert run(["stop", "--all"]) == 0
    assert "nothing was done" in capsys.readouterr().err


def test_waiting_jobs_are_cancelled_by_one_command(
    monkeypatch: pytest.MonkeyPatch, sbatch: Callable[..., Path]
) -> None:
    calls = sbatch()
    trials = make_some(name="a")
    for i, files in enumerate(trials):
        note = Submission(
            job_id=f"9_{i}",
            scheduler="slurm",
            job_ids=(f"9_{i}",),
            host="h",
            after_attempt=0,
            at=1.0,
        )
        write_record(files.submission, note)
    stops = Stops(monkeypatch, {})

    class Board:
        """Element 2 began to run before it could be cancelled."""

        def expect(self, submissions: Any) -> None:
            assert [s.job_id for s in submissions] == ["9_0", "9_2"]

        def cancellable(self, submission: Submission) -> list[str]:
            return list(submission.job_ids)

        def job(self, submission: Submission) -> JobInfo:
            state = JobState.RUNNING if submission.job_id == "9_2" else JobState.STOPPED
            return JobInfo(job_id=submission.job_id, state=state)

    monkeypatch.setattr(stopping, "JobBoard", Board)
    states = (State.QUEUED, State.RUNNING, State.HELD)
    pairs = [(f, view(f.root.name, s)) for f, s in zip(trials, states, strict=True)]
    told: list[str] = []
    failed = stop_several(pairs, grace_s=1, on_action=told.append)
    assert Path(f"{calls}.cancelled").read_text() == "9_0 9_2\n"
    golden.check(told[0])
    assert list(failed) == [trial_name(trials[1])]  # a-1: see Stops
    assert stops.stopped == ["a-2"]
    noted = read_submission(trials[0])
    assert noted is not None
    assert noted.cancelled_by
