"""Makes the next start of a requeued job avoid the nodes it lost.

Slurm accepts a new --exclude for the job itself only once it is on its way back to the queue; so the
request is repeated in a thread, beside the requeue. Nothing here may keep an attempt from ending.
"""

from __future__ import annotations

import logging
import re
import subprocess
import threading
import time
from collections.abc import Mapping

from realsys.api.errors import ConfigError
from realsys.slurm.lost_nodes import evidence, without_lost

logger = logging.getLogger(__name__)

TRY_FOR_S = 25.0  # KillWait is 30 s by default
TRY_EVERY_S = 0.5
ANSWER_S = 10.0


def leave_out(job_id: str, lost: Mapping[str, str], needed: int) -> threading.Thread:
    """Starts asking Slurm to exclude the lost nodes from the job's next start, if it can.

    Args:
        lost: node → why (realsys/slurm/lost_nodes.py).
        needed: nodes of the job.
    """
    thread = threading.Thread(
        target=_leave_out, args=(job_id, lost, needed), name="other nodes", daemon=True
    )
    thread.start()
    return thread


def _leave_out(job_id: str, lost: Mapping[str, str], needed: int) -> None:
    try:
        wanted = _wanted(job_id, lost, needed)
        if wanted is None:
            logger.warning("lost nodes not excluded lost=%s reason=job needs them", evidence(lost))
            return
        deadline = time.monotonic() + TRY_FOR_S
        while True:
            done = _run("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={wanted}")
            if done.returncode == 0:
                logger.warning("lost nodes excluded lost=%s", evidence(lost))
                return
            if time.monotonic() > deadline:
                logger.warning("lost nodes not excluded error=%s", done.stderr.strip())
                return
            time.sleep(TRY_EVERY_S)
    except (OSError, subprocess.TimeoutExpired, ConfigError, ValueError) as error:
        logger.warning("lost nodes not excluded lost=%s error=%s", evidence(lost), error)


def _wanted(job_id: str, lost: Mapping[str, str], needed: int) -> str | None:
    output = _run("scontrol", "show", "job", "--oneliner", job_id).stdout
    facts = dict(re.findall(r"(\w+)=(\S*)", output))
    excluded, pinned = (_list(facts.get(name, "")) for name in ("ExcNodeList", "ReqNodeList"))
    where = [f"--partition={facts['Partition']}"] if facts.get("Partition") else []
    sizes = _run("sinfo", "--noheader", "--format=%D", *where).stdout.split()
    return without_lost(
        lost, excluded=excluded, pinned=pinned, of_partition=sum(map(int, sizes)), needed=needed
    )


def _list(value: str) -> str:
    return "" if value == "(null)" else value


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_S, check=False)
