"""Every key that docs/workers.md lists is made by ``TrialKeys``, and written and read by the code."""

import re
from pathlib import Path

from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import canonical

ROOT = Path(__file__).parents[3]
NO_READER = "nobody: the transaction is the point"  # in the column "read by"
PAGE = (ROOT / "docs/workers.md").read_text().partition("\n## Keys\n")[2].partition("\n## ")[0]
# name, pattern below the trial's root, who reads it
ROWS = re.findall(r"^\| `((\w+)[^`]*)` \| [^|]+ \| ([^|]+) \| [^|]+ \|$", PAGE, flags=re.MULTILINE)


def uses() -> dict[str, set[Path]]:
    """Name of a key, or of all of a kind → files that take it from a trial's keys."""
    found: dict[str, set[Path]] = {}
    for path in (path for room in ("realsys", "launcher") for path in (ROOT / room).rglob("*.py")):
        for name in re.findall(r"(?:keys|TrialKeys\.of\(\w+\))\.(\w+)", path.read_text()):
            found.setdefault(name, set()).add(path)
    return found


def test_every_key_has_a_writer_and_a_reader():
    found = uses()
    for _, name, reader in ROWS:
        files = (
            found.get(name, set()) | found.get(f"{name}s", set()) | found.get(f"{name}es", set())
        )
        assert len(files) >= (1 if reader == NO_READER else 2), name


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
    assert members - others == {name for _, name, _ in ROWS}
