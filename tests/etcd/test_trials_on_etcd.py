"""A trial on an etcd of its own, which is killed, and the trial stopped and resumed.

That its numbers are those of any other run is shown by test_trials_attacked.py, and what an outage of the
site's etcd does to one, nothing, by test_store_away.py.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from real_trials import LONG_PPO, Trials, wait_until

from launcher.trials.status import trial_view
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State


def etcds_of(files: TrialFiles) -> list[int]:
    """Pids of the trial's etcd servers: its supervisor's children."""
    supervisor = trial_view(files).supervisor_pid
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            if name == "etcd" and int(rest.split()[1]) == supervisor:
                found.append(int(entry.name))
    return found


def test_a_run_whose_own_etcd_is_killed_goes_on_and_is_stopped_and_resumed(
    trials: Trials, tiny_policy: Path
) -> None:
    site = trials.file_root.parent / "site.yaml"
    site.write_text(
        f"name: lab\nscheduler: local\nfile_root: {trials.file_root}\nname_resolve: etcd+job://\n"
    )
    words = ("--cluster", str(site), f"actor.path={tiny_policy}", *LONG_PPO)
    files = trials.launch("ppo-math", "etcd", *words)
    step = trials.wait_for_step(files, 2).step
    (old,) = etcds_of(files)
    os.kill(old, signal.SIGKILL)
    trials.wait_for_step(files, step + 6)
    wait_until(files, lambda _: len(new := etcds_of(files)) == 1 and new != [old], timeout_s=120)
    done = trials.run("stop", "ppo-math/etcd", "--grace", "30")
    assert done.returncode == 0, done.stderr
    stopped = trials.wait(files)
    assert stopped.state is State.STOPPED
    trials.resume(files)
    more = (stopped.step or 0) + 2
    wait_until(files, lambda v: v.attempt == 2 and (v.step or 0) >= more, timeout_s=240)
    assert [a.number for a in files.all_attempts()] == [1, 2]
    done = trials.run("stop", "ppo-math/etcd", "--grace", "30")
    assert done.returncode == 0, done.stderr
