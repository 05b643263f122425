"""report.html: one page that describes a trial's run, made from its folder alone.

Works while the trial runs, after it failed and when it is done; the page loads nothing from elsewhere.
``python -m realsys.observability.report.report TRIAL_DIR`` recreates it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from realsys.api.errors import RealsysError
from realsys.observability.jsonl import replace_file, write_errors
from realsys.observability.report import report_details as details
from realsys.observability.report import report_sections as parts
from realsys.observability.report.report_evaluations import evaluations, samples
from realsys.observability.report.report_page import page, section
from realsys.observability.report.trial_report import TrialReport, read_trial_report
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State


def write_report(trial_dir: Path, *, output: Path | None = None) -> Path:
    """Writes the page atomically and returns its path.

    Args:
        trial_dir: the trial's folder.
        output: another place than the trial's ``report.html``.
    Raises:
        NoSuchTrial: the folder holds no trial.
        ClusterError: the page can't be written.
    """
    trial = read_trial_report(Path(trial_dir).absolute())
    path = output or TrialFiles(trial.root).report
    html = report_html(trial).encode(errors="replace")
    with write_errors(path):
        replace_file(path, html)
    return path


def report_html(trial: TrialReport) -> str:
    """Returns the page as HTML."""
    return page(
        f"{trial.trial} · realsys report",
        [
            parts.headline(trial),
            parts.failure_box(trial),
            parts.notes_box(trial),
            parts.curves(trial),
            evaluations(trial),
            samples(trial),
            parts.preparing(trial),
            details.time_spent(trial),
            details.predicted(trial),
            details.dataflow(trial),
            details.settings(trial),
            going_on(trial),
            _footer(trial),
        ],
    )


def going_on(trial: TrialReport) -> str:
    """Returns useful next commands as HTML."""
    steps = {
        State.RUNNING: (f"realsys watch {trial.trial}", "attach the live view"),
        State.UNKNOWN: (f"realsys status {trial.trial}", "ask how it stands"),
    }
    resume = (trial.marker.resume if trial.marker else "") or f"realsys resume {trial.trial}"
    lines = []
    if trial.state in steps:
        lines.append(steps[trial.state])
    elif trial.state is not State.COMPLETED:
        lines.append((resume, "resume from the newest complete checkpoint"))
    if checkpoint := _newest_checkpoint(trial):
        lines.append((str(checkpoint), "newest saved policy: a Hugging Face folder"))
        lines.append((f"realsys launch ppo-math actor.path={checkpoint}", "train it further"))
    if trial.main.files.tensorboard.is_dir():
        lines.append((f"tensorboard --logdir {trial.main.files.tensorboard}", "all curves"))
    if trial.main.files.timeline.exists():
        lines.append((str(trial.main.files.timeline), "timeline: open it in ui.perfetto.dev"))
    lines.append((f"realsys logs {trial.trial}", "log lines of every worker"))
    rows = "".join(
        f"<p><span class='soft small'>{escape(why)}</span><br><code>{escape(command)}</code></p>"
        for command, why in lines
    )
    return section("How to go on", f'<div class="card">{rows}</div>')


def _newest_checkpoint(trial: TrialReport) -> Path | None:
    """Returns the newest saved folder of the run's product: its first role, or the only one."""
    folder = trial.main.files.checkpoints
    if not folder.is_dir():
        return None
    roles = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    first = [p for p in roles if p.name in ("actor", "model")] or roles
    steps = sorted(p for p in first[0].iterdir() if p.name.startswith("step-")) if first else []
    return steps[-1] if steps else None


def _footer(trial: TrialReport) -> str:
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    return f"<footer>Written {written} from <code>{escape(str(trial.root))}</code>.</footer>"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m realsys.observability.report.report",
        description="Write a trial's report.html from its folder.",
    )
    parser.add_argument("trial_dir", type=Path, metavar="TRIAL_DIR")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: report.html in the trial's folder"
    )
    given = parser.parse_args(arguments)
    try:
        path = write_report(given.trial_dir, output=given.output)
    except RealsysError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
