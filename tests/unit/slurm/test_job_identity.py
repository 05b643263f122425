"""In which respect a job that Slurm reports is another one than was submitted; ownership has its table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from realsys.slurm.job_identity import JobIdentity, JobTraits, contradiction, ownership

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


SEEN, OURS = {"was_seen": True}, {"was_seen": False}
BEGAN = {"submitted_at": None, "began_at": 1000.0}


@pytest.mark.parametrize(
    ("known", "later_s", "restarts", "same"),
    [
        *((SEEN, later_s, 0, abs(later_s) <= 0.5) for later_s in (-0.75, -0.5, 0.5, 0.75)),
        *((OURS, later_s, 0, abs(later_s) <= 600) for later_s in (-601, -600, 600, 601)),
        *((SEEN, later_s, 1, True) for later_s in (1, 9999)),  # requeued since
        *((SEEN, later_s, None, True) for later_s in (1, 9999)),  # perhaps
        *((SEEN, later_s, 1, False) for later_s in (-1, -9999)),
        ({**SEEN, "restarts": 1}, 9999, 1, False),
        ({**SEEN, "restarts": 1}, 9999, 2, True),
        *((BEGAN, later_s, 0, later_s <= 600) for later_s in (-9999, 600, 601)),
        (BEGAN, 601, 1, True),
        (BEGAN, 601, None, True),
        ({**BEGAN, "began_at": None}, 9999, 0, True),
    ],
)
def test_which_submit_times_are_one(
    known: dict[str, object], later_s: float, restarts: int | None, same: bool
) -> None:
    job = replace(SAME, submitted_at=1000.0 + later_s, restarts=restarts)
    found = contradiction(replace(MINE, **known), job)  # type: ignore[arg-type]
    assert ("another time" in found, found == "") == (not same, same)


@pytest.mark.parametrize(
    ("comment", "same"),
    [("site: trial x;", True), ("trial x/2", False), ("trial xy", False), ("a trial x", True),
     ("my-trial x", False), ("trial x+", False)],
)  # fmt: skip
def test_a_site_may_put_words_around_our_comment(comment: str, same: bool) -> None:
    assert (contradiction(MINE, replace(SAME, comment=comment)) == "") is same
    unseen = replace(MINE, comment="", cluster="")
    assert contradiction(unseen, replace(SAME, comment=comment, cluster="b")) == ""


A_JOB = JobTraits(cluster="a", comment="trial x", submitted_at=1000.0, restarts=0)
OTHER = {"comment": "y"}, {"submitted_at": 5.0}, {"cluster": "b"}


@pytest.mark.parametrize(
    ("known", "changes", "whose"),
    [
        ({}, {}, "ours"),
        ({}, OTHER[0], "ours"),  # the same second of the same controller
        (OURS, OTHER[0], "unknown"),
        ({}, {**OTHER[0], "submitted_at": None}, "not_ours"),
        ({}, OTHER[1], "not_ours"),
        ({}, OTHER[2], "ours"),  # a federation moved it
        ({}, {**OTHER[2], "submitted_at": None}, "not_ours"),
        ({}, {**OTHER[2], "comment": None}, "not_ours"),
        ({}, {"comment": None, "submitted_at": None}, "unknown"),
        ({}, {"submitted_at": None}, "ours"),
        (OURS, {"comment": None}, "ours"),
    ],
)
def test_whose_a_job_is(known: dict[str, object], changes: dict[str, object], whose: str) -> None:
    job = replace(A_JOB, **changes)  # type: ignore[arg-type]
    mine = replace(MINE, **known)  # type: ignore[arg-type]
    assert ownership(mine, job).value == whose
    is_elsewhere = whose == "not_ours" and "cluster" in changes
    assert ownership(mine, job, answered=False).value == ("unknown" if is_elsewhere else whose)
    assert ownership(mine, None).value == "gone"
    assert ownership(mine, None, answered=False).value == "unknown"
