"""Harbor task directories for tests: a good one, and changes of its files."""

from __future__ import annotations

from pathlib import Path

FILES = {
    "task.toml": 'schema_version = "1.4"\n[agent]\ntimeout_sec = 10.0\n[environment]\nmemory_mb = 512\n',
    "instruction.md": "Write 42 into answer.txt.\n",
    "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
    "tests/test.sh": "#!/bin/bash\nif grep -qx 42 answer.txt; then echo 1; else echo 0; fi "
    "> /logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/bash\necho 42 > answer.txt\n",
}


def write_task(path: Path, **changes: str | None) -> Path:
    """Writes the good task with other files: ``tests__test.sh="…"``; None: without that file."""
    given = {name.replace("__", "/"): text for name, text in changes.items()}
    for name, text in {**FILES, **given}.items():
        if text is not None:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
    return path
