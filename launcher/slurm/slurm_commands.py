"""Runs Slurm's client programs; no other module does.

They run in an environment that does not alter what they do or print: a user's SQUEUE_FORMAT, or the
SLURM_JOB_ID of a surrounding job, never reaches them. Failures are classified here; output is parsed
elsewhere (job_rows.py).
"""

from __future__ import annotations

import os
import re
import signal as signals
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from realsys.api.errors import ClusterError
from realsys.slurm.no_answer import NO_CONTROLLER

SCRUBBED_PREFIXES = (
    "SLURM_", "SLURMD_", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_",
    "SINFO_",
)  # fmt: skip
# Cluster and credentials: without these the programs would contact another controller, or none.
KEPT = frozenset(
    "SLURM_CLUSTERS SLURM_CONF SLURM_CONF_SERVER SLURM_JWT SLURM_SACK_JWKS SLURM_SACK_KEY "
    "SLURM_SACK_SOCKET".split()
)

_NO_DATABASE = re.compile(r"problem talking to the database|slurm_persist_conn_open|slurmdbd", re.I)
_NO_CONFIGURATION = re.compile(
    r"unable to process configuration file|could not establish a configuration source"
    r"|unable to establish controller machine|cannot stat file|resolve_ctls_from_dns_srv",
    re.I,
)
_NO_JOB = re.compile(r"invalid job id|job/step already completing or completed", re.I)


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """Returns ``env`` without the variables from which Slurm's programs take options."""
    return {
        name: value
        for name, value in env.items()
        if name in KEPT or not name.startswith(SCRUBBED_PREFIXES)
    }


def run_slurm(
    argv: Sequence[str],
    *,
    timeout_s: float = 30,
    env: Mapping[str, str] | None = None,
    cluster: str | None = None,
    output_counts: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs one client program to completion; the caller checks a non-zero exit.

    Args:
        timeout_s: then it is killed, together with all processes of a site's wrapper script.
        env: further variables, e.g. SLURM_TIME_FORMAT.
        cluster: the cluster to ask, as sbatch --parsable names it; empty: the one of slurm.conf, whatever
            the user's SLURM_CLUSTERS; None: as that says.
        output_counts: do not raise if Slurm does not answer but the program has printed something: with
            several clusters one may have answered.
    Raises:
        ClusterError: there is no such program, or Slurm does not answer it.
    """
    environment = scrubbed(os.environ) | {"LC_ALL": "C"} | dict(env or {})
    if cluster is not None:
        environment.pop("SLURM_CLUSTERS", None)
    if cluster:
        argv = [argv[0], f"--clusters={cluster}", *argv[1:]]
    try:
        process = subprocess.Popen(
            list(argv),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that its whole process group can be killed
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise _cannot_run(argv[0], error) from error
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        so_far = error.stderr.decode("utf-8", "replace") if isinstance(error.stderr, bytes) else ""
        last = f", last output: {last_error_line(so_far)}" if so_far.strip() else ""
        raise _no_answer(argv[0], f"{argv[0]} timed out after {timeout_s:g} s{last}") from error
    finally:
        _end(process)
    if process.returncode != 0 and not (output_counts and stdout.strip()):
        _raise_if_unreachable(argv[0], stderr)
    return subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)


def is_unknown_job(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether the program failed only because the job has ended or never existed."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return done.returncode != 0 and bool(lines) and all(_NO_JOB.search(line) for line in lines)


def is_unreachable(stderr: str) -> bool:
    """Whether the error output says that a controller or the accounting can't be reached."""
    return bool(NO_CONTROLLER.search(stderr) or _NO_DATABASE.search(stderr))


def scancel(
    job_ids: Iterable[str],
    *,
    signal: str | None = None,
    full: bool = False,
    cluster: str | None = None,
) -> None:
    """Cancels the jobs, or sends their batch processes a signal (``USR2``); ended jobs are no error.

    The caller has made sure that the ids are still its own jobs' (own_job.py). Without ``signal`` all
    processes get TERM, and KILL after the site's KillWait; with it only the job's supervisor gets the
    signal, and the job continues.

    Args:
        full: the signal goes to the jobs' steps, too.
        cluster: theirs, as for run_slurm.
    Raises:
        ClusterError: Slurm refused; jobs before and after the refused one were processed.
    """
    ids = list(job_ids)
    if not ids:
        return
    how = ["--full" if full else "--batch", f"--signal={signal}"] if signal else []
    done = run_slurm(["scancel", *how, *ids], cluster=cluster)
    if done.returncode != 0 and not is_unknown_job(done):
        raise ClusterError(
            f"scancel refused: {failure_text(done)}",
            where=" ".join(done.args[:4]),
            fix="check the jobs with realsys status; then try again",
        )


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signals.SIGKILL)
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()


def _cannot_run(program: str, error: OSError) -> ClusterError:
    if isinstance(error, FileNotFoundError):
        return ClusterError(
            f"the program {program} is not on PATH",
            where="PATH",
            fix="work on a login node of the cluster, or load its slurm module",
        )
    return ClusterError(
        f"the program {program} does not start: {error.strerror}",
        where="PATH",
        fix=f"try {program} --version in this shell",
    )


def _raise_if_unreachable(program: str, stderr: str) -> None:
    last = last_error_line(stderr)
    if _NO_CONFIGURATION.search(stderr):
        raise ClusterError(
            f"{program} found no Slurm configuration: {last}",
            where=f"SLURM_CONF={os.environ.get('SLURM_CONF', '')}",
            fix="work on a login node, or set SLURM_CONF to the cluster's slurm.conf",
        )
    if _NO_DATABASE.search(stderr):
        raise ClusterError(
            f"slurmdbd does not answer: {last}",
            where=program,
            fix="try again later, or set slurm.accounting: false in the cluster spec",
        )
    if NO_CONTROLLER.search(stderr):
        raise _no_answer(program, last)


def _no_answer(program: str, why: str) -> ClusterError:
    return ClusterError(
        f"slurmctld does not answer: {why}",
        where=program,
        fix="running jobs continue without it; try again in a minute (scontrol ping)",
    )


def failure_text(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the last line of the program's error output, or its exit status."""
    return last_error_line(done.stderr) or f"exit {done.returncode}"


def last_error_line(stderr: str) -> str:
    """Returns the last line of an error output, without the program's name before it."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return re.sub(r"^(\w+: (error|fatal): |\w+ error: )", "", lines[-1])[:300] if lines else ""
