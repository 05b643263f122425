"""Maps Slurm's job states to ours, as one table that the docs print.

Slurm shows one word, a flag before the base state, in the order of this table (job_state_string in
src/common/slurm_protocol_defs.c, read from 22.05 to 26.11). Nothing here queries Slurm.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from realsys.trial.trial_state import JobState


class SlurmState(NamedTuple):
    """One row of the table: the compact form, our state and the meaning."""

    compact: str  # squeue %t; empty if Slurm has none
    state: JobState
    meaning: str


# fmt: off
STATE_TABLE: dict[str, SlurmState] = {
    # flags
    "COMPLETING":    SlurmState("CG", JobState.FINISHING, "processes are ending, the epilog runs"),
    "STAGE_OUT":     SlurmState("SO", JobState.FINISHING, "files are copied out of a burst buffer"),
    "CONFIGURING":   SlurmState("CF", JobState.WAITING, "nodes are assigned and being made ready"),
    "POWER_UP_NODE": SlurmState("", JobState.WAITING, "assigned nodes are being powered up"),
    "EXPEDITING":    SlurmState("", JobState.WAITING, "requeued, to start before others"),
    "RESIZING":      SlurmState("RS", JobState.RUNNING, "the running job changes its number of nodes"),
    "REQUEUED":      SlurmState("RQ", JobState.WAITING, "goes back to the queue"),
    "REQUEUE_FED":   SlurmState("RF", JobState.WAITING, "is requeued by the federation"),
    "REQUEUE_HOLD":  SlurmState("RH", JobState.HELD, "went back to the queue, held"),
    "SPECIAL_EXIT":  SlurmState("SE", JobState.HELD, "went back to the queue, held, marked by the site"),
    "STOPPED":       SlurmState("ST", JobState.PAUSED, "stopped by a signal, keeps its CPUs"),
    "REVOKED":       SlurmState("RV", JobState.STOPPED, "another cluster of the federation runs it"),
    "RESV_DEL_HOLD": SlurmState("RD", JobState.HELD, "held: its reservation was deleted"),
    "SIGNALING":     SlurmState("SI", JobState.RUNNING, "is being sent a signal"),
    "LAUNCH_FAILED": SlurmState("", JobState.INFRA_FAILURE, "could not be started on its nodes"),
    "RECONFIG_FAIL": SlurmState("", JobState.INFRA_FAILURE, "its nodes could not be configured"),
    # base states
    "PENDING":       SlurmState("PD", JobState.WAITING, "is in the queue"),
    "RUNNING":       SlurmState("R", JobState.RUNNING, "runs"),
    "SUSPENDED":     SlurmState("S", JobState.PAUSED, "suspended; others may use its CPUs"),
    "COMPLETED":     SlurmState("CD", JobState.DONE, "ended with exit code 0"),
    "CANCELLED":     SlurmState("CA", JobState.STOPPED, "cancelled by a user or an administrator"),
    "FAILED":        SlurmState("F", JobState.FAILED, "ended with another exit code, or by a signal"),
    "TIMEOUT":       SlurmState("TO", JobState.FAILED, "reached its time limit"),
    "NODE_FAIL":     SlurmState("NF", JobState.INFRA_FAILURE, "lost a node"),
    "PREEMPTED":     SlurmState("PR", JobState.INFRA_FAILURE, "had to make way for another job"),
    "BOOT_FAIL":     SlurmState("BF", JobState.INFRA_FAILURE, "a node did not boot"),
    "DEADLINE":      SlurmState("DL", JobState.FAILED, "could not end before its deadline"),
    "OUT_OF_MEMORY": SlurmState("OOM", JobState.FAILED, "used more memory than it had asked for"),
    # carries no information on the job: used only if it is the sole word
    "UPDATE_DB":     SlurmState("", JobState.UNKNOWN, "its start is being written to accounting"),
}
# fmt: on

# A node's state as sinfo or scontrol prints it (drained, IDLE+DRAIN, down*): it starts no jobs at present.
NODE_IS_OUT = re.compile(
    r"down|drain|fail|maint|not_responding|powered_down|powering_down|\*$", re.IGNORECASE
)
_BY_COMPACT = {row.compact: row.state for row in STATE_TABLE.values() if row.compact}
_CANCELLED_BY = re.compile(r"CANCELLED BY \S+")


def job_state(slurm_state: str) -> JobState:
    """Maps a state as squeue, sacct, scontrol or their JSON print it; never raises.

    Accepts ``CANCELLED by 1000``, a truncated ``OUT_OF_ME+``, a trailing ``*``, the compact form ``CG``
    and the list ``["RUNNING", "COMPLETING"]``, of which the word that Slurm itself would show counts.
    Anything else is UNKNOWN; callers should keep the original word beside it.
    """
    text = slurm_state.strip().upper()
    if text.startswith("["):
        words = {word.strip(" \"'") for word in text.strip("[]").split(",")}
        return next(
            (row.state for word, row in STATE_TABLE.items() if word in words), JobState.UNKNOWN
        )
    if _CANCELLED_BY.fullmatch(text):
        return JobState.STOPPED
    text = text.removesuffix("*")
    if text.endswith("+") and len(text) > 1:
        meant = {row.state for word, row in STATE_TABLE.items() if word.startswith(text[:-1])}
        return meant.pop() if len(meant) == 1 else JobState.UNKNOWN
    if row := STATE_TABLE.get(text):
        return row.state
    return _BY_COMPACT.get(text, JobState.UNKNOWN)
