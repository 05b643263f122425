"""Whole trials in several layouts: the same numbers as in one process, and resumes bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from paced import Pace
from real_trials import (
    SMALL_PPO,
    SMALL_PPO_STEPS,
    Trials,
    explain,
    make_policy,
    metrics_of,
    trained_ids,
    weights_of,
)
from safetensors.torch import load

from realsys.observability.events import MfcEvent, MoveEvent, StepEvent, read_events
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

pytestmark = pytest.mark.process

STEPS = 3
OPTIONS = (
    "seed=5",
    "train_bs_n_seqs=8",
    f"task.train_size={STEPS * 8}",
    "task.eval_size=0",
    "group_size=2",
    "gen.max_new_tokens=12",
    "algorithm.ppo_n_minibatches=2",
    "algorithm.kl_ctl=0.1",
    "task.reward=by_length",
    "scheduling.model_worker.cpu=1",
    *(
        f"{role}.optimizer.{setting}"
        for role in ("actor", "critic")
        # At Adam's usual eps rounding is blown up where gradients are next to nothing.
        for setting in ("lr=1e-3", "eps=1e-5", "warmup_steps_proportion=0")
    ),
)
PLUG_IN = """
from realsys.api.registry import register_reward
register_reward("by_length", lambda *, response, **_: len(response) % 7 / 7, trusted=True)
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy whose heads and layers two ranks can share."""
    return make_policy(tmp_path_factory.mktemp("policy") / "two", num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory):
    """Trials of the whole file, so that the run in one process is made once."""
    made = Trials(tmp_path_factory.mktemp("parallel") / "root")
    plug_in = made.file_root / "rule.py"
    plug_in.parent.mkdir(parents=True)
    plug_in.write_text(PLUG_IN)
    # A site whose workers meet at the first one's store, not by a file.
    (made.file_root / "meet.yaml").write_text(f"file_root: {made.file_root}\nrendezvous: tcp\n")
    yield made
    made.end_all()


def finish(trials: Trials, experiment: str, name: str, *words: str) -> TrialFiles:
    """Runs a trial to its end."""
    files = trials.launch(experiment, name, *words)
    view = trials.wait(files, timeout_s=200)
    assert view.state is State.COMPLETED, explain(files, view)
    return files


@pytest.fixture(scope="module")
def run(shared, policy):
    """name, settings → a finished three-step run with the rule of this file."""

    def start(name: str, *words: str, experiment: str = "ppo-math") -> TrialFiles:
        rule = str(shared.file_root / "rule.py")
        return finish(
            shared, experiment, name, "--import", rule, f"actor.path={policy}", *OPTIONS, *words
        )

    return start


@pytest.fixture(scope="module")
def one(run) -> TrialFiles:
    """The run in one process."""
    return run("one")


def rows_of(files: TrialFiles) -> list[dict[str, Any]]:
    return [row for row in metrics_of(files) if "actor/actor_loss" in row]


def assert_same_run(files: TrialFiles, other: TrialFiles, tolerance: float) -> None:
    rows, wanted = rows_of(files), rows_of(other)
    assert len(rows) == len(wanted) == STEPS
    for row, reference in zip(rows, wanted, strict=True):
        assert row.keys() == reference.keys()
        for key, value in reference.items():
            assert row[key] == pytest.approx(value, abs=tolerance, rel=tolerance), key
    for role in ("actor", "critic"):
        mine, its = load(weights_of(files, role)), load(weights_of(other, role))
        assert mine.keys() == its.keys()
        for name, x in its.items():
            assert (mine[name] - x).abs().max().item() <= tolerance, (role, name)


def moves_of(files: TrialFiles) -> list[MoveEvent]:
    events = read_events(files.phase(files.root).events)
    return [e for e in events if isinstance(e, MoveEvent)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "megatron-t2",
            (
                "actor.backend=megatron",
                "actor.parallel=t2",
                "critic.backend=megatron",
                "critic.parallel=p2",
                "placement.allocation=actor_gen:d2,ref_inf:t2",
            ),
        ),
        (
            "fsdp-d2",
            (
                "actor.parallel=d2",
                "critic.parallel=t2",
                "placement.allocation=actor_gen:d1",
                "placement.copies_through=disk",
            ),
        ),
    ],
)
def test_other_layouts_give_the_same_losses_and_weights(shared, run, one, name, words):
    site = {"megatron-t2": ("--cluster", str(shared.file_root / "meet.yaml"))}
    files = run(name, *words, *site.get(name, ()))
    assert_same_run(files, one, 1e-5)
    assert any(files.attempt(1).rendezvous.glob("main*")) is (name not in site)
    moved = {(e.step, e.name) for e in moves_of(files)}
    assert {(step, "weights actor@0 → actor@1") for step in range(1, STEPS + 1)} <= moved
    assert sum(e.num_bytes for e in moves_of(files)) > 0
    assert not list(files.attempts.rglob("*.safetensors")), "files that weights went through"


def test_a_split_run_equals_the_shared_one_bit_for_bit_and_overlaps(run, one):
    files = run("split", "algorithm.critic_warmup_steps=0", experiment="ppo-math-split")
    assert rows_of(files) == rows_of(one)
    assert trained_ids(files) == trained_ids(one)
    for role in ("actor", "critic"):
        assert weights_of(files, role) == weights_of(one, role)
    events = read_events(files.phase(files.root).events)
    spans = {(e.step, e.name): e for e in events if isinstance(e, MfcEvent)}
    together = [
        min(spans[step, a].end, spans[step, b].end)
        - max(spans[step, a].start, spans[step, b].start)
        for step in range(1, STEPS + 1)
        for a, b in (("actor_train", "critic_train"), ("ref_inf", "critic_inf"))
    ]
    assert max(together) > 0, "neither pair of calls ever ran at the same time"
    assert len([e for e in events if isinstance(e, StepEvent)]) == STEPS


AHEAD = (
    "schedule=one_step_off",
    "placement.pools.gen=1",
    "placement.pools.train=1",
    "placement.allocation=actor_gen:d1@gen,*:d1@train",
    "algorithm.ref_ema_eta=0.1",
    "actor.dtype=bfloat16",
)


def test_a_run_one_step_ahead_resumes_bit_for_bit(trials, tiny_policy, tmp_path):
    """The step that has begun ahead is in the checkpoint; so is the reference that follows the actor.

    All compute in bfloat16: masters and the average of the reference are float32, there as well.
    """
    pace = Pace(tmp_path, 0.0)
    words = (f"actor.path={tiny_policy}", *SMALL_PPO, *AHEAD, *pace.words)
    whole = finish(trials, "ppo-math", "whole", *words)
    pace.set(1.2)  # to be stopped in its middle, however slow the command that stops it
    stopped = trials.launch("ppo-math", "stopped", *words)
    trials.wait_for_step(stopped, 3)
    assert trials.run("stop", "ppo-math/stopped").returncode == 0
    assert trials.wait(stopped).state is State.STOPPED
    pace.set(0.0)
    trials.resume(stopped)
    view = trials.wait(stopped)
    assert view.state is State.COMPLETED, explain(stopped, view)
    assert metrics_of(stopped) == metrics_of(whole)
    assert trained_ids(stopped) == trained_ids(whole)
    for role in ("actor", "critic"):
        assert weights_of(stopped, role) == weights_of(whole, role)
        assert {x.dtype for x in load(weights_of(whole, role)).values()} == {torch.bfloat16}
    events = read_events(whole.phase(whole.root).events)
    generated = {e.step: e for e in events if isinstance(e, MfcEvent) and e.name == "actor_gen"}
    trained = {e.step: e for e in events if isinstance(e, MfcEvent) and e.name == "actor_train"}
    assert all(
        generated[step + 1].start < trained[step].start for step in range(1, SMALL_PPO_STEPS - 4)
    )


def test_a_megatron_run_resumes_bit_for_bit(trials, policy, tmp_path):
    pace = Pace(tmp_path, 0.0)
    words = (
        *pace.words,
        f"actor.path={policy}",
        *SMALL_PPO,
        "actor.backend=megatron",
        "actor.parallel=t2",
        "critic.parallel=d2",
    )
    whole = finish(trials, "ppo-math", "whole", *words)
    pace.set(1.2)
    stopped = trials.launch("ppo-math", "stopped", *words)
    trials.wait_for_step(stopped, 4)
    assert trials.run("stop", "ppo-math/stopped").returncode == 0
    assert trials.wait(stopped).state is State.STOPPED
    pace.set(0.0)
    trials.resume(stopped)
    view = trials.wait(stopped)
    assert view.state is State.COMPLETED, explain(stopped, view)
    assert metrics_of(stopped) == metrics_of(whole)
    for role in ("actor", "critic"):
        assert weights_of(stopped, role) == weights_of(whole, role)
