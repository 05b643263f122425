"""Renders wait chains between the workers of a running trial, for `realsys explain` (pure).

The master waits for the workers of the running calls; a worker reports whose tensors it waits for. Each
chain ends at a worker that waits for no other: it computes, or it is stalled and reports where. Waits
inside a collective are not visible here; the workers' stacks show them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.terminal.text import duration
from launcher.trials.trial_view import TrialView, WorkerView

MASTER = "master_worker/0"
MAX_CHAINS = 12


def wait_chains(view: TrialView) -> Iterator[str]:
    """Yields the chains; nothing if every worker that the master waits for computes."""
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
