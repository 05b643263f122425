"""Every key that ``TrialKeys`` describes is written and read by the code."""

import re
from pathlib import Path

import pytest

from realsys.name_resolve.key_table import TrialKeys

ROOT = Path(__file__).parents[3]
NO_READER = "read by nobody"  # in the member's docstring
HEARTBEAT = "realsys/heartbeat/worker_keys.py"
WATCHER = "realsys/heartbeat/key_watcher.py"
LEASES = "realsys/supervisor/health/worker_leases.py"
LIVE = "realsys/worker/live_scaling.py"
SPLIT = "realsys/supervisor/split_jobs"
# key → where it is written, what stands there; where it is read, what stands there
USES = {
    "attempt": ("realsys/supervisor/attempt/attempt.py", "Put(keys.attempt", WATCHER, "keys.attempt"),
    "worker": (HEARTBEAT, "keys.worker(", LEASES, "get_subtree(self.keys.workers)"),
    "worker_status": (HEARTBEAT, "keys.worker_status(", LEASES, "get_subtree(self.keys.worker_statuses)"),
    "command": ("launcher/control/send_command.py", "add(keys.command(", WATCHER, "_keys.command"),
    "progress": (
        *("realsys/master/run_progress.py", "Put(self._runner.keys.progress"),
        *("launcher/trials/status.py", '_value(Progress, "progress")'),
    ),
    "stop": ("launcher/control/stop_request.py", ".stop, dumps(", WATCHER, "keys.stop"),
    "scaling": (LIVE, "Put(keys.scaling", LIVE, "get(keys.scaling)"),
    "done": ("realsys/master/checkpoint/publication.py", "_publish(self._keys.done", "", ""),
    "checkpoint": ("realsys/master/checkpoint/publication.py", "_publish(self._keys.checkpoint(", "", ""),
    "saved_model": ("realsys/master/checkpoint/publication.py", "_publish(self._keys.saved_model(", "", ""),
    "component": (
        *(f"{SPLIT}/order_follower.py", "keys.component(self.component)"),
        *(f"{SPLIT}/component_board.py", "get_subtree(self.keys.components)"),
    ),
    "component_order": (
        *(f"{SPLIT}/component_board.py", "Put(self.keys.component_order"),
        *(f"{SPLIT}/order_follower.py", "get(self.keys.component_order)"),
    ),
    "component_report": (
        *(f"{SPLIT}/order_follower.py", "Put(self.keys.component_report("),
        *(f"{SPLIT}/component_board.py", "get_subtree(self.keys.component_reports)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_every_key_has_a_writer_and_a_reader(name: str):
    writer, written, reader, read = USES[name]
    says = getattr(TrialKeys, name).__doc__
    assert written in (ROOT / writer).read_text()
    assert bool(reader) == (NO_READER not in says)
    assert not reader or read in (ROOT / reader).read_text()


def test_every_use_is_of_a_key_with_its_writer_reader_and_lifetime():
    members = {name: member.__doc__ or "" for name, member in vars(TrialKeys).items()}
    assert USES.keys() == {name for name, says in members.items() if says.startswith("Written ")}
    assert all("until" in members[name] and "read" in members[name] for name in USES)


def test_the_page_lists_the_same_keys():
    rows = (ROOT / "docs/workers.md").read_text().partition("\n## Keys\n")[2].partition("\n## ")[0]
    assert USES.keys() == set(re.findall(r"^\| `(\w+)", rows, flags=re.MULTILINE))
