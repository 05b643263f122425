"""Writes a trial's report and pictures from its folder when an attempt ends.

    report.html  dataflow_graph.png  timeline.json (opens in ui.perfetto.dev)

``python -m realsys.observability.report.artifacts TRIAL_DIR`` recreates them; the supervisor runs it in a
process of its own, so that drawing can't affect a run's result.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from realsys.api.plan import PhasePlan, read_plan
from realsys.observability.events import read_events
from realsys.observability.pictures.graph_picture import draw
from realsys.observability.report.report import write_report
from realsys.observability.timeline import write_perfetto
from realsys.trial.records import TrialFiles


def write_artifacts(trial_dir: Path) -> None:
    """Writes the pictures of every phase that has begun, and the report."""
    files = TrialFiles(trial_dir)
    for phase in read_plan(files.plan).phases:
        if TrialFiles.phase(phase.folder).events.exists():
            _write_pictures(phase)
    write_report(trial_dir)


def _write_pictures(phase: PhasePlan) -> None:
    files = TrialFiles.phase(phase.folder)
    roles = {call.name: call.role for call in phase.config.model_rpcs}
    write_perfetto(read_events(files.events), files.timeline, roles=roles)
    if find_spec("matplotlib"):  # else the report says what to install
        draw(phase.config.graph(), files.graph_picture)


if __name__ == "__main__":
    write_artifacts(Path(sys.argv[1]))
