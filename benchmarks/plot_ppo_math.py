"""Draws the README's pictures from finished ``ppo-math`` trials: curves, one step's timeline, the graph.

python benchmarks/plot_ppo_math.py docs/pictures TRIAL_DIR [TRIAL_DIR …]
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from realsys.api.plan import read_plan
from realsys.observability.events import read_events
from realsys.observability.metrics import read_metrics
from realsys.observability.pictures.graph_picture import draw
from realsys.observability.pictures.step_picture import step_png
from realsys.observability.timeline import mean_ratio, typical_step
from realsys.trial.records import TrialFiles

CURVES = (
    ("held-out accuracy", "eval/accuracy", (0.4, 1.0)),
    ("reward", "critic/score/mean", (0.4, 1.0)),
    ("KL to the reference, nats an answer", "actor/kl_ref/per_sequence", None),
)


def main(folder: Path, trials: list[Path]) -> None:
    """Writes the three pictures and prints what the tables need."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    for axes, (title, key, limits) in zip(figure.subplots(1, 3), CURVES, strict=True):
        for trial in trials:
            rows = [r for r in read_metrics(trial / "metrics.jsonl") if key in r]
            seed = read_plan(trial / "plan.json").options.get("seed", "?")
            label = f"seed {seed}"
            axes.plot([r["step"] for r in rows], [r[key] for r in rows], label=label, lw=1.6)
        axes.set(title=title, xlabel="PPO step", ylim=limits)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(loc="lower right", frameon=False)
    figure.savefig(folder / "ppo_math_curve.png", dpi=110)
    first = TrialFiles(trials[0])
    events = read_events(first.phase(first.root).events)
    step = typical_step(events)
    if step is not None:
        (folder / "step_timeline.png").write_bytes(step_png(events, step))
    draw(read_plan(first.plan).phase("main").config.graph(), folder / "dataflow_graph.png")
    for trial in trials:
        accuracy = [
            r["eval/accuracy"]
            for r in read_metrics(trial / "metrics.jsonl")
            if "eval/accuracy" in r
        ]
        ratio = mean_ratio(read_events(trial / "events.jsonl")) or 0.0
        sys.stdout.write(
            f"{trial.name}: {accuracy[0]:.3f} → {accuracy[-1]:.3f}, compute ratio {ratio:.3f}\n"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(p) for p in sys.argv[2:]])
