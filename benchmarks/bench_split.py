"""Measures how placement affects a PPO step with given costs: real launcher, master and transfers.

``python benchmarks/bench_split.py [--steps 12] [--scale 1.0] [--only PLACE …]`` runs ``cost-ppo``
(tests/support/cost_plugin.py), whose calls sleep, in several placements and prints a table: the median
step, the graph's critical path, all calls in sequence, and the shortest step that the placement allows
(each worker does one thing at a time). The time beyond that is realsys' overhead: messages, transfers,
files. The last column is a step of the same placement whose calls cost nothing.

A call on two data-parallel ranks takes half as long as on one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests" / "support"
sys.path.insert(0, str(TESTS))

from cost_plugin import Costs  # noqa: E402
from real_trials import Trials, explain  # noqa: E402

from realsys.observability.events import StepEvent, read_events  # noqa: E402
from realsys.trial.trial_state import State  # noqa: E402

BATCH = 16
NEEDS = {
    "actor_gen": (),
    "rew_inf": ("actor_gen",),
    "ref_inf": ("actor_gen",),
    "critic_inf": ("actor_gen",),
    "actor_train": ("rew_inf", "ref_inf", "critic_inf"),
    "critic_train": ("rew_inf", "ref_inf", "critic_inf"),
}


@dataclass(frozen=True)
class Place:
    """A placement: settings, and the model workers of each role."""

    words: tuple[str, ...]
    workers: Mapping[str, tuple[int, ...]]

    def costs(self, whole: Costs) -> Costs:
        """Seconds on each rank: ``whole`` is for one."""
        names = [f.name for f in fields(whole)]
        return Costs(**{n: getattr(whole, n) / len(self.of_call(n)) for n in names})

    def of_call(self, name: str) -> tuple[int, ...]:
        """The workers of a call."""
        return self.workers[{"rew": "reward"}.get(role := name.split("_")[0], role)]

    def shortest_step_s(self, costs: Costs) -> float:
        """Calls in order, each as soon as its inputs are there and its workers are free."""
        ends: dict[str, float] = {}
        free: dict[int, float] = {}
        for name, needs in NEEDS.items():
            waits = [ends[n] for n in needs] + [free.get(w, 0.0) for w in self.of_call(name)]
            ends[name] = max(waits, default=0.0) + getattr(costs, name)
            free |= dict.fromkeys(self.of_call(name), ends[name])
        return max(ends.values())


PLACES = {
    "serial, 1 worker": Place((), {"actor": (0,), "ref": (0,), "critic": (0,), "reward": (0,)}),
    "shared, 2 workers": Place(
        ("placement.n_model_workers=2", "placement.allocation=reward:d1,*:d2"),
        {"actor": (0, 1), "ref": (0, 1), "critic": (0, 1), "reward": (0,)},
    ),
    "split, 2 workers": Place(
        ("placement=split",), {"actor": (0,), "ref": (0,), "critic": (1,), "reward": (1,)}
    ),
    "apart, 3 workers": Place(
        (
            "placement.pools.left=1",
            "placement.pools.right=1",
            "placement.pools.rules=1",
            "placement.allocation=actor:d1@left,ref:d1@left,critic:d1@right,reward:d1@rules",
        ),
        {"actor": (0,), "ref": (0,), "critic": (1,), "reward": (2,)},
    ),
}


def median_step_s(trials: Trials, name: str, place: Place, costs: Costs, steps: int) -> float:
    """Runs a trial; the median of its steps but the first, in which connections are made."""
    files = trials.launch(
        "cost-ppo",
        name,
        *("--import", str(TESTS / "cost_plugin.py")),
        *(f"costs.{f.name}={getattr(costs, f.name)}" for f in fields(costs)),
        f"task.train_size={BATCH}",
        f"train_bs_n_seqs={BATCH}",
        f"exp_ctrl.total_train_epochs={steps}",
        "exp_ctrl.ckpt_freq_secs=none",
        "algorithm.ppo_n_minibatches=2",
        "scheduling.model_worker.cpu=1",
        "tensorboard=false",
        *place.words,
    )
    view = trials.wait(files, timeout_s=600)
    if view.state is not State.COMPLETED:
        raise SystemExit(explain(files, view))
    events = read_events(files.phase(files.root).events)
    took_s = [e.end - e.start for e in events if isinstance(e, StepEvent)]
    return statistics.median(took_s[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--scale", type=float, default=1.0, help="of all costs")
    parser.add_argument("--only", nargs="+", default=list(PLACES), choices=list(PLACES))
    args = parser.parse_args()
    whole = Costs(**{f.name: f.default * args.scale for f in fields(Costs)})
    nothing = Costs(**{f.name: 0.0 for f in fields(Costs)})
    sys.stdout.write(
        "| placement | step | critical path | of it | one after another | of it | shortest possible "
        "| of it | costs nothing |\n|---|---|---|---|---|---|---|---|---|\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder))
        try:
            for i, name in enumerate(args.only):
                place = PLACES[name]
                costs = place.costs(whole)
                step_s = median_step_s(trials, f"place{i}", place, costs, args.steps)
                empty_s = median_step_s(trials, f"empty{i}", place, nothing, args.steps)
                bounds = (costs.critical_path_s, costs.serial_s, place.shortest_step_s(costs))
                cells = [f"{bound:.3f} s | {step_s / bound:.1%}" for bound in bounds]
                row = " | ".join([name, f"{step_s:.3f} s", *cells, f"{empty_s:.3f} s"])
                sys.stdout.write(f"| {row} |\n")
                sys.stdout.flush()
        finally:
            trials.end_all()


if __name__ == "__main__":
    main()
