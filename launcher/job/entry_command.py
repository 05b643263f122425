"""The command line of a job's first process (pure): what runs, of which trial, by which plan.

All of it stands in the command, and on Slurm so in the batch script, which Slurm has copied when it took
the job: nothing that lies in a folder decides what runs. realsys/supervisor/job_entry.py is at the other
end.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

# By name: importing it would bring the supervisor's room into the launcher.
ENTRY = "realsys.supervisor.job_entry"
SUPERVISOR = "realsys.supervisor.supervisor_main:supervise"
COMPONENT_AGENT = "realsys.supervisor.component_agent:run_component"


def entry_command(python: str, function: str, trial: Path, plan_hash: str, *numbers: int) -> str:
    """Calls ``function(trial, plan_hash, *numbers)``."""
    return shlex.join([*_entry(python), function, str(trial), plan_hash, *map(str, numbers)])


def job_command(python: str, trial: Path, plan_hash: str, held: Sequence[int], attempt: int) -> str:
    """Of the job that holds these components: the supervisor's holds the first one."""
    if 0 in held:
        return entry_command(python, SUPERVISOR, trial, plan_hash)
    return entry_command(python, COMPONENT_AGENT, trial, plan_hash, held[0], attempt)


def array_command(python: str, elements: Path, sha256: str) -> str:
    """Of a job array: each element's trial and hash are in a file, whose own hash is here."""
    return shlex.join([*_entry(python), SUPERVISOR, f"--elements={elements}", f"--sha256={sha256}"])


def _entry(python: str) -> list[str]:
    return [python, "-u", "-P", "-m", ENTRY]  # -P: no module is taken from the working folder
