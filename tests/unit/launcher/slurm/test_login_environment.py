"""What a job takes over from the launching shell, and what it must not."""

from __future__ import annotations

import golden

from launcher.slurm.login_environment import (
    dropped_variable_warnings,
    host_variables,
    task_variables,
)

SHELL = {
    "PATH": "/bin",
    "HOME": "/home/u",
    "LC_ALL": "C.UTF-8",
    "SLURM_CONF": "/etc/slurm.conf",
    "CUDA_VISIBLE_DEVICES": "3",
    "NCCL_DEBUG": "INFO",
    "HF_HOME": "/hf",
    "HF_TOKEN": "secret",
    "WANDB_API_KEY": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "SLURM_JOB_ID": "7",
    "SBATCH_PARTITION": "other",
    "SRUN_CPUS_PER_TASK": "3",
}


def test_a_host_gets_what_finds_programs_and_nothing_that_is_secret_or_stale():
    assert host_variables(SHELL) == {
        "HOME": "/home/u",
        "LC_ALL": "C.UTF-8",
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
    }


def test_a_task_gets_library_settings_and_the_secrets_that_the_site_names():
    assert task_variables(SHELL, ()) == {"HF_HOME": "/hf", "NCCL_DEBUG": "INFO"}
    named = task_variables(SHELL, ("HF_TOKEN", "WANDB_API_KEY", "NOT_SET"))
    assert named == {
        "HF_HOME": "/hf",
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "secret",
        "WANDB_API_KEY": "secret",
    }


def test_variables_that_would_change_the_submission_are_named():
    golden.check(dropped_variable_warnings(SHELL))
    assert dropped_variable_warnings({"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}) == []
