"""The servers that fork the processes of tests' trials: started once for a run of the tests.

What they are for stands in fork_server/server.py. Under `pytest --at-once` all forks share them.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[1] / "fork_server"
FOLDER = "REALSYS_TESTS_FORK_FOLDER"  # for forks of `pytest --at-once`
# Of what libraries read when they are loaded, all that a forked process can no longer be given.
# realsys/worker/environment.py gives its workers these.
LOADED_WITH = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "GOMP_SPINCOUNT": "2000",
    "HF_HUB_OFFLINE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


KINDS = ("workers", "commands", "hosts")
LIBRARY = "file_calls.so"  # what is forked can no longer be given it; it counts when it is asked to
_servers: list[subprocess.Popen[bytes]] = []


def start() -> None:
    """Starts them in the background, tied to this process. What asks before one is ready waits."""
    folder = Path(tempfile.mkdtemp(prefix="realsys-fork-"))
    folder.chmod(0o755)  # tests have ordinary users
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "sitecustomize.py").symlink_to(HERE / "sitecustomize.py")
    environment = {**os.environ, **LOADED_WITH, "PYTHONPATH": str(HERE.parents[1])}
    if shutil.which("gcc"):
        environment["LD_PRELOAD"] = str(compile_library(folder))
    padding = "x" * 65_000  # room in /proc for arguments and environment of what is forked
    for kind in KINDS:
        server = subprocess.Popen(
            [sys.executable, HERE / "server.py", kind, folder / kind, str(os.getpid()), padding],
            env={**environment, "PADDING": padding},
            stdin=subprocess.DEVNULL,
        )
        atexit.register(_end, server)
        _servers.append(server)
    os.environ[FOLDER] = str(folder)


def compile_library(folder: Path) -> Path:
    """Makes what file_calls.py loads into processes, in ``folder``."""
    library, source = folder / LIBRARY, Path(__file__).with_name("file_calls.c")
    command = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


def library() -> Path | None:
    """The one that forked processes have; None where no server was started, or without gcc."""
    path = Path(os.environ.get(FOLDER, "")) / LIBRARY
    return path if FOLDER in os.environ and path.exists() else None


def ended() -> bool:
    """Whether one that was started here is gone: tests still pass then, and take three times as long."""
    return any(server.poll() is not None for server in _servers)


def _end(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait()


def environment() -> dict[str, str]:
    """For a Python whose heavy processes are to be forked; nothing where no server was started."""
    if FOLDER not in os.environ:
        return {}
    paths = (os.environ[FOLDER], os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": ":".join(path for path in paths if path)}
