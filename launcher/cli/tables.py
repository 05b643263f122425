"""Prints `status`, `ls` and `show` as lines and tables; a sweep has a row per trial.

Values in, text out through launcher/terminal/output.py; the `--json` documents have the same values.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from launcher.slurm.query.time_left import time_warning, time_words
from launcher.terminal import output
from launcher.terminal.text import duration, headline, moment, times
from launcher.trials.render import failure_details, rates
from launcher.trials.trial_view import TrialView
from realsys.api.plain import to_plain

if TYPE_CHECKING:
    from realsys.config.option_tree import OptionRow
    from realsys.observability.predicted import PredictedRow

Row = tuple[Mapping[str, str], TrialView]  # the trial's values in its sweep, and its state


def print_status(view: TrialView) -> None:
    """Prints one trial: state, progress, workers."""
    say = output.data
    say(f"{view.trial}  {view.state.value}" + (f"  attempt {view.attempt}" if view.attempt else ""))
    if view.reason:
        say(f"  why       {view.reason}")
    if view.fix:
        say(f"  fix       {view.fix}")
    for line in failure_details(view):
        say(line)
    if view.progress:
        p = view.progress
        say(f"  progress  phase {p.phase}, step {p.step}/{p.total_steps or '?'}   {rates(view)}")
        if p.headline:
            say(f"  metrics   {headline(p.headline)}")
        for name, where in p.running.items():
            say(f"  computes  {name} on {where}")
    if evaluated := evaluation_text(view.metrics):
        say(f"  evaluated {evaluated}")
    if view.job:
        say(f"  job       {_job_words(view)}")
    if view.time:
        say(f"  time      {time_words(view.time)}")
    if late := time_warning(view.time, view.trial):
        output.warn(late)
    if view.supervisor_pid:
        say(f"  where     {view.host}, supervisor pid {view.supervisor_pid}")
    if view.started_at:
        end = view.ended_at or time.time()
        say(f"  started   {moment(view.started_at)}, {duration(end - view.started_at)}")
    for change in view.changes:
        say(f"  changed   {change}")
    for name in view.trusted_rules:
        say(f"  trusted   rule {name}: it runs in the workers' own process")
    say(f"  folder    {view.folder}")
    output.warn(*view.notes)
    if view.workers:
        say("")
        output.table(
            ("worker", "state", "for", "call", "step", "host", "pid", "heartbeat"),
            [_worker_row(w) for w in view.workers],
        )


def print_times(rows: Sequence[PredictedRow]) -> None:
    """Prints step and calls, predicted and measured."""
    from realsys.observability.predicted import error_text

    output.data("")
    if not rows:
        output.say(
            "no times: none was predicted for this trial (see realsys plan), or no step has finished"
        )
        return
    output.table(
        ("", "predicted", "measured", "error"),
        [(r.name, f"{r.predicted_s:.3f} s", f"{r.measured_s:.3f} s", error_text(r)) for r in rows],
    )


def _job_words(view: TrialView) -> str:
    """Renders ``892026  RUNNING on n[1-2]``."""
    job = view.job
    assert job is not None
    words = f"{', '.join(view.job_ids) or job.job_id}  {job.slurm_state or job.doubt}"
    return words + (f" on {job.nodes}" if job.nodes else "")


def evaluation_text(metrics: Mapping[str, Any]) -> str:
    """Renders ``step 200: accuracy 0.5   aime/accuracy 0.1`` for the newest evaluated checkpoint."""
    prefix = "auto_eval/"
    figures = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}
    step = figures.pop("step", None)
    error = figures.pop("error", "")
    of_others = {k: v for k, v in figures.items() if k.endswith(("/accuracy", "/success"))}
    others = [k.rpartition("/")[0] for k in of_others]
    own = {k: v for k, v in figures.items() if k.partition("/")[0] not in others}
    shown = own | of_others
    failed = f"   failed: {error}" if error else ""
    return f"step {step}: {headline(shown)}{failed}" if shown else ""


def _worker_row(worker: Any) -> tuple[str, ...]:
    spent = duration(worker.seconds_in_state) if worker.seconds_in_state is not None else ""
    pid = str(worker.pid or "") + (" (gone)" if worker.alive is False else "")
    state = worker.state + (f": {worker.reason}" if worker.reason else "")
    state += f", restarted {times(worker.restarts)}" if worker.restarts else ""
    age = worker.heartbeat_age_s
    beat = "" if age is None else f"{duration(age)} ago"
    return worker.worker, state, spent, worker.mfc, str(worker.step), worker.host, pid, beat


def _step(view: TrialView) -> str:
    if view.progress:
        return f"{view.step}/{view.total_steps or '?'}"
    return str(view.step or "")


def print_trials(views: Iterable[TrialView]) -> None:
    """Prints all trials, newest first."""
    rows = [
        (
            view.trial,
            view.state.value,
            moment(view.created_at),
            _step(view),
            headline(view.progress.headline) if view.progress else "",
        )
        for view in views
    ]
    if not rows:
        output.say("no trials yet; start one: realsys launch ppo-math")
        return
    output.table(("trial", "state", "launched", "step", "last metrics"), rows)


def sweep_table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Builds (columns, rows): trial, a column per setting that differs, state, step, metrics, reason."""
    axes = list(dict.fromkeys(name for point, _ in rows for name in point))
    columns = ("trial", *axes, "state", "step", "last metrics", "reason")
    return columns, [
        (
            view.trial,
            *(point.get(name, "") for name in axes),
            view.state.value,
            _step(view),
            headline(view.progress.headline) if view.progress else "",
            view.reason,
        )
        for point, view in rows
    ]


def sweep_document(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the trials as plain values: those of `status TRIAL --json`, and ``point``."""
    return [{"point": dict(point), **to_plain(view)} for point, view in rows]


def print_options(rows: Sequence[OptionRow], *, width: int) -> None:
    """Prints every option: name and default, then its range, unit and meaning.

    A group in which nothing is set, such as a worker type's resources, is explained once.
    """
    explained: dict[tuple[str, ...], str] = {}
    starts = sorted({0, *(i for i, row in enumerate(rows) if row.section)})
    for start, end in pairwise([*starts, len(rows)]):
        block = [row for row in rows[start:end] if not row.section]
        meanings = tuple(row.meaning for row in block)
        unset = len(block) > 1 and not any(row.default for row in block)
        as_before = explained.get(meanings) if unset else None
        if rows[start].section:
            row = rows[start]
            kind = f" = {row.default} ({row.range})" if row.default else ""
            same = f" (as {as_before}.*)" if as_before else ""
            output.data("")
            output.data(f"# {row.path}{kind}" + (f": {row.meaning}" if row.meaning else "") + same)
            if unset:
                explained.setdefault(meanings, row.path)
        if not as_before:
            _print_block(block, width)


def _print_block(rows: Sequence[OptionRow], width: int) -> None:
    """Prints the options of one group, aligned with each other."""
    from realsys.config.option_tree import value_text

    names = max((len(row.path) for row in rows), default=0)
    values = min(24, max((len(value_text(row.default)) for row in rows), default=0))
    for row in rows:
        limits = row.range.replace(" ", "\u00a0") if len(row.range) < 20 else row.range
        about = ", ".join([limits or row.type, *([row.unit] if row.unit else [])])
        left = f"{row.path:<{names}}  {value_text(row.default):<{values}}  "
        text = (f"{row.meaning} " if row.meaning else "") + f"({about})"
        room = max(24, width - len(left))
        first, *others = textwrap.wrap(text, room, break_long_words=False) or [""]
        output.data(left + first)
        for line in others:
            output.data(" " * len(left) + line)
