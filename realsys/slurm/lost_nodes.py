"""Which nodes an attempt lost, and whether the next one can do without them (pure).

For the supervisor, which leaves them out when its job is requeued, and for `realsys resume`, which offers
to. A node that is back in Slurm's eyes may fail again: Slurm alone would give it to the same job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from realsys.slurm.hostlist import compress, expand
from realsys.trial.records import ExitMarker

# In a failure's own words: nobody saw the worker end, its node just fell silent; or CUDA says that a GPU
# is broken (not seen on a real one).
_OF_A_NODE = (
    *("its node is lost", "but has not ended within", "ode failure"),
    "has not been seen to end",  # in records before 0.2
    *("uncorrectable ECC error", "GPU is lost", "fallen off the bus"),
    "failed the preflight",
)


def lost_nodes(marker: ExitMarker | None, nodes: str) -> dict[str, str]:
    """Node of the attempt → the evidence against it: a worker there of which nobody heard any more, or
    whose GPU is broken, or what the preflight found (realsys/supervisor/health/preflight_check.py).

    Args:
        nodes: hostlist of the attempt's nodes; empty on one machine.
    """
    if marker is None or not nodes:
        return {}
    by_host = {_short(node): node for node in expand(nodes)}
    told: dict[str, str] = {}
    for failure in filter(None, (marker.first_failure, *marker.other_failures)):
        node = by_host.get(_short(failure.host))
        if node is not None and any(words in failure.why for words in _OF_A_NODE):
            told.setdefault(node, f"{failure.worker} there: {failure.why.splitlines()[0]}")
    return told


def without_lost(
    lost: Iterable[str], *, excluded: str, pinned: str, of_partition: int, needed: int
) -> str | None:
    """The job's new --exclude; None where it could then never start.

    Args:
        excluded, pinned: the job's present --exclude and --nodelist, hostlists.
        of_partition, needed: how many nodes the partition has, and the job wants.
    """
    gone = set(lost)
    if gone & set(expand(pinned) if pinned else ()):
        return None
    everything = sorted({*(expand(excluded) if excluded else ()), *gone})
    return compress(everything) if of_partition - len(everything) >= needed else None


def evidence(lost: Mapping[str, str]) -> str:
    """``n2 (model_worker/1 there: its lease has ended …)``."""
    return "; ".join(f"{node} ({why})" for node, why in lost.items())


def _short(host: str) -> str:
    return host.partition(".")[0]
