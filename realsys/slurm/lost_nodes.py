"""Determines which nodes an attempt lost, and whether the next one can do without them (pure).

For the supervisor, which excludes them when its job is requeued, and for `realsys resume`, which offers
to. A node that Slurm considers healthy again may fail again: Slurm alone would assign it to the same job.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from realsys.runtime import worker_exit_codes
from realsys.slurm.hostlist import compress, expand, short_name
from realsys.trial.records import ExitMarker, Failure

# Texts of failures: the worker's end was not observed because its node fell silent; or CUDA reports a
# broken GPU (not seen on a real one).
_SILENCE = (
    *("its node is lost", "but has not ended within", "can't reach its node"),
    "has not been seen to end",  # in records before 0.2
)
_OF_A_NODE = (
    *_SILENCE,
    *("uncorrectable ECC error", "GPU is lost", "fallen off the bus", "NVLink error"),
    *("no CUDA-capable device", "Required node not available"),
    "failed the preflight",
)
# srun's words, in the failures of all tasks of a step: `Node failure on n2`
_NAMED_BY_SRUN = re.compile(r"[Nn]ode failure on ([\w.-]+(?:\[[\d,-]+\])?)")
_FENCED = f"exited with code {worker_exit_codes.FENCED}"
_STORE_SILENT = "the store has not answered"


def lost_nodes(marker: ExitMarker | None, nodes: str) -> dict[str, str]:
    """Returns node of the attempt → the evidence against it: a worker there that was lost, with a broken
    GPU, or alone in not reaching the store; srun's word; or a finding of the preflight
    (realsys/supervisor/health/preflight_check.py).

    Args:
        nodes: hostlist of the attempt's nodes; empty on one machine.
    """
    if marker is None or not nodes:
        return {}
    by_host = {short_name(node): node for node in expand(nodes)}
    found: dict[str, str] = {}
    failures = [f for f in (marker.first_failure, *marker.other_failures) if f is not None]
    for failure in failures:
        first_line = failure.why.partition("\n")[0]
        for host in blamed_hosts(failure):
            if (node := by_host.get(short_name(host))) is not None:
                found.setdefault(node, f"{failure.worker} there: {first_line}")
    if len(found) == len(by_host) > 1 and all(map(is_silence, failures)):
        return {}  # the supervisor's own node too: it is the store that lost them
    return found or _cut_off_from_store(failures, by_host)


def is_silence(failure: Failure) -> bool:
    """Returns whether nobody saw that worker end: its lease, or Slurm's word on its node, is all there
    is."""
    return any(words in failure.why for words in _SILENCE)


def blamed_hosts(failure: Failure) -> tuple[str, ...]:
    """Returns the hosts that a failure's words blame; the worker's own, unless srun names another."""
    if named := _NAMED_BY_SRUN.search(failure.why):
        return expand(named[1])
    if any(words in failure.why for words in _OF_A_NODE):
        return (failure.host,)
    return ()


def _cut_off_from_store(failures: Iterable[Failure], by_host: Mapping[str, str]) -> dict[str, str]:
    """Returns the nodes whose workers could not renew their leases; none if that holds for all nodes: it
    was the store then."""
    fenced: dict[str, str] = {}
    for failure in failures:
        node = by_host.get(short_name(failure.host))
        if node is not None and failure.why.startswith((_FENCED, _STORE_SILENT)):
            fenced.setdefault(node, f"{failure.worker} there: {failure.why}")
    return fenced if len(fenced) < len(by_host) else {}


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
