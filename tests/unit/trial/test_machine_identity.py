"""On which machine a process was started, whatever that is called now."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest

from realsys.trial import liveness as module
from realsys.trial.liveness import Liveness, liveness
from realsys.trial.machine_identity import (
    MachineIdentity,
    Whereabouts,
    this_machine,
    whereabouts,
)
from realsys.trial.records import process_start

HERE, BEFORE, ELSEWHERE = Whereabouts
ME = MachineIdentity(boot="b1", pid_namespace="pid:[1]", machine="m1")
NAME, OTHER = socket.gethostname(), "another-name"


@pytest.mark.parametrize(
    ("host", "recorded", "here", "where"),
    [
        (OTHER, ME, ME, HERE),  # renamed
        (NAME, ME, ME, HERE),
        (OTHER, replace(ME, boot="b0"), ME, ELSEWHERE),  # of the same image: its id is ours
        (NAME, replace(ME, boot="b0"), ME, BEFORE),
        (OTHER, replace(ME, pid_namespace="pid:[2]"), ME, ELSEWHERE),  # another container
        (NAME, replace(ME, pid_namespace="pid:[2]"), ME, ELSEWHERE),
        (OTHER, replace(ME, boot="b0", machine="m0"), ME, ELSEWHERE),
        (NAME, replace(ME, boot="b0", machine="m0"), ME, ELSEWHERE),  # of the same name
        (OTHER, replace(ME, boot="b0", machine=""), ME, ELSEWHERE),
        (NAME, replace(ME, boot="b0", machine=""), ME, ELSEWHERE),  # of the same name, too
        # The name decides where nothing else is known.
        (NAME, None, ME, HERE),
        (OTHER, None, ME, ELSEWHERE),
        (NAME, MachineIdentity(), ME, HERE),
        (OTHER, ME, MachineIdentity(), ELSEWHERE),
    ],
)
def test_boot_namespace_and_machine_count_before_the_name(
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    recorded: MachineIdentity | None,
    here: MachineIdentity,
    where: Whereabouts,
) -> None:
    monkeypatch.setattr("realsys.trial.machine_identity.this_machine", lambda: here)
    assert whereabouts(host, recorded) is where


def test_a_process_is_recognised_after_its_host_was_renamed() -> None:
    me, start = os.getpid(), process_start(os.getpid())
    assert start is not None
    assert liveness(OTHER, me, start, this_machine()) is Liveness.ALIVE
    assert liveness(OTHER, me, start + 1, this_machine()) is Liveness.DEAD
    assert liveness(OTHER, me, start) is Liveness.UNKNOWN
    if this_machine().machine:
        rebooted = replace(this_machine(), boot="another")
        assert liveness(NAME, me, start, rebooted) is Liveness.DEAD
        assert liveness(OTHER, me, start, rebooted) is Liveness.UNKNOWN


def test_this_machine_has_a_boot_and_a_namespace() -> None:
    assert this_machine().boot
    assert this_machine().pid_namespace.startswith("pid:")
    assert module.whereabouts(NAME, this_machine()) is HERE
