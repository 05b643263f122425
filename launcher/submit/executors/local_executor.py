"""submitit's local executor, adapted so that the job outlives the terminal that launched it.

Differs from the original in how the controller process starts: in its own session (Ctrl-C and hang-up of
the terminal do not reach it), with its output in files instead of on the terminal, and with
CUDA_VISIBLE_DEVICES as the user set it. The controller's own time limit is set far away, because the
supervisor decides when a run ends.
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
from realsys.runtime.child_processes.python_path import named_folders

# submitit counts this down in steps of 1/24 s (a Python int, no overflow).
TIMEOUT_MIN = 10 * 365 * 24 * 60


class DetachedLocalExecutor(LocalExecutor):  # type: ignore[misc]
    """Runs a command in a local process with its own session.

    Args:
        folder: where submitit stores the output; created if missing.
        environment: variables added to this process's for the job and all its processes.
    """

    def __init__(self, folder: Path, *, environment: Mapping[str, str]) -> None:
        check_folder(folder)
        super().__init__(folder)
        self.environment = environment
        self.update_parameters(timeout_min=TIMEOUT_MIN, tasks_per_node=1)

    def start(self, command: str) -> str:
        """Starts the controller of a shell command and returns its process id. Nothing is pickled."""
        return str(self._submit_command(command).job_id)

    def _submit_command(self, command: str) -> LocalJob:
        process = _start_controller(self.folder, command, self.environment)
        process.returncode = 0  # it outlives this process; without this, Popen would warn of a leak
        return LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])


def check_folder(folder: Path) -> None:
    """Raises ClusterError for a path with a pattern that submitit would replace by a job's number."""
    if found := [tag for tag in ("%j", "%t", "%a", "%A") if tag in str(folder)]:
        raise ClusterError(
            f"the folder's path contains {found[0]!r}, which submitit replaces by a number",
            where=str(folder),
            fix="use a file_root without it (REALSYS_FILE_ROOT or the cluster spec)",
        )


def _start_controller(
    folder: Path, command: str, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts submitit's controller as submitit.local.local does, except as the header says."""
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
                **named_folders(os.environ),
                **environment,
                **{name: str(value) for name, value in settings.items()},
            },
            # `python -m` imports from the working directory first, so it must not be the user's.
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
