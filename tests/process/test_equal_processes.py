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


CODE = """
import pathlib, sys
from real_trials import make_policy
from realsys.generation.engine.sampling import row_seed
make_policy(pathlib.Path(sys.argv[1]))
print(row_seed(1, "p-3", 2, 40))
"""


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What another process makes and says."""
    folder = tmp_path_factory.mktemp("other") / "there"
    hash_seed = "78" if os.environ.get("PYTHONHASHSEED") == "77" else "77"
    path = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    command = [sys.executable, "-c", CODE, str(folder)]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return folder, done.stdout


def file_hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_equal_seeds_give_equal_models_byte_by_byte(
    there: tuple[Path, str], tmp_path: Path
) -> None:
    assert file_hashes(there[0]) == file_hashes(make_policy(tmp_path / "here"))


def test_a_rows_seed_is_the_same(there: tuple[Path, str]) -> None:
    assert int(there[1].splitlines()[-1]) == row_seed(1, "p-3", 2, 40)
