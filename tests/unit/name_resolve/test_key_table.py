"""Every key that the table of keys promises is written and read by the code."""

from pathlib import Path

import pytest

from realsys.name_resolve.key_table import KEY_TABLE, KeyRow

ROOT = Path(__file__).parents[3]
NO_READER = "nobody: the transaction is the point"  # in the row's column "read by"
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
    "stop": ("launcher/control/stop.py", ".stop, dumps(", WATCHER, "keys.stop"),
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


@pytest.mark.parametrize("row", KEY_TABLE, ids=lambda row: row.name)
def test_every_key_has_a_writer_and_a_reader(row: KeyRow):
    writer, written, reader, read = USES[row.name]
    assert written in (ROOT / writer).read_text()
    assert bool(reader) == (row.reader != NO_READER)
    assert not reader or read in (ROOT / reader).read_text()


def test_every_use_is_of_a_key_of_the_table():
    assert USES.keys() == {row.name for row in KEY_TABLE}
