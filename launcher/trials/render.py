"""Live view of a trial: a screen on a terminal, one line per step in a pipe.

For attached launches, watch and resume. It only reads the records (launcher/trials/status.py), so leaving
it never affects the run. Also the summary at the end, and the tables of `status`.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from launcher.slurm.query.time_left import time_words
from launcher.terminal import output
from launcher.terminal.exit_codes import ExitCode
from launcher.terminal.text import duration, headline, times, visible
from launcher.trials.await_end import views_until_over, wait_for_supervisor_exit
from launcher.trials.merged_logs import LogLine, TrialLogs
from launcher.trials.status import StatusReader
from launcher.trials.submission import batch_logs, known_submission
from launcher.trials.trial_view import TrialView
from realsys.trial.last_lines import last_lines
from realsys.trial.records import AttemptFiles, Failure, TrialFiles
from realsys.trial.trial_state import State

if TYPE_CHECKING:
    from rich.console import RenderableType

LINE_S = 2.0  # minimum interval of progress lines in a pipe,
QUIET_S = 15.0  # and their maximum interval
MASTER = "master_worker/0"
MASTER_LINES = 5
SHOWN_WARNINGS = 3
ERROR_LINES = 6
# Start of a log line; a traceback's last line, and the further lines of a RealsysError.
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT")
_ERROR = re.compile(r" ERROR |^[\w.]*(Error|Exception|Lost|Timeout)\b.*: |^  where: |^  fix:   ")
COLOURS = {
    State.COMPLETED: "green",
    State.RUNNING: "cyan",
    State.QUEUED: "yellow",
    State.HELD: "yellow",
    State.PAUSED: "yellow",
    State.STARTING: "cyan",
    State.STOPPING: "yellow",
    State.STOPPED: "yellow",
    State.FAILED: "red",
    State.LOST: "red",
}
EXIT = {
    State.COMPLETED: ExitCode.OK,
    State.STOPPED: ExitCode.RUN_STOPPED,
}


def exit_code(view: TrialView) -> ExitCode:
    """Returns the exit status of a verb that waited for the end."""
    return EXIT.get(view.state, ExitCode.RUN_FAILED)


def watch_until_over(files: TrialFiles, trial: str) -> int:
    """Shows the live view on stderr, then the summary; returns the run's exit status."""
    try:
        view = follow(files, sys.stderr)
        wait_for_supervisor_exit(files)
    except KeyboardInterrupt:
        output.say(
            f"\n{trial} keeps running.  watch: realsys watch {trial}   stop: realsys stop {trial}"
        )
        return ExitCode.INTERRUPTED
    output.say(*summary(view, files))
    return exit_code(view)


def follow(
    files: TrialFiles, stream: TextIO, *, sleep: Callable[[float], None] = time.sleep
) -> TrialView:
    """Shows the trial on ``stream`` until it has ended; returns the last view."""
    with closing(StatusReader(files)) as reader:
        if output.can_draw(stream):
            return _screen(files, reader, stream, sleep)
        return _lines(reader, stream, sleep)


# ---- in a pipe ------------------------------------------------------------------------------


def _lines(reader: StatusReader, stream: TextIO, sleep: Callable[[float], None]) -> TrialView:
    shown: TrialView | None = None
    last_written = 0.0
    for view in views_until_over(reader, sleep=sleep):
        if shown is None or is_line_due(view, shown, age_s=time.monotonic() - last_written):
            shown, last_written = view, time.monotonic()
            stream.write(visible(progress_line(view)) + "\n")
            stream.flush()
    return view


def is_line_due(view: TrialView, shown: TrialView, *, age_s: float) -> bool:
    """Whether a pipe gets a line for ``view``, ``age_s`` after the line for ``shown``."""

    if (view.state, view.attempt, view.phase) != (shown.state, shown.attempt, shown.phase):
        return True
    doing, then = (v.progress.doing if v.progress else "" for v in (view, shown))
    moves = (view.step, doing) != (shown.step, then)
    return age_s >= (LINE_S if moves else QUIET_S)


