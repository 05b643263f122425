"""The report page: what it tells of a finished, a failed, a running and a damaged trial."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.ppo_math import ppo_math
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import NoSuchTrial
from realsys.api.options import WandbOptions
from realsys.api.plain import to_plain
from realsys.api.plan import LaunchPlan, PhasePlan, plan_text
from realsys.observability.events import EventLog, MfcEvent, PeriodicEvent, StepEvent
from realsys.observability.jsonl import JsonlAppender
from realsys.observability.metrics import MetricsWriter
from realsys.observability.report import report
from realsys.observability.report.attempt_outcomes import duration_s
from realsys.observability.report.curves import (
    ACCURACY,
    KINDS,
    find,
    first_and_last,
    smoothed,
    table,
)
from realsys.observability.report.option_rows import option_rows
from realsys.observability.report.svg_chart import tick_texts, ticks
from realsys.trial.liveness import Liveness
from realsys.trial.records import (
    AttemptFiles,
    AttemptRecord,
    ExitMarker,
    Failure,
    PhaseFiles,
    Result,
    TrialFiles,
    TrialRecord,
    process_start,
    write_record,
)
from realsys.trial.trial_reader import Attempt

T0 = 1_795_000_000.0
STEPS = 60
CALLS = {  # call: (start, compute seconds) within a step of 2 s
    "actor_gen": (0.02, 0.80),
    "rew_inf": (0.84, 0.05),
    "ref_inf": (0.84, 0.15),
    "critic_inf": (1.00, 0.14),
    "actor_train": (1.16, 0.45),
    "critic_train": (1.62, 0.30),
}


def make_trial(root: Path, *, steps: int = STEPS) -> TrialFiles:
    """A trial folder as a run of ``ppo-math`` leaves it, but for the attempt."""
    files = TrialFiles(root)
    root.mkdir(parents=True)
    plan = _plan(root)
    files.plan.write_text(plan_text(plan))
    record = TrialRecord(
        experiment_name="ppo-math", trial_name="run1", user="alice", cluster="local",
        plan_hash="", created_at=T0, launch_host="login1", realsys_version="0.1.0",
    )  # fmt: skip
    write_record(files.record, record)
    _write_sft(PhaseFiles(root / "prepare" / "sft"))
    main = PhaseFiles(root)
    with _metrics(main) as metrics:
        for step in range(steps + 1):
            metrics.write(step, _row(step))
    _write_events(main.events, steps)
    _write_samples(main.samples, steps)
    (main.checkpoints / "actor" / f"step-{steps:06d}").mkdir(parents=True)
    return files


def _plan(root: Path) -> LaunchPlan:
    defaults = ppo_math()
    options = replace(
        defaults,
        exp_ctrl=replace(defaults.exp_ctrl, benchmark_steps=STEPS),
        actor=replace(defaults.actor, optimizer=replace(defaults.actor.optimizer, lr=0.125)),
    )
    phases = []
    for name, experiment, folder in (
        ("sft", options.sft, root / "prepare" / "sft"),
        ("main", options.with_prepared("sft", "/models/start"), root),
    ):
        phases.append(
            PhasePlan(
                name=name,
                experiment_name="sft-math" if name == "sft" else "ppo-math",
                folder=str(folder),
                publish=None,
                scheduling=experiment.scheduling_setup(),
                config=experiment.initial_setup().lazy_init(),
            )
        )
    return LaunchPlan(
        experiment_name="ppo-math", trial_name="run1", user="alice", trial_dir=str(root),
        cluster=ClusterSpec(), phases=tuple(phases), options=to_plain(options),
    )  # fmt: skip


def _metrics(files: PhaseFiles) -> MetricsWriter:
    return MetricsWriter(
        files,
        tensorboard=False,
        wandb=WandbOptions(),
        run_name="ppo-math/run1",
        config={},
        attempt=1,
        resume_step=None,
    )


def _write_sft(files: PhaseFiles) -> None:
    with _metrics(files) as metrics:
        for step in range(1, 201):
            metrics.write(step, {"sft_train/loss": 3 * math.exp(-step / 50) + 0.2})


def _row(step: int) -> dict[str, float]:
    """Numbers of a run that learns, with a noise that repeats."""
    noise = math.sin(step * 12.9898) * 0.05
    row = {"eval/accuracy": 0.46 + 0.41 * (step / STEPS) ** 0.6} if step % 20 == 0 else {}
    if step == 0:
        return row
    return row | {
        "critic/score/mean": 0.45 + 0.4 * (1 - math.exp(-step / 20)) + noise,
        "actor/kl_ref/per_sequence": 0.0008 * step + abs(noise) * 0.1,
        "actor/entropy": 1.2 - 0.01 * step + noise,
        "actor/actor_loss": -0.01 + noise * 0.1,
        "actor/pg_clipfrac": 0.02 + abs(noise) * 0.3,
        "actor/grad_norm": 1 + noise,
        "critic/vf_loss": 0.3 * math.exp(-step / 15) + 0.02 + abs(noise) * 0.1,
        "response_length/mean": 18 + 4 * noise,
        "time/step_s": 2.0,
    }


def _write_events(path: Path, steps: int) -> None:
    log = EventLog(path)
    for step in range(1, steps + 1):
        start = T0 + 40 + 2 * (step - 1)
        for name, (offset, compute) in CALLS.items():
            begin = start + offset
            end = begin + compute + 0.012
            times = {"queued": begin - 0.01, "start": begin, "end": end, "compute_s": compute}
            log.note(MfcEvent(step=step, name=name, worker="model_worker/0", **times, tokens=4096))
        if step % 20 == 0:
            log.note(PeriodicEvent(kind="evaluate", step=step, start=start + 1.95, end=start + 2.9))
        log.note(StepEvent(step=step, start=start, end=start + 2.0))
    log.close()


def _write_samples(path: Path, steps: int) -> None:
    with JsonlAppender(path) as file:
        for step in (0, steps // 2, steps):
            for i in range(12):
                right = i % 4 == 0 or (step == steps and i % 4 != 3)
                text = f"{i + 20} + {i + 7}\n= {2 * i + 27 if right else 2 * i + 17}"
                file.append(
                    {
                        "step": step,
                        "prompt": f"What is {i + 20} + {i + 7}? <b>&",
                        "response": f"<script>alert(1)</script> {text}",
                        "answer": str(2 * i + 27),
                        "correct": right,
                    }
                )


def attempt_record(number: int = 1, **changes: object) -> AttemptRecord:
    """Of a supervisor on this host that is gone: process ids end at 2^22."""
    values: dict[str, object] = {
        "number": number, "token": "00", "host": socket.gethostname(), "supervisor_pid": 2**22 + 1,
        "supervisor_start": 1, "started_at": T0,
    }  # fmt: skip
    return AttemptRecord(**{**values, **changes})  # type: ignore[arg-type]


def finish(files: TrialFiles, **changes: object) -> None:
    """Writes attempt 1 and its exit marker."""
    values: dict[str, object] = {
        "result": Result.COMPLETED, "attempt": 1, "ended_at": T0 + 200.0, "phase": "main",
        "step": STEPS,
    }  # fmt: skip
    write_record(files.attempt(1).record, attempt_record())
    write_record(files.attempt(1).exit, ExitMarker(**{**values, **changes}))  # type: ignore[arg-type]


@pytest.fixture
def trial(tmp_path: Path) -> TrialFiles:
    return make_trial(tmp_path / "runs" / "alice" / "ppo-math" / "run1")


def words(page: str) -> str:
    """What a reader sees: the page without tags, with single spaces."""
    body = page[page.index("<body>") :]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body))


def test_finished_trial_tells_result_steps_duration_and_gain(trial: TrialFiles) -> None:
    finish(trial)
    path = report.write_report(trial.root)
    assert path == trial.report
    text = words(path.read_text())
    assert "ppo-math/run1 completed" in text
    assert "60 steps of 60" in text
    assert "20 s duration" in text  # 200 s
    # accuracy 0.46 at step 0, 0.46 + 0.41 at step 60
    assert "87.0 % held-out accuracy, +41.0 points from 46.0 %" in text
    # 0.8 + 0.05 + 0.15 + 0.14 + 0.45 + 0.30 = 1.89 s of 2 s
    assert "94.5 % of" in text
    assert "actor_gen actor 40.0 % 0.800 0.010 5,120" in text  # 4096 tokens in 0.8 s
    assert "rew_inf reward 2.5 %" in text
    for title in ("Reward", "KL to the reference", "Entropy", "Value loss", "Response length",
                  "Clip ratio", "Step time, seconds", "sft: loss"):  # fmt: skip
        assert title in text
    assert "What failed first" not in text


def test_page_stands_alone_and_escapes_everything(trial: TrialFiles) -> None:
    finish(trial)
    html = report.write_report(trial.root).read_text()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "? &lt;b&gt;&amp;" in html
    assert not re.search(r"https?:", html)
    sources = re.findall(r'(?:src|href)="([^"]{0,40})', html)
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)


def test_samples_are_counted_and_shown_in_file_order(trial: TrialFiles) -> None:
    finish(trial)
    text = words(report.write_report(trial.root).read_text())
    # of 12: i % 4 == 0 right both times (3), 1 and 2 turn right (6), 3 stays wrong (3)
    numbers = re.findall(r"\d+", text[text.index("Of 12 questions") :])
    assert numbers[:5] == ["12", "6", "0", "3", "3"]
    assert text.index("What is 20 + 7?") < text.index("What is 21 + 8?")
    assert "step 0 ✗ wrong" in text
    assert "step 30" not in text


def test_settings_that_differ_come_first(trial: TrialFiles) -> None:
    finish(trial)
    text = words(report.write_report(trial.root).read_text())
    settings = text[text.index("Settings option") :]
    changed, every = re.split(r"All \d+ options", settings)
    defaults = ppo_math()
    lr, steps = defaults.actor.optimizer.lr, defaults.exp_ctrl.benchmark_steps
    clip = defaults.algorithm.loss.eps_clip
    assert f"actor.optimizer.lr 0.125 {lr} peak learning rate" in changed
    assert f"exp_ctrl.benchmark_steps 60 {'none' if steps is None else steps} stop" in changed
    assert "algorithm.loss.eps_clip" not in changed
    assert f"algorithm.loss.eps_clip {clip} {clip} " in every


def test_failed_trial_says_which_where_why_and_how_to_go_on(trial: TrialFiles) -> None:
    log = trial.attempt(1).log("model_worker/0")
    log.parent.mkdir(parents=True)
    log.write_text("first line\n\x1b[31mout of memory & <dead>\x1b[0m\n")
    failure = Failure(
        worker="model_worker/0", host="node3", pid=41, why="was killed by signal 9 (SIGKILL)",
        at=T0 + 90, fix="lower actor.max_tokens_per_mb", log=str(log),
    )  # fmt: skip
    other = Failure(worker="master_worker/0", host="node3", pid=40, why="lost a worker", at=T0)
    finish(
        trial, result=Result.FAILED, step=31, first_failure=failure, other_failures=(other,),
        resume="realsys resume ppo-math/run1 --cluster here",
    )  # fmt: skip
    text = words(report.write_report(trial.root).read_text())
    assert "ppo-math/run1 failed" in text
    assert "signal 9 (SIGKILL)" in text
    assert "on node3, process 41" in text
    assert "after step 31" in text
    assert "lower actor.max_tokens_per_mb" in text
    assert "memory &amp; &lt;dead&gt;" in text
    assert "master_worker/0 lost a" in text
    assert "realsys resume ppo-math/run1 --cluster here" in text


def test_supervisor_that_vanished_is_lost_and_its_log_is_shown(trial: TrialFiles) -> None:
    write_record(trial.attempt(1).record, attempt_record())
    log = trial.attempt(1).log("supervisor")
    log.parent.mkdir(parents=True)
    log.write_text("step started\n")
    text = words(report.write_report(trial.root).read_text())
    assert "ppo-math/run1 lost" in text
    assert "without an exit" in text
    assert "step started" in text
    assert "realsys resume ppo-math/run1" in text


def test_supervisor_of_another_host_is_unknown_never_fine(trial: TrialFiles) -> None:
    write_record(trial.attempt(1).record, attempt_record(host="elsewhere"))
    assert "ppo-math/run1 unknown" in words(report.write_report(trial.root).read_text())


def test_running_trial_before_its_first_step(tmp_path: Path) -> None:
    root = tmp_path / "ppo-math" / "run1"
    root.mkdir(parents=True)
    files = TrialFiles(root)
    files.plan.write_text(plan_text(_plan(root)))
    start = process_start(os.getpid())
    record = attempt_record(supervisor_pid=os.getpid(), supervisor_start=start)
    write_record(files.attempt(1).record, record)
    text = words(report.write_report(root).read_text())
    assert "ppo-math/run1 running" in text
    assert "No step" in text
    assert "realsys watch ppo-math/run1" in text
    assert "the cache" in text


def test_damaged_files_become_notes_and_the_rest_is_told(trial: TrialFiles) -> None:
    finish(trial)
    files = PhaseFiles(trial.root)
    trial.plan.write_text("{half")
    files.metrics.write_bytes(b"\0\0\n" + files.metrics.read_bytes() + b'{"step": 61, "x"')
    with files.events.open("a") as events:
        events.write('{"event": "mfc", "step": 61}\n')
    text = words(report.write_report(trial.root).read_text())
    assert "plan can&#x27;t be" in text
    assert "left out: 1" in text
    assert "is no event" in text
    assert "87.0 % held-out accuracy" in text
    assert "actor_gen actor 40.0 %" in text


def test_folder_without_a_trial_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoSuchTrial, match="this folder holds no trial"):
        report.write_report(tmp_path / "nothing")


def test_command_line_writes_the_page_and_names_mistakes(
    trial: TrialFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(trial)
    out = tmp_path / "page.html"
    assert report.main([str(trial.root), "--output", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert report.main([str(tmp_path / "nothing")]) == NoSuchTrial.exit_code
    assert "fix:" in capsys.readouterr().err


def test_report_loads_without_torch_and_matplotlib() -> None:
    heavy = "{'torch', 'matplotlib', 'tensorboard', 'wandb', 'numpy'}"
    probe = f"import realsys.observability.report.report, sys; sys.exit({heavy} & set(sys.modules) or 0)"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# ---- its parts ------------------------------------------------------------------------------


def test_time_between_attempts_does_not_count() -> None:
    first, second = (
        Attempt(AttemptFiles(Path(str(n))), attempt_record(n, started_at=at), Liveness.DEAD, end)
        for n, at, end in ((1, 100.0, _marker(ended_at=130.0)), (2, 500.0, _marker(ended_at=520.0)))
    )
    assert duration_s([first, second], []) == 50.0


def _marker(ended_at: float) -> ExitMarker:
    return ExitMarker(result=Result.STOPPED, attempt=1, ended_at=ended_at, phase="main")


@pytest.mark.parametrize(
    ("title", "key", "other"),
    [
        ("Reward", "actor_train/reward/mean", "actor_train/reward/std"),
        ("Reward", "critic/score/mean", "actor/reward/overlong_penalty"),
        ("Reward", "rew_inf/reward", "actor_train/kl_reward"),
        ("Entropy", "actor_train/entropy", "actor_train/entropy_coef"),
        ("Value loss", "critic_train/loss", "actor_train/loss"),
        ("Loss", "actor_train/loss", "critic_train/loss"),
        ("Loss", "actor_train/actor_loss", "critic_train/value_loss"),
        ("Value loss", "critic_train/value_loss", "actor_train/actor_loss"),
        ("Clip ratio", "actor_train/clip_ratio", "actor_train/dual_clip_ratio"),
        ("Clip ratio", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"),
        ("Clip ratio", "actor/pg_clipfrac", "critic/vf_clipfrac"),
        ("Value loss", "critic/vf_loss", "actor/actor_loss"),
        ("Response length", "response_length/mean", "response_length/max"),
        ("Clip ratio", "actor_train/clip_fraction", "critic_train/value_clip_fraction"),
        ("KL to the reference", "actor_train/kl_ref/per_sequence", "actor_train/kl_ref/per_token"),
        ("KL to the reference", "actor_train/kl_to_ref", "actor_train/kl_coef"),
        ("Response length", "actor_train/response_length/mean", "actor_train/response_length/max"),
        ("Response length", "actor_gen/response_length", "time/response_length"),
        ("Response length", "actor_train/response_length/mean", "eval/response_length/mean"),
        ("Clip ratio", "actor_train/clip_ratio", "actor_train/first_minibatch/clip_ratio"),
    ],
)
def test_curve_takes_its_metric_and_leaves_its_namesake(title: str, key: str, other: str) -> None:
    kind = next(k for k in KINDS if k.title == title)
    metrics = table([{"step": 1, key: 0.5, other: 0.25}])
    assert find(metrics, kind) == {key: ((1, 0.5),)}


def test_series_that_say_the_same_are_drawn_once() -> None:
    rows = [
        {"step": i, "a_train/reward/mean": i, "c_train/reward/mean": i, "d/reward/mean": 2 * i}
        for i in range(3)
    ]
    kind = next(k for k in KINDS if k.title == "Reward")
    assert list(find(table(rows), kind)) == ["a_train/reward/mean", "d/reward/mean"]


def test_rows_of_one_step_join_and_nan_is_kept() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 2, "a": 1},
        {"step": 1, "a": "nan", "note": "text"},
        {"step": 2, "b": "inf"},
    ]
    found = table(rows)
    assert set(found) == {"a", "b"}
    assert math.isnan(found["a"][0][1])
    assert found["a"][1] == (2, 1.0)
    assert found["b"] == ((2, math.inf),)


def test_gain_is_from_first_to_last_finite_value() -> None:
    rows = [{"step": i, "eval/accuracy": v} for i, v in enumerate(["nan", 0.25, 0.5, "nan"])]
    assert first_and_last(table(rows), ACCURACY) == (0.25, 0.5)


def test_smoothing_is_centred_and_keeps_the_ends() -> None:
    # a window of one on either side: a straight line stays, a peak of 3 becomes 1, 1, 1
    line = tuple((i, 2.0 * i) for i in range(5))
    assert smoothed(line) == line
    peak = tuple((i, 3.0 if i == 2 else 0.0) for i in range(5))
    assert [value for _, value in smoothed(peak)] == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert smoothed(((1, math.nan), (2, 1.0))) == ((2, 1.0),)


def test_options_of_an_unknown_experiment_have_no_defaults() -> None:
    rows = option_rows({"a": {"b": None}, "c": [1, 2], "d": True}, "nobody-registered-this")
    assert [(r.name, r.value, r.default, r.differs) for r in rows] == [
        ("a.b", "none", None, False),
        ("c", "1, 2", None, False),
        ("d", "true", None, False),
    ]


def test_strange_plan_options_do_not_stop_the_report(
    trial: TrialFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(trial)
    data = json.loads(trial.plan.read_text())
    data["experiment_name"] = "gone-plugin"
    trial.plan.write_text(json.dumps(data))
    text = words(report.write_report(trial.root).read_text())
    assert "The defaults of" in text


@pytest.mark.parametrize("exponent", range(-18, 16))
def test_no_two_ticks_of_an_axis_read_alike(exponent: int) -> None:
    for middle in (0.0, 1.0, 11.3, 123_456.0):
        spread = 10.0**exponent
        if spread > 1e-9 * middle:
            texts = tick_texts(ticks(middle, middle + spread))
            assert len(set(texts)) == len(texts)
