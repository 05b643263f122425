"""No Python that we start imports from the current folder, where another user's ``json.py`` may lie.

The process test is tests/process/test_current_folder.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ISOLATED = {"-P", "-I"}
SHELLS = {"bash", "sh", "/bin/bash", "/bin/sh"}
# Where a Python is started by -m or -c without -P, and why that is safe.
EXCEPTIONS = {
    "launcher/slurm/doctor/node_job.py": "in /, by whatever Python a node has; 3.10 has no -P",
    "realsys/slurm/preflight/drive.py": "in /, by whatever Python a node or an image has",
    "realsys/slurm/preflight/node_program.py": "in /, as drive.py started it",
    "realsys/generation/served_engines/sglang.py": "a Python of its own, in the trial's folder",
    "realsys/generation/served_engines/vllm.py": "a Python of its own, in the trial's folder",
    "realsys/rewards/sandbox/sandbox.py": "argv of a program in a box",
    "realsys/rewards/sandbox/box_program.py": "argv of a program in a box",
}


def unsafe_starts(source: str) -> Iterator[str]:
    """Yields the command lines that start a Python by -m or -c with the working folder on its path."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.List | ast.Tuple):
            words = [x.value if isinstance(x, ast.Constant) else None for x in node.elts]
            options = [i for i, word in enumerate(words) if word in ("-m", "-c")]
            before = (
                {word for word in words[: options[0]] if isinstance(word, str)}
                if options
                else set()
            )
            is_argv = bool(options) and not any(w.isidentifier() for w in before - SHELLS)
            if is_argv and not before & (ISOLATED | SHELLS):
                yield ast.unparse(node)
        elif isinstance(node, ast.JoinedStr):
            texts = [part.value for part in node.values if isinstance(part, ast.Constant)]
            if any(re.match(r"[\"']? -[mc] ", str(text)) for text in texts):
                yield ast.unparse(node)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("[sys.executable, '-m', 'x']", 1),
        ("(python, '-u', '-c', text)", 1),
        ("[*command, '-c', text]", 1),
        ("f'{python} -m realsys.x'", 1),
        ("[sys.executable, '-P', '-m', 'x']", 0),
        ("[python, '-I', '-S', '-c', text]", 0),
        ("['bash', '-l', '-c', text]", 0),
        ("['srun', '-m', 'block']", 0),
    ],
)
def test_a_start_with_the_working_folder_on_the_path_is_found(source: str, count: int) -> None:
    assert len(list(unsafe_starts(source))) == count


@pytest.mark.thorough
def test_no_python_is_started_with_the_working_folder_on_its_path() -> None:
    files = [
        path
        for folder in ("realsys", "launcher", "experiments", "release")
        for path in (ROOT / folder).rglob("*.py")
    ]
    found = {str(path.relative_to(ROOT)): list(unsafe_starts(path.read_text())) for path in files}
    assert {
        name: starts for name, starts in found.items() if starts and name not in EXCEPTIONS
    } == {}
    assert {name for name, starts in found.items() if starts} == set(EXCEPTIONS)
