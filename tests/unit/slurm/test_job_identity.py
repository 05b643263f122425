"""In which respect a job that Slurm reports is another one than was submitted; ownership has its table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from realsys.slurm.job_identity import JobIdentity, JobTraits, contradiction

MINE = JobIdentity(job_id="12", cluster="a", comment="trial x", submitted_at=1000.0, was_seen=True)
SAME = JobTraits(cluster="a", comment="trial x", submitted_at=1000.0, restarts=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"cluster": ""}, ""),
        ({"comment": None}, ""),
        ({"submitted_at": None}, ""),
        ({"comment": "trial y"}, "'trial y'"),
        ({"comment": ""}, "no comment"),
        ({"submitted_at": 5000.0}, "another time"),
        ({"submitted_at": 5000.0, "restarts": 1}, ""),  # requeued
        ({"submitted_at": 5.0, "restarts": 1}, "another time"),
        ({"cluster": "b"}, "cluster b"),
    ],
)
def test_what_contradicts_an_identity(changes: dict[str, object], words: str) -> None:
    found = contradiction(MINE, replace(SAME, **changes))  # type: ignore[arg-type]
    assert words in found
    assert bool(found) == bool(words)
