"""Cancels the trial's remaining Slurm jobs if a graceful stop failed."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Sequence

logger = logging.getLogger(__name__)

SCANCEL_TIMEOUT_S = 60.0


def cancel_jobs(job_ids: Sequence[str]) -> None:
    """Cancels all jobs with one scancel; messages about jobs that have ended go to the log only."""
    if not job_ids:
        return
    argv = ["scancel", *job_ids]
    logger.warning("jobs cancelled jobs=%s", ",".join(job_ids))
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=SCANCEL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.error("scancel failed jobs=%s error=%s", ",".join(job_ids), error)
        return
    if done.returncode or done.stderr.strip():
        logger.warning("scancel said=%s code=%d", done.stderr.strip(), done.returncode)