def progress_line(view: TrialView) -> str:
    """Renders the trial's progress in one line."""
    parts = [view.trial, view.state.value]
    progress = view.progress
    if view.phase and len(view.phases) > 1:
        parts.append(f"phase {view.phase}")
    if progress is not None:
        parts.append(f"step {progress.step}/{progress.total_steps or '?'}")
        parts += [headline(progress.headline)] if progress.headline else []
        parts += [rates(view)] if progress.step else []
        parts += [progress.doing] if progress.doing else []
    elif view.state in (State.QUEUED, State.HELD, State.UNKNOWN):
        parts += [view.reason]
    elif view.state in State.live():
        parts += [f"{w.worker} {w.state}" for w in view.workers[:4]]
    return " | ".join(part for part in parts if part)


def rates(view: TrialView) -> str:
    """Renders ``1,234 tokens/s   2.1 s a step   ETA 8 min 12 s``."""
    progress = view.progress
    if progress is None:
        return ""
    parts = []
    if progress.tokens_per_second:
        parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if progress.step_seconds:
        parts.append(f"{duration(progress.step_seconds)} a step")
    if progress.eta_seconds is not None and view.state is State.RUNNING:
        parts.append(f"ETA {duration(progress.eta_seconds)}{_after_the_limit(view)}")
    return "   ".join(parts)


def _after_the_limit(view: TrialView) -> str:
    """Renders a note after the ETA if the job's time limit comes first."""
    if view.time is None or view.time.over_s is None or view.time.left_s is None:
        return ""
    return f", but the time limit comes in {duration(view.time.left_s)}"


# ---- on a terminal --------------------------------------------------------------------------


def _screen(
    files: TrialFiles, reader: StatusReader, stream: TextIO, sleep: Callable[[float], None]
) -> TrialView:
    from rich.live import Live

    warned: deque[LogLine] = deque(maxlen=SHOWN_WARNINGS)
    submission = known_submission(files)
    after = submission.after_attempt if submission else 0
    logs = TrialLogs(files, grep=r"\b(WARNING|ERROR|CRITICAL)\b")
    with Live(console=output.console(stream), auto_refresh=False, transient=True) as live:
        for view in views_until_over(reader, sleep=sleep):
            warned.extend(logs.read())
            live.update(picture(view, current_warnings(warned, view.attempt, after)), refresh=True)
    return view


def current_warnings(warned: Iterable[LogLine], attempt: int, after: int) -> list[str]:
    """Selects lines of the present attempt, or of the one to follow attempt ``after`` (pure)."""
    newest = max(attempt, after + 1)
    return [f"{line.worker} | {line.text}" for line in warned if line.attempt >= newest]


