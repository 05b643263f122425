"""submitit's local executor, started so that the job outlives the terminal that launched it.

Differs from the original in how the controller process begins: in a session of its own (Ctrl-C and
hang-up of the terminal do not reach it), with its output in files instead of on the terminal, and
with CUDA_VISIBLE_DEVICES as the user had it. The controller ends a job by its own clock, set far
away here: a run ends by its supervisor's decision.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from submitit.local.local import LocalExecutor, LocalJob

from realsys.api.errors import ClusterError

# submitit counts this down in steps of 1/24 s (a Python int, no overflow).
TIMEOUT_MIN = 10 * 365 * 24 * 60


class DetachedLocalExecutor(LocalExecutor):  # type: ignore[misc]
    """Runs a command in a process of its own session on this machine.

    Args:
        folder: where submitit keeps the output; created if missing.
        environment: variables that the job and all its processes have besides ours.
    """

    def __init__(self, folder: Path, *, environment: Mapping[str, str]) -> None:
        check_folder(folder)
        super().__init__(folder)
        self.environment = environment
        self.update_parameters(timeout_min=TIMEOUT_MIN, tasks_per_node=1)

    def start(self, command: str) -> str:
        """Starts the controller of a shell command; returns its process id. Nothing is pickled."""
        return str(self._submit_command(command).job_id)

    def _submit_command(self, command: str) -> LocalJob:
        process = _start_controller(self.folder, command, self.environment)
        process.returncode = (
            0  # not ours to wait for: it outlives us, and Popen would call that a leak
        )
        return LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])


def check_folder(folder: Path) -> None:
    """Raises ClusterError for a path in which submitit would replace a part by a job's number."""
    if found := [tag for tag in ("%j", "%t", "%a", "%A") if tag in str(folder)]:
        raise ClusterError(
            f"the folder's name has {found[0]!r}, which submitit replaces by a number",
            where=str(folder),
            fix="use a file_root without it (REALSYS_FILE_ROOT or the cluster spec)",
        )


def _start_controller(
    folder: Path, command: str, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """submitit.local.local.start_controller, with the differences of this file's header."""
    settings: dict[str, Any] = {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_COMMAND": command,
        "SUBMITIT_LOCAL_NTASKS": 1,
        "SUBMITIT_LOCAL_NODEID": 0,
        "SUBMITIT_LOCAL_JOB_NUM_NODES": 1,
        "SUBMITIT_LOCAL_TIMEOUT_S": TIMEOUT_MIN * 60,
        "SUBMITIT_LOCAL_SIGNAL_DELAY_S": 30,
        "SUBMITIT_STDERR_TO_STDOUT": "",
        "SUBMITIT_LOCAL_WITH_SHELL": "",
    }
    with open(folder / "controller.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "submitit.local._local", str(folder)],
            env={
                **os.environ,
                **environment,
                **{name: str(value) for name, value in settings.items()},
            },
            # `python -m` looks for modules in the working directory first: not in the user's.
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
