"""submitit's Slurm executor with our script, a clean environment, and Slurm's refusals in words.

Its folder, file names and pickled call are submitit's; status, results and requeue are not used
(without accounting they wait for ever, and a time limit written as text crashes them).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

from submitit.core import utils
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from launcher.local_executor import check_folder
from launcher.slurm.commands import run_slurm
from launcher.slurm.refusals import refusal
from launcher.slurm.script import sbatch_argv, submitit_command

SUBMIT_TIMEOUT_S = 60.0


class BatchExecutor(SlurmExecutor):  # type: ignore[misc]
    """Submits one function call as the batch step of a job.

    Args:
        folder: where submitit keeps the pickled call, the script and the output.
        script: the batch script, from the shell command that makes the call.
        python: interpreter of the batch script.
    """

    def __init__(self, folder: Path, *, script: Callable[[str], str], python: str) -> None:
        check_folder(folder)
        super().__init__(folder)
        self._script, self._interpreter = script, python

    @classmethod
    def affinity(cls) -> int:
        """Always possible: a missing sbatch is told when it is run."""
        return 2

    @property
    def _submitit_command_str(self) -> str:
        return submitit_command(self._interpreter, self.folder)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script(command)

    def _num_tasks(self) -> int:
        return 1

    def _submit_command(self, command: str) -> SlurmJob:
        """Writes the script, runs sbatch, names the script after the job. Raises ClusterError."""
        folder = utils.JobPaths.get_first_id_independent_folder(self.folder)
        path = folder / f".submission_file_{uuid.uuid4().hex}.sh"
        path.write_text(self._make_submission_file_text(command, ""), encoding="utf-8")
        done = run_slurm(sbatch_argv(folder, str(path)), timeout_s=SUBMIT_TIMEOUT_S)
        if done.returncode != 0:
            path.unlink()
            raise refusal(done.stderr, where=f"sbatch of {folder.parent}")
        job_id = self._get_job_id_from_submission_command(done.stdout)
        job = SlurmJob(folder=self.folder, job_id=job_id, tasks=[0])
        job.paths.move_temporary_file(path, "submission_file")
        return job