def picture(view: TrialView, warnings: list[str]) -> RenderableType:
    """Renders the live view with rich."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text as Raw

    def Text(text: str, **style: Any) -> Raw:
        """A rich Text of untrusted text, with control characters made visible."""
        return Raw(visible(text), **style)

    head = Raw.assemble(
        Text(view.trial, style="bold"),
        "  ",
        (view.state.value, COLOURS.get(view.state, "")),
        Text(_where(view)),
    )
    rows: list[RenderableType] = [head]
    if progress := view.progress:
        bar = Table.grid(padding=(0, 2))
        total = progress.total_steps or None
        bar.add_row(
            ProgressBar(total=total, completed=progress.step, width=30),
            f"step {progress.step}/{progress.total_steps or '?'}",
        )
        rows += [bar]
        if text := rates(view):
            rows.append(Text(text))  # on its own line: beside the bar it would exceed 80 columns
        if progress.headline:
            rows.append(Text(headline(progress.headline), style="bold"))
        rows += [
            Text(f"  {name}  on {where}", style="cyan") for name, where in progress.running.items()
        ]
        if progress.doing:
            rows.append(Text(f"  {progress.doing}", style="cyan"))
    elif view.workers:
        rows.append(Text("  " + ", ".join(f"{w.worker} {w.state}" for w in view.workers[:8])))
    for worker in view.workers:
        if worker.restarts:
            text = f"  {worker.worker} {worker.state}, restarted {times(worker.restarts)}"
            rows.append(Text(text, style="yellow"))
    if view.reason:
        rows.append(Text(view.reason))
    rows += [Text(line, style="yellow", no_wrap=True, overflow="ellipsis") for line in warnings]
    rows += [Text(note, style="yellow") for note in view.notes]
    return Group(*rows)


def _where(view: TrialView) -> str:
    parts = [f"attempt {view.attempt}"] if view.attempt > 1 else []
    if len(view.phases) > 1 and view.phase:
        parts.append(
            f"phase {view.phase} ({view.phases.index(view.phase) + 1} of {len(view.phases)})"
        )
    if view.started_at and not view.ended_at:
        parts.append(f"{duration(time.time() - view.started_at)} so far")
    if view.time:
        parts.append(time_words(view.time))
    return "".join(f"   {part}" for part in parts)


# ---- at the end -----------------------------------------------------------------------------


def summary(view: TrialView, files: TrialFiles) -> list[str]:
    """Summarises results and their locations; or the first failure, its log, and how to resume."""
    lines = [
        f"{view.trial} {view.state.value}" + (f" after {_spent(view)}" if _spent(view) else "")
    ]
    if view.progress and view.progress.headline:
        lines.append(f"  at step {view.step}: {headline(view.progress.headline)}")
    if view.reason:
        lines += _indented(f"why: {view.reason}")
    if view.fix:
        lines += _indented(f"fix: {view.fix}")
    lines += [f"  note: {note}" for note in view.notes]
    lines += failure_details(view)
    return lines + [f"  {name:<12}{path}" for name, path in products(files) if path.exists()]


def failure_details(view: TrialView) -> list[str]:
    """Lists how to resume an ended trial, and the end of the log of its first failure."""
    lines = []
    if view.state in State.live():  # requeued: the run continues
        return []
    resume = view.exit.resume if view.exit else ""
    if resume and resume not in view.fix and view.is_resumable:
        lines.append(f"  resume    {resume}")
    failure = view.exit.first_failure if view.exit else None
    if failure is not None:
        lines += [f"  log       {failure.log}"] if failure.log else []
        lines += [f"    {line}" for line in failure.log_tail]
        lines += _master_tail(view, failure)
    elif view.state is State.LOST and view.attempt:
        lines += _errors_in_logs(TrialFiles(Path(view.folder)).attempt(view.attempt))
    elif view.state is State.LOST:
        lines += [f"    {line}" for line in _submitit_tail(TrialFiles(Path(view.folder)))]
    return lines


def _errors_in_logs(attempt: AttemptFiles) -> list[str]:
    """Extracts the last errors of each log of an attempt without an exit marker."""
    lines = []
    for log in sorted(attempt.logs.glob("*.log")):
        errors = [line for line in last_lines(log) if _ERROR.search(line)]
        if errors:
            lines += [f"  log       {log}", *(f"    {e}" for e in errors[-ERROR_LINES:])]
    return lines


def _master_tail(view: TrialView, failure: Failure) -> list[str]:
    """Shows the run's progress from the master's log, unless the master failed first.

    Lines that repeat the failure are left out.
    """
    if failure.worker == MASTER or not view.attempt:
        return []
    log = TrialFiles(Path(view.folder)).attempt(view.attempt).log(MASTER)
    logged = [line for line in last_lines(log) if _LOG_LINE.match(line)]  # no lines of tracebacks
    tail = [line for line in logged[-MASTER_LINES:] if line not in failure.log_tail]
    return [f"  master    {log}", *(f"    {line}" for line in tail)] if any(tail) else []


def products(files: TrialFiles) -> list[tuple[str, Path]]:
    """Lists the products of a run for users, whether or not they exist."""
    main = TrialFiles.phase(files.root)
    latest = sorted(main.checkpoints.glob("*/latest"))
    return [
        *(("checkpoint", path.resolve()) for path in latest),
        ("metrics", main.metrics),
        ("tensorboard", main.tensorboard),
        ("report", files.report),
        ("folder", files.root),
    ]


def _spent(view: TrialView) -> str:
    if view.started_at is None or view.ended_at is None:
        return ""
    return duration(view.ended_at - view.started_at)


def _submitit_tail(files: TrialFiles, lines: int = 15) -> list[str]:
    """Reads the end of what the supervisor's process printed before it had a log."""
    logs = batch_logs(files, known_submission(files))
    return last_lines(logs[-1])[-lines:] if logs else []


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]
