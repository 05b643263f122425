"""What scheduling makes of a step: calls on workers of their own overlap, and nothing else takes time.

The calls sleep (cost_plugin.py); everything around them is real.
"""

from __future__ import annotations

import statistics
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from cost_plugin import Costs
from real_trials import Trials, explain, metrics_of

from realsys.observability.events import MfcEvent, StepEvent, read_events
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

PLUGIN = Path(__file__).parents[1] / "support" / "cost_plugin.py"
STEPS = 6
SMALL = (
    "task.train_size=8",
    "train_bs_n_seqs=8",
    "group_size=2",
    f"exp_ctrl.total_train_epochs={STEPS}",
    "exp_ctrl.ckpt_freq_secs=none",
    "exp_ctrl.save_freq_epochs=none",
    "algorithm.ppo_n_minibatches=2",
    "scheduling.model_worker.cpu=1",
    "tensorboard=false",
)
APART = (
    "placement.pools.left=1",
    "placement.pools.right=1",
    "placement.pools.rules=1",
    "placement.allocation=actor:d1@left,ref:d1@left,critic:d1@right,reward:d1@rules",
)
COSTS = Costs(
    actor_gen=0.8, rew_inf=0.5, ref_inf=0.5, critic_inf=0.5, actor_train=0.8, critic_train=0.8
)
NOTHING = Costs(actor_gen=0, rew_inf=0, ref_inf=0, critic_inf=0, actor_train=0, critic_train=0)


def run(trials: Trials, name: str, costs: Costs, *words: str) -> TrialFiles:
    """A whole trial of ``cost-ppo``."""
    told = [f"costs.{call}={getattr(costs, call)}" for call in costs.__dataclass_fields__]
    plugin = ("--import", str(PLUGIN))
    files = trials.launch("cost-ppo", name, *plugin, *SMALL, *told, *words)
    view = trials.wait(files, timeout_s=200)
    assert view.state is State.COMPLETED, explain(files, view)
    return files


def typical_step_s(files: TrialFiles) -> float:
    """The median, which a step that somebody disturbed does not move."""
    events = read_events(files.phase(files.root).events)
    steps = [e.end - e.start for e in events if isinstance(e, StepEvent)]
    assert len(steps) == STEPS
    return statistics.median(steps)


def least_step_s(files: TrialFiles) -> float:
    """Of the step that other processes disturbed least."""
    events = read_events(files.phase(files.root).events)
    return min(e.end - e.start for e in events if isinstance(e, StepEvent))


def overlap(a: MfcEvent, b: MfcEvent) -> float:
    """Share of the shorter call during which both ran."""
    both_s = min(a.end, b.end) - max(a.start, b.start)
    return both_s / min(a.end - a.start, b.end - b.start)


def test_a_step_on_workers_apart_takes_its_critical_path(trials: Trials) -> None:
    files = run(trials, "apart", COSTS, *APART)
    overhead_s = typical_step_s(run(trials, "nothing", NOTHING, *APART))
    step_s, critical_s = least_step_s(files), COSTS.critical_path_s
    assert critical_s == pytest.approx(0.8 + 0.5 + 0.8)
    # What is not a call costs about as much as in a run of nothing else. One after the other the calls
    # alone would take nearly twice as long.
    assert critical_s <= step_s <= (critical_s + COSTS.serial_s) / 2 + overhead_s

    calls = [e for e in read_events(files.phase(files.root).events) if isinstance(e, MfcEvent)]
    shares: dict[tuple[str, str], list[float]] = {}
    for step in range(1, STEPS + 1):
        of = {e.name: e for e in calls if e.step == step}
        assert len(of) == 6
        for a, b in (
            *combinations(("rew_inf", "ref_inf", "critic_inf"), 2),
            ("actor_train", "critic_train"),
        ):
            shares.setdefault((a, b), []).append(overlap(of[a], of[b]))
        for first, then in pairwise(("actor_gen", "ref_inf", "actor_train")):
            assert overlap(of[first], of[then]) <= 0, (step, first, then)
    # A busy machine may start one of two late, in some steps; one after the other they never overlap.
    assert all(max(found) > 0.5 for found in shares.values()), shares


def test_calls_of_any_layouts_get_their_own_rows(trials: Trials) -> None:
    """The updates check every row (cost_plugin.py); here they come from workers of other layouts."""
    files = run(
        trials,
        "layouts",
        NOTHING,
        "placement.n_model_workers=3",
        "placement.pools.all=0-2",
        "placement.pools.ends=1-2",
        "placement.allocation=actor:d2@ends,ref:d3@all,critic:d1t2p1@all,reward:d1@ends",
    )
    rows = metrics_of(files)
    assert len(rows) == STEPS
    assert rows[-1]["actor/loss"] == 1 / STEPS
