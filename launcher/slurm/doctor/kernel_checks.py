"""Whether a kernel can hold a process by a descriptor, as every worker's heartbeat does.

For doctor.py (this host, where tasks run here) and node_checks.py (a compute node, by node_probe.py's
report). Says something only where it can't.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.slurm.doctor.findings import Finding
from realsys.api.errors import ClusterError
from realsys.runtime.linux import pidfd_open


def kernel_here() -> Iterator[Finding]:
    """Of this host."""
    try:
        os.close(pidfd_open(os.getpid()))
    except ClusterError:
        yield _lacking("kernel", platform.release())


def kernel_there(report: Mapping[str, Any]) -> Iterator[Finding]:
    """What the node's report says of it (pure)."""
    if report.get("pidfd") is False:
        yield _lacking("kernel there", str(report.get("kernel", "?")))


def _lacking(name: str, release: str) -> Finding:
    fix = "use nodes with Linux 5.3 or later (or a distribution's kernel that has pidfd_open)"
    return Finding(name, False, f"Linux {release} has no pidfd_open(2): no worker starts", fix)
