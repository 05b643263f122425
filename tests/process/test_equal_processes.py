"""What must come out equal in every process, whatever its hash seed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_trials import make_policy

from realsys.generation.engine.sampling import row_seed

pytestmark = pytest.mark.process


def in_another_process(code: str, *words: str) -> str:
    hash_seed = "78" if os.environ.get("PYTHONHASHSEED") == "77" else "77"
    path = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


def file_hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_equal_seeds_give_equal_models_byte_by_byte(tmp_path: Path) -> None:
    code = "import sys, pathlib, real_trials; real_trials.make_policy(pathlib.Path(sys.argv[1]))"
    in_another_process(code, str(tmp_path / "there"))
    assert file_hashes(tmp_path / "there") == file_hashes(make_policy(tmp_path / "here"))


def test_a_rows_seed_is_the_same() -> None:
    code = (
        "from realsys.generation.engine.sampling import row_seed; print(row_seed(1, 'p-3', 2, 40))"
    )
    assert int(in_another_process(code)) == row_seed(1, "p-3", 2, 40)
