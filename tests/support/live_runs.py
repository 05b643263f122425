"""Runs that workers join and leave while they live: how they are started, and that nothing was lost.

Soon they crawl (crawl_plugin.py), three steps in eight seconds, until the test lets them go on: its
commands, of some ten seconds each, have a minute and a half on the quickest machine.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from real_trials import Trials, explain, small_ppo, trained_ids

from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

STEPS, CRAWLS_FROM = 42, 6
SEQUENCES = 8  # of a step
TWO_MAKERS = (
    "schedule.makers={maker_0: trainer_0, maker_1: trainer_0}",
    'schedule.trainers={trainer_0: "maker_0, maker_1"}',
    f"schedule.experience_batch_size={SEQUENCES}",
)


def launch(trials: Trials, experiment: str, policy: Path, *words: str) -> TrialFiles:
    """Starts ``<experiment>/live`` with ``policy``; returns after three steps."""
    agent = f"{{version: {CRAWLS_FROM}, go: {_go(trials)}}}"
    files = trials.launch(
        experiment,
        "live",
        f"actor.path={policy}",
        *small_ppo(
            "exp_ctrl.total_train_epochs=50",
            "exp_ctrl.ckpt_freq_steps=25",
            "exp_ctrl.eval_freq_steps=none",
        ),
        f"exp_ctrl.benchmark_steps={STEPS}",
        "schedule.max_staleness=2",
        *("--import", str(Path(__file__).with_name("crawl_plugin.py"))),
        *("task.agent=crawl", f"task.agent_args={agent}"),
        *words,
    )
    trials.wait_for_step(files, 3, timeout_s=180)
    return files


def finish(trials: Trials, files: TrialFiles) -> None:
    """Lets the run end; fails unless every step came, and each datapoint was trained once."""
    _go(trials).touch()
    view = trials.wait(files, timeout_s=300)
    assert (view.state, view.attempt) == (State.COMPLETED, 1), explain(files, view)
    trained = trained_ids(files)
    assert set(Counter(trained).values()) == {1}
    assert len(trained) == STEPS * SEQUENCES
    assert not files.attempt(1).restarts.exists()


def _go(trials: Trials) -> Path:
    return trials.file_root / "go"
