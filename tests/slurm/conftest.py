"""The slurm tier: a real Slurm of four nodes on this machine, and trials on it.

Every test gets the same cluster, without jobs and with all nodes up. A test that needs another one starts
it with ``start_slurm``, which takes two seconds, or a tenth of one without accounting.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import other_site
import pytest
from slurm_cluster import SlurmCluster
from slurm_daemons import SYSTEM_TABLES
from slurm_trials import SlurmTrials

PROGRAMS = (
    *("slurmctld", "slurmd", "slurmdbd", "sbatch", "munged", "mariadbd", "mariadb"),
    *("gcc", "setpriv", "unshare"),
)
FILES = (SYSTEM_TABLES, Path("/usr/include/slurm/spank.h"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is of the slurm tier."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slurm)


def missing() -> str | None:
    """What keeps a cluster from being started here, and what to do; None when nothing does."""
    if os.geteuid() != 0:
        return "slurmds with host names of their own need root: sudo make test"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    gone = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    gone += [str(file) for file in FILES if not file.exists()]
    if gone:
        return f"no {', '.join(gone)} here: make slurm-packages"
    unshared = subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True)
    if unshared.returncode != 0:
        return f"no namespaces here (run the container with --privileged): {unshared.stderr!r}"
    return None


@pytest.fixture(scope="session")
def fake_pyxis(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A stand-in for pyxis with its argument, as a line of plugstack.conf."""
    folder = tmp_path_factory.mktemp("fake_pyxis")
    (folder / "scratch").mkdir()
    source = Path(__file__).with_name("fake_pyxis.c")
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    command = ["gcc", *options, "-o", str(folder / "fake_pyxis.so"), str(source)]
    subprocess.run(command, check=True)
    return f"{folder}/fake_pyxis.so {folder}/scratch"


@pytest.fixture(scope="session")
def start_slurm() -> Callable[..., SlurmCluster]:
    """Makes a cluster with the given options (SlurmCluster's), to be entered by ``with``."""
    if reason := missing():
        pytest.skip(reason)

    def start(**options: Any) -> SlurmCluster:
        memory = Path("/dev/shm")
        place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
        return SlurmCluster(Path(tempfile.mkdtemp(prefix="slurm-", dir=place)), **options)

    return start


@pytest.fixture(scope="session")
def session_slurm(
    start_slurm: Callable[..., SlurmCluster], fake_pyxis: str
) -> Iterator[SlurmCluster]:
    """The cluster of the session, for fixtures that outlive a test; tests take ``slurm``."""
    with start_slurm(spank=fake_pyxis) as cluster:
        yield cluster


@pytest.fixture
def slurm(session_slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """Four idle nodes n1 to n4 with 64 CPUs and 8 GPUs each, accounting, QOS, container options."""
    yield session_slurm
    session_slurm.clear()


@pytest.fixture(scope="session")
def session_other_slurm(start_slurm: Callable[..., SlurmCluster]) -> Iterator[SlurmCluster]:
    """The second cluster of the session; tests take ``other_slurm``."""
    with start_slurm(**other_site.options()) as cluster:
        yield cluster


@pytest.fixture
def other_slurm(session_other_slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """A cluster of another shape, idle: two threads a core, limits of all kinds (other_site.py)."""
    yield session_other_slurm
    session_other_slurm.clear()


@pytest.fixture(scope="module")
def slurm_without_accounting(
    start_slurm: Callable[..., SlurmCluster],
) -> Iterator[SlurmCluster]:
    """The same without sacct and container options, for the tests of a module."""
    with start_slurm(accounting=False) as cluster:
        yield cluster


@pytest.fixture
def slurm_trials(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmTrials]:
    """Trials on the session's cluster; none of their processes outlives the test."""
    yield from _trials_on(slurm, tmp_path, monkeypatch)


@pytest.fixture
def other_trials(
    other_slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmTrials]:
    """The same on the cluster of another shape."""
    yield from _trials_on(other_slurm, tmp_path, monkeypatch)


def _trials_on(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmTrials]:
    # For looking at them here.
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    made = SlurmTrials(tmp_path / "root", cluster)
    made.write_spec()
    yield made
    cluster.clear()  # first, so that Slurm starts nothing anew
    made.end_all()
