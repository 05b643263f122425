"""Which nodes Slurm can't reach, by sinfo's words."""

from __future__ import annotations

import pytest

from realsys.slurm.hostlist import short_name
from realsys.slurm.lost_nodes import lost_nodes
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
    assert node_states_argv("n[1-3]")[-2:] == ["--nodes=n[1-3]", "--format=%N|%T|%E"]


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


def test_sruns_word_on_a_node_blames_that_node_and_not_the_worker_whose_failure_has_it() -> None:
    words = "exited with code 1 (srun ended with 1: Node failure on n2)"
    assert list(lost_nodes(marker(("n1", words), ("n2", words)), "n[1-2]")) == ["n2"]


def test_who_alone_can_not_reach_the_store_is_left_out_and_not_all() -> None:
    assert list(lost_nodes(marker(("n2", FENCED), ("n1", "a reset")), "n[1-2]")) == ["n2"]
    assert lost_nodes(marker(("n2", FENCED), ("n1", FENCED)), "n[1-2]") == {}


def test_a_store_that_lost_all_leases_blames_no_node() -> None:
    assert lost_nodes(marker(("n1", SILENT), ("n2", SILENT)), "n[1-2]") == {}
    assert list(lost_nodes(marker(("n1", SILENT), ("n2", SILENT)), "n[1-3]")) == ["n1", "n2"]
