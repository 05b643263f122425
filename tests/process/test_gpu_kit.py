"""The kit for a first GPU reaches its end with CUDA's calls stood in for, and tells what failed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

GPU = Path(__file__).parents[1] / "by_hand" / "gpu"
sys.path.insert(0, str(GPU))

import kit  # noqa: E402
import probes  # noqa: E402
import runs  # noqa: E402
from device import Device  # noqa: E402
from registry import PROBES  # noqa: E402

pytestmark = pytest.mark.process
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def asked_of(program: str) -> list[str]:
    return [n for part in kit.PARTS.values() if part.program == program for n in part.names.split()]


@pytest.fixture
def restored() -> Iterator[None]:
    """Torch's switches, which a probe sets as a worker does."""
    before = torch.get_deterministic_debug_mode()
    yield
    torch.set_deterministic_debug_mode(before)


def test_each_probe_and_trial_is_asked_for_once_and_has_its_row() -> None:
    assert sorted(asked_of("probes")) == sorted(PROBES)
    trials = runs.commands(Path("policy"), Device("cpu"))
    assert sorted(asked_of("runs")) == sorted(trials)
    told = PAGE.read_text()
    assert not [name for name in (*PROBES, *trials) if f"| `{name}` |" not in told]


@pytest.mark.usefixtures("restored")
def test_every_probe_reaches_its_end_on_the_stand_in(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    probes.main("cpu", str(file))
    found = json.loads(file.read_text())
    assert {row["part"]: row.get("error") for row in found} == dict.fromkeys(PROBES)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> tuple[int, dict]:
    monkeypatch.setattr(sys, "argv", ["kit.py", "--device", "cpu", "--out", str(out), *arguments])
    code = kit.main()
    return code, json.loads((out / "stand-in.json").read_text())


def test_two_processes_reach_their_end_on_the_stand_in(monkeypatch, tmp_path) -> None:
    code, found = run(monkeypatch, tmp_path, "--only", "two_processes", "--slow", "4")
    assert [(row["part"], row.get("error")) for row in found["rows"]] == [
        ("two_sharded_training", None),
        ("two_dealt_answers", None),
    ]
    assert (code, found["device"]) == (0, "stand-in")


def test_a_part_that_hangs_or_dies_is_told_with_what_it_had(monkeypatch, tmp_path) -> None:
    row = json.dumps([{"part": "a", "ok": True}])
    head = f"import sys, time, os\nopen(sys.argv[2], 'w').write({row!r})\n"
    (tmp_path / "hangs.py").write_text(head + "time.sleep(60)\n")
    (tmp_path / "dies.py").write_text(head + "print('why')\nos.kill(os.getpid(), 9)\n")
    (tmp_path / "silent.py").write_text("pass\n")
    monkeypatch.setattr(kit, "HERE", tmp_path)
    limits = {"hangs": 2.0, "dies": 30.0, "silent": 30.0}
    parts = {name: kit.KitPart(name, "", seconds) for name, seconds in limits.items()}
    monkeypatch.setattr(kit, "PARTS", parts)
    code, found = run(monkeypatch, tmp_path)
    assert code == 1
    told = [(row["part"], row.get("error", "").partition(";")[0]) for row in found["rows"]]
    assert told == [
        ("a", ""),
        ("hangs", "not done after 2 s"),
        ("a", ""),
        ("dies", "ended with -9"),
        ("silent", "wrote nothing"),
    ]
    monkeypatch.setattr(kit, "TOTAL_S", kit.LEAST_S)  # all parts come too late
    assert [row["ok"] for row in run(monkeypatch, tmp_path)[1]["rows"]] == [False] * 3
