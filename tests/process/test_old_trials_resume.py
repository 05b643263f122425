"""A trial that an older revision made and stopped goes on, or is refused with what to do.

The trial is in tests/old_trials. Plans may change so that old ones can't be run any more: `resume` then
says which revision can, and touches nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from old_trials.unpack import unpack
from real_trials import Trials, explain, metrics_of, trained_ids

from realsys.observability.metrics import read_metrics
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

NAME, STEPS, STOPPED_AT = "ppo-math/stopped", 60, 4


def stopped(trials: Trials) -> TrialFiles:
    (folder,) = unpack("stopped", trials.file_root)
    return TrialFiles(folder)


def finished_by_resume(trials: Trials, files: TrialFiles) -> bool:
    """Resumes it. False where that was refused as it should be: place, fix, nothing touched."""
    done = trials.run("resume", NAME, "--detach")
    if done.returncode == 0:
        view = trials.wait(files, timeout_s=240)
        assert view.state is State.COMPLETED, explain(files, view)
        return True
    assert done.returncode in (1, 4)
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in ("error: ", "where: ", "fix: ", "revision"))
    assert not files.attempt(2).root.exists()
    assert trials.status_json(files)["trial"]["state"] == "stopped"
    return False


def test_a_stopped_one_goes_on_where_it_was_or_is_refused(trials: Trials) -> None:
    files = stopped(trials)
    before, ids = metrics_of(files), trained_ids(files)
    assert before[-1]["step"] == STOPPED_AT
    if not finished_by_resume(trials, files):
        return
    rows = metrics_of(files)
    assert rows[: len(before)] == before
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert trained_ids(files)[: len(ids)] == ids
    assert len(set(trained_ids(files))) == STEPS * 8


@pytest.mark.parametrize("lost", ["file", "folder"])
def test_without_its_checkpoint_it_begins_again(trials: Trials, lost: str) -> None:
    """As before: what is lost is named in the master's log, and the same questions are trained once."""
    files = stopped(trials)
    (checkpoint,) = (files.root / "recover").glob("step-*")
    ids = trained_ids(files)
    if lost == "file":
        (checkpoint / "model_worker-0.pt").unlink()
    else:
        shutil.rmtree(checkpoint)
    if not finished_by_resume(trials, files):
        return
    if lost == "file":
        log = files.attempt(2).log("master_worker/0").read_text()
        assert "checkpoint refused" in log
        assert "model_worker-0.pt" in log
    assert [row["step"] for row in read_metrics(files.root / "metrics.jsonl")][-1] == STEPS
    assert trained_ids(files)[: len(ids)] == ids
    assert len(trained_ids(files)) == len(set(trained_ids(files))) == STEPS * 8


def test_without_the_model_that_it_began_with_it_fails_with_what_to_do(trials: Trials) -> None:
    files = stopped(trials)
    shutil.rmtree(Path(trials.file_root, "cache"))
    done = trials.run("resume", NAME, "--detach")
    if done.returncode != 0:
        assert all(word in done.stderr for word in ("where: ", "fix: "))
        return
    view = trials.wait(files, timeout_s=240)
    assert view.state is State.FAILED
    assert "no directory" in view.reason
    assert "model directory" in view.fix
