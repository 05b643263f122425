"""Checks that a kernel supports pidfd_open(2), which every worker's heartbeat process needs.

For doctor.py (this host, if tasks run here) and node_checks.py (a compute node, from node_probe.py's
report). Reports a finding only if the call is missing.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.slurm.doctor.findings import Finding
from realsys.api.errors import ClusterError
from realsys.runtime.linux import pidfd_open


def local_kernel_findings() -> Iterator[Finding]:
    """Checks this host's kernel."""
    try:
        os.close(pidfd_open(os.getpid()))
    except ClusterError:
        yield _lacking("kernel", platform.release())


def node_kernel_findings(report: Mapping[str, Any]) -> Iterator[Finding]:
    """Checks the kernel in a compute node's report (pure)."""
    if report.get("pidfd") is False:
        yield _lacking("kernel there", str(report.get("kernel", "?")))


def _lacking(name: str, release: str) -> Finding:
    fix = "use nodes with Linux 5.3 or later (or a distribution's kernel that has pidfd_open)"
    return Finding(name, False, f"Linux {release} has no pidfd_open(2): no worker starts", fix)
