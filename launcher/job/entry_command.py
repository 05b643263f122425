"""Builds the command line of a job's first process: its function, trial and plan hash (pure).

Everything is in the command, and so on Slurm in the batch script, which Slurm copies when it accepts the
job: no file in a folder decides what runs. realsys/supervisor/job_entry.py executes it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

# By name: importing it would load the supervisor's modules into the launcher.
ENTRY = "realsys.supervisor.job_entry"
SUPERVISOR = "realsys.supervisor.supervisor_main:supervise"
COMPONENT_AGENT = "realsys.supervisor.component_agent:run_component"


def entry_command(python: str, function: str, trial: Path, plan_hash: str, *numbers: int) -> str:
    """Builds the command that calls ``function(trial, plan_hash, *numbers)``."""
    return shlex.join([*_entry(python), function, str(trial), plan_hash, *map(str, numbers)])


def job_command(python: str, trial: Path, plan_hash: str, held: Sequence[int], attempt: int) -> str:
    """Builds the command of the job with these components; the job with component 0 runs the supervisor."""
    if 0 in held:
        return entry_command(python, SUPERVISOR, trial, plan_hash)
    return entry_command(python, COMPONENT_AGENT, trial, plan_hash, held[0], attempt)


def array_command(python: str, elements: Path, sha256: str) -> str:
    """Builds the command of a job array: a file lists each element's trial and hash; its own hash is
    passed here.
    """
    return shlex.join([*_entry(python), SUPERVISOR, f"--elements={elements}", f"--sha256={sha256}"])


def _entry(python: str) -> list[str]:
    return [python, "-u", "-P", "-m", ENTRY]  # -P: no module is imported from the working folder
