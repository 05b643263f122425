"""Which nodes Slurm can't reach, by sinfo's words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from realsys.slurm.hostlist import short_name
from realsys.slurm.lost_nodes import evidence, lost_nodes, without_lost
from realsys.slurm.unreachable_nodes import is_unreachable, node_states_argv, unreachable_nodes
from realsys.trial.records import ExitMarker, Failure, Result


@pytest.mark.parametrize(
    ("state", "found"),
    [
        *((state, True) for state in ("down", "down*", "DOWN*", "mixed*", "idle*", "drained*")),
        *((state, True) for state in ("reboot^", "rebooting", "idle%", "NODE_FAIL", "powered_down")),
        *((state, False) for state in ("idle", "mixed", "allocated", "draining", "drained", "mixed-")),
        *((state, False) for state in ("idle~", "mixed@", "mixed#", "reserved", "unknown", "maint", "")),
    ],
)  # fmt: skip
def test_a_state(state: str, found: bool) -> None:
    assert is_unreachable(state) is found


def test_sinfos_lines() -> None:
    output = "n1|mixed|none\nn2|down*|Not responding\nn2|down*|Not responding\nn3|mixed*|none\n\n"
    assert unreachable_nodes(output) == {"n2": "down*: Not responding", "n3": "mixed*"}
    argv = ["sinfo", "--noheader", "--Node", "--nodes=n[1-3]", "--format=%N|%T|%E"]
    assert node_states_argv("n[1-3]") == argv
    odd = " n5 | down* | a | b\nn6\n|down|x\nn7|down|\nn8|down\n"
    assert unreachable_nodes(odd) == {"n5": "down*: a", "n7": "down", "n8": "down"}


@pytest.mark.parametrize(
    ("host", "name"),
    [("GPU01.site.edu", "gpu01"), ("n1", "n1"), ("10.78.0.2", "10.78.0.2"), ("fd00::2", "fd00::2")],
)
def test_a_hosts_short_name(host: str, name: str) -> None:
    assert short_name(host) == name


def marker(*failures: tuple[str, str]) -> ExitMarker:
    first, *others = (Failure(worker="w/0", host=h, pid=1, why=why, at=1.0) for h, why in failures)
    return ExitMarker(
        result=Result.FAILED, attempt=1, ended_at=2.0, phase="main", first_failure=first,
        other_failures=tuple(others),
    )  # fmt: skip


FENCED = "exited with code 77: its lease could not be renewed in time, so it stopped itself"
SILENT = "its lease has ended: its node is lost or cut off, or it hangs"


RANGE = "exited with code 1 (srun ended with 1: Node failure on n[2-3])"
ECC = "CUDA error: uncorrectable ECC error encountered"
STORE = "the store has not answered for 60 s"


@pytest.mark.parametrize(
    ("nodes", "failures", "lost"),
    [
        ("", [("n1", SILENT)], {}),  # on one machine
        ("n[1-2]", [("n2.site", SILENT), ("n2", ECC)], {"n2": SILENT}),
        ("N2", [("n2", SILENT)], {"N2": SILENT}),  # there is no other
        ("n[1-2]", [("n9", SILENT)], {}),
        ("n[1-2]", [("n1", ECC + "\nmore"), ("n2", SILENT)], {"n1": ECC, "n2": SILENT}),
        ("n[1-2]", [("n1", SILENT), ("n2", SILENT)], {}),  # it is the store that lost them
        ("n[1-3]", [("n1", SILENT), ("n2", SILENT)], {"n1": SILENT, "n2": SILENT}),
        ("n[1-4]", [("n1", RANGE)], {"n2": RANGE, "n3": RANGE}),  # srun's word, of no worker there
        ("n[1-2]", [("n2", FENCED), ("n1", "a reset")], {"n2": FENCED}),
        ("n[1-3]", [("n2", STORE), ("n3", FENCED), ("n2", FENCED)], {"n2": STORE, "n3": FENCED}),
        ("n[1-2]", [("n2", FENCED), ("n1", STORE)], {}),
        ("n[1-2]", [("n9", FENCED)], {}),
        ("n[1-2]", [("n2", f"it says: {FENCED}")], {}),  # another's words
        (
            "n[1-2]",
            [("n1", "failed the preflight"), ("n2", FENCED)],
            {"n1": "failed the preflight"},
        ),
    ],
)
def test_nodes_that_an_attempt_lost(
    nodes: str, failures: list[tuple[str, str]], lost: dict[str, str]
) -> None:
    told = {node: f"w/0 there: {why}" for node, why in lost.items()}
    assert lost_nodes(marker(*failures), nodes) == told
    assert evidence(told) == "; ".join(f"{node} (w/0 there: {why})" for node, why in lost.items())
    assert lost_nodes(None, nodes) == {}
    assert (
        lost_nodes(replace(marker(*failures), first_failure=None, other_failures=()), nodes) == {}
    )


@pytest.mark.parametrize(
    ("excluded", "pinned", "of_partition", "new"),
    [
        ("", "", 4, "n2"),
        ("n[7-8],n2", "", 5, "n[2,7-8]"),
        ("n[7-8]", "", 4, None),  # two are left, it needs two; with n2 gone only one
        ("", "n[1,3]", 3, "n2"),
        ("", "n[1-2]", 9, None),
        ("", "", 3, "n2"),
        ("", "", 2, None),
    ],
)
def test_a_job_without_its_lost_nodes(
    excluded: str, pinned: str, of_partition: int, new: str | None
) -> None:
    options = {"excluded": excluded, "pinned": pinned, "of_partition": of_partition, "needed": 2}
    assert without_lost(["n2"], **options) == new  # type: ignore[arg-type]
