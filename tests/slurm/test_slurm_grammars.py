"""Our tables of hostlists and times are what the real Slurm says."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import pytest
from hostlist_table import EXPANDED, WRITTEN
from slurm_cluster import SlurmCluster
from slurm_time_table import BEGINS, TIME_LIMITS

from launcher.job.time_spec import parse_begin
from realsys.api.errors import ConfigError


def test_hostlists(slurm: SlurmCluster) -> None:
    for text, names in EXPANDED:
        if text:
            said = slurm.run("scontrol", "show", "hostnames", text).stdout.split()
            assert list(dict.fromkeys(said)) == names.split(), text
    for names, text in WRITTEN:
        said = slurm.run("scontrol", "show", "hostlist", ",".join(names.split())).stdout.strip()
        assert said == text


def submitted(slurm: SlurmCluster, option: str, field: str) -> str | None:
    """A field of a job that was submitted with the option, and taken back; None if refused."""
    command = ["sbatch", "--parsable", "--nodes=4", "--exclusive", option, "--output=/dev/null"]
    done = slurm.run(*command, "--wrap=true", check=False)
    if done.returncode != 0:
        return None
    value = slurm.show_job(done.stdout.strip())[field]
    slurm.run("scancel", done.stdout.strip())
    return value


def test_time_limits(slurm: SlurmCluster) -> None:
    for text, normal in TIME_LIMITS:
        assert submitted(slurm, f"--time={text}", "TimeLimit") == normal, text


@pytest.mark.parametrize("text", [text for text, _ in BEGINS])
def test_begins(slurm: SlurmCluster, text: str) -> None:
    """Read at this moment, by both: the table's own moment is another."""
    before = datetime.now()
    said = submitted(slurm, f"--begin={text}", "EligibleTime")
    now = datetime.now()
    if said is None:
        with pytest.raises(ConfigError):
            parse_begin(text, now=now)
        return
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", said)
    theirs, some = datetime.fromisoformat(said), timedelta(seconds=3)
    first, last = (max(parse_begin(text, now=at).at, at) for at in (before, now))  # past: at once
    assert first - some <= theirs <= last + some, (text, first, last, said)
