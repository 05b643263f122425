"""What sbatch says when it refuses, with what to do: sentences of Slurm 22.05."""

from __future__ import annotations

import golden
import pytest

from launcher.slurm.sbatch_refusals import refusal

SAID = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("slurms_words", "fix"),
    [
        ("Invalid account or account/partition combination specified", "--account"),
        ("Invalid partition name specified", "--partition"),
        ("Invalid qos specification", "--qos"),
        ("Invalid feature specification", "--constraint"),
        ("Invalid node name specified", "--nodelist"),
        ("Requested node configuration is not available", "realsys clusters init"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "deadline"),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
         "sacctmgr show assoc"),
        ("Slurm temporarily unable to accept job, sleeping and retrying", "MaxJobCount"),
        ("Resource temporarily unavailable", "MaxJobCount"),
        ("Invalid job array specification", "MaxArraySize"),
        ("Job dependency problem: Invalid dependency", "--after"),
    ],
)  # fmt: skip
def test_every_refusal_keeps_slurms_words_and_says_what_to_do(slurms_words, fix):
    error = refusal(SAID + slurms_words + "\n", where="sbatch")
    assert slurms_words in error.what
    assert "sbatch: error" not in error.what
    assert fix in error.fix
    assert error.exit_code == 5


def test_a_silent_refusal_says_so():
    golden.check(refusal("", where="sbatch"))
