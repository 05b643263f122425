"""Trials that an older revision made can be looked at as then: status, report, logs, explain and ls.

The trials are in tests/old_trials, with what the command line said of them when they were made. A resume
needs workers: tests/process/test_old_trials_resume.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from old_trials.unpack import HERE, manifest, unpack

from launcher.cli.command_line import run
from launcher.submit.planning import make_plan

pytestmark = pytest.mark.usefixtures("file_root")

KINDS = manifest()
TRIALS = [(kind, trial) for kind, made in KINDS.items() for trial in made["trials"]]
KEPT = ("state", "phase", "step", "total_steps", "attempt")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]):
    """words → what the command line printed, which ended well."""

    def ask(*words: str) -> str:
        status = run(list(words))
        out, err = capsys.readouterr()
        assert status == 0, f"{words}: {status}\n{err}"
        assert "Traceback" not in err
        return out

    return ask


def test_there_is_one_of_each_kind() -> None:
    assert {"finished", "stopped", "failed", "async", "detached", "sweep"} <= KINDS.keys()
    assert sorted(f.name for f in HERE.glob("*.tar.xz")) == sorted(f"{k}.tar.xz" for k in KINDS)
    assert sum(f.stat().st_size for f in HERE.glob("*.tar.xz")) < 600_000


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "trial"), TRIALS)
def test_it_is_shown_as_when_it_was_made(kind: str, trial: str, file_root: Path, said: Any) -> None:
    then = KINDS[kind]["trials"][trial]
    unpack(kind, file_root)

    view = json.loads(said("status", trial, "--json"))["trial"]
    assert {key: view[key] for key in KEPT} == {key: then[key] for key in KEPT}
    assert {w["worker"]: w["state"] for w in view["workers"]} == then["workers"]
    assert view["progress"]["headline"] == then["headline"]
    failure = view["exit"]["first_failure"]
    assert (failure["worker"] if failure else None) == then["failed_first"]
    if failure:
        assert failure["why"].startswith(then["why"])
    shown = said("status", trial)
    assert trial in shown
    assert then["state"] in shown

    lines = json.loads(said("logs", trial, "--json"))["lines"]
    assert len(lines) == then["log_lines"]
    assert sorted({line["worker"] for line in lines}) == then["log_workers"]
    assert len(said("logs", trial, "--tail", "5").splitlines()) == 5

    explained = said("explain", trial)
    assert explained.startswith(f"{trial} is {then['state']}")
    assert (then["why"] or "") in explained


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "trial"), TRIALS)
def test_its_report_can_be_made_again(kind: str, trial: str, file_root: Path, said: Any) -> None:
    unpack(kind, file_root)
    page = Path(said("report", trial).strip())
    text = page.read_text()
    assert trial in text
    assert text.rstrip().endswith("</html>")
    if KINDS[kind]["trials"][trial]["state"] == "completed":
        assert "critic/score/mean" in text
        assert "actor_train/reward" not in text


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_in_the_list(kind: str, file_root: Path, said: Any) -> None:
    unpack(kind, file_root)
    trials = json.loads(said("ls", "--json"))["trials"]
    then = KINDS[kind]["trials"]
    assert {t["trial"]: t["state"] for t in trials} == {
        name: t["state"] for name, t in then.items()
    }
    shown = said("ls")
    assert all(name in shown for name in then)


def test_a_sweep_is_a_table(file_root: Path, said: Any) -> None:
    unpack("sweep", file_root)
    shown = said("status", "ppo-math/seeds")
    assert all(word in shown for word in ("seeds-0", "seeds-1", "seed"))


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("stopped", "failed")])
def test_a_completed_one_is_not_resumed(
    kind: str, file_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unpack(kind, file_root)
    name = next(iter(KINDS[kind]["trials"]))
    assert run(["resume", name, "--detach"]) == 1
    assert f"{name} has completed" in capsys.readouterr().err


def test_the_plan_of_another_version_is_refused_with_what_to_use(
    file_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What resume says when plans have changed; the folder can be looked at all the same."""
    (trial,) = unpack("stopped", file_root)
    (trial / "plan.json").write_text(
        (trial / "plan.json").read_text().replace('"version": 1', '"version": 0')
    )
    assert run(["resume", "ppo-math/stopped", "--detach"]) == 4
    error = capsys.readouterr().err
    assert "plan.json" in error
    assert "fix:" in error
    assert run(["status", "ppo-math/stopped", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trial"]["state"] == "stopped"


def change_plan(trial: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """What another revision would have written, with its hash in the trial's record."""
    plan = json.loads((trial / "plan.json").read_text())
    change(plan)
    text = json.dumps(plan)
    (trial / "plan.json").write_text(text)
    record = json.loads((trial / "trial.json").read_text())
    record["plan_hash"] = hashlib.sha256(text.encode()).hexdigest()
    (trial / "trial.json").write_text(json.dumps(record))


def rename_option(plan: dict[str, Any]) -> None:
    plan["options"]["seed_of_old"] = plan["options"].pop("seed")


def add_field(plan: dict[str, Any]) -> None:
    plan["phases"][-1]["config"]["field_of_old"] = 1


@pytest.mark.parametrize(
    ("change", "named"),
    [(rename_option, "its settings can't be read"), (add_field, "field_of_old")],
)
@pytest.mark.parametrize("words", [[], ["exp_ctrl.ckpt_keep=2"]], ids=["as it is", "changed"])
def test_settings_of_another_revision_are_refused_with_that_revision(
    change: Callable[[dict[str, Any]], object],
    named: str,
    words: list[str],
    file_root: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One problem with the name that this code does not know, and the code that knows it."""
    (trial,) = unpack("stopped", file_root)

    def of_other_code(plan: dict[str, Any]) -> None:
        change(plan)
        plan["revision"] = "0123456789ab+"

    change_plan(trial, of_other_code)
    before = sorted(trial.rglob("*"))
    assert run(["resume", "ppo-math/stopped", *words, "--detach"]) == 4
    error = capsys.readouterr().err
    assert named in error
    assert "revision 0123456789ab" in error
    assert "git checkout 0123456789ab" in error
    assert error.count("fix:") == 1
    assert not (trial / "attempts/0002").exists()
    assert {p for p in set(trial.rglob("*")) - set(before) if p.name != "lock"} == set()


@pytest.mark.thorough
@pytest.mark.parametrize("change", [rename_option, add_field])
def test_it_is_shown_though_its_settings_cant_be_read(
    change: Callable[[dict[str, Any]], object], file_root: Path, said: Any
) -> None:
    (trial,) = unpack("stopped", file_root)
    change_plan(trial, change)
    then = KINDS["stopped"]["trials"]["ppo-math/stopped"]
    view = json.loads(said("status", "ppo-math/stopped", "--json"))["trial"]
    assert (view["state"], view["attempt"]) == ("stopped", 1)
    lines = json.loads(said("logs", "ppo-math/stopped", "--json"))["lines"]
    assert len(lines) == then["log_lines"]
    assert "ppo-math/stopped" in said("ls")
    assert said("explain", "ppo-math/stopped").startswith("ppo-math/stopped is stopped")
    page = Path(said("report", "ppo-math/stopped").strip()).read_text()
    assert page.rstrip().endswith("</html>")


def test_a_revision_that_was_not_recorded_is_named_by_its_day(
    file_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trial,) = unpack("stopped", file_root)
    change_plan(trial, rename_option)
    assert run(["resume", "ppo-math/stopped", "--detach"]) == 4
    error = capsys.readouterr().err
    assert "realsys 0.1.0 on 2026-" in error
    assert "pip install realsys==0.1.0" in error
    assert "git rev-list" in error


def test_a_replay_is_refused_likewise(file_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trial,) = unpack("async", file_root)
    change_plan(trial, rename_option)
    assert run(["replay", "ppo-math-async/run1", "--detach"]) == 4
    error = capsys.readouterr().err
    assert "replay ppo-math-async/run1" in error
    assert error.count("fix:") == 1


def test_a_trial_of_this_machine_records_its_revision(
    file_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realsys.trial.snapshot.revision", lambda: "abc+")
    assert make_plan("ppo-math").revision == "abc+"


def test_rm_says_how_to_remove_what_it_cant_read(
    file_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trial,) = unpack("stopped", file_root)
    change_plan(trial, add_field)
    assert run(["rm", "ppo-math/stopped", "--yes"]) == 4
    assert f"rm -r {trial}" in capsys.readouterr().err
    assert trial.is_dir()
