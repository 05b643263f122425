"""submitit's Slurm executor with our script, a clean environment, and Slurm's refusals in words.

Its folder, file names and pickled call are submitit's; status, results and requeue are not used
(without accounting they wait for ever, and a time limit written as text crashes them).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from launcher.local_executor import check_folder
from launcher.slurm.commands import run_slurm, scancel
from launcher.slurm.refusals import refusal
from launcher.slurm.script import sbatch_argv, submitit_command
from realsys.api.errors import ClusterError

SUBMIT_TIMEOUT_S = 30.0
FULL = "temporarily unable to accept job"
CALL_TIMEOUT_MIN = 5  # submitit's default; its own clock is not used


class BatchExecutor(SlurmExecutor):  # type: ignore[misc]
    """Submits one function call as the batch step of a job, or one for each element of a job array.

    Args:
        folder: where submitit keeps the pickled call, the script and the output.
        script: the batch script, from the shell command that makes the call.
        python: interpreter of the batch script.
    """

    def __init__(self, folder: Path, *, script: Callable[[str], str], python: str) -> None:
        check_folder(folder)
        super().__init__(folder)
        self._script, self._interpreter, self._array = script, python, False

    def submit_array(
        self, function: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]]
    ) -> dict[int, str]:
        """Submits one array; element i calls ``function`` with ``arguments[i]``: i → its job id.

        The script's --array must name just these indices. All or none is submitted.

        Raises:
            ClusterError: Slurm refuses.
        """
        folder = utils.JobPaths.get_first_id_independent_folder(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        pickles = {index: folder / f"{uuid.uuid4().hex}.pkl" for index in arguments}
        try:
            for index, path in pickles.items():
                call = utils.DelayedSubmission(function, *arguments[index])
                call.set_timeout(CALL_TIMEOUT_MIN, self.max_num_timeout)
                call.dump(path)
            self._array = True
            whole = self._submit_command(self._submitit_command_str)
            return self._named(whole.job_id, pickles)
        finally:
            self._array = False
            for path in pickles.values():
                path.unlink(missing_ok=True)  # those that were not moved

    def _named(self, array_id: str, pickles: Mapping[int, Path]) -> dict[int, str]:
        """The pickled calls where the elements look for them; an element waits a minute for its own."""
        ids = {index: f"{array_id}_{index}" for index in pickles}
        try:
            for index, path in pickles.items():
                job = SlurmJob(folder=self.folder, job_id=ids[index], tasks=[0])
                job.paths.move_temporary_file(path, "submitted_pickle")
        except BaseException:
            scancel([array_id])
            raise
        return ids

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
        where = f"sbatch of {folder.parent}"
        try:
            argv = sbatch_argv(folder, str(path), array=self._array)
            done = run_slurm(argv, timeout_s=SUBMIT_TIMEOUT_S)
            if done.returncode != 0:
                raise refusal(done.stderr, where=where)
        except ClusterError as error:
            path.unlink()
            if FULL in error.what:  # sbatch itself would go on trying for ever
                raise refusal(f"{FULL} jobs", where=where) from error
            raise
        job_id = self._get_job_id_from_submission_command(done.stdout)
        job = SlurmJob(folder=self.folder, job_id=job_id, tasks=[0])
        job.paths.move_temporary_file(path, "submission_file")
        return job
