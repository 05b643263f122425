"""submitit's Slurm executor with realsys's script, a clean environment, and explained refusals.

Folder and file names are submitit's; its status, results and requeue are not used (without accounting
they wait forever, and a time limit given as text crashes them), nor are pickled calls: the command is in
the script.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from submitit.core import utils
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from launcher.job.entry_command import array_command
from launcher.slurm.sbatch_refusals import refusal
from launcher.slurm.script import sbatch_argv
from launcher.slurm.slurm_commands import run_slurm
from launcher.submit.executors.local_executor import check_folder
from realsys.api.errors import ClusterError
from realsys.trial.folders import write_private

SUBMIT_TIMEOUT_S = 30.0
QUEUE_FULL = "temporarily unable to accept job"
NO_ANSWER = "slurmctld does not answer"
NO_ID = "sbatch printed no job id"
RECHECK_PAUSES_S = (2.0, 5.0)  # pauses before checking again whether Slurm accepted the job
# What sbatch prints with --parsable, and without, should a site's wrapper drop that.
_ACCEPTED = re.compile(
    r"(?:Submitted batch job )?(\d{1,10})(?:(?:;| on cluster )([\w.-]+))?", re.ASCII
)
ELEMENTS = "elements.json"  # of a job array: index → trial's folder and plan's hash


def accepted_job(script: Path, *, cluster: str | None = None) -> str | None:
    """Finds the job that Slurm created although sbatch got no answer; None if there is none.

    Args:
        cluster: that it was submitted to, as run_slurm takes it.
    Raises:
        ClusterError: this query is not answered either.
    """
    argv = ["squeue", "--me", "--noheader", "--states=all", "--format=%F|%o"]
    pauses = iter(RECHECK_PAUSES_S)
    while True:
        try:
            listing = run_slurm(argv, timeout_s=SUBMIT_TIMEOUT_S, cluster=cluster).stdout
        except ClusterError as error:
            pause_s = next(pauses, None)
            if pause_s is None:
                raise ClusterError(
                    f"{error.what}; whether it accepted the job is unknown",
                    where=error.where,
                    fix="when it answers again: squeue --me, and scancel a job of this trial before "
                    "launching again",
                ) from error
            time.sleep(pause_s)
        else:
            rows = (line.strip().split("|", 1) for line in listing.splitlines() if "|" in line)
            return next((job_id for job_id, command in rows if command == str(script)), None)


def parsed_answer(stdout: str) -> tuple[str, str] | None:
    """Parses job id and cluster (empty: slurm.conf's own) from the last line that holds them and nothing
    else; None if there is none. A site's wrapper may print lines of its own (pure).
    """
    lines = [found for line in stdout.splitlines() if (found := _ACCEPTED.fullmatch(line.strip()))]
    return (lines[-1][1], lines[-1][2] or "") if lines else None


class BatchExecutor(SlurmExecutor):  # type: ignore[misc]
    """Submits a command as the batch step of a job, or of each element of a job array.

    Args:
        folder: where submitit stores the script and the output.
        script: renders the batch script that executes a shell command.
        cluster: to submit to, as run_slurm takes it.

    Attributes:
        cluster: after a submission, the cluster that accepted it, as sbatch named it.
    """

    def __init__(
        self, folder: Path, *, script: Callable[[str], str], cluster: str | None = None
    ) -> None:
        check_folder(folder)
        super().__init__(folder)
        self.cluster = cluster
        self._script, self._array = script, False

    def start(self, command: str) -> str:
        """Submits the job and returns its id. Raises ClusterError if Slurm refuses."""
        return str(self._submit_command(command).job_id)

    def submit_array(self, python: str, trials: Mapping[int, tuple[str, str]]) -> dict[int, str]:
        """Submits one array; element i runs ``trials[i]`` (folder, plan's hash). Returns i → job id.

        The script's --array must list exactly these indices. All or none is submitted.

        Raises:
            ClusterError: Slurm refused.
        """
        elements = self.folder / ELEMENTS
        data = json.dumps({str(index): trial for index, trial in trials.items()}).encode()
        write_private(elements, data)
        try:
            self._array = True
            sha256 = hashlib.sha256(data).hexdigest()
            array_id = self.start(array_command(python, elements, sha256))
        except BaseException:
            elements.unlink(missing_ok=True)
            raise
        finally:
            self._array = False
        return {index: f"{array_id}_{index}" for index in trials}

    @classmethod
    def affinity(cls) -> int:
        """Always available: a missing sbatch is reported when it is run."""
        return 2

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script(command)

    def _num_tasks(self) -> int:
        return 1

    def _submit_command(self, command: str) -> SlurmJob:
        """Writes the script, runs sbatch, and names the script after the job. Raises ClusterError."""
        folder = utils.JobPaths.get_first_id_independent_folder(self.folder)
        path = folder / f".submission_file_{uuid.uuid4().hex}.sh"
        write_private(path, self._make_submission_file_text(command, "").encode())
        where = f"sbatch of {folder.parent}"
        try:
            argv = sbatch_argv(folder, str(path), array=self._array)
            done = run_slurm(argv, timeout_s=SUBMIT_TIMEOUT_S, cluster=self.cluster)
            if done.returncode != 0:
                raise refusal(done.stderr, where=where)
            answer = parsed_answer(done.stdout)
            if answer is None:
                raise _no_id(done.stdout, where)
            job_id, self.cluster = answer
        except ClusterError as error:
            may_be_accepted = error.what.startswith((NO_ANSWER, NO_ID))
            accepted = accepted_job(path, cluster=self.cluster) if may_be_accepted else None
            if accepted is None:
                path.unlink()
                if QUEUE_FULL in error.what:  # sbatch itself would retry forever
                    raise refusal(f"{QUEUE_FULL} jobs", where=where) from error
                raise
            job_id = accepted
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        job = SlurmJob(folder=self.folder, job_id=job_id, tasks=[0])
        job.paths.move_temporary_file(path, "submission_file")
        return job


def _no_id(stdout: str, where: str) -> ClusterError:
    lines = stdout.strip().splitlines()
    return ClusterError(
        f"{NO_ID}: {lines[-1][:200] if lines else 'nothing'}",
        where=where,
        fix="see what `sbatch --parsable` prints here: a number, on a line of its own, is expected",
    )
