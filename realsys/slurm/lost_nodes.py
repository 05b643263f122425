"""Determines which nodes an attempt lost, and whether the next one can do without them (pure).

For the supervisor, which excludes them when its job is requeued, and for `realsys resume`, which offers
to. A node that Slurm considers healthy again may fail again: Slurm alone would assign it to the same job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from realsys.slurm.hostlist import compress, expand
from realsys.trial.records import ExitMarker

# Texts of failures: the worker's end was not observed because its node fell silent; or CUDA reports a
# broken GPU (not seen on a real one).
_OF_A_NODE = (
    *("its node is lost", "but has not ended within", "ode failure"),
    "has not been seen to end",  # in records before 0.2
    *("uncorrectable ECC error", "GPU is lost", "fallen off the bus"),
    "failed the preflight",
)


def lost_nodes(marker: ExitMarker | None, nodes: str) -> dict[str, str]:
    """Returns node of the attempt → the evidence against it: a worker there that was lost, or with a
    broken GPU, or a finding of the preflight (realsys/supervisor/health/preflight_check.py).

    Args:
        nodes: hostlist of the attempt's nodes; empty on one machine.
    """
    if marker is None or not nodes:
        return {}
    by_host = {_short(node): node for node in expand(nodes)}
    found: dict[str, str] = {}
    for failure in filter(None, (marker.first_failure, *marker.other_failures)):
        node = by_host.get(_short(failure.host))
        if node is not None and any(words in failure.why for words in _OF_A_NODE):
            found.setdefault(node, f"{failure.worker} there: {failure.why.splitlines()[0]}")
    return found


def without_lost(
    lost: Iterable[str], *, excluded: str, pinned: str, of_partition: int, needed: int
) -> str | None:
    """Returns the job's new --exclude; None if the job could then never start.

    Args:
        excluded, pinned: the job's present --exclude and --nodelist, hostlists.
        of_partition, needed: number of nodes that the partition has, and that the job needs.
    """
    gone = set(lost)
    if gone & set(expand(pinned) if pinned else ()):
        return None
    everything = sorted({*(expand(excluded) if excluded else ()), *gone})
    return compress(everything) if of_partition - len(everything) >= needed else None


def evidence(lost: Mapping[str, str]) -> str:
    """Formats ``n2 (model_worker/1 there: its lease has ended …)``."""
    return "; ".join(f"{node} ({why})" for node, why in lost.items())


def _short(host: str) -> str:
    return host.partition(".")[0]
