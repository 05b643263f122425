"""The kit for a first GPU reaches its end with CUDA's calls stood in for, and tells what failed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).parents[1] / "by_hand" / "gpu"
sys.path.insert(0, str(GPU))

import kit  # noqa: E402

pytestmark = pytest.mark.process
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> tuple[int, dict]:
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["kit.py", "--device", "cpu", "--out", str(out), *arguments])
    code = kit.main()
    return code, json.loads(out.read_text())


def test_every_probe_reaches_its_end_on_the_stand_in(monkeypatch, tmp_path):
    code, found = run(monkeypatch, tmp_path, "--only", "probes", "--only", "two_processes")
    failed = {row["part"]: row["error"] for row in found["rows"] if not row["ok"]}
    assert not failed
    assert code == 0
    assert found["device"] == "stand-in"
    assert {"decode", "masters", "step_memory", "two_sharded_training"} <= {
        row["part"] for row in found["rows"]
    }
    told = PAGE.read_text()
    missing = [row["part"] for row in found["rows"] if f"| `{row['part']}` |" not in told]
    assert not missing, f"docs/gpu.md has no row for {missing}"


def test_a_part_that_hangs_or_dies_is_told_with_what_it_had(monkeypatch, tmp_path):
    row = json.dumps([{"part": "a", "ok": True}])
    head = f"import sys, time, os\nopen(sys.argv[2], 'w').write({row!r})\n"
    (tmp_path / "hangs.py").write_text(head + "time.sleep(60)\n")
    (tmp_path / "dies.py").write_text(head + "os.kill(os.getpid(), 9)\n")
    (tmp_path / "silent.py").write_text("pass\n")
    monkeypatch.setattr(kit, "HERE", tmp_path)
    monkeypatch.setattr(kit, "PARTS", {"hangs": 2.0, "dies": 30.0, "silent": 30.0})
    code, found = run(monkeypatch, tmp_path)
    assert code == 1
    assert [(row["part"], row.get("error", "")) for row in found["rows"]] == [
        ("a", ""),
        ("hangs", "not done after 2 s"),
        ("a", ""),
        ("dies", "ended with -9"),
        ("silent", "wrote nothing"),
    ]
