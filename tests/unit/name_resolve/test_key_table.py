"""Every key that docs/workers.md lists is made by ``TrialKeys``, and written and read by the code."""

import re
from pathlib import Path

import pytest

from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import canonical

ROOT = Path(__file__).parents[3]
NO_READER = "nobody: the transaction is the point"  # in the column "read by"
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
    "scaling": (LIVE, "Put(keys.scaling", LIVE, "find(store, keys.scaling)"),
    "done": ("realsys/master/checkpoint/publication.py", "_publish(self._keys.done", "", ""),
    "checkpoint": ("realsys/master/checkpoint/publication.py", "_publish(self._keys.checkpoint(", "", ""),
    "saved_model": ("realsys/master/checkpoint/publication.py", "_publish(self._keys.saved_model(", "", ""),
    "component": (
        *(f"{SPLIT}/order_follower.py", "keys.component(self.component)"),
        *(f"{SPLIT}/component_board.py", "get_subtree(self.keys.components)"),
    ),
    "component_order": (
        *(f"{SPLIT}/component_board.py", "Put(self.keys.component_order"),
        *(f"{SPLIT}/order_follower.py", "self.store, self.keys.component_order)"),
    ),
    "component_report": (
        *(f"{SPLIT}/order_follower.py", "Put(self.keys.component_report("),
        *(f"{SPLIT}/component_board.py", "get_subtree(self.keys.component_reports)"),
    ),
}  # fmt: skip


PAGE = (ROOT / "docs/workers.md").read_text().partition("\n## Keys\n")[2].partition("\n## ")[0]
# name, pattern below the trial's root, who reads it
ROWS = re.findall(r"^\| `((\w+)[^`]*)` \| [^|]+ \| ([^|]+) \| [^|]+ \|$", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize(("pattern", "name", "reader"), ROWS)
def test_every_key_has_a_writer_and_a_reader(pattern: str, name: str, reader: str):
    writer, written, its_reader, read = USES[name]
    assert written in (ROOT / writer).read_text()
    assert bool(its_reader) == (reader != NO_READER)
    assert not its_reader or read in (ROOT / its_reader).read_text()


def test_the_page_has_every_key_of_a_trial_and_its_pattern():
    keys = TrialKeys(cluster="site", user="anna", experiment="ppo-math", trial="run1")
    arguments = {"<type>": "model_worker", "<index>": 3}
    for pattern, name, _ in ROWS:
        blanks = [part for part in pattern.split("/") if part.startswith("<")]
        filled = [arguments.get(blank, "actor") for blank in blanks]
        member = getattr(keys, name)
        key = member(*filled) if blanks else member
        expected = pattern
        for blank, value in zip(blanks, filled, strict=True):
            expected = expected.replace(blank, str(value))
        assert key == canonical(f"realsys/v1/site/anna/ppo-math/run1/{expected}")
    others = set("of root workers worker_statuses components component_reports commands".split())
    members = {name for name in dir(TrialKeys) if not name.startswith("_")} - set(
        TrialKeys.__slots__
    )
    assert members - others == {name for _, name, _ in ROWS} == USES.keys()
