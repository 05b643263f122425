"""Explains in sentences why a trial waits, hangs or has failed, for `realsys explain` (pure).

``status`` shows the state; this shows its causes and what to do: Slurm's reason, missing workers by name,
the first failure with the end of its log, and the failures that followed from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.slurm.query.time_left import time_warning, time_words
from launcher.terminal.text import duration, listed, moment, times
from launcher.trials.idle_episodes import IdleEpisodes
from launcher.trials.trial_view import TrialView, WorkerView
from realsys.trial.records import Failure
from realsys.trial.trial_state import State

LONG_CALL_S = 120.0  # a call longer than this is reported
MAX_NAMES = 12
MASTER = "master_worker/0"
MAX_CHAINS = 12


def explain(view: TrialView, idle: IdleEpisodes | None = None) -> Iterator[str]:
    """Yields the causes in order; the last line says what to do.

    Args:
        idle: episodes that are under way while none has ended for minutes.
    """
    yield f"{view.trial} is {view.state.value}" + (f": {view.reason}" if view.reason else "")
    yield from _job(view)
    if view.state in State.live():
        yield from _workers(view)
        if idle is not None:
            yield from _idle(idle)
    failure = view.exit.first_failure if view.exit else None
    if failure is not None:
        yield from _failure(view, failure)
    for note in view.notes:
        yield f"note: {note}"
    if view.fix:
        yield f"what to do: {view.fix}"
    elif view.state is State.RUNNING and idle is not None:
        yield (
            f"what to do: see what the oldest episode does, in {idle.log}; "
            "task.agent_args.timeout_s ends one that hangs"
        )
    elif view.state in (State.RUNNING, State.STARTING):
        yield f"what to do: nothing; watch it with `realsys watch {view.trial}`"


def _job(view: TrialView) -> Iterator[str]:
    job = view.job
    if job is None:
        return
    if job.doubt:
        yield job.doubt
        return
    line = f"Slurm says of job {job.job_id}: {job.slurm_state}"
    if job.reason and job.reason not in ("None", "(null)"):
        line += f" ({job.reason})"
    if job.expected_start and view.state in (State.QUEUED, State.HELD):
        line += f", expected to start {moment(job.expected_start)}"
    if job.nodes:
        line += f", on {job.nodes}"
    if job.restarts:
        line += f", restarted {job.restarts} time{'s' * (job.restarts > 1)}"
    yield line
    if view.time:
        yield f"time limit of the job: {time_words(view.time)}"
    if late := time_warning(view.time, view.trial):
        yield f"warning: {late}"


def _workers(view: TrialView) -> Iterator[str]:
    """Yields missing, lost, restarted and busy workers."""
    for state, words in (
        ("not known", "have an unknown state: the store can't be read at present"),
        ("not started", "have not registered yet"),
        ("gone", "have lost their leases (dead or cut off)"),
        ("lost", "ended without deregistering"),
        ("failed", "failed"),
    ):
        names = [w.worker for w in view.workers if w.state == state]
        if names:
            yield f"{len(names)} of {len(view.workers)} workers {words}: {listed(names, MAX_NAMES)}"
            if state == "not started":
                yield from _logs_of_unregistered(view)
    for worker in view.workers:
        if worker.restarts:
            why = worker.restart_why.partition("\n")[0]
            yield f"{worker.worker} was restarted {times(worker.restarts)}, the last time because: {why}"
        if worker.worker == MASTER and worker.waits_for:
            yield f"{MASTER} waits: {worker.waits_for}"
        if worker.state == "running" and (worker.seconds_in_state or 0) > LONG_CALL_S:
            yield _busy(worker)
    if view.progress and view.progress.running:
        running = ", ".join(f"{name} on {where}" for name, where in view.progress.running.items())
        yield f"step {view.progress.step + 1} computes {running}"
        yield from wait_chains(view)


def _idle(idle: IdleEpisodes) -> Iterator[str]:
    what = "question's episodes have" if idle.are_groups else "episode has"
    yield f"no {what} ended for {duration(idle.idle_s)}; {len(idle.running)} under way:"
    shown = (f"{id_} on {worker} for {duration(s)}" for id_, worker, s in idle.running)
    yield f"  {listed(shown, MAX_NAMES)}"


def _logs_of_unregistered(view: TrialView) -> Iterator[str]:
    """Yields, for workers that have not registered, the first one with a log, or why there is none."""
    silent = [w for w in view.workers if w.state == "not started"]
    if logged := [w.worker for w in silent if w.has_log]:
        yield f"  see their logs: realsys logs {view.trial} '{logged[0]}'"
    if unstarted := [w for w in silent if w.is_not_started]:
        names = listed((w.worker for w in unstarted), MAX_NAMES)
        why = next((f": {w.reason}" for w in unstarted if w.reason), "")
        yield f"  have not been started: {names}{why}"


def _busy(worker: WorkerView) -> str:
    call = f"in {worker.mfc}" if worker.mfc else "running"
    return f"{worker.worker} has been {call} for {duration(worker.seconds_in_state or 0.0)}"


def _failure(view: TrialView, failure: Failure) -> Iterator[str]:
    yield f"first failure: {failure.who}, {moment(failure.at)}"
    yield f"  {failure.why}"
    if failure.log_tail:
        yield f"  end of {failure.log}:"
        yield from (f"    {line}" for line in failure.log_tail)
    others = view.exit.other_failures if view.exit else ()
    for other in others[:MAX_NAMES]:
        why = other.why.splitlines()[0] if other.why else "ended"
        yield f"{'because of it' if other.secondary else 'then'}: {other.worker}: {why}"
    if len(others) > MAX_NAMES:
        yield f"then: {len(others) - MAX_NAMES} more"


def wait_chains(view: TrialView) -> Iterator[str]:
    """Yields the wait chains between workers; nothing if every one that the master waits for computes.

    The master waits for the workers of the running calls; a worker reports whose tensors it waits for. Each
    chain ends at a worker that waits for no other: it computes, or it is stalled and reports where. Waits
    inside a collective are not visible here; the workers' stacks show them.
    """
    workers = {worker.worker: worker for worker in view.workers}
    found = [_chain(first, workers) for first in _waited_for(view)]
    chains = [text for text, is_informative in found if is_informative]
    if not chains:
        return
    yield "wait chains:"
    for chain in chains[:MAX_CHAINS]:
        yield f"  {chain}"
    if len(chains) > MAX_CHAINS:
        yield f"  and {len(chains) - MAX_CHAINS} more"


def _waited_for(view: TrialView) -> Iterator[tuple[str, str]]:
    """Yields (worker, call) of everything that the master waits for."""
    if view.progress is None:
        return
    for call, names in view.progress.running.items():
        for name in names.split(", "):
            yield name, call


def _chain(first: tuple[str, str], workers: Mapping[str, WorkerView]) -> tuple[str, bool]:
    """Renders the chain; False if it shows no more than that its first worker computes."""
    name, call = first
    text, seen = f"{MASTER} → {name} ({call}{_since(workers.get(name))})", {name}
    while (worker := workers.get(name)) is not None and worker.waits_for:
        name, _, what = worker.waits_for.partition(": ")
        text += f" → {name}" + (f" ({what})" if what else "")
        if name in seen:
            return f"{text}: a cycle", True
        seen.add(name)
    end = workers.get(name)
    if end is None:
        return text, len(seen) > 1
    if end.stalled_s:
        where = f", {end.stalled_where}" if end.stalled_where else ""
        return f"{text}: no progress for {duration(end.stalled_s)}{where}", True
    computes = end.state == "running"
    return text + ("" if computes else f": {end.state}"), len(seen) > 1 or not computes


def _since(worker: WorkerView | None) -> str:
    if worker is None or worker.seconds_in_state is None:
        return ""
    return f", {duration(worker.seconds_in_state)}"
