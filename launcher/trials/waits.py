"""Who waits for whom in a running trial, as lines (pure): for `realsys explain`.

The master waits for the workers of the calls that run; a worker says for whose tensors it waits. At the
end of each chain stands a worker that waits for nobody: it computes, or it stands still and says where.
What ranks wait for inside a collective nobody can say: their stacks do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.terminal.text import duration
from launcher.trials.trial_view import TrialView, WorkerView

MASTER = "master_worker/0"
MAX_CHAINS = 12


def waits(view: TrialView) -> Iterator[str]:
    """The picture; nothing while every worker that the master waits for computes."""
    workers = {worker.worker: worker for worker in view.workers}
    found = [_chain(first, workers) for first in _waited_for(view)]
    chains = [text for text, tells_more in found if tells_more]
    if not chains:
        return
    yield "who waits for whom:"
    for chain in chains[:MAX_CHAINS]:
        yield f"  {chain}"
    if len(chains) > MAX_CHAINS:
        yield f"  and {len(chains) - MAX_CHAINS} more"


def _waited_for(view: TrialView) -> Iterator[tuple[str, str]]:
    """(worker, call) of all that the master waits for."""
    if view.progress is None:
        return
    for call, names in view.progress.running.items():
        for name in names.split(", "):
            yield name, call


def _chain(first: tuple[str, str], workers: Mapping[str, WorkerView]) -> tuple[str, bool]:
    """The chain, and whether it says more than that its first worker computes."""
    name, call = first
    told, seen = f"{MASTER} → {name} ({call}{_since(workers.get(name))})", {name}
    while (worker := workers.get(name)) is not None and worker.waits_for:
        name, _, what = worker.waits_for.partition(": ")
        told += f" → {name}" + (f" ({what})" if what else "")
        if name in seen:
            return f"{told}: a circle", True
        seen.add(name)
    end = workers.get(name)
    if end is None:
        return told, len(seen) > 1
    if end.stalled_s:
        where = f", {end.stalled_where}" if end.stalled_where else ""
        return f"{told}: no progress for {duration(end.stalled_s)}{where}", True
    computes = end.state == "running"
    return told + ("" if computes else f": {end.state}"), len(seen) > 1 or not computes


def _since(worker: WorkerView | None) -> str:
    if worker is None or worker.seconds_in_state is None:
        return ""
    return f", {duration(worker.seconds_in_state)}"
