"""Asks Slurm for `realsys plan --check` whether it would accept the job, and when it would start."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from launcher.slurm.plan_lines import scripts
from launcher.slurm.sbatch_refusals import refusal
from launcher.slurm.slurm_commands import run_slurm
from realsys.api.errors import ConfigError
from realsys.api.plan import LaunchPlan


def check_plan(plan: LaunchPlan) -> Iterator[str]:
    """Yields Slurm's answer for each job of the plan; nothing is submitted.

    Raises:
        ConfigError: the plan is for the local machine.
        ClusterError: Slurm would refuse the job, or does not answer.
    """
    if plan.job is None:
        raise ConfigError(
            f"cluster {plan.cluster.name!r} does not use Slurm",
            where="--check",
            fix="name a Slurm cluster with --cluster",
        )
    with tempfile.TemporaryDirectory() as folder:
        for number, text in enumerate(scripts(plan)):
            script = Path(folder, f"{number}.sh")
            script.write_text(text, encoding="utf-8")
            done = run_slurm(["sbatch", "--test-only", str(script)], timeout_s=60)
            if done.returncode != 0:
                raise refusal(done.stderr, where="sbatch --test-only")
            yield (done.stderr or done.stdout).strip().removeprefix("sbatch: ")
